"""The figures of a step: computed from its rows, written to ``metrics.jsonl`` and to the backends the recipe names.

One JSON object per step, keys fixed; what was not measured is null. Lines of steps that were lost to a return to a
checkpoint stay, and readers take each step's highest incarnation. A backend that fails is warned about once and never
stops training.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Protocol

from system.core.errors import DataError
from system.core.records import Row, rewards_are_equal
from system.metrics_backends import MetricsBackend, open_backends

log = logging.getLogger("triptych.metrics")

BUSY_KINDS = ("generate", "reward", "reference")


@dataclass(frozen=True)
class RolloutFigures:
    """What the rows of a step say. Trajectories count, not rows; lengths are generated tokens, masked or not."""

    reward: float | None
    """Mean over the scored trajectories, as trained; None when there is none."""
    reward_std: float | None
    """Population standard deviation over the scored trajectories of the step."""
    completion_tokens: int
    length_mean: float
    """Generated tokens per trajectory."""
    truncated_share: float
    """Trajectories that ended at the length limit."""
    zero_signal_share: float
    """Groups whose scored rewards are all equal."""
    staleness_min: int
    staleness_mean: float
    staleness_max: int
    """Consuming version minus the version of the group's oldest token, over groups."""
    null_rewards: int
    """Trajectories that could not be scored."""
    groups: int
    reward_parts: dict[str, float]
    """Mean of each component over the trajectories that have it."""


