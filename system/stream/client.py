"""The stream actor as the driver and the rollout workers see it: the methods of ``StreamCore``, each with a deadline.

Picklable, so it is handed to actors by value. Errors arrive as the stream raised them, not wrapped by Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from system.core.deadlines import answer
from system.core.protocols import Lease
from system.core.records import DropReason
from system.stream.core import LEASE_WAIT_S, TakenStep

TAKE_WAIT_S = 2.0
"""A take waits in the actor for at most this long at a time, so that an abandoned one does not linger there."""


class StreamClient:
    """Implements ``LeaseSource``, and the driver's side of the stream."""

    def __init__(self, handle: Any, call_deadline_s: float = 60.0) -> None:
        """
        Args:
            handle: of the ``StreamActor``.
            call_deadline_s: longest time for one call, beyond what the call itself waits for.
        """
        self.handle = handle
        self.call_deadline_s = call_deadline_s

    async def lease(self, worker: str, room: int) -> list[Lease]:
        return await self._call("lease", worker, room, wait_s=LEASE_WAIT_S)

    async def submit(self, worker: str, payload: bytes) -> str:
        return await self._call("submit", worker, payload)

    async def give_up(self, worker: str, group_id: int, reason: DropReason, cause: str) -> None:
        await self._call("give_up", worker, group_id, reason, cause)

    async def revoke(self, worker: str, cause: str, lost: bool = True) -> list[int]:
        return await self._call("revoke", worker, cause, lost)

    async def report_failure(self, worker: str, cause: str, workers_left: int, suspect: bool = True) -> list[int]:
        return await self._call("report_failure", worker, cause, workers_left, suspect)

    async def report_recovery(self, workers_left: int) -> None:
        await self._call("report_recovery", workers_left)

    async def take(self, version: int, deadline_s: float) -> TakenStep | None:
        left_s = deadline_s
        while True:
            wait_s = min(left_s, TAKE_WAIT_S)
            taken = await self._call("take", version, wait_s, wait_s=wait_s)
            left_s -= wait_s
            if taken is not None or left_s <= 0:
                return taken

    async def commit(self, version: int) -> None:
        await self._call("commit", version)

    async def snapshot(self) -> dict[str, Any]:
        return await self._call("snapshot")

    async def restore(self, snapshot: Mapping[str, Any], version: int, incarnation: int) -> None:
        await self._call("restore", dict(snapshot), version, incarnation)

    async def release(self) -> None:
        await self._call("release")

    async def cancel(self) -> None:
        await self._call("cancel")

    async def counts(self) -> dict[str, Any]:
        return await self._call("counts")

    async def why_waiting(self) -> str:
        return await self._call("why_waiting")

    async def open(self, deadline_s: float) -> None:
        """Waits until the actor runs and its prompts are open."""
        await self._call("open", wait_s=deadline_s)

    async def _call(self, method: str, *arguments: Any, wait_s: float = 0.0) -> Any:
        reference = getattr(self.handle, method).remote(*arguments)
        return await answer(reference, wait_s + self.call_deadline_s, f"stream actor: {method}")
