"""Which rollout workers take part, and where each stands in the transfer group. Pure.

Rank 0 of the group is the sender; every healthy worker follows with as many ranks as its engine has processes, in the
order in which workers were added. So the offset of worker i is 1 + the worlds before it, and all of it changes only
when the membership does (``generation`` counts that).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Health = Literal["healthy", "lost"]


@dataclass(frozen=True)
class Member:
    """One worker: its name, and the processes its engine brings into a transfer group."""

    name: str
    world: int
    health: Health = "healthy"
    cause: str | None = None
    """Why it was lost: the first cause."""


@dataclass(frozen=True)
class TransferPlan:
    """The transfer group of one membership."""

    generation: int
    world_size: int
    offsets: dict[str, int]
    """Worker -> first rank of its engine."""


class Fleet:
    """Names, health and offsets."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._generation = 0

    def add(self, name: str, world: int = 1) -> None:
        """A worker whose engine has ``world`` processes joins; a lost one of the same name is replaced.

        Raises:
            ValueError: a healthy worker of that name is there, or ``world`` is not positive.
        """
        if world < 1:
            raise ValueError(f"{name}: an engine of {world} processes")
        if name in self._members and self._members[name].health == "healthy":
            raise ValueError(f"{name} is in the fleet already")
        self._members.pop(name, None)
        self._members[name] = Member(name, world)
        self._generation += 1

    def lose(self, name: str, cause: str) -> None:
        """A worker is gone; the first cause stays."""
        member = self._members[name]
        if member.health == "healthy":
            self._members[name] = Member(name, member.world, "lost", cause)
            self._generation += 1

    def remove(self, name: str) -> None:
        """A worker leaves for good."""
        if self._members.pop(name).health == "healthy":
            self._generation += 1

    def members(self) -> list[Member]:
        return list(self._members.values())

    def healthy(self) -> list[str]:
        return [member.name for member in self._members.values() if member.health == "healthy"]

    def first_cause(self) -> str | None:
        """Of the worker that was lost first and is still listed."""
        return next((f"{m.name}: {m.cause}" for m in self._members.values() if m.health == "lost"), None)

    def transfer_plan(self) -> TransferPlan:
        """Offsets of the healthy workers, by value; a group built for another ``generation`` must be rebuilt."""
        offsets: dict[str, int] = {}
        rank = 1
        for member in self._members.values():
            if member.health == "healthy":
                offsets[member.name] = rank
                rank += member.world
        return TransferPlan(self._generation, rank, offsets)
