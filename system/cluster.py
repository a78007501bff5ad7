"""A run's parts as Ray actors: stream, learner ranks, reference workers, rollout workers, control actor.

Everything starts at the same time, since each takes its while to load a model; the first failure ends the start and
closes what was opened. Actors are handed each other by value, as picklable clients. Roles ask Ray for GPUs when the
placement gives them some, and for no CPUs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from learner.pool import LearnerPool
from learner.reference_actor import ReferenceClient, start_reference_actors
from reward_service.scorer import build_scorer
from rollout_workers.actor import RolloutClient, WorkerPlan, create_rollout_actor
from system import ray_session
from system.control import start_control
from system.core.deadlines import together
from system.logs import LOG_FOLDER_VARIABLE, QUIET_ENVIRONMENT, ROLE_VARIABLE
from system.parts import LearnerPart, PairSupply, learner_plan, ledger_limits, probe_limit, probe_tokens
from system.recipe import Plan, Recipe, reference_settings
from system.rollouts import RolloutWorkers
from system.run import Parts
from system.run_folder import RunFolder, RunRecord
from system.stream import StreamClient
from system.stream.actor import start_stream
from system.sync import WeightSync

log = logging.getLogger("triptych.cluster")


@contextlib.asynccontextmanager
async def open_parts(recipe: Recipe, plan: Plan, folder: RunFolder, record: RunRecord) -> AsyncIterator[Parts]:
    """Starts Ray (or joins it), builds a run's parts on it, and ends them afterwards, whatever happened."""
    async with contextlib.AsyncExitStack() as opened:
        address = await asyncio.to_thread(ray_session.start, record.ray_namespace)
        opened.push_async_callback(asyncio.to_thread, ray_session.leave)
        folder.update(ray_address=address)
        control = start_control(folder.read(), folder.token())

        log.info("starting the stream, %s", ", ".join(_described(recipe, plan)))
        scorer = build_scorer(recipe.rewards, [str(source.name) for source in recipe.data])
        prompts = await asyncio.to_thread(plan.prompts)
        stream = await start_stream(
            ledger_limits(recipe), recipe.rollout.group_size, plan.prompts, record.incarnation,
            **_options(folder, "stream", 0),
        )  # fmt: skip
        opened.push_async_callback(stream.cancel)

        pool = LearnerPool(
            learner_plan(recipe, plan),
            actor_options=[
                _options(folder, f"learner-{rank}", plan.placement.learner_gpus_each)
                for rank in range(recipe.learner.workers)
            ],
        )
        opened.push_async_callback(pool.close)
        workers, reference = await _rollout_workers(recipe, plan, folder, record, stream, scorer)
        opened.push_async_callback(workers.close)
        await together(pool.start(), workers.start())

        learner = LearnerPart(pool, _backend(plan), await PairSupply.open(plan, reference))
        sync = WeightSync(
            learner, workers, deadline_s=recipe.sync.deadline_s, bucket_bytes=recipe.sync.bucket_bytes,
            probe_tokens=probe_tokens(recipe, prompts), limit=probe_limit(recipe, record),
        )  # fmt: skip
        yield Parts(stream=stream, learner=learner, rollouts=workers, sync=sync, control=control)


async def _rollout_workers(
    recipe: Recipe, plan: Plan, folder: RunFolder, record: RunRecord, stream: StreamClient, scorer: Any
) -> tuple[RolloutWorkers, ReferenceClient | None]:
    """The rollout workers, not started yet; engines start while the reference model loads."""
    actors: list[Any] = []
    if plan.needs_reference:
        settings = recipe.reference.model_copy(update={"threads": plan.placement.reference_threads})
        options = [
            _options(folder, f"reference-{index}", plan.placement.reference_gpus_each)
            for index in range(recipe.reference.workers)
        ]
        actors = await start_reference_actors(reference_settings(recipe), settings, recipe.rollout.temperature, options)
    reference = ReferenceFactory(tuple(actors), recipe.reference.deadline_s) if actors else None

    def build(name: str) -> RolloutClient:
        worker_plan = WorkerPlan(
            name=name, model=recipe.model, rollout=recipe.rollout, run_name=record.run_id,
            run_seed=recipe.run.seed, stream=StreamFactory(stream), scorer=scorer, reference=reference,
            threads=plan.placement.engine_cores, backend=_backend(plan),
        )  # fmt: skip
        return create_rollout_actor(worker_plan, **_options(folder, name, plan.placement.rollout_gpus_each))

    workers = RolloutWorkers(
        [f"rollout-{index}" for index in range(recipe.rollout.workers)],
        build,
        stream,
        world=recipe.rollout.tensor_parallel,
        restarts=recipe.rollout.restarts,
        start_deadline_s=recipe.rollout.start_deadline_s,
    )
    return workers, None if reference is None else reference()


@dataclass(frozen=True)
class StreamFactory:
    """Gives a worker's process its client of the stream."""

    client: StreamClient

    def __call__(self) -> StreamClient:
        return self.client


@dataclass(frozen=True)
class ReferenceFactory:
    """Gives a worker's process its client of the reference workers."""

    actors: tuple[Any, ...]
    deadline_s: float

    def __call__(self) -> ReferenceClient:
        return ReferenceClient(self.actors, self.deadline_s)


def _options(folder: RunFolder, role: str, gpus: int) -> dict[str, Any]:
    return {
        "num_cpus": 0,
        "num_gpus": gpus,
        "runtime_env": {
            "env_vars": {**QUIET_ENVIRONMENT, LOG_FOLDER_VARIABLE: str(folder.logs), ROLE_VARIABLE: role},
        },
    }


def _backend(plan: Plan) -> Any:
    return plan.placement.sync_backend


def _described(recipe: Recipe, plan: Plan) -> list[str]:
    return [f"{role.processes} x {role.role}" for role in plan.placement.roles if role.processes]
