"""The Ray actor around one learner rank: forwards, on one thread, and answers questions meanwhile.

Made by ``learner.handles.ActorRank``. The module imports neither Ray nor DeepSpeed; the actor's own process does.
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from learner.rank import LearnerPlan, LearnerRank
from learner.world import RanksDisconnected, is_disconnection
from system.core.deadlines import first_line
from system.core.weights.sender import LOOPBACK


class LearnerActor:
    """An asyncio actor: ``call`` queues for the rank's thread, everything else answers at once."""

    def __init__(self, plan: LearnerPlan, rank: int, size: int) -> None:
        self._rank = LearnerRank(plan, rank, size)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="learner")
        self._running: str | None = None

    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Runs ``LearnerRank.<method>`` after what was called before it."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, self._run, method, arguments)

    async def node_address(self) -> str:
        """Where other processes of the cluster reach this machine: loopback while the cluster has no other."""
        return await asyncio.to_thread(_node_address)

    async def status(self) -> dict[str, Any]:
        """What the rank is doing now."""
        return {"pid": os.getpid(), "running": self._running, "updates": self._rank.updates}

    def __ray_shutdown__(self) -> None:
        if self._running is None:
            self._rank.close()

    def _run(self, method: str, arguments: tuple[Any, ...]) -> Any:
        self._running = method
        try:
            return getattr(self._rank, method)(*arguments)
        except RuntimeError as failure:
            if not is_disconnection(failure):
                raise
            where = f"learner rank {self._rank.rank}: {method}"
            raise RanksDisconnected(f"{where}: lost the other ranks: {first_line(failure)}") from failure
        finally:
            self._running = None


def _node_address() -> str:
    import ray

    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK if len(machines) < 2 else str(ray.util.get_node_ip_address())
