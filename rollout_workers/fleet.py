"""Where each rollout worker stands, and which ranks its engine takes in a weight transfer. Pure; the one place that
decides membership.

    starting -> ready -> healthy           only a finished, verified weight sync makes a worker healthy
    any of these -> lost -> starting       rebuilt, at most ``restarts`` times each; then it stays lost

Rank 0 of a transfer group is the sender; the workers that take part follow with as many ranks as their engines have
processes. So the offset of worker i is 1 + the worlds before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Health = Literal["starting", "ready", "healthy", "lost"]

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 60.0


@dataclass
class Member:
    """One worker: its name, and the processes its engine brings into a transfer group."""

    name: str
    world: int
    health: Health = "starting"
    rebuilt: int = 0
    """How often it was started again."""
    cause: str | None = None
    """Why it was lost last."""


@dataclass(frozen=True)
class TransferPlan:
    """The transfer group of some workers, by value."""

    world_size: int
    offsets: dict[str, int]
    """Worker -> first rank of its engine."""


class Fleet:
    """Names, health, restart budgets and offsets."""

    def __init__(self, restarts: int = 0) -> None:
        """``restarts``: how often each worker may be rebuilt."""
        self._restarts = restarts
        self._members: dict[str, Member] = {}
        self._first_cause: str | None = None

    def add(self, name: str, world: int = 1) -> None:
        """A worker whose engine has ``world`` processes is being started.

        Raises:
            ValueError: a worker of that name is there, or ``world`` is not positive.
        """
        if world < 1:
            raise ValueError(f"{name}: an engine of {world} processes")
        if name in self._members:
            raise ValueError(f"{name} is in the fleet already")
        self._members[name] = Member(name, world)

    def started(self, name: str) -> None:
        """Its engine is loaded; the next weight sync takes it in."""
        self._move(name, ("starting",), "ready")

    def admitted(self, name: str) -> None:
        """A weight sync to it is finished and verified."""
        self._move(name, ("ready", "healthy"), "healthy")

    def lose(self, name: str, cause: str) -> bool:
        """It is gone, or must not serve any more. Returns whether it may be rebuilt."""
        member = self._members[name]
        if member.health != "lost":
            member.health, member.cause = "lost", cause
            self._first_cause = self._first_cause or f"{name}: {cause}"
        return member.rebuilt < self._restarts

    def rebuild(self, name: str) -> None:
        """A lost worker is being started again.

        Raises:
            ValueError: it is not lost, or was rebuilt as often as allowed.
        """
        member = self._members[name]
        if member.health != "lost" or member.rebuilt >= self._restarts:
            raise ValueError(f"{name} is {member.health}, rebuilt {member.rebuilt} of {self._restarts} times")
        member.health, member.rebuilt = "starting", member.rebuilt + 1

    def pause_before_rebuild_s(self, name: str) -> float:
        """None before the first rebuild, then twice as long each time."""
        rebuilt = self._members[name].rebuilt
        return 0.0 if rebuilt == 0 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (rebuilt - 1))

    def members(self) -> list[Member]:
        return list(self._members.values())

    def named(self, *healths: Health) -> list[str]:
        """Workers in one of these states, in the order in which they were added."""
        return [member.name for member in self._members.values() if member.health in healths]

    def producers(self) -> list[str]:
        """Workers that produce groups, or will once they are (re)built."""
        return [
            member.name
            for member in self._members.values()
            if member.health != "lost" or member.rebuilt < self._restarts
        ]

    @property
    def first_cause(self) -> str | None:
        """Of the worker that was lost first, in the whole run."""
        return self._first_cause

    def transfer_plan(self, names: Sequence[str]) -> TransferPlan:
        """Offsets of the named workers in a group of their own, in this order."""
        offsets: dict[str, int] = {}
        rank = 1
        for name in names:
            offsets[name] = rank
            rank += self._members[name].world
        return TransferPlan(rank, offsets)

    def _move(self, name: str, allowed: tuple[Health, ...], to: Health) -> None:
        member = self._members[name]
        if member.health not in allowed:
            raise ValueError(f"{name} is {member.health}, it cannot become {to}")
        member.health = to
