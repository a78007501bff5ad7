"""A rollout worker as a Ray actor: builds its parts inside its own process, and forwards.

All methods are coroutines on the actor's one event loop, with room for many at once, so a control call never waits for
a generation. (Ray runs each concurrency group of an async actor on a loop of its own; an engine belongs to one.)
Whoever holds the handle waits with a deadline: ``RolloutClient`` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollout_workers.contract import EngineDied, WeightBackend
from rollout_workers.engine import RolloutEngine
from rollout_workers.settings import RolloutSettings
from rollout_workers.worker import RolloutWorker, WorkerStatus
from system.core.clock import RealClock
from system.core.deadlines import answer, as_raised, within
from system.core.errors import InfrastructureError
from system.core.model import ModelSettings
from system.core.processes import ProcessPlace, end_process, place_of_this_process
from system.core.protocols import LeaseSource, Reference, Scorer
from system.core.weights.wire import Endpoint, Manifest

CONCURRENT_CALLS = 64
CONTROL_DEADLINE_S = 30.0
CALL_GRACE_S = 5.0
DISCARD_DEADLINE_S = 20.0


@dataclass(frozen=True)
class WorkerPlan:
    """Everything a worker's process needs, by value. The factories are picklable and run inside it."""

    name: str
    model: ModelSettings
    rollout: RolloutSettings
    run_name: str
    run_seed: int
    stream: Callable[[], LeaseSource]
    scorer: Callable[[], Scorer] | None = None
    reference: Callable[[], Reference] | None = None
    threads: str | None = None
    """Cores of the engine, as vLLM's CPU binding writes them; None on GPUs."""
    backend: WeightBackend = "gloo"


