"""The life of an engine around its weight updates, written once for every kind of engine. Imports no vLLM.

    starting -> serving -> updating -> serving ...        a failure while updating -> broken -> updating (mended)
                                                          any state -> dead, closed

Requests pass only while ``serving``; others wait for it. The version changes only together with the weights, while
nothing runs. A failure keeps its kind: ``SyncFailed`` as the receiving process raised it, ``EngineDied`` when the
engine is gone. An engine says how it pauses, calls its worker processes and resumes; all the rest is here.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from rollout_workers.contract import EngineDied, EngineState
from system.core.deadlines import within
from system.core.errors import SyncFailed
from system.core.weights.wire import Endpoint, Manifest, Report, TransferBroken

GRACE_S = 3.0
"""What a call may take beyond the deadline that its receiving end enforces itself."""


@dataclass(frozen=True)
class _Join:
    address: str
    port: int
    rank_offset: int
    world_size: int
    deadline_s: float


class UpdateCycle(ABC):
    """State, version and the gate that requests wait at."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._state: EngineState = "starting"
        self._version = 0
        self._changed = asyncio.Event()
        self._death: EngineDied | None = None

    @abstractmethod
    async def _pause(self) -> None:
        """Freezes running requests and queues new ones; idempotent."""

    @abstractmethod
    async def _resume(self) -> None: ...

    @abstractmethod
    async def _call_workers(self, method: str, **arguments: Any) -> list[Any]:
        """Calls ``method`` of vLLM's weight-transfer interface on every worker process of the engine; the answers."""

    @abstractmethod
    async def _reports(self) -> list[Report]:
        """What each worker process says of the last call."""

    @abstractmethod
    async def _label(self, version: str) -> None: ...

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def version(self) -> int:
        return self._version

    async def join_transfer(self, endpoint: Endpoint, rank_offset: int, world_size: int, deadline_s: float) -> None:
        self._check_alive()
        join = _Join(endpoint.address, endpoint.port, rank_offset, world_size, deadline_s)
        with self._kind_kept():
            await self._bounded(
                self._told("init_weight_transfer_engine", init_info=asdict(join)),
                deadline_s + GRACE_S,
                "join the weight transfer",
            )

    async def begin_update(self, deadline_s: float) -> None:
        async with self._updating():
            await self._bounded(self._open_model(), deadline_s, "begin a weight update")

    async def receive(self, manifest: Manifest, deadline_s: float) -> None:
        update = {"manifest": manifest.to_dict(), "deadline_s": deadline_s}
        self._check_updating("receive")
        async with self._updating():
            await self._bounded(
                self._told("update_weights", update_info=update), deadline_s + GRACE_S, "receive weights"
            )

    async def finish_update(self, version: int, deadline_s: float) -> None:
        self._check_updating("finish")
        async with self._updating():
            await self._bounded(self._close_model(version), deadline_s, "finish the weight update")
        self._version = version
        self._enter("serving")

    async def _open_model(self) -> None:
        """Also after an update that was cut off anywhere, by whomever."""
        await self._pause()
        if any(report.updating for report in await self._reports()):
            await self._call_workers("finish_weight_update")
        await self._told("start_weight_update")

    async def _close_model(self, version: int) -> None:
        await self._told("finish_weight_update")
        await self._label(str(version))
        await self._resume()

    async def _told(self, method: str, **arguments: Any) -> None:
        """Calls ``method`` on all worker processes; raises the failure of one, if it cannot be mended rather that."""
        await self._call_workers(method, **arguments)
        failures = [failure for report in await self._reports() if (failure := report.failure()) is not None]
        if failures:
            raise next((failure for failure in failures if not isinstance(failure, TransferBroken)), failures[0])

    async def _pass_gate(self) -> None:
        """Returns while serving; waits out an update. The caller's own deadline bounds the wait."""
        while self._state != "serving":
            self._check_alive()
            self._changed.clear()
            await self._changed.wait()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death
        if self._state in ("closed", "starting"):
            raise EngineDied(f"{self.name}: the engine is {'closed' if self._state == 'closed' else 'not started'}")

    def _check_updating(self, step: str) -> None:
        self._check_alive()
        if self._state != "updating":
            raise SyncFailed(f"{self.name}: {step} without an update that has begun (the engine is {self._state})")

    def _enter(self, state: EngineState) -> None:
        if self._state not in ("dead", "closed") or state == "closed":
            self._state = state
        self._changed.set()

    def _died(self, cause: str) -> EngineDied:
        """Marks the engine dead; the first cause stays."""
        if self._death is None:
            self._death = EngineDied(f"{self.name}: the engine died: {cause}")
        self._enter("dead")
        return self._death

    @asynccontextmanager
    async def _updating(self) -> AsyncIterator[None]:
        """Nothing generates inside, nor after a failure inside."""
        self._check_alive()
        self._enter("updating")
        try:
            with self._kind_kept():
                yield
        except BaseException:
            self._enter("broken")
            raise

    @contextmanager
    def _kind_kept(self) -> Iterator[None]:
        """What is neither of the transfer nor the engine's death becomes a plain ``SyncFailed``."""
        try:
            yield
        except (EngineDied, SyncFailed):
            raise
        except Exception as failure:
            raise SyncFailed(f"{self.name}: {type(failure).__name__}: {failure}") from failure

    async def _bounded(self, call: Any, deadline_s: float, what: str) -> Any:
        return await within(call, deadline_s, f"{self.name}: {what}", SyncFailed)
