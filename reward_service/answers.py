"""The same request asked twice is judged once and has one answer, also while the first is still being judged.

A request is the same when its id and all that is judged are the same; an id that comes again with other completions
(a group issued again after a return to a checkpoint) is another request. Only answers without an error are kept:
asking again is how a caller retries.
"""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from system.core.errors import InfrastructureError
from system.core.protocols import Score, ScoreRequest

KEPT_ANSWERS = 256


@dataclass
class _Pending:
    task: asyncio.Task[list[Score]]
    callers: int = 0


class AnswerBook:
    """Joins twins under way and remembers the last answers."""

    def __init__(self, kept: int = KEPT_ANSWERS) -> None:
        self._kept = kept
        self._answers: OrderedDict[bytes, list[Score]] = OrderedDict()
        self._pending: dict[bytes, _Pending] = {}
        self._closed = False

    async def ask(self, request: ScoreRequest, judge: Callable[[], Coroutine[Any, Any, list[Score]]]) -> list[Score]:
        """The answer to ``request``, from ``judge`` unless it is known or under way.

        The judging is cancelled when its last caller is.
        """
        if self._closed:
            raise InfrastructureError("the scorer is closed")
        key = fingerprint(request)
        if key in self._answers:
            self._answers.move_to_end(key)
            return list(self._answers[key])
        pending = self._pending.get(key)
        if pending is None:
            pending = self._pending[key] = _Pending(asyncio.ensure_future(judge()))
        pending.callers += 1
        try:
            scores = await asyncio.shield(pending.task)
        finally:
            pending.callers -= 1
            if pending.callers == 0:
                if self._pending.get(key) is pending:
                    del self._pending[key]
                if not pending.task.done():
                    pending.task.cancel()
                    await asyncio.wait({pending.task})
        if all(score.error is None for score in scores):
            self._answers[key] = scores
            while len(self._answers) > self._kept:
                self._answers.popitem(last=False)
        return list(scores)

    async def close(self) -> None:
        """Cancels what is under way; later requests are refused."""
        self._closed = True
        tasks = [pending.task for pending in self._pending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def fingerprint(request: ScoreRequest) -> bytes:
    """A digest of the request's id, data source and items."""
    judged = (request.request_id, request.source, request.items)
    return hashlib.blake2b(pickle.dumps(judged, protocol=pickle.HIGHEST_PROTOCOL), digest_size=16).digest()
