"""A thread that steps something and runs commands between its steps, so that one thread alone ever touches it.

Commands go first. When a step raises, the thread ends: ``failed`` is told the cause, and so is every
command then and later.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

IDLE_POLL_S = 0.5


class StepThread:
    """``step`` does a piece of work and says whether there may be more at once."""

    def __init__(self, name: str, step: Callable[[], bool], failed: Callable[[Exception], None]) -> None:
        self._step = step
        self._failed = failed
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any] | None, Future[Any]]] = queue.SimpleQueue()
        self._ended: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        return self._ended is not None

    def do(self, command: Callable[[], Any]) -> Future[Any]:
        """Runs ``command`` on the thread, between two steps; the future has its result or what it raised."""
        done: Future[Any] = Future()
        self._commands.put((command, done))
        if self._ended is not None:
            self._refuse_rest()
        return done

    def end(self, deadline_s: float) -> bool:
        """Ends the thread after the commands before this call; False when it is still busy at the deadline."""
        self._commands.put((None, Future()))
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        busy = False
        while self._ended is None:
            try:
                command, done = self._commands.get(timeout=IDLE_POLL_S) if not busy else self._commands.get_nowait()
            except queue.Empty:
                busy = self._guarded_step()
                continue
            if command is None:
                self._ended = RuntimeError(f"{self._thread.name} has ended")
            elif done.set_running_or_notify_cancel():
                try:
                    done.set_result(command())
                except Exception as failure:
                    done.set_exception(failure)
                busy = True
        self._refuse_rest()

    def _guarded_step(self) -> bool:
        try:
            return self._step()
        except Exception as failure:
            self._ended = failure
            self._failed(failure)
            return False

    def _refuse_rest(self) -> None:
        assert self._ended is not None
        while True:
            try:
                _, done = self._commands.get_nowait()
            except queue.Empty:
                return
            with suppress(InvalidStateError):
                done.set_exception(self._ended)