def rollout_figures(rows: Sequence[Row], version: int) -> RolloutFigures:
    """Figures of the groups that were consumed at policy ``version``.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("no rows to take figures of")
    trajectories: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rows:
        trajectories[row.group_id, row.trajectory_id].append(row)
    rewards: dict[int, list[float | None]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    for (group_id, _), segments in trajectories.items():
        rewards[group_id].append(segments[0].reward)
        for name, value in segments[0].reward_parts.items():
            parts[name].append(value)
    oldest: dict[int, int] = {}
    for row in rows:
        oldest[row.group_id] = min(oldest.get(row.group_id, row.oldest_version), row.oldest_version)
    staleness = [version - oldest_version for oldest_version in oldest.values()]
    scored = [reward for group in rewards.values() for reward in group if reward is not None]
    last_segments = [max(segments, key=lambda row: row.segment_index) for segments in trajectories.values()]
    tokens = sum(row.length for row in rows)
    return RolloutFigures(
        reward=fmean(scored) if scored else None,
        reward_std=pstdev(scored) if scored else None,
        completion_tokens=tokens,
        length_mean=tokens / len(trajectories),
        truncated_share=fmean(row.finish_reason == "length" for row in last_segments),
        zero_signal_share=fmean(
            rewards_are_equal([reward for reward in group if reward is not None]) for group in rewards.values()
        ),
        staleness_min=min(staleness),
        staleness_mean=fmean(staleness),
        staleness_max=max(staleness),
        null_rewards=len(trajectories) - len(scored),
        groups=len(rewards),
        reward_parts={name: fmean(values) for name, values in sorted(parts.items())},
    )


SOURCE_KEYS = ("reward", "reward_std", "length_mean", "truncated_share", "zero_signal_share", "null_rewards", "groups")


def source_figures(rows: Sequence[Row], version: int) -> dict[str, float | None]:
    """``source/NAME/KEY`` for every data source among the rows, and ``source/NAME/part/PART`` for reward components."""
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(row)
    values: dict[str, float | None] = {}
    for source, its_rows in sorted(by_source.items()):
        figures = rollout_figures(its_rows, version)
        values.update({f"source/{source}/{key}": getattr(figures, key) for key in SOURCE_KEYS})
        values.update({f"source/{source}/part/{name}": mean for name, mean in figures.reward_parts.items()})
    return values


@dataclass(frozen=True)
class StepTimes:
    """Where the seconds of a step went."""

    step_s: float
    """From the end of the last step's line to the end of this one's."""
    learner_wait_s: float
    """The learner waited for groups."""
    learn_s: float
    sync_s: float
    checkpoint_s: float = 0.0
    """Of the checkpoint before this step."""
    busy: Mapping[str, float] = field(default_factory=dict)
    """Exclusive seconds by kind (generate, reward, reference) during the step, averaged over the rollout workers."""
    busy_while_waiting: Mapping[str, float] = field(default_factory=dict)
    """The same during ``learner_wait_s``."""

    @property
    def wait_s(self) -> float:
        """The part of ``learner_wait_s`` in which no rollout worker was generating, scoring or asking the reference."""
        busy_s = sum(self.busy_while_waiting.get(kind, 0.0) for kind in BUSY_KINDS)
        return max(0.0, self.learner_wait_s - busy_s)


class LearnReport(Protocol):
    """What a learner reports of a step."""

    @property
    def loss(self) -> float | None: ...

    @property
    def grad_norm(self) -> float | None: ...

    @property
    def learning_rate(self) -> float | None: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class StepMetrics:
    """One line of ``metrics.jsonl``. ``as_dict`` gives the keys in this order, then those of ``more``."""

    step: int
    version: int
    """Policy version that consumed the groups."""
    incarnation: int
    time_s: float
    """Wall time at which the step ended, in seconds since 1970."""
    step_s: float
    generate_s: float
    reward_s: float
    reference_s: float
    learn_s: float
    sync_s: float
    wait_s: float
    learner_wait_s: float
    checkpoint_s: float
    reward: float | None
    reward_std: float | None
    completion_tokens: int
    completion_tokens_per_s: float | None
    length_mean: float
    truncated_share: float
    zero_signal_share: float
    loss: float | None
    grad_norm: float | None
    learning_rate: float | None
    kl_reference: float | None
    ratio_mean: float | None
    ess: float | None
    clip_share: float | None
    staleness_min: int
    staleness_mean: float
    staleness_max: int
    issued: int
    leased: int
    ready: int
    taken: int
    trained: int
    dropped: Mapping[str, int]
    """Reason -> count, since the start of the run."""
    null_rewards: int
    more: Mapping[str, float | None] = field(default_factory=dict)
    """``objective/NAME``, ``source/NAME/KEY`` and other figures with keys of their own."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able; a number that is not finite becomes None."""
        line = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "more"}
        line["dropped"] = dict(self.dropped)
        line.update(self.more)
        return {key: _finite(value) for key, value in line.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


ROLLOUT_KEYS = (
    "reward",
    "reward_std",
    "completion_tokens",
    "length_mean",
    "truncated_share",
    "zero_signal_share",
    "staleness_min",
    "staleness_mean",
    "staleness_max",
    "null_rewards",
)
LEDGER_KEYS = ("issued", "leased", "ready", "taken", "trained", "dropped")
OBJECTIVE_KEYS = ("kl_reference", "ratio_mean", "ess", "clip_share")


def step_metrics(
    *,
    step: int,
    version: int,
    incarnation: int,
    rows: Sequence[Row],
    report: LearnReport,
    times: StepTimes,
    counts: Mapping[str, Any],
    extra: Mapping[str, float] | None = None,
) -> StepMetrics:
    """Composes the line of a step.

    Args:
        rows: that the step trained.
        counts: of the ledger, after the step was committed.
        extra: further figures, under their own keys.
    """
    figures = rollout_figures(rows, version)
    learned = dict(report.metrics)
    from_learner: dict[str, Any] = {key: learned.pop(key, None) for key in OBJECTIVE_KEYS}
    from_rollouts: dict[str, Any] = {key: getattr(figures, key) for key in ROLLOUT_KEYS}
    from_ledger: dict[str, Any] = {key: counts[key] for key in LEDGER_KEYS}
    return StepMetrics(
        step=step,
        version=version,
        incarnation=incarnation,
        time_s=time.time(),
        step_s=times.step_s,
        generate_s=times.busy.get("generate", 0.0),
        reward_s=times.busy.get("reward", 0.0),
        reference_s=times.busy.get("reference", 0.0),
        learn_s=times.learn_s,
        sync_s=times.sync_s,
        wait_s=times.wait_s,
        learner_wait_s=times.learner_wait_s,
        checkpoint_s=times.checkpoint_s,
        **from_rollouts,
        completion_tokens_per_s=figures.completion_tokens / times.step_s if times.step_s > 0 else None,
        loss=report.loss,
        grad_norm=report.grad_norm,
        learning_rate=report.learning_rate,
        **from_learner,
        **from_ledger,
        more={
            **{f"objective/{name}": value for name, value in sorted(learned.items())},
            **source_figures(rows, version),
            **(extra or {}),
        },
    )


class MetricsWriter:
    """Appends each step's line to ``metrics.jsonl`` and hands it to the backends."""

    def __init__(self, path: Path, events: Path | None = None, recipe: Any | None = None, fsync: bool = False) -> None:
        """
        Args:
            path: of ``metrics.jsonl``; lines of earlier incarnations stay, half a line of a killed process is removed.
            events: folder for TensorBoard; None: none.
            recipe: names further backends in its ``log``, and is handed to them.
        Raises:
            ConfigError: the recipe names a backend whose package is not installed.
        """
        self._path = path
        self._fsync = fsync
        self._warned: set[str] = set()
        self._backends: list[MetricsBackend] = open_backends(events, recipe, self._warn)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_half_line(path)
        except OSError as failure:
            self._warn(path.name, failure)

    def write(self, line: StepMetrics) -> None:
        """Never raises for a failing disk or backend: it warns once about each."""
        values = line.as_dict()
        try:
            self._append(json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as failure:
            self._warn(self._path.name, failure)
        numbers = dict(_numbers(values))
        for backend in self._backends:
            try:
                backend.write(numbers, line.step, line.incarnation)
            except Exception as failure:
                self._warn(backend.name, failure)

    def close(self) -> None:
        for backend in self._backends:
            try:
                backend.close()
            except Exception as failure:
                self._warn(backend.name, failure)
        self._backends = []

    def _append(self, text: str) -> None:
        with open(self._path, "ab", buffering=0) as handle:
            size = handle.seek(0, os.SEEK_END)
            try:
                payload = text.encode()
                if handle.write(payload) != len(payload):
                    raise OSError(f"{self._path}: the disk took only a part of the line")
                if self._fsync:
                    os.fsync(handle.fileno())
            except OSError:
                handle.truncate(size)
                raise

    def _warn(self, name: str, failure: Exception) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("metrics: %s fails, training goes on without it: %s: %s", name, type(failure).__name__, failure)


def _numbers(values: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}/{name}", float(number)) for name, number in value.items())
        elif isinstance(value, int | float):
            yield key, float(value)


def _remove_half_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl`` by step, each step's from its highest incarnation; empty when there is no file.

    A last line that is still being written is left out.

    Raises:
        DataError: a line in the middle is not a metrics line.
    """
    if not path.exists():
        return []
    newest: dict[int, dict[str, Any]] = {}
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            line = json.loads(text)
            step, incarnation = line["step"], line["incarnation"]
        except (ValueError, KeyError, TypeError) as failure:
            raise DataError(f"{path}, line {number}: not a metrics line ({failure!r})") from failure
        if step not in newest or incarnation >= newest[step]["incarnation"]:
            newest[step] = line
    return [newest[step] for step in sorted(newest)]
