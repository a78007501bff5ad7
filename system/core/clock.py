"""Time as an object, so that what waits can be tested without waiting.

Pure classes get ``now_s`` (monotonic seconds) with every call; only actors hold a ``Clock``.
Wall time stands in logs and records only.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds, and a sleep measured in them."""

    def now_s(self) -> float: ...

    async def sleep_s(self, seconds: float) -> None: ...


class RealClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    async def sleep_s(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class SimulatedClock:
    """A clock that moves only when ``advance_s`` is called; sleepers wake in order of their time."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    def now_s(self) -> float:
        return self._now_s

    async def sleep_s(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + max(0.0, seconds), next(self._order), woken))
        await woken

    async def advance_s(self, seconds: float) -> None:
        """Moves time on and lets every sleeper whose time came run once."""
        target = self._now_s + seconds
        while self._sleepers and self._sleepers[0][0] <= target:
            self._now_s, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
            await asyncio.sleep(0)
        self._now_s = target
        await asyncio.sleep(0)
