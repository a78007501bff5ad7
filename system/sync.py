"""Weight sync: moves the learner's current weights to every rollout worker, and proves that they arrived.

    transfer group (rebuilt when membership changes)  ->  begin (generation freezes)  ->  buckets, each with a checksum
    ->  finish (caches cleared, generation goes on)  ->  probe prompt on every engine against the learner  ->  admit

Only a finished, verified sync admits a worker. A failure leaves nothing generating under doubtful weights: it is
raised as ``SyncFailed`` with the first cause and the worker's name. Every wait has the sync's deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rollout_workers.fleet import Fleet
from system.core.deadlines import within
from system.core.errors import InfrastructureError, SyncFailed, TriptychError

FLOAT32_LIMIT_NATS = 1e-4
"""Largest difference of a probe token's log-prob in float32, engine against learner."""
YARDSTICK_FACTOR = 3.0
YARDSTICK_FLOOR_NATS = 0.02
"""In bf16 two correct implementations differ by about 0.03 nat on average; a gap below the floor is never a failure."""


class Receiver(Protocol):
    """A rollout worker as the sync sees it."""

    name: str

    async def join_transfer(self, endpoint: Any, rank: int, world_size: int, deadline_s: float) -> None: ...

    async def begin_update(self, deadline_s: float) -> None: ...

    async def receive(self, manifest: Any, deadline_s: float) -> None: ...

    async def finish_update(self, version: int, deadline_s: float) -> None: ...

    async def probe(self, tokens: Sequence[int], deadline_s: float) -> list[float]: ...

    async def admit(self, version: int) -> None: ...


class Source(Protocol):
    """The learner pool as the sync sees it."""

    async def open_transfer(self, deadline_s: float) -> Any: ...

    async def connect_transfer(self, world_size: int, deadline_s: float) -> None: ...

    async def manifest(self, version: int, bucket_bytes: int) -> Any: ...

    async def send_weights(self, manifest: Any, deadline_s: float) -> None: ...

    async def close_transfer(self) -> None: ...

    async def probe(self, tokens: Sequence[int]) -> list[float]: ...


@dataclass(frozen=True)
class SyncReport:
    """What one verified sync did."""

    version: int
    sync_s: float
    probe_gap_mean: float = 0.0
    probe_gap_max: float = 0.0
    workers: tuple[str, ...] = field(default_factory=tuple)


@dataclass(frozen=True)
class ProbeLimit:
    """When engine and learner disagree too much about the probe prompt.

    In float32 the limit is absolute. In bf16 the mean gap of the first verified sync is the yardstick, and three times
    that is a failure; ``yardstick`` is None until it has been measured.
    """

    float32: bool
    yardstick: float | None = None

    def verdict(self, gaps: np.ndarray) -> str | None:
        """None when the gaps are fine, else why not."""
        if not np.isfinite(gaps).all():
            return "a probe log-prob is not a finite number"
        if self.float32:
            worst = float(gaps.max())
            return None if worst <= FLOAT32_LIMIT_NATS else f"largest gap {worst:.2e} nat, limit {FLOAT32_LIMIT_NATS:g}"
        if self.yardstick is None:
            return None
        limit = YARDSTICK_FACTOR * max(self.yardstick, YARDSTICK_FLOOR_NATS)
        mean = float(gaps.mean())
        return None if mean <= limit else f"mean gap {mean:.3f} nat, limit {limit:.3f} (3 x the first sync's)"


