"""The one place that waits. Every wait has a deadline, an owner (``what``) and a named error.

``within`` is for coroutines and futures, ``together`` for several that have deadlines already, ``answer`` for calls to
Ray actors, ``wait_ray`` for code outside an event loop. No other module calls ``ray.get`` or awaits something remote
without one of these; a lint test holds that.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable
from typing import Any, TypeVar

from system.core.errors import InfrastructureError, TriptychError
from system.core.records import RecordError

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


async def together(*calls: Awaitable[Any]) -> list[Any]:
    """All results, or the first failure at once, which cancels the other calls. Each call has its own deadline."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def answer(
    reference: Any, deadline_s: float, what: str, error: type[InfrastructureError] = InfrastructureError
) -> Any:
    """The result of a call to a Ray actor, for at most ``deadline_s`` seconds; see ``as_raised``."""
    return await within(as_raised(reference, what, error), deadline_s, what, error)


async def as_raised(reference: Any, what: str, error: type[InfrastructureError] = InfrastructureError) -> Any:
    """Awaits an ``ObjectRef`` under its caller's deadline.

    Raises:
        TriptychError, RecordError: as the actor raised them. A defect keeps Ray's wrapping, with the remote traceback.
        error: the actor's process is gone.
    """
    from ray.exceptions import RayError, RayTaskError

    try:
        return await reference
    except RayTaskError as failure:
        if isinstance(failure.cause, TriptychError | RecordError):
            raise failure.cause from None
        raise
    except RayError as failure:  # died, killed for memory, lost with its node
        raise error(f"{what}: its process is gone: {why_gone(failure)}") from failure


def why_gone(failure: BaseException) -> str:
    """What Ray knows of the end of a process, on one line: that memory ran out, or where to look."""
    from ray.exceptions import OutOfMemoryError

    if isinstance(failure, OutOfMemoryError):
        return f"Ray ended it because its machine ran out of memory: {first_line(failure)}"
    text = str(failure)
    if "OOM killer" not in text:
        return first_line(failure)
    address = re.search(r"^\s*ip: (\S+)", text, re.MULTILINE)
    machine = f"machine {address[1]}" if address else "its machine"
    return (
        f"{first_line(failure)} It crashed or was killed; whether the kernel did it because memory ran out, "
        f"dmesg on {machine} tells"
    )


def first_line(failure: BaseException) -> str:
    """What a failure says, on one line."""
    text = str(failure).strip()
    return text.splitlines()[0] if text else type(failure).__name__


def wait_ray(refs: Any, deadline_s: float, what: str, error: type[TriptychError] = DeadlineExceeded) -> Any:
    """``ray.get`` with a deadline, for code outside an event loop; raises ``error`` naming ``what``."""
    import ray

    try:
        return ray.get(refs, timeout=deadline_s)
    except ray.exceptions.GetTimeoutError:
        raise error(f"{what}: no answer within {deadline_s:g} s") from None
    except ray.exceptions.RayTaskError:
        raise
    except ray.exceptions.RayError as failure:
        raise InfrastructureError(f"{what}: its process is gone: {why_gone(failure)}") from failure
