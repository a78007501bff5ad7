"""Weight sync: moves the learner's current weights to every rollout worker, proves that they arrived, mends what broke.

    transfer group (rebuilt when membership changes)  ->  begin (generation freezes)  ->  buckets, each with a checksum
    ->  finish (caches cleared, generation goes on)  ->  probe prompt on every engine against the learner  ->  admit

A round takes the workers through all of this, and leaves each one verified, lost, or to be tried again. A broken
transfer breaks it for everyone, so the innocent are tried again at once, in place; whoever died, gave no answer until
the deadline, rejected the weights or disagrees about the probe is lost, and the others go on without it. When transfers
break and nobody is to blame, each worker is tried alone: one that then breaks again is lost.

Only a finished, verified sync admits a worker. Nothing that was sampled under unverified weights is handed in: a worker
holds it back until it is admitted, and an engine generates nothing between a broken transfer and the next whole one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rollout_workers.fleet import TransferPlan
from system.core.deadlines import first_line, within
from system.core.errors import LearnerLost, SyncFailed, TriptychError
from system.core.weights.wire import TransferBroken, WeightsRejected
from system.probe import ProbeDisagrees, ProbeLimit

log = logging.getLogger("triptych.sync")

TOGETHER_ROUNDS = 2
"""Rounds in which nobody is lost and nobody verified, before workers are tried one by one."""
EARLIER_S = 1.0
"""The sides of a call give up this long before the round's deadline, so that those who live can still say so."""
SOURCE_GRACE_S = 5.0
"""The learner pool ends its own calls by their deadlines; one that has not by then is lost."""


class Receiver(Protocol):
    """A rollout worker as the sync sees it."""

    name: str

    async def join_transfer(self, endpoint: Any, rank: int, world_size: int, deadline_s: float) -> None: ...

    async def begin_update(self, deadline_s: float) -> None: ...

    async def receive(self, manifest: Any, deadline_s: float) -> None: ...

    async def finish_update(self, version: int, deadline_s: float) -> None: ...

    async def probe(self, tokens: Sequence[int], deadline_s: float) -> list[float]: ...

    async def admit(self, version: int) -> None: ...


class Members(Protocol):
    """Who takes part in syncs; decided by the fleet."""

    def receivers(self) -> list[Receiver]:
        """Every worker whose engine runs."""
        ...

    def late(self) -> list[Receiver]:
        """Those of them that no sync has admitted yet."""
        ...

    def transfer_plan(self, receivers: Sequence[Receiver]) -> TransferPlan: ...

    def admitted(self, receiver: Receiver) -> None: ...

    def lose(self, receiver: Receiver, cause: str) -> bool:
        """``receiver`` must not serve any more. Returns whether it is being rebuilt."""
        ...


class Source(Protocol):
    """The learner pool as the sync sees it. Its own failures end the sync; ``TransferBroken`` does not."""

    async def open_transfer(self, deadline_s: float) -> Any: ...

    async def connect_transfer(self, world_size: int, deadline_s: float) -> None: ...

    async def manifest(self, version: int, bucket_bytes: int) -> Any: ...

    async def send_weights(self, manifest: Any, deadline_s: float) -> None: ...

    async def close_transfer(self) -> None: ...

    async def probe(self, tokens: Sequence[int]) -> list[float]: ...


@dataclass(frozen=True)
class SyncReport:
    """What one sync did."""

    version: int
    sync_s: float
    workers: tuple[str, ...] = ()
    """Verified and admitted."""
    lost: dict[str, str] = field(default_factory=dict)
    """Worker -> cause."""
    rounds: int = 1
    """More than one: something was mended."""
    probe_gap_mean: float = 0.0
    probe_gap_max: float = 0.0

    def figures(self) -> dict[str, float]:
        """For the step's metrics line."""
        return {
            "probe_gap_mean": self.probe_gap_mean,
            "probe_gap_max": self.probe_gap_max,
            "sync_workers": len(self.workers),
            "sync_workers_lost": len(self.lost),
            "sync_rounds": self.rounds,
        }


class _NoAnswer(SyncFailed):
    """Nothing came back until the round's deadline."""


