"""The stream as a Ray actor: forwards every call to its ``StreamCore``.

Submitting, leasing, taking and control have concurrency groups of their own, so submits that fill one never block a
take. Ray gives each group its own event loop and thread; ``StreamCore`` is made for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import ray

from system.core.clock import RealClock
from system.core.errors import InfrastructureError
from system.core.protocols import Lease, Prompt
from system.core.records import DropReason
from system.ledger_facts import LedgerLimits
from system.stream.client import StreamClient
from system.stream.core import StreamCore, TakenStep

CONCURRENCY_GROUPS = {"lease": 1024, "submit": 256, "take": 4, "control": 64}
"""Calls of each kind that may be under way at once; leases wait in the actor, one per rollout worker."""


class StreamActor:
    """Made by ``start_stream``; called through ``StreamClient`` only."""

    def __init__(
        self,
        limits: LedgerLimits,
        group_size: int,
        prompts: Callable[[], Callable[[int], Prompt]],
        incarnation: int,
        version: int,
    ) -> None:
        self._arguments = (limits, group_size, prompts, incarnation, version)
        self._opened: StreamCore | None = None

    @property
    def _core(self) -> StreamCore:
        if self._opened is None:
            raise InfrastructureError("the stream actor is not open yet")
        return self._opened

    @ray.method(concurrency_group="control")
    async def open(self) -> None:
        """Opens the prompts here rather than in the constructor, so that an error of theirs keeps its class."""
        if self._opened is None:
            limits, group_size, factory, incarnation, version = self._arguments
            prompts = await asyncio.to_thread(factory)
            self._opened = StreamCore(limits, group_size, prompts, incarnation, version, RealClock())

    @ray.method(concurrency_group="lease")
    async def lease(self, worker: str, room: int) -> list[Lease]:
        return await self._core.lease(worker, room)

    @ray.method(concurrency_group="submit")
    async def submit(self, worker: str, payload: bytes) -> str:
        return await self._core.submit(worker, payload)

    @ray.method(concurrency_group="submit")
    async def give_up(self, worker: str, group_id: int, reason: DropReason, cause: str) -> None:
        await self._core.give_up(worker, group_id, reason, cause)

    @ray.method(concurrency_group="take")
    async def take(self, version: int, deadline_s: float) -> TakenStep | None:
        return await self._core.take(version, deadline_s)

    @ray.method(concurrency_group="control")
    async def revoke(self, worker: str, cause: str, lost: bool) -> list[int]:
        return await self._core.revoke(worker, cause, lost)

    @ray.method(concurrency_group="control")
    async def report_failure(self, worker: str, cause: str, workers_left: int, suspect: bool) -> list[int]:
        return await self._core.report_failure(worker, cause, workers_left, suspect)

    @ray.method(concurrency_group="control")
    async def report_recovery(self, workers_left: int) -> None:
        await self._core.report_recovery(workers_left)

    @ray.method(concurrency_group="control")
    async def commit(self, version: int) -> None:
        await self._core.commit(version)

    @ray.method(concurrency_group="control")
    async def snapshot(self) -> dict[str, Any]:
        return await self._core.snapshot()

    @ray.method(concurrency_group="control")
    async def restore(self, snapshot: Mapping[str, Any], version: int, incarnation: int) -> None:
        await self._core.restore(snapshot, version, incarnation)

    @ray.method(concurrency_group="control")
    async def release(self) -> None:
        await self._core.release()

    @ray.method(concurrency_group="control")
    async def cancel(self) -> None:
        await self._core.cancel()

    @ray.method(concurrency_group="control")
    async def counts(self) -> dict[str, Any]:
        return await self._core.counts()

    @ray.method(concurrency_group="control")
    async def why_waiting(self) -> str:
        return await self._core.why_waiting()


async def start_stream(
    limits: LedgerLimits,
    group_size: int,
    prompts: Callable[[], Callable[[int], Prompt]],
    incarnation: int = 0,
    version: int = 0,
    open_deadline_s: float = 300.0,
    **options: Any,
) -> StreamClient:
    """Starts the actor and waits until its prompts are open. It lives as long as somebody holds the client.

    Args:
        prompts: picklable; makes the prompt function inside the actor.
        options: Ray's actor options (name, resources, runtime_env).
    Raises:
        DataError, ConfigError: from the prompts.
        InfrastructureError: the actor could not start within ``open_deadline_s``.
    """
    actor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(StreamActor)
    handle = actor.options(**{"num_cpus": 0, **options}).remote(limits, group_size, prompts, incarnation, version)
    client = StreamClient(handle)
    await client.open(open_deadline_s)
    return client