class RolloutActor:
    """The class behind the actor; ``start``, then ``run`` for as long as it serves."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._engine = RolloutEngine(
            plan.model, plan.rollout, name=plan.name, threads=plan.threads, backend=plan.backend
        )
        self._scorer = plan.scorer() if plan.scorer is not None else None
        self._worker = RolloutWorker(
            plan.name,
            self._engine,
            plan.stream(),
            self._scorer,
            plan.reference() if plan.reference is not None else None,
            plan.rollout,
            run_name=plan.run_name,
            run_seed=plan.run_seed,
            clock=RealClock(),
        )

    async def start(self) -> None:
        await self._engine.start(self._plan.rollout.start_deadline_s)

    async def run(self) -> None:
        await self._worker.run()

    async def join_transfer(self, endpoint: Endpoint, rank_offset: int, world_size: int, deadline_s: float) -> None:
        await self._worker.join_transfer(endpoint, rank_offset, world_size, deadline_s)

    async def begin_update(self, deadline_s: float) -> None:
        await self._worker.begin_update(deadline_s)

    async def receive(self, manifest: Manifest, deadline_s: float) -> None:
        await self._worker.receive(manifest, deadline_s)

    async def finish_update(self, version: int, deadline_s: float) -> None:
        await self._worker.finish_update(version, deadline_s)

    async def probe(self, tokens: Sequence[int], deadline_s: float) -> list[float]:
        return await self._worker.probe(tokens, deadline_s)

    async def admit(self, version: int) -> None:
        await self._worker.admit(version)

    async def isolate(self) -> None:
        await self._worker.isolate()

    async def drain(self, deadline_s: float) -> None:
        await self._worker.drain(deadline_s)

    async def activity(self) -> dict[str, float]:
        return self._worker.activity()

    async def status(self) -> WorkerStatus:
        return self._worker.status()

    async def place(self) -> ProcessPlace:
        import ray

        return place_of_this_process(ray.get_runtime_context().get_node_id())

    async def close(self) -> None:
        """Ends ``run``, the scorer and every process of the engine."""
        await self._worker.stop()
        if self._scorer is not None:
            await self._scorer.close()
        await self._engine.close()

    def __ray_shutdown__(self) -> None:
        self._engine.shut_down()


class RolloutClient:
    """A worker as ``system`` sees it: the same calls over an actor handle, each with a deadline.

    Errors come back as the worker raised them; a process that died is an ``EngineDied`` that names it.
    """

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self.actor = actor
        self.place: ProcessPlace | None = None
        """Known once ``start`` was called; the engine's processes are children of this one."""

    async def start(self, deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        self.place = await self._call(self.actor.place.remote(), deadline_s, "start of its process")
        await self._call(self.actor.start.remote(), end_s - time.monotonic(), "start")

    async def run(self) -> None:
        """As long as the worker serves: returns after ``close``, or raises what the worker failed with."""
        await as_raised(self.actor.run.remote(), self.name, EngineDied)

    async def join_transfer(self, endpoint: Endpoint, rank_offset: int, world_size: int, deadline_s: float) -> None:
        call = self.actor.join_transfer.remote(endpoint, rank_offset, world_size, deadline_s)
        await self._call(call, deadline_s, "join the weight transfer")

    async def begin_update(self, deadline_s: float) -> None:
        await self._call(self.actor.begin_update.remote(deadline_s), deadline_s, "begin the weight update")

    async def receive(self, manifest: Manifest, deadline_s: float) -> None:
        await self._call(self.actor.receive.remote(manifest, deadline_s), deadline_s, "receive weights")

    async def finish_update(self, version: int, deadline_s: float) -> None:
        await self._call(self.actor.finish_update.remote(version, deadline_s), deadline_s, "finish the weight update")

    async def probe(self, tokens: Sequence[int], deadline_s: float) -> list[float]:
        return await self._call(self.actor.probe.remote(list(tokens), deadline_s), deadline_s, "probe")

    async def admit(self, version: int) -> None:
        await self._call(self.actor.admit.remote(version), CONTROL_DEADLINE_S, "admit")

    async def isolate(self) -> None:
        await self._call(self.actor.isolate.remote(), CONTROL_DEADLINE_S, "isolate")

    async def drain(self, deadline_s: float) -> None:
        await self._call(self.actor.drain.remote(deadline_s), deadline_s, "drain")

    async def activity(self) -> dict[str, float]:
        return await self._call(self.actor.activity.remote(), CONTROL_DEADLINE_S, "activity")

    async def status(self) -> WorkerStatus:
        return await self._call(self.actor.status.remote(), CONTROL_DEADLINE_S, "status")

    async def close(self) -> None:
        await self._call(self.actor.close.remote(), CONTROL_DEADLINE_S, "close")

    async def discard(self, deadline_s: float = DISCARD_DEADLINE_S) -> None:
        """Ends all processes of the worker at once, whatever they do: nothing is asked of them. Idempotent.

        Returns when they are gone, and so is what they held of a GPU.

        Raises:
            InfrastructureError: some are still there at the deadline.
        """
        import ray

        ray.kill(self.actor)
        if self.place is None:
            return
        if self.place.node_id == ray.get_runtime_context().get_node_id():
            ending = asyncio.to_thread(end_process, self.place, deadline_s)
            await within(ending, deadline_s + CALL_GRACE_S, f"{self.name}: end of its processes", InfrastructureError)
        else:
            await self._discard_elsewhere(self.place, deadline_s)

    async def _discard_elsewhere(self, place: ProcessPlace, deadline_s: float) -> None:
        """On the worker's own node; when that is gone, so are the processes."""
        import ray
        from ray.exceptions import NodeDiedError, TaskUnschedulableError
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(place.node_id, soft=False)
        ending = ray.remote(end_process).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        with suppress(NodeDiedError, TaskUnschedulableError):
            await answer(
                ending.remote(place, deadline_s), deadline_s + CALL_GRACE_S, f"{self.name}: end of its processes"
            )

    async def _call(self, reference: Any, deadline_s: float, what: str) -> Any:
        return await answer(reference, deadline_s + CALL_GRACE_S, f"{self.name}: {what}", EngineDied)


def create_rollout_actor(plan: WorkerPlan, **options: Any) -> RolloutClient:
    """Places a rollout worker on the cluster. Args: options: of ``ray.remote`` (name, num_cpus, num_gpus, ...)."""
    import ray

    actor_class = ray.remote(RolloutActor).options(max_concurrency=CONCURRENT_CALLS, **options)
    return RolloutClient(plan.name, actor_class.remote(plan))
