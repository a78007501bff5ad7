"""Which rows share a forward pass, and which rank takes which rows. Pure and deterministic.

Invariants: every item is in exactly one micro-batch and on exactly one rank; the padded size of a micro-batch
(rows x longest row) is within the budget unless it holds a single row; the answer depends on the arguments alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PackItem:
    """A row to place: the number of its tokens (prompt and completion), and what it belongs to."""

    tokens: int
    group: Hashable
    trajectory: Hashable
    """Within the group; its rows share one ratio in some objectives, so they are cut only when they must be."""


def pack_rows(items: Sequence[PackItem], budget_tokens: int, keep_groups: bool = False) -> list[list[int]]:
    """Micro-batches of row indices: first fit by decreasing length on the padded size.

    Args:
        budget_tokens: most tokens of one micro-batch, padding included; a longer row goes alone.
        keep_groups: place whole groups, not just whole trajectories. What does not fit the budget is packed row by row.
    """
    units: list[list[int]] = []
    for members in _together(items, _group if keep_groups else _trajectory):
        fits = len(members) * max(items[index].tokens for index in members) <= budget_tokens
        units.extend([members] if fits else [[index] for index in members])
    return _first_fit(units, items, budget_tokens)


def spread_over_ranks(items: Sequence[PackItem], ranks: int, tolerance: float = 0.1) -> list[list[int]]:
    """Row indices of each rank: longest group first to the least loaded rank, cost in tokens.

    Groups stay together while the heaviest rank stays within ``1 + tolerance`` of the even share; otherwise
    trajectories are placed one by one (coefficients do not depend on the cut).
    """
    if ranks == 1:
        return [list(range(len(items)))]
    whole = _least_loaded(_together(items, _group), items, ranks)
    even_share = sum(item.tokens for item in items) / ranks
    heaviest = max(sum(items[index].tokens for index in rank) for rank in whole)
    if heaviest <= even_share * (1.0 + tolerance):
        return whole
    single = _least_loaded(_together(items, _trajectory), items, ranks)
    heaviest_single = max(sum(items[index].tokens for index in rank) for rank in single)
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


def _together(items: Sequence[PackItem], key: Callable[[PackItem], Hashable]) -> list[list[int]]:
    """Indices of items with equal keys, in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        members.setdefault(key(item), []).append(index)
    return list(members.values())


def _first_fit(units: list[list[int]], items: Sequence[PackItem], budget_tokens: int) -> list[list[int]]:
    def longest(unit: list[int]) -> int:
        return max(items[index].tokens for index in unit)

    bins: list[list[int]] = []
    widths: list[int] = []
    for unit in sorted(units, key=lambda unit: (-longest(unit), unit[0])):
        for place, members in enumerate(bins):
            if (len(members) + len(unit)) * widths[place] <= budget_tokens:
                members.extend(unit)
                break
        else:
            bins.append(list(unit))
            widths.append(longest(unit))
    return [sorted(members) for members in bins]


def _least_loaded(units: list[list[int]], items: Sequence[PackItem], ranks: int) -> list[list[int]]:
    def cost(unit: list[int]) -> int:
        return sum(items[index].tokens for index in unit)

    loads = [(0, rank) for rank in range(ranks)]
    placed: list[list[int]] = [[] for _ in range(ranks)]
    for unit in sorted(units, key=lambda unit: (-cost(unit), unit[0])):
        load, rank = heapq.heappop(loads)
        placed[rank].extend(unit)
        heapq.heappush(loads, (load + cost(unit), rank))
    return [sorted(members) for members in placed]
