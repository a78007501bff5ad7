"""The rollout workers of a run: starts them, notices who is lost, has its groups issued again, and rebuilds it.

``Fleet`` decides, this carries it out. A worker that is lost (its engine died, a weight sync gave it up) is discarded
at once, whatever it is doing, and built again while the others go on; the next weight sync admits it. What is not the
infrastructure's fault (a reward that cannot be loaded, a defect) would happen again: it ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from rollout_workers.fleet import Fleet, TransferPlan
from system.core.deadlines import first_line, together, within
from system.core.errors import InfrastructureError, WorkerLost

log = logging.getLogger("triptych.rollouts")

ACTIVITY_DEADLINE_S = 2.0
"""For figures that may be missing; a step does not wait longer for them."""
CLOSE_S = 40.0


class Client(Protocol):
    """A rollout worker, as ``rollout_workers.actor.RolloutClient`` is one."""

    name: str

    async def start(self, deadline_s: float) -> None: ...

    async def run(self) -> None: ...

    async def activity(self) -> dict[str, float]: ...

    async def close(self) -> None: ...

    async def discard(self) -> None:
        """Ends its processes at once, whatever they do."""
        ...


class Stream(Protocol):
    """Where leases of lost workers are taken away."""

    async def report_failure(self, worker: str, cause: str, workers_left: int, suspect: bool) -> Any: ...

    async def report_recovery(self, workers_left: int) -> None: ...


class RolloutWorkers:
    """All rollout workers: what the loop asks of them (``Rollouts``), and who takes part in syncs (``Members``)."""

    def __init__(
        self,
        names: Sequence[str],
        build: Callable[[str], Client],
        stream: Stream,
        *,
        world: int = 1,
        restarts: int = 0,
        start_deadline_s: float = 600.0,
    ) -> None:
        """
        Args:
            build: creates the worker's process; its engine starts with ``start``.
            world: processes of one engine.
            restarts: how often each worker may be rebuilt.
        """
        self.fleet = Fleet(restarts)
        for name in names:
            self.fleet.add(name, world)
        self._build = build
        self._stream = stream
        self._start_deadline_s = start_deadline_s
        self._clients: dict[str, Client] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._replacing: set[asyncio.Task[None]] = set()
        self._fatal: BaseException | None = None
        self._busy: dict[str, float] = {}
        self._busy_before: dict[str, dict[str, float]] = {}

    async def start(self) -> None:
        """Starts all workers at once. Raises the first failure."""
        await together(*(self._open(member.name) for member in self.fleet.members()))

    async def check(self) -> None:
        """Raises what no rebuilding mends, or ``WorkerLost`` with the first cause when nobody is left to rebuild."""
        if self._fatal is not None:
            raise self._fatal
        if self.fleet.members() and not self.fleet.producers():
            raise WorkerLost(
                f"no rollout worker is left, and none may be rebuilt (rollout.restarts); the first cause was "
                f"{self.fleet.first_cause}"
            )

    async def activity(self) -> dict[str, float]:
        """Seconds by kind since the start, each second of a worker counted once; the mean over those that answer."""
        asked = [self._clients[name] for name in self.fleet.named("healthy")]
        calls = [within(client.activity(), ACTIVITY_DEADLINE_S, f"{client.name}: activity") for client in asked]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        known = {client.name: answer for client, answer in zip(asked, answers, strict=True) if isinstance(answer, dict)}
        for name, seconds in known.items():
            before = self._busy_before.get(name, {})
            for kind, value in seconds.items():
                self._busy[kind] = self._busy.get(kind, 0.0) + (value - before.get(kind, 0.0)) / len(known)
        self._busy_before |= known
        return dict(self._busy)

    # Members of weight syncs

    def receivers(self) -> list[Any]:
        return [self._clients[name] for name in self.fleet.named("ready", "healthy")]

    def late(self) -> list[Any]:
        return [self._clients[name] for name in self.fleet.named("ready")]

    def transfer_plan(self, receivers: Sequence[Any]) -> TransferPlan:
        return self.fleet.transfer_plan([receiver.name for receiver in receivers])

    def admitted(self, receiver: Any) -> None:
        if self._is_current(receiver):
            self.fleet.admitted(receiver.name)

    def lose(self, receiver: Any, cause: str) -> bool:
        """A sync gave it up. Returns whether it, or who came in its place, is going to serve."""
        return self._lost(receiver, cause, suspect=False)

    async def close(self) -> None:
        """Ends all workers: orderly where they answer, at once where they do not."""
        for task in (*self._serving.values(), *self._replacing):
            task.cancel()
        await asyncio.gather(*(self._close(client) for client in self._clients.values()))

    # Inside

    async def _open(self, name: str) -> None:
        client = self._clients[name] = self._build(name)
        self._busy_before.pop(name, None)
        await client.start(self._start_deadline_s)
        self.fleet.started(name)
        self._serving[name] = serving = asyncio.ensure_future(client.run())
        serving.add_done_callback(lambda task: self._ended(client, task))

    def _ended(self, client: Client, serving: asyncio.Task[None]) -> None:
        failure = None if serving.cancelled() else serving.exception()
        if isinstance(failure, InfrastructureError):
            self._lost(client, first_line(failure), suspect=True)
        elif failure is not None and self._is_current(client):
            self._fatal = self._fatal or failure

    def _lost(self, client: Client, cause: str, *, suspect: bool) -> bool:
        """``suspect``: the groups it held may be what killed it."""
        if not self._is_current(client):
            return client.name in self.fleet.producers()
        may_rebuild = self.fleet.lose(client.name, cause)
        del self._clients[client.name]
        self._in_background(self._replace(client, cause, may_rebuild, suspect))
        return may_rebuild

    async def _replace(self, client: Client, cause: str, may_rebuild: bool, suspect: bool) -> None:
        name = client.name
        await self._stream.report_failure(name, cause, len(self.fleet.producers()), suspect)
        try:
            await client.discard()
        except InfrastructureError as failure:
            log.warning("%s could not be ended: %s", name, failure)
        if not may_rebuild:
            log.error("%s is given up, it was rebuilt as often as rollout.restarts allows; last: %s", name, cause)
            return
        await asyncio.sleep(self.fleet.pause_before_rebuild_s(name))
        log.info("rebuilding %s", name)
        self.fleet.rebuild(name)
        try:
            await self._open(name)
        except InfrastructureError as failure:
            self._lost(self._clients[name], first_line(failure), suspect=False)
            return
        await self._stream.report_recovery(len(self.fleet.producers()))
        log.info("%s is rebuilt, the next weight sync admits it", name)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._replacing.add(task)
        task.add_done_callback(self._replaced)

    def _replaced(self, task: asyncio.Task[None]) -> None:
        self._replacing.discard(task)
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            self._fatal = self._fatal or failure

    async def _close(self, client: Client) -> None:
        try:
            await within(client.close(), CLOSE_S, f"{client.name}: close")
        except Exception as failure:
            log.warning("%s did not end by itself: %s", client.name, first_line(failure))
            await client.discard()

    def _is_current(self, client: Any) -> bool:
        return self._clients.get(client.name) is client
