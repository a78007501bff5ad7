"""The account of every group: leased -> ready -> taken -> trained, or dropped with a reason.

Always holds: ``issued = leased + ready + taken + trained + dropped``; no group is trained twice; at most
``(max_staleness + 1) x groups_per_step`` groups are outstanding, so staleness is bounded by pacing the producer and
finished work is not thrown away. A group that lost its worker waits, counted among the leased ones, and is issued again
under its id before new ones. Pure: no clock, no threads, no I/O; memory grows with the outstanding groups only.
``system.stream`` is its only caller in a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from system.core.errors import CheckpointDamaged
from system.core.records import DROP_REASONS, DropReason, RecordError
from system.ledger_facts import (
    FINAL_REASONS,
    UNCHARGED_REASONS,
    LeaseTicket,
    LedgerCounts,
    LedgerLimits,
    Losses,
    Verdict,
)
from system.taking_rule import choose_groups

State = Literal["waiting", "leased", "ready", "taken"]


@dataclass
class _Entry:
    group_id: int
    version: int
    """Of the oldest token when ready, else of the lease."""
    state: State = "waiting"
    worker: str = ""
    since_s: float = 0.0
    attempt: int = -1
    failures: int = 0


class GroupLedger:
    """See the module. Every method that depends on time is told ``now_s`` (monotonic seconds)."""

    def __init__(self, limits: LedgerLimits, incarnation: int = 0, version: int = 0) -> None:
        self.limits = limits
        self.incarnation = incarnation
        self.version = version
        """Policy version that the next step consumes."""
        self._next_id = limits.first_group_id
        self._issued = 0
        self._trained = 0
        self._steps = 0
        self._dropped: Counter[str] = Counter()
        self._reissued = 0
        self._late_twins = 0
        self._revoked_submissions = 0
        self._entries: dict[int, _Entry] = {}
        self._losses = Losses(limits)
        self._last_ask: tuple[str, float] | None = None

    # Producers

    def lease(self, worker: str, room: int, now_s: float) -> list[LeaseTicket]:
        """At most ``room`` groups for ``worker``: those to be issued again, then new ones while admission allows."""
        self._last_ask = (worker, now_s)
        entries = sorted(self._in_state("waiting"), key=lambda entry: entry.group_id)[: max(0, room)]
        self._reissued += len(entries)
        while len(entries) < room and self._may_issue():
            entry = _Entry(group_id=self._next_id, version=self.version)
            self._entries[entry.group_id] = entry
            self._next_id += 1
            self._issued += 1
            entries.append(entry)
        for entry in entries:
            entry.state, entry.worker, entry.since_s, entry.version = "leased", worker, now_s, self.version
            entry.attempt += 1
        return [
            LeaseTicket(entry.group_id, entry.version, entry.attempt, self.incarnation, self.limits.deadline_s)
            for entry in entries
        ]

    def submit(
        self,
        worker: str,
        group_id: int,
        oldest_version: int,
        scored: int,
        zero_signal: bool,
        incarnation: int,
        now_s: float,
        unscored_cause: str = "",
        silent_cause: str = "all rewards equal",
    ) -> Verdict:
        """Accepts a finished group once, from the worker that holds its lease.

        Args:
            oldest_version: of the group's tokens.
            scored: trajectories with a reward.
            zero_signal: whether the rewards say nothing.
            unscored_cause: why others have none.
            silent_cause: what they are where they say nothing.
        Returns:
            ``"ready"``; ``"late_twin"``: already handed in or gone; ``"revoked"``: the lease is no longer this
            worker's, or of an earlier incarnation; or the reason it was dropped for.
        Raises:
            RecordError: the group was never issued.
        """
        if incarnation != self.incarnation:
            self._revoked_submissions += 1
            return "revoked"
        if not self.limits.first_group_id <= group_id < self._next_id:
            raise RecordError(f"worker {worker} handed in group {group_id}, which was never issued")
        entry = self._entries.get(group_id)
        if entry is None or entry.state in ("ready", "taken"):
            self._late_twins += 1
            return "late_twin"
        if entry.state != "leased" or entry.worker != worker:
            self._revoked_submissions += 1
            return "revoked"
        if scored < self.limits.min_scored:
            cause = f"{scored} trajectories scored, {self.limits.min_scored} needed. {unscored_cause}"
            return self._drop(entry, "too_few_scored", cause.rstrip())
        if zero_signal and self.limits.refill_zero_signal:
            return self._drop(entry, "zero_signal", silent_cause)
        if oldest_version < self.version - self.limits.max_staleness:
            return self._drop(entry, "too_old", f"tokens of version {oldest_version} at version {self.version}")
        entry.state, entry.version, entry.since_s = "ready", oldest_version, now_s
        return "ready"

    def give_up(self, worker: str, group_id: int, reason: DropReason, cause: str, now_s: float) -> bool:
        """A lease comes back: issued again, or dropped when the reason is final or the attempts are used up.

        Returns:
            False when ``worker`` no longer holds the lease (nothing changes).
        """
        if reason not in DROP_REASONS:
            raise RecordError(f"worker {worker} gave up group {group_id} for an unknown reason {reason!r}")
        entry = self._entries.get(group_id)
        if entry is None or entry.state != "leased" or entry.worker != worker:
            return False
        self._fail(entry, reason, cause, now_s)
        return True

    def revoke(self, worker: str, now_s: float, lost: bool = True, cause: str = "worker lost") -> list[int]:
        """Takes all leases of ``worker`` away. A lost worker's groups are suspects (``poison`` after ``attempts``)."""
        entries = [entry for entry in self._in_state("leased") if entry.worker == worker]
        for entry in entries:
            self._fail(entry, "poison" if lost else "cancelled", f"{worker}: {cause}", now_s)
        return [entry.group_id for entry in entries]

    def expire(self, now_s: float) -> list[int]:
        """Takes away the leases that are over ``deadline_s + grace_s`` old."""
        allowed_s = self.limits.deadline_s + self.limits.grace_s
        entries = [entry for entry in self._in_state("leased") if now_s - entry.since_s >= allowed_s]
        for entry in entries:
            self._fail(entry, "deadline", f"{entry.worker} held it for {now_s - entry.since_s:.0f} s", now_s)
        return [entry.group_id for entry in entries]

    # The learner

    def take(self, version: int) -> list[int] | None:
        """The next step's groups in issue order, or None while it must wait. The same answer until ``commit``.

        Raises:
            DataError: the step cannot be filled, because what was finished was filtered out.
            InfrastructureError: the step cannot be filled, because groups failed to be produced.
        """
        if version != self.version:
            raise ValueError(f"take at version {version}, but the ledger is at version {self.version}")
        taken = self._in_state("taken")
        if taken:
            return sorted(entry.group_id for entry in taken)
        oldest_allowed = version - self.limits.max_staleness
        for entry in [entry for entry in self._in_state("ready") if entry.version < oldest_allowed]:
            self._drop(entry, "too_old", f"tokens of version {entry.version} at version {version}")
        chosen = choose_groups(
            {entry.group_id: entry.version for entry in self._in_state("ready")},
            self._unfinished_versions(),
            version,
            self.limits.groups_per_step,
            self.limits.max_staleness,
        )
        if chosen is None:
            ready = len(self._in_state("ready"))
            if self._losses.too_many and ready < self.limits.groups_per_step:
                raise self._losses.error(self._steps + 1, ready)
            return None
        for group_id in chosen:
            self._entries[group_id].state = "taken"
        self._losses = Losses(self.limits)
        return chosen

    def commit(self, version_next: int) -> list[int]:
        """The taken groups are trained, and the next step consumes at ``version_next``. Returns their ids."""
        taken = sorted(entry.group_id for entry in self._in_state("taken"))
        if not taken:
            raise ValueError("commit without a taken step")
        if version_next <= self.version:
            raise ValueError(f"commit to version {version_next}, but version {self.version} is already used")
        for group_id in taken:
            del self._entries[group_id]
        self._trained += len(taken)
        self._steps += 1
        self.version = version_next
        return taken

    def cancel(self) -> list[int]:
        """The end of the run: drops everything outstanding as ``cancelled``. Returns their ids."""
        entries = sorted(self._entries.values(), key=lambda entry: entry.group_id)
        for entry in entries:
            self._drop(entry, "cancelled", "the run ended")
        return [entry.group_id for entry in entries]

    # The account

    def counts(self) -> LedgerCounts:
        states = Counter(entry.state for entry in self._entries.values())
        return LedgerCounts(
            issued=self._issued,
            leased=states["leased"] + states["waiting"],
            ready=states["ready"],
            taken=states["taken"],
            trained=self._trained,
            dropped={reason: self._dropped[reason] for reason in DROP_REASONS if self._dropped[reason]},
            waiting=states["waiting"],
            reissued=self._reissued,
            late_twins=self._late_twins,
            revoked_submissions=self._revoked_submissions,
        )

    def check_conservation(self) -> None:
        """Raises RuntimeError when a group is unaccounted for or too many are outstanding: a defect of ours."""
        counts = self.counts()
        if not counts.conserved or len(self._entries) > self.limits.outstanding_groups:
            raise RuntimeError(f"the ledger does not add up: {counts}, bound {self.limits.outstanding_groups}")

    def state(self, group_id: int) -> State | None:
        """Of an outstanding group; None when it was trained, dropped or not issued yet."""
        entry = self._entries.get(group_id)
        return entry.state if entry else None

    def oldest_version(self, group_id: int) -> int:
        """Of a ready or taken group's tokens."""
        return self._entries[group_id].version

    @property
    def steps_committed(self) -> int:
        return self._steps

    def held_by(self, worker: str) -> int:
        """Leases that ``worker`` holds."""
        return sum(entry.worker == worker for entry in self._in_state("leased"))

    @property
    def producing(self) -> bool:
        """Some worker holds a lease."""
        return bool(self._in_state("leased"))

    def snapshot(self) -> dict[str, Any]:
        """JSON-able; belongs into a checkpoint, taken after ``commit``."""
        return {
            "next_group_id": self._next_id,
            "issued": self._issued,
            "trained": self._trained,
            "steps": self._steps,
            "version": self.version,
            "dropped": dict(self._dropped),
            "reissued": self._reissued,
            "late_twins": self._late_twins,
            "revoked_submissions": self._revoked_submissions,
            "outstanding": [
                [entry.group_id, entry.attempt, entry.failures]
                for entry in sorted(self._entries.values(), key=lambda entry: entry.group_id)
            ],
        }

    def restore(self, snapshot: Mapping[str, Any], incarnation: int, version: int) -> None:
        """Goes back to ``snapshot`` as ``incarnation``, whose first step consumes at ``version``.

        Leases are revoked and what was ready or taken is discarded: all of it waits to be issued again under its
        ids. Groups first issued after the snapshot follow, because the next id goes back.

        An empty snapshot is the start of the run, before anything was issued.

        Raises:
            CheckpointDamaged: the snapshot lacks a part or does not add up.
            ValueError: the incarnation or version was used before.
        """
        snapshot = snapshot or GroupLedger(self.limits, version=-1).snapshot()
        try:
            entries = {
                int(group_id): _Entry(int(group_id), version, attempt=int(attempt), failures=int(failures))
                for group_id, attempt, failures in snapshot["outstanding"]
            }
            dropped = Counter({str(reason): int(number) for reason, number in snapshot["dropped"].items()})
            names = ("next_group_id", "issued", "trained", "steps", "version")
            next_id, issued, trained, steps, version_then = (int(snapshot[name]) for name in names)
            extras = [int(snapshot[name]) for name in ("reissued", "late_twins", "revoked_submissions")]
        except (KeyError, TypeError, ValueError) as failure:
            raise CheckpointDamaged(f"ledger in the checkpoint cannot be read: {failure!r}") from failure
        adds_up = issued == len(entries) + trained + dropped.total() and next_id - self.limits.first_group_id == issued
        if not adds_up or any(not self.limits.first_group_id <= group_id < next_id for group_id in entries):
            raise CheckpointDamaged(
                f"ledger in the checkpoint does not add up: issued {issued} up to group {next_id - 1}, "
                f"outstanding {len(entries)}, trained {trained}, dropped {dropped.total()}"
            )
        if incarnation < self.incarnation or (self._issued and incarnation == self.incarnation):
            raise ValueError(f"incarnation {incarnation} was used before; the ledger is at {self.incarnation}")
        if version <= version_then or (self._issued and version <= self.version):
            raise ValueError(f"version {version} was used before; the ledger was at {max(version_then, self.version)}")
        self._entries, self._dropped = entries, dropped
        self._next_id, self._issued, self._trained, self._steps = next_id, issued, trained, steps
        self._reissued, self._late_twins, self._revoked_submissions = extras
        self.incarnation, self.version = incarnation, version
        self._losses, self._last_ask = Losses(self.limits), None

    def why_waiting(self, now_s: float) -> str:
        """Who waits for what, since when: one paragraph for stall errors and progress."""
        limits, counts = self.limits, self.counts()
        step = f"step {self._steps + 1} (version {self.version})"
        leased = sorted(self._in_state("leased"), key=lambda entry: (entry.version, entry.group_id))
        if counts.taken:
            parts = [f"{step} is with the learner ({counts.taken} groups), {counts.ready} ready"]
        else:
            parts = [f"{step} needs {limits.groups_per_step} groups: {counts.ready} ready"]
            if leased and counts.ready >= limits.groups_per_step:
                parts.append(f"it must wait for the oldest unfinished ones, first of all group {leased[0].group_id}")
        for worker, number in sorted(Counter(entry.worker for entry in leased).items()):
            oldest = min((entry for entry in leased if entry.worker == worker), key=lambda entry: entry.since_s)
            parts.append(
                f"worker {worker} holds {number}, longest group {oldest.group_id} for {now_s - oldest.since_s:.0f} s "
                f"(attempt {oldest.attempt}, version {oldest.version})"
            )
        if counts.waiting:
            parts.append(f"{counts.waiting} wait to be issued again")
        if self._losses.too_many:
            parts.append(f"nothing more is issued: {self._losses}")
        elif counts.waiting or self._may_issue():
            asked = f"{self._last_ask[0]} {now_s - self._last_ask[1]:.0f} s ago" if self._last_ask else "never"
            parts.append(f"there is work to hand out, last asked for: {asked}")
        else:
            parts.append(f"all {len(self._entries)} groups that staleness and steps allow are out: workers wait")
        if self._losses and not self._losses.too_many:
            parts.append(f"lost while filling this step: {self._losses}")
        return "; ".join(parts)

    # Inside

    def _in_state(self, state: State) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.state == state]

    def _unfinished_versions(self) -> list[int]:
        """A group that waits to be issued again will be leased at this version or later."""
        return [
            self.version if entry.state == "waiting" else entry.version
            for entry in self._entries.values()
            if entry.state in ("waiting", "leased")
        ]

    def _may_issue(self) -> bool:
        bound = self.limits.outstanding_groups
        if self.limits.steps is not None:
            bound = min(bound, (self.limits.steps - self._steps) * self.limits.groups_per_step)
        return len(self._entries) < bound and not self._losses.too_many

    def _fail(self, entry: _Entry, reason: DropReason, cause: str, now_s: float) -> None:
        if reason not in UNCHARGED_REASONS:
            entry.failures += 1
        if reason in FINAL_REASONS or entry.failures >= self.limits.attempts:
            self._drop(entry, reason, cause)
        else:
            entry.state, entry.worker, entry.since_s = "waiting", "", now_s

    def _drop(self, entry: _Entry, reason: DropReason, cause: str) -> DropReason:
        del self._entries[entry.group_id]
        self._dropped[reason] += 1
        if reason not in UNCHARGED_REASONS and len(self._in_state("ready")) < self.limits.groups_per_step:
            self._losses.record(entry.group_id, reason, cause)
        return reason
