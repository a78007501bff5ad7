"""How a pool reaches a learner rank: in this process on a thread, or as a Ray actor; same calls, same errors.

A rank's work runs in one thread, so a step and a checkpoint never overlap; what asks how a rank is doing does not queue
behind them. An actor that is gone becomes ``LearnerLost``; what a rank raises arrives as it was raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from learner.rank import LearnerPlan, LearnerRank
from system.core.deadlines import as_raised
from system.core.errors import LearnerLost
from system.core.weights.sender import LOOPBACK


class RankHandle(Protocol):
    """One rank, wherever it runs."""

    name: str

    async def call(self, method: str, *arguments: Any) -> Any:
        """Runs ``LearnerRank.<method>``; the caller sets the deadline."""
        ...

    async def node_address(self) -> str:
        """Where other processes of the cluster reach this rank's machine."""
        ...

    async def close(self) -> None:
        """Ends the rank, whatever it is doing."""
        ...


class LocalRank:
    """A rank in this process (``--local``): one thread does its work."""

    def __init__(self, plan: LearnerPlan) -> None:
        self.name = "learner rank 0"
        self._rank = LearnerRank(plan)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")

    async def call(self, method: str, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, getattr(self._rank, method), *arguments)

    async def node_address(self) -> str:
        return LOOPBACK

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._worker, self._rank.close)
        self._worker.shutdown(wait=False)


class ActorRank:
    """A rank in a Ray actor."""

    def __init__(self, plan: LearnerPlan, rank: int, size: int, options: Mapping[str, Any]) -> None:
        """``options``: of the actor (resources, placement group, name, runtime environment), as Ray names them."""
        import ray

        from learner.actor import LearnerActor

        self.name = f"learner rank {rank}"
        self._actor = ray.remote(LearnerActor).options(**options).remote(plan, rank, size)

    async def call(self, method: str, *arguments: Any) -> Any:
        return await as_raised(self._actor.call.remote(method, arguments), self.name, LearnerLost)

    async def node_address(self) -> str:
        return await as_raised(self._actor.node_address.remote(), self.name, LearnerLost)

    async def close(self) -> None:
        import ray

        ray.kill(self._actor, no_restart=True)
