"""The record of what was sampled: one row per completion (per segment), one Arrow record batch per group.

The same bytes cross the stream and are written to Parquet. Lengths and dtypes are checked when a row is made, so
nothing downstream checks them again. A null reward means "could not be scored"; 0 never stands in its place.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import numpy as np
import pyarrow as pa

SCHEMA_VERSION = 1

REWARD_ERROR_KEY = "reward_error"
"""In the metadata of a row without a reward: {reward name: {code, message}}, why it could not be judged."""

FinishReason = Literal["stop", "length", "abort"]
DropReason = Literal["zero_signal", "too_few_scored", "generation_failed", "deadline", "too_old", "poison", "cancelled"]
DROP_REASONS: tuple[DropReason, ...] = (
    "zero_signal",
    "too_few_scored",
    "generation_failed",
    "deadline",
    "too_old",
    "poison",
    "cancelled",
)

SCHEMA = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("trajectory_id", pa.int32(), nullable=False),
        pa.field("segment_index", pa.int32(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("completion_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("rollout_logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("reference_logprobs", pa.list_(pa.float32())),
        pa.field("versions", pa.list_(pa.int32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("reward", pa.float32()),
        pa.field("reward_parts", pa.map_(pa.string(), pa.float32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("attempt", pa.int16(), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("worker", pa.string(), nullable=False),
        pa.field("incarnation", pa.int32(), nullable=False),
        pa.field("step", pa.int32()),
        pa.field("advantage", pa.float32()),
        pa.field("completion_text", pa.string(), nullable=False),
        pa.field("metadata", pa.string(), nullable=False),
        pa.field("sampling_mask", pa.list_(pa.int32())),
        pa.field("routed_experts", pa.list_(pa.int32())),
        pa.field("turn", pa.int32()),
    ],
    metadata={"triptych_schema": str(SCHEMA_VERSION)},
)


class RecordError(ValueError):
    """A row or group that cannot be: lengths that differ, a reward that is not finite, ids that do not match."""


def _array(name: str, values: Sequence[float] | np.ndarray, dtype: type, length: int | None = None) -> np.ndarray:
    array: np.ndarray = np.asarray(values, dtype=dtype)
    if array.ndim != 1:
        raise RecordError(f"{name}: expected one dimension, got shape {array.shape}")
    if length is not None and len(array) != length:
        raise RecordError(f"{name}: {len(array)} entries for {length} completion tokens")
    array.setflags(write=False)
    return array


@dataclass(frozen=True, eq=False)
class Row:
    """One completion of one trajectory. Sequences may be given as lists; they are kept as read-only numpy arrays."""

    group_id: int
    trajectory_id: int
    prompt_id: str
    source: str
    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    rollout_logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    seed: int
    worker: str
    completion_text: str
    segment_index: int = 0
    reference_logprobs: np.ndarray | None = None
    loss_mask: np.ndarray | None = None
    """[T] bool; None means every completion token was written by the policy."""
    reward: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    attempt: int = 0
    incarnation: int = 0
    step: int | None = None
    advantage: float | None = None
    metadata: str = "{}"
    """JSON, exactly as the data source and the scorer wrote it."""
    sampling_mask: np.ndarray | None = None
    routed_experts: np.ndarray | None = None
    turn: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "prompt_tokens", _array("prompt_tokens", self.prompt_tokens, np.int32))
        put(self, "completion_tokens", _array("completion_tokens", self.completion_tokens, np.int32))
        length = len(self.completion_tokens)
        if length == 0:
            raise RecordError(f"group {self.group_id}: a completion without tokens")
        put(self, "rollout_logprobs", _array("rollout_logprobs", self.rollout_logprobs, np.float32, length))
        put(self, "versions", _array("versions", self.versions, np.int32, length))
        if self.reference_logprobs is not None:
            put(self, "reference_logprobs", _array("reference_logprobs", self.reference_logprobs, np.float32, length))
        mask = np.ones(length, bool) if self.loss_mask is None else self.loss_mask
        put(self, "loss_mask", _array("loss_mask", mask, np.bool_, length))
        if self.reward is not None and not np.isfinite(self.reward):
            raise RecordError(f"group {self.group_id}: reward {self.reward} is not a finite number")
        if self.finish_reason not in ("stop", "length", "abort"):
            raise RecordError(f"group {self.group_id}: finish_reason {self.finish_reason!r}")

    @property
    def length(self) -> int:
        """Generated tokens, masked or not."""
        return len(self.completion_tokens)

    @property
    def offline(self) -> bool:
        """Whether it belongs to an offline pair, whose ids are below 0; everything else was sampled by the run."""
        return self.group_id < 0

    @property
    def oldest_version(self) -> int:
        return int(self.versions.min())

    def with_scores(
        self, reward: float | None, parts: dict[str, float], reference_logprobs: np.ndarray | None, metadata: str
    ) -> Row:
        """The same completion, judged."""
        return replace(
            self, reward=reward, reward_parts=parts, reference_logprobs=reference_logprobs, metadata=metadata
        )

    def as_trained(self, step: int, advantage: float | None) -> Row:
        """The same completion with the step that trained it, as it is written to Parquet."""
        return replace(self, step=step, advantage=advantage)


@dataclass(frozen=True, eq=False)
class Group:
    """All trajectories of one prompt; the unit of leasing, streaming, accounting and loss coupling."""

    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows))
        if not self.rows:
            raise RecordError("a group without rows")
        if len({row.group_id for row in self.rows}) != 1:
            raise RecordError(f"rows of several groups in one: {sorted({row.group_id for row in self.rows})}")
        rewards: dict[int, float | None] = {}
        for row in self.rows:
            if rewards.setdefault(row.trajectory_id, row.reward) != row.reward:
                raise RecordError(f"group {self.group_id}: trajectory {row.trajectory_id} has two rewards")

    @property
    def group_id(self) -> int:
        return self.rows[0].group_id

    @property
    def oldest_version(self) -> int:
        return min(row.oldest_version for row in self.rows)

    def trajectory_rewards(self) -> dict[int, float | None]:
        """Reward of each trajectory, by its id; None where it could not be scored."""
        return {row.trajectory_id: row.reward for row in self.rows}

    def scored_rewards(self) -> list[float]:
        return [reward for reward in self.trajectory_rewards().values() if reward is not None]

    def has_zero_signal(self) -> bool:
        """All scored rewards equal: max - min <= 1e-6 x max(1, largest magnitude)."""
        return rewards_are_equal(self.scored_rewards())

    def to_batch(self) -> pa.RecordBatch:
        columns = []
        for column in SCHEMA:
            values = [getattr(row, column.name) for row in self.rows]
            if pa.types.is_map(column.type):
                values = [list(value.items()) for value in values]
            columns.append(pa.array(values, type=column.type))
        return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    def to_bytes(self) -> bytes:
        """Arrow IPC stream of one record batch."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, SCHEMA) as writer:
            writer.write_batch(self.to_batch())
        return sink.getvalue().to_pybytes()

    @staticmethod
    def from_bytes(payload: bytes) -> Group:
        with pa.ipc.open_stream(payload) as reader:
            table = reader.read_all()
        return Group(rows_from_table(table))