@dataclass
class _Round:
    """One attempt with some workers; what has not failed or been verified at its end is tried again."""

    receivers: list[Receiver]
    end_s: float
    verified: dict[str, np.ndarray] = field(default_factory=dict)
    """Worker -> probe gaps."""
    failures: dict[str, BaseException] = field(default_factory=dict)

    def left_s(self) -> float:
        return max(0.0, self.end_s - time.monotonic())

    def given_s(self) -> float:
        """What the sides of a call are told."""
        left_s = self.left_s()
        return max(left_s - EARLIER_S, left_s / 2)

    def broken(self) -> bool:
        return bool(self.failures)


@dataclass
class _Account:
    """What the rounds of one sync came to."""

    started_s: float
    gaps: dict[str, np.ndarray] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    rounds: int = 0
    refused: bool = False
    """Somebody rejected the weights, or disagrees about the probe."""
    rebuilding: bool = False
    """Somebody who was lost is coming back."""

    def settled(self) -> int:
        return len(self.gaps) + len(self.lost)

    def report(self, version: int) -> SyncReport:
        every = np.concatenate([np.zeros(0), *self.gaps.values()])
        return SyncReport(
            version=version,
            sync_s=time.monotonic() - self.started_s,
            workers=tuple(sorted(self.gaps)),
            lost=self.lost,
            rounds=self.rounds,
            probe_gap_mean=float(every.mean()) if every.size else 0.0,
            probe_gap_max=float(every.max()) if every.size else 0.0,
        )


