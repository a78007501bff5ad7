"""The run, top to bottom: the one file to read first.

    prompts -> [lease] -> rollout worker -> vLLM -> rewards, reference
            -> group -> stream -> learner -> weight sync -> vLLM

Rollout workers pull leases from the stream and push finished groups into it by themselves. This loop is the other end:
it takes ``groups_per_step`` groups, has the learner learn them, moves the new weights to the engines, and commits
the step. It is written against the small protocols below; Ray actors implement them (``system/cluster.py``), and so
do plain objects in one process (``system/local.py``).

Invariants: a version is written to ``run.json`` before it is first sent, so it is never used twice. A step's metrics
line exists whenever its checkpoint does. Whatever ends the loop, nothing that a checkpoint holds is lost. A lost
rollout worker is rebuilt meanwhile; after a lost learner rank the run goes back to the newest checkpoint, as a new
incarnation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from system.checkpoint import CheckpointStore, RunProgress
from system.core.errors import DataError, Interrupted, LearnerLost, Preempted, StalledError, TriptychError
from system.metrics import MetricsWriter, StepTimes, step_metrics
from system.progress import Progress
from system.recipe import Recipe
from system.rollout_files import write_step
from system.run_folder import RunFolder
from system.stream import TakenStep
from system.sync import WeightSync

log = logging.getLogger("triptych.run")

POLL_S = 1.0
"""How often a wait looks up to see whether it should end: a stop, a lost worker, a stall."""


class Stream(Protocol):
    """The ledger and the ready groups."""

    async def take(self, version: int, deadline_s: float) -> TakenStep | None:
        """The next step's groups, or None if they are not ready within ``deadline_s``."""
        ...

    async def commit(self, version: int) -> None:
        """The taken groups are trained; leases from now on carry ``version``."""
        ...

    async def snapshot(self) -> dict[str, Any]: ...

    async def restore(self, snapshot: dict[str, Any], version: int, incarnation: int) -> None:
        """Goes back to ``snapshot``; no lease is given until ``release``."""
        ...

    async def release(self) -> None: ...

    async def counts(self) -> dict[str, Any]: ...

    async def why_waiting(self) -> str: ...


class Learner(Protocol):
    """The learner pool."""

    async def step(self, groups: Sequence[bytes], step: int, version: int) -> Any: ...

    async def save(self, folder: Path) -> None: ...

    async def load(self, folder: Path) -> None: ...

    async def restart(self, folder: Path | None) -> None:
        """New ranks, from the checkpoint in ``folder``, or from the starting model."""
        ...


class Rollouts(Protocol):
    """All rollout workers together."""

    async def activity(self) -> dict[str, float]:
        """Cumulative exclusive seconds by kind (generate, reward, reference), averaged over workers."""
        ...

    async def check(self) -> None:
        """Raises the first cause when no worker is left to produce groups, or when rebuilding would not mend it."""
        ...


@dataclass(frozen=True)
class Parts:
    """What a run is made of; ``system/cluster.py`` and ``system/local.py`` build it."""

    stream: Stream
    learner: Learner
    rollouts: Rollouts
    sync: WeightSync
    control: Any | None = None
    """The control actor, when there is a Ray cluster to hold one."""


class StopRequest:
    """Set by a signal or by ``run stop``; the loop ends at the next point where nothing is lost."""

    def __init__(self) -> None:
        self.reason: type[TriptychError] | None = None
        self.learning = False
        """Whether the loop runs; before that, a stop ends the start-up at once."""

    def request(self, reason: type[TriptychError]) -> None:
        self.reason = self.reason or reason


@dataclass(frozen=True)
class Outcome:
    """How a run ended, for the summary."""

    steps: int
    updates: int


async def train(
    parts: Parts, recipe: Recipe, folder: RunFolder, progress: Progress, stop: StopRequest, store: CheckpointStore
) -> Outcome:
    """Runs the recipe's remaining steps.

    Raises:
        Interrupted, Preempted: a stop was requested; a checkpoint is written.
        StalledError: no step finished within ``run.stall_s``; the message says who waits for what.
        LearnerLost: more often than ``learner.restarts``.
        WorkerLost, SyncFailed: no rollout worker is left, or none can be given the learner's weights.
        DataError: steps remain or ran, and none of them changed the model.
    """
    metrics = MetricsWriter(folder.metrics, folder.events if recipe.log.tensorboard else None, recipe)
    restarts_left = recipe.learner.restarts
    lost: LearnerLost | None = None
    try:
        while True:
            try:
                at = await (_restore(parts, store, folder) if lost is None else _go_back(parts, store, folder))
                return await _learn(parts, recipe, folder, progress, stop, store, metrics, at)
            except LearnerLost as failure:
                lost = failure
                if restarts_left == 0 or stop.reason is not None:
                    raise
                restarts_left -= 1
                log.warning(
                    "the learner pool is lost, going back to the newest checkpoint (%d restarts left): %s",
                    restarts_left,
                    lost,
                )
    finally:
        metrics.close()


