"""What the group ledger enforces, gives out and reports: limits, lease tickets, counts, losses of a step. Pure values.

``Losses`` remembers what was dropped while a step is being filled, and decides when that is too much.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from system.core.errors import ConfigError, DataError, InfrastructureError, TriptychError
from system.core.records import DropReason

Verdict = Literal["ready", "late_twin", "revoked"] | DropReason

FINAL_REASONS: frozenset[DropReason] = frozenset({"zero_signal", "too_few_scored"})
"""Judgements of finished groups: another attempt draws the same answers, so there is none."""
UNCHARGED_REASONS: frozenset[DropReason] = frozenset({"cancelled", "too_old"})
"""Not the group's fault: issued again without using up an attempt."""


SILENT_CAUSES_TOLD = 3


@dataclass(frozen=True)
class LedgerLimits:
    """What the ledger enforces.

    Raises:
        ConfigError: a limit under which no step could ever be filled.
    """

    groups_per_step: int
    max_staleness: int
    deadline_s: float
    """What a worker is given for one group."""
    grace_s: float = 5.0
    """A silent worker's lease is taken away this much after ``deadline_s``, so that its own report comes first."""
    attempts: int = 3
    refill_limit: int = 8
    """A step may lose ``refill_limit x groups_per_step`` groups while it is being filled."""
    refill_zero_signal: bool = False
    """Whether groups whose rewards say nothing are dropped, so that the next prompts take their place."""
    refill_margin: float = 0.0
    """Rewards that differ by less than this say nothing either."""
    min_scored: int = 2
    """Scored trajectories that a group needs."""
    steps: int | None = None
    """Steps of the whole run; nothing is issued that no step would train. None: no end."""
    first_group_id: int = 0

    def __post_init__(self) -> None:
        least: dict[str, float] = {
            "groups_per_step": 1,
            "max_staleness": 0,
            "grace_s": 0,
            "attempts": 1,
            "refill_limit": 1,
            "min_scored": 1,
            "first_group_id": 0,
        }
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ConfigError(f"stream: {name} is {getattr(self, name)}, must be at least {smallest}")
        if not self.deadline_s > 0:
            raise ConfigError(
                f"stream: deadline_s is {self.deadline_s:g}, must be above 0: every lease would expire at once"
            )
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"stream: steps is {self.steps}, must be at least 1")

    @property
    def outstanding_groups(self) -> int:
        """Most groups that are leased, ready or taken at any time."""
        return (self.max_staleness + 1) * self.groups_per_step


@dataclass(frozen=True)
class LeaseTicket:
    """The right to produce one group; the stream adds the prompt."""

    group_id: int
    version: int
    attempt: int
    incarnation: int
    deadline_s: float


@dataclass(frozen=True)
class LedgerCounts:
    """The account at one moment. ``leased`` includes groups that wait to be issued again."""

    issued: int
    leased: int
    ready: int
    taken: int
    trained: int
    dropped: dict[str, int]
    waiting: int
    reissued: int
    late_twins: int
    revoked_submissions: int

    @property
    def conserved(self) -> bool:
        """issued = leased + ready + taken + trained + dropped."""
        parts = self.leased + self.ready + self.taken + self.trained + sum(self.dropped.values())
        return self.issued == parts


class Losses:
    """Groups dropped since the last step was taken, counted only while the next one lacks groups."""

    def __init__(self, limits: LedgerLimits) -> None:
        self._limits = limits
        self._reasons: Counter[DropReason] = Counter()
        self._silent: Counter[str] = Counter()
        self._last = ""

    def record(self, group_id: int, reason: DropReason, cause: str) -> None:
        self._reasons[reason] += 1
        if reason == "zero_signal":
            self._silent[cause] += 1
        self._last = f"group {group_id} {reason}: {cause}"

    @property
    def too_many(self) -> bool:
        return self._reasons.total() >= self._limits.refill_limit * self._limits.groups_per_step

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def __str__(self) -> str:
        numbers = ", ".join(f"{reason} {number}" for reason, number in self._reasons.most_common())
        silent = "".join(f"{cause} in {number}, " for cause, number in self._silent.most_common(SILENT_CAUSES_TOLD))
        return f"{numbers} ({silent}last: {self._last})"

    def error(self, step: int, ready: int) -> TriptychError:
        """Why ``step`` cannot be filled: the data's doing when most losses were filtered, else the infrastructure's."""
        limits, total = self._limits, self._reasons.total()
        text = (
            f"step {step} cannot be filled: {total} groups were dropped while it needed {limits.groups_per_step} and "
            f"{ready} were ready: {self}. The limit is stream.refill_limit x groups_per_step = "
            f"{limits.refill_limit} x {limits.groups_per_step}"
        )
        if 2 * sum(self._reasons[reason] for reason in FINAL_REASONS) >= total:
            mend = (
                "Prompts that the policy answers right some of the time, a larger rollout.group_size or a larger "
                "stream.refill_limit would help; objective.zero_variance: keep trains such groups with advantage 0"
            )
            if 2 * self._reasons["too_few_scored"] >= total:
                mend = "The rewards could not judge these answers: mend the reward named last"
            return DataError(f"{text}. {mend}")
        return InfrastructureError(
            f"{text}. The rollout workers' logs say more; for deadline, raise rollout.deadline_s"
        )
