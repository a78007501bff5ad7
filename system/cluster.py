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
from system.core.errors import WorkerLost
from system.logs import LOG_FOLDER_VARIABLE, QUIET_ENVIRONMENT, ROLE_VARIABLE
from system.parts import LearnerPart, PairSupply, learner_plan, ledger_limits, probe_limit, probe_tokens
from system.recipe import Plan, Recipe, reference_settings
from system.run import Parts
from system.run_folder import RunFolder, RunRecord
from system.stream import StreamClient
from system.stream.actor import start_stream
from system.sync import WeightSync

log = logging.getLogger("triptych.cluster")

STOP_S = 20.0
"""Longest time for one role to end by itself; Ray ends what is left."""


class ClusterRollouts:
    """The rollout workers together, as the loop sees them."""

    def __init__(self, workers: list[RolloutClient], stream: StreamClient) -> None:
        self._workers = workers
        self._running = {worker.name: asyncio.ensure_future(worker.run()) for worker in workers}
        for worker in workers:
            self._running[worker.name].add_done_callback(
                lambda task, name=worker.name: self._ended(task, name, stream)  # type: ignore[misc]
            )
        self._reports: set[asyncio.Task[Any]] = set()

    async def activity(self) -> dict[str, float]:
        """Mean over the workers that answer."""
        answers = await asyncio.gather(*(worker.activity() for worker in self._alive()), return_exceptions=True)
        known = [answer for answer in answers if isinstance(answer, dict)]
        kinds = {kind for answer in known for kind in answer}
        return {kind: sum(answer.get(kind, 0.0) for answer in known) / len(known) for kind in kinds}

    async def check(self) -> None:
        if not self._alive():
            first = next(iter(self._running.values()))
            cause = first.exception() if not first.cancelled() else None
            raise WorkerLost(f"no rollout worker is left: {cause}") from cause

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers), return_exceptions=True)
        for task in self._running.values():
            task.cancel()

    def _alive(self) -> list[RolloutClient]:
        return [worker for worker in self._workers if not self._running[worker.name].done()]

    def _ended(self, task: asyncio.Task[None], name: str, stream: StreamClient) -> None:
        """Tells the stream of a lost worker: its groups are issued again, a waiting step learns the cause."""
        if task.cancelled() or task.exception() is None:
            return
        report = stream.report_failure(name, str(task.exception()), len(self._alive()))
        self._reports.add(asyncio.ensure_future(report))


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
        _, (workers, reference) = await _together(
            pool.start(), _start_rollouts(recipe, plan, folder, record, stream, scorer)
        )

        rollouts = ClusterRollouts(workers, stream)
        opened.push_async_callback(rollouts.close)
        pairs = await PairSupply.open(plan, reference)
        learner = LearnerPart(pool, plan.placement.sync_backend, await _sender_address(pool, workers), pairs)
        sync = WeightSync(
            learner, workers, deadline_s=recipe.sync.deadline_s, bucket_bytes=recipe.sync.bucket_bytes,
            probe_tokens=probe_tokens(recipe, prompts), limit=probe_limit(recipe, record),
            worlds=[recipe.rollout.tensor_parallel] * len(workers),
        )  # fmt: skip
        yield Parts(stream=stream, learner=learner, rollouts=rollouts, sync=sync, control=control)


async def _start_rollouts(
    recipe: Recipe, plan: Plan, folder: RunFolder, record: RunRecord, stream: StreamClient, scorer: Any,
) -> tuple[list[RolloutClient], ReferenceClient | None]:  # fmt: skip
    """Engines start while the reference model loads; a worker gets the reference client before it serves."""
    actors: list[Any] = []
    if plan.needs_reference:
        settings = recipe.reference.model_copy(update={"threads": plan.placement.reference_threads})
        options = [
            _options(folder, f"reference-{index}", plan.placement.reference_gpus_each)
            for index in range(recipe.reference.workers)
        ]
        actors = await start_reference_actors(reference_settings(recipe), settings, recipe.rollout.temperature, options)
    reference = ReferenceFactory(tuple(actors), recipe.reference.deadline_s) if actors else None
    workers = []
    for index in range(recipe.rollout.workers):
        worker_plan = WorkerPlan(
            name=f"rollout-{index}", model=recipe.model, rollout=recipe.rollout, run_name=record.run_id,
            run_seed=recipe.run.seed, stream=StreamFactory(stream), scorer=scorer, reference=reference,
            threads=plan.placement.engine_cores, backend=_backend(plan),
        )  # fmt: skip
        options_of = _options(folder, worker_plan.name, plan.placement.rollout_gpus_each)
        workers.append(create_rollout_actor(worker_plan, **options_of))
    await _together(*(worker.start(recipe.rollout.start_deadline_s) for worker in workers))
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


async def _sender_address(pool: LearnerPool, workers: list[RolloutClient]) -> str:
    """Loopback while all roles are on one node, else the address of learner rank 0's node."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    return "127.0.0.1" if len(nodes) == 1 else await pool.sender_address(STOP_S)


async def _together(*calls: Any) -> list[Any]:
    """All results, or the first failure at once."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


def _described(recipe: Recipe, plan: Plan) -> list[str]:
    return [f"{role.processes} x {role.role}" for role in plan.placement.roles if role.processes]