async def _learn(
    parts: Parts, recipe: Recipe, folder: RunFolder, progress: Progress, stop: StopRequest, store: CheckpointStore,
    metrics: MetricsWriter, at: RunProgress,
) -> Outcome:  # fmt: skip
    """The steps from ``at`` to the last."""
    incarnation = folder.read().incarnation
    await _publish(parts, folder, at.version)
    await parts.stream.release()
    folder.update(state="running", step=at.step)
    updates = int(at.totals.get("updates", 0))
    line_started_s = time.monotonic()
    checkpoint_s = 0.0
    busy_mark = await parts.rollouts.activity()
    for step in range(at.step, recipe.run.steps):
        busy_asked = await parts.rollouts.activity()
        taken, waited_s = await _take(parts, recipe, at.version, stop)
        busy_taken = await parts.rollouts.activity()
        if taken is None:
            await _checkpoint(parts, store, at)
            raise _stopped(stop)

        report = await parts.learner.step(taken.groups, step, at.version)
        updates += report.updates
        rows = await asyncio.to_thread(write_step, folder.rollouts, taken, report.advantages, step, incarnation)

        consumed_at, version = at.version, _next_version(folder)
        synced = await _publish(parts, folder, version) if stop.reason is None else None
        busy_before, busy_mark = busy_mark, await parts.rollouts.activity()
        await parts.stream.commit(version)
        at = replace(at, step=step + 1, version=version, totals={"updates": updates})

        now_s = time.monotonic()
        times = StepTimes(
            step_s=now_s - line_started_s,
            learner_wait_s=waited_s,
            learn_s=report.learn_s,
            sync_s=synced.sync_s if synced else 0.0,
            checkpoint_s=checkpoint_s,
            busy=_difference(busy_mark, busy_before),
            busy_while_waiting=_difference(busy_taken, busy_asked),
        )
        line = step_metrics(
            step=step,
            version=consumed_at,
            incarnation=incarnation,
            rows=rows,
            report=report,
            times=times,
            counts=await parts.stream.counts(),
            extra={**report.figures(), **(synced.figures() if synced else {})},
        )
        line_started_s = now_s
        metrics.write(line)
        progress.step(line)
        folder.update(step=step + 1)

        last = step + 1 == recipe.run.steps
        checkpoint_s = 0.0
        if last or stop.reason or (step + 1) % recipe.run.checkpoint_every_steps == 0:
            began_s = time.monotonic()
            await _checkpoint(parts, store, at)
            checkpoint_s = time.monotonic() - began_s
        if stop.reason and not last:
            raise _stopped(stop)
    if updates == 0 and recipe.run.steps > 0:
        raise DataError(
            "the run made no optimiser step: every group was filtered or had equal rewards. Rewards that differ "
            f"within a group are needed; {folder.rollouts} holds every answer with its reward"
        )
    return Outcome(steps=recipe.run.steps, updates=updates)


async def _restore(parts: Parts, store: CheckpointStore, folder: RunFolder) -> RunProgress:
    """Goes on from the newest checkpoint, under a version that was never used; a fresh run starts at version 0."""
    record = folder.read()
    newest = store.newest()
    if newest is None and record.highest_version < 0:
        return RunProgress()
    at = RunProgress()
    if newest is not None:
        path, at = newest
        log.info("going on from %s (step %d)", path.name, at.step)
        await parts.learner.load(path)
    return await _rewind(parts, folder, at)


async def _go_back(parts: Parts, store: CheckpointStore, folder: RunFolder) -> RunProgress:
    """A new learner pool at the newest checkpoint, or at the start; the engines stay, and lease nothing meanwhile."""
    folder.update(incarnation=folder.read().incarnation + 1)
    path, at = store.newest() or (None, RunProgress())
    at = await _rewind(parts, folder, at)
    await parts.learner.restart(path)
    parts.sync.disconnect()
    return at


async def _rewind(parts: Parts, folder: RunFolder, at: RunProgress) -> RunProgress:
    """The stream goes back to ``at``, under the next unused version."""
    version = _next_version(folder)
    folder.update(highest_version=version)
    await parts.stream.restore(at.ledger, version, folder.read().incarnation)
    return replace(at, version=version)


async def _publish(parts: Parts, folder: RunFolder, version: int) -> Any:
    """One verified weight sync; the version is on disk before it is on the wire."""
    folder.update(highest_version=max(version, folder.read().highest_version))
    report = await parts.sync.publish(version)
    if parts.sync.limit.yardstick is not None and folder.read().probe_yardstick is None:
        folder.update(probe_yardstick=parts.sync.limit.yardstick)
    return report


async def _take(parts: Parts, recipe: Recipe, version: int, stop: StopRequest) -> tuple[TakenStep | None, float]:
    """Waits for the step's groups; None when a stop was requested meanwhile."""
    started_s = time.monotonic()
    while stop.reason is None:
        taken = await parts.stream.take(version, POLL_S)
        waited_s = time.monotonic() - started_s
        if taken is not None:
            return taken, waited_s
        await parts.rollouts.check()
        await _catch_up(parts, version)
        if waited_s > recipe.run.stall_s:
            raise StalledError(f"no step for {waited_s:.0f} s (run.stall_s): {await parts.stream.why_waiting()}")
    return None, time.monotonic() - started_s


async def _catch_up(parts: Parts, version: int) -> None:
    """Workers that were rebuilt get the current weights while the learner waits, rather than after the next step."""
    report = await parts.sync.catch_up(version)
    if report is not None and report.workers:
        log.info("%s caught up with version %d in %.1f s", ", ".join(report.workers), version, report.sync_s)


async def _checkpoint(parts: Parts, store: CheckpointStore, at: RunProgress) -> None:
    folder = store.begin(at.step)
    await parts.learner.save(folder)
    final = await asyncio.to_thread(store.finish, folder, replace(at, ledger=await parts.stream.snapshot()))
    log.info("checkpoint %s", final)


def _next_version(folder: RunFolder) -> int:
    return folder.read().highest_version + 1


def _stopped(stop: StopRequest) -> TriptychError:
    message = "a checkpoint is written; run the same command again to go on"
    return Preempted(f"preempted: {message}") if stop.reason is Preempted else Interrupted(f"interrupted: {message}")


def _difference(after: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {kind: after[kind] - before.get(kind, 0.0) for kind in after}
