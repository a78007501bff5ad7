"""``triptych train --local``: the same loop over plain objects in one process, without Ray, where a debugger works.

vLLM is stepped by one thread, the learner works on another, rewards still run in processes of their own (they are the
user's code, and must be killable). Everything else shares the loop of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from learner.pool import LearnerPool
from learner.reference_actor import ReferenceWorker
from reward_service.scorer import build_scorer
from rollout_workers.engine import LocalEngine
from rollout_workers.fleet import TransferPlan
from rollout_workers.worker import RolloutWorker
from system.core.clock import RealClock
from system.parts import LearnerPart, PairSupply, learner_plan, ledger_limits, probe_limit, probe_tokens
from system.recipe import Plan, Recipe, reference_settings
from system.run import Parts
from system.run_folder import RunFolder, RunRecord
from system.stream import StreamCore
from system.sync import WeightSync

log = logging.getLogger("triptych.local")

ENGINE_START_S = 600.0


class LocalRollouts:
    """The one worker of a local run, as the loop and the weight sync see it. It is never rebuilt."""

    def __init__(self, worker: RolloutWorker, running: asyncio.Task[None]) -> None:
        self._worker = worker
        self._running = running

    async def activity(self) -> dict[str, float]:
        return self._worker.activity()

    async def check(self) -> None:
        if self._running.done():
            failure = self._running.exception()
            if failure is not None:
                raise failure

    def receivers(self) -> list[Any]:
        return [self._worker]

    def late(self) -> list[Any]:
        return []

    def transfer_plan(self, receivers: Sequence[Any]) -> TransferPlan:
        return TransferPlan(world_size=1 + len(receivers), offsets={self._worker.name: 1})

    def admitted(self, receiver: Any) -> None: ...

    def lose(self, receiver: Any, cause: str) -> bool:
        return False


@contextlib.asynccontextmanager
async def open_parts(recipe: Recipe, plan: Plan, folder: RunFolder, record: RunRecord) -> AsyncIterator[Parts]:
    """Builds a run's parts in this process and closes them afterwards, whatever happened."""
    async with contextlib.AsyncExitStack() as opened:
        prompts = await asyncio.to_thread(plan.prompts)
        stream = StreamCore(ledger_limits(recipe), recipe.rollout.group_size, prompts, record.incarnation)

        scorer = build_scorer(recipe.rewards, [str(source.name) for source in recipe.data])()
        opened.push_async_callback(scorer.close)
        await scorer.start()

        log.info("starting vLLM and the learner in this process")
        engine = LocalEngine(recipe.model, recipe.rollout, name="engine", threads=plan.placement.engine_cores)
        await engine.start(ENGINE_START_S)
        opened.push_async_callback(engine.close)

        reference = None
        if plan.needs_reference:
            settings = recipe.reference.model_copy(update={"threads": plan.placement.reference_threads})
            reference = ReferenceWorker(reference_settings(recipe), settings, recipe.rollout.temperature)
            await reference.start()
            opened.push_async_callback(reference.close)

        pool = LearnerPool(learner_plan(recipe, plan), local=True)
        opened.push_async_callback(pool.close)
        await pool.start()

        worker = RolloutWorker(
            "local", engine, stream, scorer, reference, recipe.rollout,
            run_name=record.run_id, run_seed=recipe.run.seed, clock=RealClock(),
        )  # fmt: skip
        running = asyncio.create_task(worker.run(), name="rollout worker")
        opened.push_async_callback(_stop, worker, running)

        learner = LearnerPart(pool, "inline", await PairSupply.open(plan, reference))
        rollouts = LocalRollouts(worker, running)
        sync = WeightSync(
            learner, rollouts, deadline_s=recipe.sync.deadline_s, bucket_bytes=recipe.sync.bucket_bytes,
            probe_tokens=probe_tokens(recipe, prompts), limit=probe_limit(recipe, record),
        )  # fmt: skip
        yield Parts(stream=stream, learner=learner, rollouts=rollouts, sync=sync)


async def _stop(worker: RolloutWorker, running: asyncio.Task[None]) -> None:
    await worker.stop()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await running