class WeightSync:
    """Publishes versions to a fixed list of workers. ``publish`` is the only public action."""

    def __init__(
        self,
        source: Source,
        receivers: Sequence[Receiver],
        *,
        deadline_s: float,
        bucket_bytes: int,
        probe_tokens: Sequence[int] | None,
        limit: ProbeLimit,
        worlds: Sequence[int] | None = None,
    ) -> None:
        """``worlds``: processes of each receiver in the transfer group (its tensor-parallel size); default: one."""
        self.source = source
        self.receivers = list(receivers)
        self.deadline_s = deadline_s
        self.bucket_bytes = bucket_bytes
        self.probe_tokens = list(probe_tokens) if probe_tokens is not None else None
        self.limit = limit
        self.fleet = Fleet()
        for receiver, world in zip(self.receivers, worlds or [1] * len(self.receivers), strict=True):
            self.fleet.add(receiver.name, world)
        self._connected = False

    async def publish(self, version: int) -> SyncReport:
        """Sends the learner's weights as ``version``.

        Raises:
            SyncFailed: naming the worker and the first cause; no worker generates under unverified weights.
        """
        started_s = time.monotonic()
        try:
            if not self._connected:
                await self._connect()
            manifest = await self.source.manifest(version, self.bucket_bytes)
            await self._all("begin update", [r.begin_update(self.deadline_s) for r in self.receivers])
            await self._transfer(manifest)
            await self._all("finish update", [r.finish_update(version, self.deadline_s) for r in self.receivers])
            gaps = await self._probe()
        except BaseException:
            self._connected = False
            with contextlib.suppress(InfrastructureError):  # the first cause is what counts
                await self.source.close_transfer()
            raise
        for receiver in self.receivers:
            await receiver.admit(version)
        return SyncReport(
            version=version,
            sync_s=time.monotonic() - started_s,
            probe_gap_mean=float(gaps.mean()) if gaps.size else 0.0,
            probe_gap_max=float(gaps.max()) if gaps.size else 0.0,
            workers=tuple(receiver.name for receiver in self.receivers),
        )

    async def _connect(self) -> None:
        endpoint = await self.source.open_transfer(self.deadline_s)
        group = self.fleet.transfer_plan()
        joins = [
            receiver.join_transfer(endpoint, group.offsets[receiver.name], group.world_size, self.deadline_s)
            for receiver in self.receivers
        ]
        await self._all("join transfer", joins, self.source.connect_transfer(group.world_size, self.deadline_s))
        self._connected = True

    async def _transfer(self, manifest: Any) -> None:
        receives = [receiver.receive(manifest, self.deadline_s) for receiver in self.receivers]
        await self._all("receive weights", receives, self.source.send_weights(manifest, self.deadline_s))

    async def _probe(self) -> np.ndarray:
        if self.probe_tokens is None:
            return np.zeros(0)
        answers = await self._all(
            "probe",
            [r.probe(self.probe_tokens, self.deadline_s) for r in self.receivers],
            self.source.probe(self.probe_tokens),
        )
        expected = np.asarray(answers[-1], dtype=np.float64)
        gaps = []
        for receiver, answer in zip(self.receivers, answers, strict=False):
            gap = np.abs(np.asarray(answer, dtype=np.float64) - expected)
            problem = self.limit.verdict(gap)
            if problem is not None:
                raise SyncFailed(f"{receiver.name}: the weights that arrived are not the learner's: {problem}")
            gaps.append(gap)
        if not self.limit.float32 and self.limit.yardstick is None:
            self.limit = ProbeLimit(False, max(float(gap.mean()) for gap in gaps))
        return np.concatenate(gaps)

    async def _all(self, what: str, receivers: list[Any], source: Any | None = None) -> list[Any]:
        """Runs one phase on all sides at once; the first failure names its side and ends the phase."""
        names = [receiver.name for receiver in self.receivers]
        calls = list(receivers)
        if source is not None:
            names.append("learner")
            calls.append(source)
        tasks = [
            asyncio.ensure_future(within(call, self.deadline_s + 5.0, f"{name}: {what}", SyncFailed))
            for name, call in zip(names, calls, strict=True)
        ]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=1.0)
        for task, name in zip(tasks, names, strict=True):
            if task in done and task.exception() is not None:
                cause = task.exception()
                text = str(cause) if isinstance(cause, TriptychError) else f"{type(cause).__name__}: {cause}"
                raise SyncFailed(f"weight sync, {what}: {name}: {text}") from cause
        return [task.result() for task in tasks]
