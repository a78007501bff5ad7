"""Which rows share a forward pass, and which rank takes which rows. Pure and deterministic.

Invariants: every item is in exactly one micro-batch and on exactly one rank; what a micro-batch computes is within the
budget unless it holds a single row; the answer depends on the arguments alone. What is computed depends on the layout:
padded rows, rows x longest row; with shared prefixes, each distinct prompt once and the completions behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

Layout = Literal["shared_prefix", "padded"]


@dataclass(frozen=True)
class PackItem:
    """A row to place: the number of its tokens (prompt and completion), and what it belongs to."""

    tokens: int
    group: Hashable
    trajectory: Hashable
    """Within the group; its rows share one ratio in some objectives, so they are cut only when they must be."""
    prefix: Hashable = None
    """The same for rows with the same prompt."""
    prefix_tokens: int = 0
    """Those of ``tokens`` that are the prompt."""


class _Load(Protocol):
    """Rows that are computed together, and what they cost in tokens."""

    members: list[int]

    @property
    def tokens(self) -> int: ...

    def tokens_with(self, unit: Sequence[int]) -> int: ...

    def add(self, unit: Sequence[int]) -> None: ...


@dataclass
class _PaddedLoad:
    items: Sequence[PackItem]
    members: list[int] = field(default_factory=list)
    width: int = 0

    @property
    def tokens(self) -> int:
        return len(self.members) * self.width

    def tokens_with(self, unit: Sequence[int]) -> int:
        return (len(self.members) + len(unit)) * self._width_with(unit)

    def add(self, unit: Sequence[int]) -> None:
        self.width = self._width_with(unit)
        self.members.extend(unit)

    def _width_with(self, unit: Sequence[int]) -> int:
        return max(self.width, *(self.items[index].tokens for index in unit))


@dataclass
class _ExactLoad:
    """Without padding; a prompt counts once where ``shared``."""

    items: Sequence[PackItem]
    shared: bool
    keys_per_token: float | None = None
    members: list[int] = field(default_factory=list)
    tokens: int = 0
    pairs: int = 0
    """Of a query and a key that it sees."""
    prefixes: set[Hashable] = field(default_factory=set)

    @property
    def cost(self) -> float:
        return self._cost(self.tokens, self.pairs)

    def cost_with(self, unit: Sequence[int]) -> float:
        return self._cost(*self._sizes_with(unit))

    def tokens_with(self, unit: Sequence[int]) -> int:
        return self._sizes_with(unit)[0]

    def add(self, unit: Sequence[int]) -> None:
        self.tokens, self.pairs = self._sizes_with(unit)
        self.members.extend(unit)
        self.prefixes.update(self.items[index].prefix for index in unit)

    def _sizes_with(self, unit: Sequence[int]) -> tuple[int, int]:
        tokens, pairs, found = self.tokens, self.pairs, set()
        for index in unit:
            item = self.items[index]
            tokens += item.tokens
            pairs += item.tokens * (item.tokens + 1) // 2
            if self.shared and (item.prefix in self.prefixes or item.prefix in found):
                tokens -= item.prefix_tokens
                pairs -= item.prefix_tokens * (item.prefix_tokens + 1) // 2
            found.add(item.prefix)
        return tokens, pairs

    def _cost(self, tokens: int, pairs: int) -> float:
        return tokens + (pairs / self.keys_per_token if self.keys_per_token else 0.0)


def _load(items: Sequence[PackItem], layout: Layout, unit: Sequence[int] = ()) -> _Load:
    load: _Load = _ExactLoad(items, shared=True) if layout == "shared_prefix" else _PaddedLoad(items)
    if unit:
        load.add(unit)
    return load


def computed_tokens(items: Sequence[PackItem], members: Sequence[int], layout: Layout) -> int:
    """Positions that a micro-batch of ``members`` computes, padding included."""
    return _load(items, layout, members).tokens


def pack_rows(
    items: Sequence[PackItem], budget_tokens: int, keep_groups: bool = False, layout: Layout = "padded"
) -> list[list[int]]:
    """Micro-batches of row indices: first fit by decreasing size.

    Padded, what stays together (a trajectory, or a group) and does not fit the budget is packed row by row. With shared
    prefixes groups stay together; one that does not fit is cut into parts that do, by trajectories and then by rows,
    each part with its prompt.

    Args:
        budget_tokens: most tokens that one micro-batch computes, padding included; a longer row goes alone.
        keep_groups: place whole groups, not just whole trajectories.
    """
    everything = list(range(len(items)))
    if layout == "shared_prefix":
        units = [
            part
            for members in _together(items, everything, _group)
            for part in _cut(items, members, budget_tokens, layout, [_trajectory, None])
        ]
        return _first_fit(units, items, budget_tokens, layout)
    units = []
    for members in _together(items, everything, _group if keep_groups else _trajectory):
        fits = _load(items, layout, members).tokens <= budget_tokens
        units.extend([members] if fits else [[index] for index in members])
    return _first_fit(units, items, budget_tokens, layout)


def spread_over_ranks(
    items: Sequence[PackItem],
    ranks: int,
    tolerance: float = 0.1,
    layout: Layout = "padded",
    keys_per_token: float | None = None,
) -> list[list[int]]:
    """Row indices of each rank: costliest group first to the rank that then has least.

    Groups stay together while the heaviest rank stays within ``1 + tolerance`` of the even share; otherwise
    trajectories are placed one by one (coefficients do not depend on the cut). With shared prefixes a prompt costs
    once per rank that has rows of it.

    Args:
        keys_per_token: as many keys cost a query as much as all the rest of a token's way through the model; None:
            rows cost their tokens alone.
    """
    everything = list(range(len(items)))
    if ranks == 1:
        return [everything]
    empty = _ExactLoad(items, layout == "shared_prefix", keys_per_token)
    whole, heaviest = _least_loaded(_together(items, everything, _group), empty, ranks)
    if heaviest <= empty.cost_with(everything) / ranks * (1.0 + tolerance):
        return whole
    single, heaviest_single = _least_loaded(_together(items, everything, _trajectory), empty, ranks)
    return single if heaviest_single < heaviest else whole


def split_in_order(group_ids: Sequence[int], parts: int) -> list[list[int]]:
    """The distinct ids in issue order, cut into at most ``parts`` runs whose sizes differ by at most one.

    Ids below 0, of offline pairs, are cut by themselves: every run gets its share of both.
    """
    sampled = sorted({group_id for group_id in group_ids if group_id >= 0})
    paired = sorted({group_id for group_id in group_ids if group_id < 0}, reverse=True)
    parts = min(parts, len(sampled) or len(paired))

    def run(ordered: list[int], part: int) -> list[int]:
        return ordered[len(ordered) * part // parts : len(ordered) * (part + 1) // parts]

    return [run(sampled, part) + run(paired, part) for part in range(parts)]


def _group(item: PackItem) -> Hashable:
    return item.group


def _trajectory(item: PackItem) -> Hashable:
    return item.group, item.trajectory


def _together(
    items: Sequence[PackItem], members: Sequence[int], key: Callable[[PackItem], Hashable] | None
) -> list[list[int]]:
    """Indices of items with equal keys, in order of first appearance; without a key each by itself."""
    found: dict[Hashable, list[int]] = {}
    for index in members:
        found.setdefault(index if key is None else key(items[index]), []).append(index)
    return list(found.values())


def _cut(
    items: Sequence[PackItem],
    members: list[int],
    budget_tokens: int,
    layout: Layout,
    finer: Sequence[Callable[[PackItem], Hashable] | None],
) -> list[list[int]]:
    """Parts of ``members`` within the budget, as few as filling them in order gives."""
    if _load(items, layout, members).tokens <= budget_tokens or not finer:
        return [members]
    parts: list[list[int]] = []
    filling = _load(items, layout)
    for unit in _together(items, members, finer[0]):
        if filling.members and filling.tokens_with(unit) <= budget_tokens:
            filling.add(unit)
            continue
        if filling.members:
            parts.append(filling.members)
        filling = _load(items, layout)
        if filling.tokens_with(unit) <= budget_tokens:
            filling.add(unit)
        else:
            parts.extend(_cut(items, unit, budget_tokens, layout, finer[1:]))
    return [*parts, filling.members] if filling.members else parts


def _first_fit(
    units: list[list[int]], items: Sequence[PackItem], budget_tokens: int, layout: Layout
) -> list[list[int]]:
    def size(unit: list[int]) -> int:
        return _load(items, layout, unit).tokens if layout == "shared_prefix" else max(items[i].tokens for i in unit)

    bins: list[_Load] = []
    for unit in sorted(units, key=lambda unit: (-size(unit), unit[0])):
        for placed in bins:
            if placed.tokens_with(unit) <= budget_tokens:
                placed.add(unit)
                break
        else:
            bins.append(_load(items, layout, unit))
    return [sorted(placed.members) for placed in bins]


def _least_loaded(units: list[list[int]], empty: _ExactLoad, ranks: int) -> tuple[list[list[int]], float]:
    """Rows of each rank, and the cost of the heaviest.

    Args:
        empty: a load without rows, of which each rank gets a copy.
    """
    loads = [replace(empty, members=[], prefixes=set()) for _ in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-empty.cost_with(unit), unit[0])):
        min(loads, key=lambda load: load.cost_with(unit)).add(unit)
    return [sorted(load.members) for load in loads], max(load.cost for load in loads)
