"""Wakes whoever waits for a change, on whichever event loop and thread it waits.

Ray runs every concurrency group of an actor on an event loop of its own, so asyncio's conditions cannot be shared among
them. A waiter calls ``watch`` before it looks at the state; then no change between looking and waiting is missed.
"""

from __future__ import annotations

import asyncio
import threading

from system.core.clock import Clock

Watch = asyncio.Future


class Changes:
    """``announce`` may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._watches: set[Watch[None]] = set()

    def watch(self) -> Watch[None]:
        """A future that the next change resolves; hand it to ``wait`` or ``forget``."""
        watch: Watch[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._watches.add(watch)
        return watch

    def announce(self) -> None:
        """Something changed: every watch made so far is resolved."""
        with self._lock:
            watches, self._watches = self._watches, set()
        for watch in watches:
            loop = watch.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, watch)

    def forget(self, watch: Watch[None]) -> None:
        with self._lock:
            self._watches.discard(watch)

    async def wait(self, watch: Watch[None], seconds: float) -> None:
        """Returns after the change, or after ``seconds``."""
        sleep = asyncio.ensure_future(self._clock.sleep_s(seconds))
        try:
            await asyncio.wait({watch, sleep}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleep.cancel()
            self.forget(watch)


def _resolve(watch: Watch[None]) -> None:
    if not watch.done():
        watch.set_result(None)
