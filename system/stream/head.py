"""What the ledger must know of a finished group, read from its Arrow bytes column by column, without making rows."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from system.core.records import REWARD_ERROR_KEY, SCHEMA_VERSION, RecordError, rewards_are_equal


@dataclass(frozen=True)
class GroupHead:
    """A group's identity, age and signal."""

    group_id: int
    incarnation: int
    trajectories: int
    oldest_version: int
    scored: int
    """Trajectories with a reward."""
    zero_signal: bool
    """Whether its rewards are equal, or differ by less than the margin."""
    silent_cause: str = ""
    """What the rewards are where they carry no signal."""
    unscored_cause: str = ""
    """Why the first trajectory without a reward could not be judged."""

    @staticmethod
    def from_bytes(payload: bytes, margin: float = 0.0) -> GroupHead:
        """Reads ``Group.to_bytes()``.

        Args:
            margin: rewards that differ by less carry no signal.
        Raises:
            RecordError: these are not the bytes of one group in this schema version.
        """
        try:
            with pa.ipc.open_stream(payload) as reader:
                table = reader.read_all()
        except pa.ArrowInvalid as failure:
            raise RecordError(f"a submitted group is not an Arrow stream: {failure}") from failure
        found = (table.schema.metadata or {}).get(b"triptych_schema", b"").decode()
        if found != str(SCHEMA_VERSION):
            raise RecordError(f"a submitted group has schema version {found or 'none'}, expected {SCHEMA_VERSION}")
        group_ids = pc.unique(table["group_id"]).to_pylist()
        incarnations = pc.unique(table["incarnation"]).to_pylist()
        if len(group_ids) != 1 or len(incarnations) != 1:
            raise RecordError(f"one group was expected, got ids {group_ids} of incarnations {incarnations}")
        oldest_version = pc.min(pc.list_flatten(table["versions"])).as_py()
        if oldest_version is None:
            raise RecordError(f"group {group_ids[0]} has no tokens")
        trajectories = dict(zip(table["trajectory_id"].to_pylist(), table["reward"].to_pylist(), strict=True))
        rewards = [reward for reward in trajectories.values() if reward is not None]
        return GroupHead(
            group_id=group_ids[0],
            incarnation=incarnations[0],
            trajectories=len(trajectories),
            oldest_version=oldest_version,
            scored=len(rewards),
            zero_signal=rewards_are_equal(rewards, margin),
            silent_cause=_silent_cause(rewards, margin),
            unscored_cause=_unscored_cause(table),
        )


def _silent_cause(rewards: list[float], margin: float) -> str:
    if not rewards or not rewards_are_equal(rewards, margin):
        return ""
    if rewards_are_equal(rewards):
        return f"all rewards {rewards[0]:.4g}"
    return f"rewards differ by less than {margin:.4g}"


def _unscored_cause(table: pa.Table) -> str:
    """What the rewards said about the first row that has none."""
    for reward, metadata in zip(table["reward"].to_pylist(), table["metadata"].to_pylist(), strict=True):
        if reward is None:
            errors = json.loads(metadata).get(REWARD_ERROR_KEY) or {}
            return "; ".join(f"reward '{name}' {error['code']}: {error['message']}" for name, error in errors.items())
    return ""
