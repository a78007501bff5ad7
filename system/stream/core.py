"""The stream in one process: the ledger, the prompts, and the bytes of finished groups.

Every method may be called from any event loop and thread (a Ray actor has one loop per concurrency group); the ledger
is touched under a lock that is never held while waiting or making prompts. Nobody waits here longer than asked:
``lease`` returns an empty list after ``LEASE_WAIT_S``, ``take`` returns None at its deadline, and both notice expired
leases meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from system.core.clock import Clock, RealClock
from system.core.errors import WorkerLost
from system.core.protocols import Lease, Prompt
from system.core.records import DropReason, RecordError
from system.ledger import GroupLedger
from system.ledger_facts import LeaseTicket, LedgerLimits
from system.stream.changes import Changes
from system.stream.head import GroupHead

log = logging.getLogger("triptych.stream")

LEASE_WAIT_S = 2.0
"""A request for work returns empty-handed after this, so that a worker can look up between requests."""
TICK_S = 0.5
"""How often a wait looks for expired leases."""
ASKING_S = 2 * TICK_S
"""A worker with room asks again at every tick; one that has not for this long wants nothing."""


@dataclass(frozen=True)
class TakenStep:
    """The groups of one step in issue order."""

    groups: tuple[bytes, ...]
    """``Group.to_bytes()`` of each."""
    group_ids: tuple[int, ...]
    version: int
    """That consumes them."""
    staleness: tuple[int, ...]
    """Of each group: ``version`` minus the version of its oldest token."""
    wait_s: float
    """How long the learner waited for this step."""
    idle_s: float
    """The part of ``wait_s`` in which no worker held a lease."""


class StreamCore:
    """See the module. Implements ``LeaseSource`` for workers; the rest is for the driver."""

    def __init__(
        self,
        limits: LedgerLimits,
        group_size: int,
        prompts: Callable[[int], Prompt],
        incarnation: int = 0,
        version: int = 0,
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            group_size: trajectories per group.
            prompts: the prompt at a position of the stream (0, 1, 2, ...); a pure function.
        """
        self._margin = limits.refill_margin
        self._ledger = GroupLedger(limits, incarnation, version)
        self._group_size = group_size
        self._prompts = prompts
        self._clock: Clock = clock or RealClock()
        self._lock = threading.Lock()
        self._changes = Changes(self._clock)
        self._payloads: dict[int, bytes] = {}
        self._revocations: dict[str, int] = {}
        self._wait_s = self._idle_s = 0.0
        self._first_cause: str | None = None
        self._workers_left: int | None = None
        self._broken: Exception | None = None
        self._held = False
        self._asked_s: dict[str, float] = {}

    # Rollout workers

    async def lease(self, worker: str, room: int) -> list[Lease]:
        """At most ``room`` leases; none when there is no work within ``LEASE_WAIT_S`` or ``worker`` was lost."""
        until_s = self._clock.now_s() + LEASE_WAIT_S
        with self._lock:
            revocations = self._revocations.get(worker, 0)
        while room > 0 and self._broken is None:
            watch = self._changes.watch()
            with self._lock:
                now_s = self._clock.now_s()
                self._expire(now_s)
                if self._revocations.get(worker, 0) != revocations:
                    self._changes.forget(watch)
                    return []
                tickets = [] if self._held else self._ledger.lease(worker, self._share(worker, room, now_s), now_s)
            if tickets:
                self._changes.forget(watch)
                return self._with_prompts(worker, tickets)
            if now_s >= until_s:
                self._changes.forget(watch)
                break
            await self._changes.wait(watch, min(TICK_S, until_s - now_s))
        return []

    async def submit(self, worker: str, payload: bytes) -> str:
        """Hands in ``Group.to_bytes()``. Returns ``"ready"``, ``"late_twin"``, ``"revoked"`` or a drop reason.

        Raises:
            RecordError: not one group of this run.
        """
        head = GroupHead.from_bytes(payload, self._margin)
        if head.trajectories > self._group_size:
            raise RecordError(
                f"worker {worker}: group {head.group_id} has {head.trajectories} trajectories, "
                f"group_size is {self._group_size}"
            )
        with self._lock:
            verdict = self._ledger.submit(
                worker,
                head.group_id,
                head.oldest_version,
                head.scored,
                head.zero_signal,
                head.incarnation,
                self._clock.now_s(),
                head.unscored_cause,
                head.silent_cause,
            )
            if verdict == "ready":
                self._payloads[head.group_id] = payload
        self._changes.announce()
        return verdict

    async def give_up(self, worker: str, group_id: int, reason: DropReason, cause: str) -> None:
        """Returns a lease unfulfilled; it is issued again, or dropped with the reason."""
        with self._lock:
            given_up = self._ledger.give_up(worker, group_id, reason, cause, self._clock.now_s())
        if given_up:
            log.info("worker %s gave up group %d (%s): %s", worker, group_id, reason, cause)
            self._changes.announce()

    # Whoever watches over the workers

    async def revoke(self, worker: str, cause: str, lost: bool = True) -> list[int]:
        """Takes the leases of ``worker`` away and ends its waiting requests. ``lost=False``: drained on purpose."""
        with self._lock:
            self._revocations[worker] = self._revocations.get(worker, 0) + 1
            group_ids = self._ledger.revoke(worker, self._clock.now_s(), lost, cause)
        self._changes.announce()
        return group_ids

    async def report_failure(self, worker: str, cause: str, workers_left: int, suspect: bool = True) -> list[int]:
        """``worker`` is lost, ``workers_left`` can still produce (those being rebuilt included).

        With none left, a ``take`` that cannot be filled raises ``WorkerLost`` with the first cause at once.

        Args:
            suspect: the groups it held may be what killed it; each such loss uses up one of their attempts.
        """
        group_ids = await self.revoke(worker, cause, lost=suspect)
        with self._lock:
            if self._first_cause is None:
                self._first_cause = f"worker {worker}: {cause}"
            self._workers_left = workers_left
        log.warning(
            "worker %s is lost (%d left), its groups %s are issued again: %s", worker, workers_left, group_ids, cause
        )
        self._changes.announce()
        return group_ids

    async def report_recovery(self, workers_left: int) -> None:
        """Workers were added or came back; earlier causes are forgotten."""
        with self._lock:
            self._workers_left, self._first_cause = workers_left, None

    # The driver

    async def take(self, version: int, deadline_s: float) -> TakenStep | None:
        """The next step's groups, or None if they are not ready within ``deadline_s``. The same step until ``commit``.

        Raises:
            DataError, InfrastructureError: the step cannot be filled; the message says what was dropped and why.
            WorkerLost: no worker is left to fill it; with the first cause.
        """
        until_s = self._clock.now_s() + deadline_s
        while True:
            watch = self._changes.watch()
            try:
                with self._lock:
                    now_s = self._clock.now_s()
                    self._expire(now_s)
                    taken = self._take_now(version)
                    producing = self._ledger.producing
            except BaseException:
                self._changes.forget(watch)
                raise
            if taken is not None or now_s >= until_s:
                self._changes.forget(watch)
                return taken
            await self._changes.wait(watch, min(TICK_S, until_s - now_s))
            waited_s = self._clock.now_s() - now_s
            self._wait_s += waited_s
            self._idle_s += 0.0 if producing else waited_s

    async def commit(self, version: int) -> None:
        """The taken groups are trained; the next step consumes at ``version``, and leases from now on carry it."""
        with self._lock:
            self._ledger.commit(version)
            self._forget_gone()
            self._wait_s = self._idle_s = 0.0
        self._changes.announce()

    async def snapshot(self) -> dict[str, Any]:
        """The ledger, JSON-able, for a checkpoint."""
        with self._lock:
            return self._ledger.snapshot()

    async def restore(self, snapshot: Mapping[str, Any], version: int, incarnation: int) -> None:
        """Goes back to ``snapshot`` (an empty one: to the start). Leases are revoked and finished groups discarded.

        Nothing is leased until ``release``: the restored weights must reach the workers first.
        """
        with self._lock:
            self._ledger.restore(snapshot, incarnation, version)
            self._payloads.clear()
            self._held = True
            self._wait_s = self._idle_s = 0.0
        self._changes.announce()

    async def release(self) -> None:
        """Leases are given from now on."""
        with self._lock:
            self._held = False
        self._changes.announce()

    async def cancel(self) -> None:
        """The end of the run: everything outstanding is dropped as ``cancelled``."""
        with self._lock:
            self._ledger.cancel()
            self._payloads.clear()
        self._changes.announce()

    async def counts(self) -> dict[str, Any]:
        """``LedgerCounts`` as a dictionary."""
        with self._lock:
            return asdict(self._ledger.counts())

    async def why_waiting(self) -> str:
        """Who waits for what, since when."""
        with self._lock:
            text = self._ledger.why_waiting(self._clock.now_s())
            return f"{text}; first lost {self._first_cause}" if self._first_cause else text

    # Inside; all but the last with the lock held

    def _share(self, worker: str, room: int, now_s: float) -> int:
        """What ``worker`` may lease now: its part of all outstanding groups, among the workers that ask for some.

        A worker that could do more is not held back for longer than a busy or dead one stays on this list.
        """
        self._asked_s[worker] = now_s
        self._asked_s = {name: asked_s for name, asked_s in self._asked_s.items() if now_s - asked_s <= ASKING_S}
        part = -(-self._ledger.limits.outstanding_groups // len(self._asked_s))
        return max(0, min(room, part - self._ledger.held_by(worker)))

    def _expire(self, now_s: float) -> None:
        expired = self._ledger.expire(now_s)
        if expired:
            log.warning("groups %s are past their deadline and are issued again", expired)
            self._changes.announce()

    def _take_now(self, version: int) -> TakenStep | None:
        group_ids = self._ledger.take(version)
        self._forget_gone()
        if group_ids is None:
            if self._broken is not None:
                raise self._broken
            if self._workers_left == 0:
                raise WorkerLost(f"no rollout worker is left; the first cause was {self._first_cause}")
            return None
        return TakenStep(
            groups=tuple(self._payloads[group_id] for group_id in group_ids),
            group_ids=tuple(group_ids),
            version=version,
            staleness=tuple(version - self._ledger.oldest_version(group_id) for group_id in group_ids),
            wait_s=self._wait_s,
            idle_s=self._idle_s,
        )

    def _forget_gone(self) -> None:
        """Frees the bytes of groups that were trained or dropped."""
        for group_id in [known for known in self._payloads if self._ledger.state(known) is None]:
            del self._payloads[group_id]

    def _with_prompts(self, worker: str, tickets: list[LeaseTicket]) -> list[Lease]:
        try:
            return [
                Lease(
                    group_id=ticket.group_id,
                    prompt=self._prompts(ticket.group_id),
                    group_size=self._group_size,
                    version=ticket.version,
                    attempt=ticket.attempt,
                    incarnation=ticket.incarnation,
                    deadline_s=ticket.deadline_s,
                )
                for ticket in tickets
            ]
        except Exception as failure:
            log.exception("the prompts of groups %s cannot be made", [ticket.group_id for ticket in tickets])
            with self._lock:
                self._broken = failure
                self._ledger.revoke(worker, self._clock.now_s(), lost=False, cause=str(failure))
            self._changes.announce()
            return []
