"""The one place that waits. Every wait has a deadline, an owner (``what``) and a named error.

``within`` is for coroutines and futures (a Ray ``ObjectRef`` is awaitable too); ``wait_ray`` is for code outside an
event loop. No other module calls ``ray.get`` or awaits something remote without one of these; a lint test holds that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from system.core.errors import InfrastructureError, TriptychError

T = TypeVar("T")


class DeadlineExceeded(InfrastructureError):
    """Something took longer than its deadline; the message names it."""


async def within(
    awaitable: Awaitable[T],
    deadline_s: float,
    what: str,
    error: type[TriptychError] = DeadlineExceeded,
) -> T:
    """Awaits ``awaitable`` for at most ``deadline_s`` seconds.

    Args:
        what: names the thing waited for, as an operator would: ``"rollout worker w0: weight update"``.
        error: raised at the deadline, saying ``what`` and the seconds.
    """

    async def forward() -> T:
        return await awaitable

    task = asyncio.ensure_future(forward())
    try:
        done, _ = await asyncio.wait({task}, timeout=deadline_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task in done:
        return task.result()
    task.cancel()
    raise error(f"{what}: no answer within {deadline_s:g} s")


def wait_ray(refs: Any, deadline_s: float, what: str, error: type[TriptychError] = DeadlineExceeded) -> Any:
    """``ray.get`` with a deadline, for code outside an event loop; raises ``error`` naming ``what``."""
    import ray

    try:
        return ray.get(refs, timeout=deadline_s)
    except ray.exceptions.GetTimeoutError:
        raise error(f"{what}: no answer within {deadline_s:g} s") from None