def rewards_are_equal(rewards: Sequence[float], margin: float = 0.0) -> bool:
    """The zero-variance test on rewards (not on their std, which float32 leaves above 0 for equal values).

    Args:
        margin: rewards that differ by less count as equal too.
    """
    if not rewards:
        return True
    spread, largest = max(rewards) - min(rewards), max(abs(reward) for reward in rewards)
    residue = 1e-6 * max(1.0, largest)
    return spread <= residue or spread < margin - residue


def rows_from_table(table: pa.Table) -> tuple[Row, ...]:
    """Rows of an Arrow table in ``SCHEMA`` (a group's bytes, or a run's Parquet file).

    Raises:
        RecordError: the table was written with another schema version.
    """
    found = (table.schema.metadata or {}).get(b"triptych_schema", b"").decode()
    if found != str(SCHEMA_VERSION):
        raise RecordError(f"rollouts have schema version {found or 'none'}; this Triptych reads {SCHEMA_VERSION}")
    names = [column.name for column in fields(Row)]
    columns = {name: table.column(name).to_pylist() for name in names}
    rows = []
    for index in range(table.num_rows):
        values = {name: column[index] for name, column in columns.items()}
        values["reward_parts"] = dict(values["reward_parts"])
        rows.append(Row(**values))
    return tuple(rows)


def merge_metadata(*parts: str) -> str:
    """Joins JSON objects, later ones winning key by key; an absent one is ``"{}"``."""
    present = [part for part in parts if part and part != "{}"]
    if len(present) <= 1:
        return present[0] if present else "{}"
    merged: dict[str, object] = {}
    for part in present:
        merged.update(json.loads(part))
    return json.dumps(merged, ensure_ascii=False)