class WeightSync:
    """``publish`` and ``catch_up`` are called one at a time, by the run's loop."""

    def __init__(
        self,
        source: Source,
        members: Members,
        *,
        deadline_s: float,
        bucket_bytes: int,
        probe_tokens: Sequence[int] | None,
        limit: ProbeLimit,
    ) -> None:
        """
        Args:
            deadline_s: for one round; a worker that gives no answer by then is lost.
            probe_tokens: compared after each sync; None: no probe.
        """
        self.limit = limit
        self._source = source
        self._members = members
        self._deadline_s = deadline_s
        self._bucket_bytes = bucket_bytes
        self._probe_tokens = list(probe_tokens) if probe_tokens is not None else None
        self._connected: tuple[Receiver, ...] | None = None

    async def publish(self, version: int) -> SyncReport:
        """Sends the learner's weights as ``version`` to every worker whose engine runs.

        Raises:
            SyncFailed: every worker refuses these weights, or none is left and none is being rebuilt; with the first
                cause.
            LearnerLost: the learner pool failed.
        """
        receivers = self._members.receivers()
        account = await self._sync(version, receivers)
        if receivers and not account.gaps and (account.refused or not account.rebuilding):
            name, cause = next(iter(account.lost.items()))
            raise SyncFailed(f"weight sync of version {version}: no worker could be verified; {name}: {cause}")
        return account.report(version)

    async def catch_up(self, version: int) -> SyncReport | None:
        """Sends the current weights, still as ``version``, to workers that were (re)built meanwhile, if there are any.

        Only while the learner's weights are those that were published as ``version``.
        """
        late = self._members.late()
        return (await self._sync(version, late)).report(version) if late else None

    def disconnect(self) -> None:
        """The learner pool was started anew: its end of the transfer group is gone."""
        self._connected = None

    async def _sync(self, version: int, receivers: Sequence[Receiver]) -> _Account:
        """Rounds until every worker is verified or lost."""
        account = _Account(time.monotonic())
        manifest = await self._source.manifest(version, self._bucket_bytes)
        pending, fruitless = list(receivers), 0
        while pending:
            alone = fruitless >= (1 if len(pending) == 1 else TOGETHER_ROUNDS)
            settled_before = account.settled()
            again: list[Receiver] = []
            for group in [[one] for one in pending] if alone else [pending]:
                again += self._settle(version, await self._round(version, manifest, group), alone, account)
            fruitless += account.settled() == settled_before
            pending = again
            if pending:
                names = ", ".join(receiver.name for receiver in pending)
                log.warning("weight sync of version %d broke, mending %s", version, names)
        self.limit = self.limit.measured(list(account.gaps.values()))
        return account

    def _settle(self, version: int, ended: _Round, alone: bool, account: _Account) -> list[Receiver]:
        """Enters a round into the account. Returns who is to be tried again."""
        account.rounds += 1
        account.gaps |= ended.verified
        again = []
        for receiver in ended.receivers:
            if receiver.name in ended.verified:
                continue
            failure = ended.failures.get(receiver.name)
            if failure is None or (isinstance(failure, TransferBroken) and not alone):
                again.append(receiver)
                continue
            account.lost[receiver.name] = cause = _said(failure)
            account.refused |= isinstance(failure, WeightsRejected | ProbeDisagrees)
            log.warning("weight sync of version %d: %s is lost: %s", version, receiver.name, cause)
            account.rebuilding |= self._members.lose(receiver, cause)
        return again

    async def _round(self, version: int, manifest: Any, receivers: list[Receiver]) -> _Round:
        """Takes ``receivers`` through all phases, up to the first that somebody does not get through."""
        now = _Round(receivers, time.monotonic() + self._deadline_s)
        try:
            await self._connect(now)
            if not now.broken():
                await self._each(now, "begin the update", lambda receiver: receiver.begin_update(now.given_s()))
            if not now.broken():
                await self._each(
                    now,
                    "receive weights",
                    lambda receiver: receiver.receive(manifest, now.given_s()),
                    self._source.send_weights(manifest, now.given_s()),
                )
            if not now.broken():
                await self._verify(now, version)
        except BaseException:
            self._connected = None
            raise
        if now.broken():
            self._connected = None
            await self._source.close_transfer()
        return now

    async def _connect(self, now: _Round) -> None:
        if self._connected == tuple(now.receivers):
            return
        self._connected = None
        endpoint = await self._source.open_transfer(now.given_s())
        plan = self._members.transfer_plan(now.receivers)
        await self._each(
            now,
            "join the transfer",
            lambda receiver: receiver.join_transfer(
                endpoint, plan.offsets[receiver.name], plan.world_size, now.given_s()
            ),
            self._source.connect_transfer(plan.world_size, now.given_s()),
        )
        if not now.broken():
            self._connected = tuple(now.receivers)

    async def _verify(self, now: _Round, version: int) -> None:
        """Closes the update, probes and admits; each worker for itself, so that none waits for another's trouble."""
        probing = asyncio.ensure_future(self._expected())

        async def verify(receiver: Receiver) -> None:
            await receiver.finish_update(version, now.given_s())
            gaps = np.zeros(0)
            if self._probe_tokens is not None:
                answered = await receiver.probe(self._probe_tokens, now.given_s())
                gaps = self.limit.gaps(answered, await asyncio.shield(probing))
            await receiver.admit(version)
            self._members.admitted(receiver)
            now.verified[receiver.name] = gaps

        try:
            await self._each(now, "verify the update", verify, asyncio.shield(probing))
        finally:
            probing.cancel()

    async def _expected(self) -> list[float]:
        """The learner's log-probs of the probe."""
        return [] if self._probe_tokens is None else await self._source.probe(self._probe_tokens)

    async def _each(
        self, now: _Round, what: str, call: Callable[[Receiver], Awaitable[None]], source: Awaitable[Any] | None = None
    ) -> None:
        """Runs one phase on all sides at once, until all answered or the round's deadline; notes who failed, and how.

        Raises what the source raises, unless that is a broken transfer, which breaks the phase for everybody.
        """
        calls = [
            asyncio.ensure_future(within(call(receiver), now.left_s(), what, _NoAnswer)) for receiver in now.receivers
        ]
        sending = (
            asyncio.ensure_future(within(source, now.left_s() + SOURCE_GRACE_S, f"learner: {what}", LearnerLost))
            if source is not None
            else None
        )
        tasks = [*calls, *([sending] if sending else [])]
        try:
            await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
        for receiver, task in zip(now.receivers, calls, strict=True):
            failure = task.exception()
            if failure is not None:
                now.failures[receiver.name] = failure
        if sending is not None and (failure := sending.exception()) is not None:
            if not isinstance(failure, TransferBroken):
                raise failure
            for receiver in now.receivers:
                now.failures.setdefault(receiver.name, failure)


def _said(failure: BaseException) -> str:
    return first_line(failure) if isinstance(failure, TriptychError) else f"{type(failure).__name__}: {failure}"
