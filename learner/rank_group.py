"""The learner ranks that were started together, called as one.

One call at a time: every rank gets the same calls in the same order, whoever makes them, and a call that its caller
gave up runs on to its end before the next one starts. The first error of any rank is the call's error, at once. When
the ranks may disagree or hang after it (a rank lost, a deadline, a defect, no memory, weights that are not finite),
every later call is refused: such a group is only ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from learner.deepspeed_engine import NonFiniteError
from learner.handles import RankHandle
from learner.world import RanksDisconnected
from system.core.deadlines import first_line, within
from system.core.errors import InfrastructureError, LearnerLost, OutOfMemory, TriptychError

CLOSE_DEADLINE_S = 20.0
"""A rank that is idle closes in milliseconds; one that hangs is not waited for longer than this."""

OTHERS_DEADLINE_S = 5.0
"""How long after a rank's error the others may still say what happened to them, which may be its cause."""


class RankGroup:
    """The ranks of one start, by rank."""

    def __init__(self, ranks: Sequence[RankHandle]) -> None:
        self.ranks = list(ranks)
        self._turn = asyncio.Lock()
        self._doing = "nothing"
        self._failure: str | None = None

    async def all(self, method: str, deadline_s: float, *arguments: Any) -> list[Any]:
        """What ``LearnerRank.<method>`` answers on every rank."""
        return await self.each(method, deadline_s, [arguments] * len(self.ranks))

    async def first(self, method: str, deadline_s: float, *arguments: Any) -> Any:
        """The same on rank 0 alone."""
        return (await self.each(method, deadline_s, [arguments]))[0]

    async def each(self, method: str, deadline_s: float, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls the first ranks, each with its own of ``arguments``; the deadline includes the wait for its turn.

        Raises:
            TriptychError: the first error of a rank, as it was raised; a cause before what follows from it.
            LearnerLost: a rank is gone, or did not answer in time; or it never was this call's turn.
        """
        ends_s = time.monotonic() + deadline_s
        self._refuse_after_failure()
        try:  # in this very task rather than by ``within``, so that a cancelled caller leaves no turn taken
            async with asyncio.timeout(deadline_s):
                await self._turn.acquire()
        except TimeoutError:
            raise LearnerLost(
                f"learner: {method}: not begun within {deadline_s:g} s, the ranks are busy with {self._doing}"
            ) from None
        calls = asyncio.ensure_future(self._call(method, deadline_s, ends_s, arguments))
        calls.add_done_callback(lambda _: self._turn.release())
        return await asyncio.shield(calls)

    async def address(self, deadline_s: float) -> str:
        """Where rank 0's machine is reached."""
        self._refuse_after_failure()
        first = self.ranks[0]
        return await within(first.node_address(), deadline_s, f"{first.name}: its node's address", LearnerLost)

    async def close(self) -> None:
        """Ends all ranks, whatever they are doing."""
        self._failure = self._failure or "it was closed"
        ends = [within(rank.close(), CLOSE_DEADLINE_S, f"{rank.name}: close") for rank in self.ranks]
        for outcome in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(outcome, BaseException) and not isinstance(outcome, InfrastructureError):
                raise outcome

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise LearnerLost(f"the learner pool failed before: {self._failure}; start it again from a checkpoint")

    async def _call(
        self, method: str, deadline_s: float, ends_s: float, arguments: Sequence[tuple[Any, ...]]
    ) -> list[Any]:
        self._refuse_after_failure()
        self._doing = method
        tasks = {
            asyncio.ensure_future(rank.call(method, *own)): rank.name
            for rank, own in zip(self.ranks, arguments, strict=False)
        }
        timeout_s = max(0.0, ends_s - time.monotonic())
        done, waiting = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        if waiting and any(task.exception() for task in done):
            _, waiting = await asyncio.wait(waiting, timeout=OTHERS_DEADLINE_S)
        errors = [error for task in tasks if task not in waiting and (error := task.exception()) is not None]
        if waiting and not errors:
            silent = ", ".join(name for task, name in tasks.items() if task in waiting)
            errors.append(LearnerLost(f"{silent}: {method}: no answer within {deadline_s:g} s"))
        for task in waiting:
            task.cancel()
        if not errors:
            return [task.result() for task in tasks]
        first = min(errors, key=_distance_from_cause)
        if waiting or _leaves_ranks_apart(first):
            self._failure = self._failure or f"{type(first).__name__}: {first_line(first)}"
        raise first


def _distance_from_cause(failure: BaseException) -> int:
    """A named error says more than a lost rank, and a lost rank more than the broken connections it leaves behind."""
    if isinstance(failure, RanksDisconnected):
        return 2
    if isinstance(failure, LearnerLost):
        return 1
    return 0 if isinstance(failure, TriptychError) else 3


def _leaves_ranks_apart(failure: BaseException) -> bool:
    return isinstance(failure, LearnerLost | NonFiniteError | OutOfMemory) or not isinstance(failure, TriptychError)
