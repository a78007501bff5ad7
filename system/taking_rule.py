"""Which ready groups a step takes: in issue order, as long as every outstanding group can still be trained in time.

Let ``v`` be the version that consumes, ``B`` the groups of a step, ``S`` the largest staleness, and ``N(w)`` the
number of outstanding groups whose oldest token is of version <= ``w``. A group of version ``w`` is consumed at
``w + S`` at the latest, so after this step at most ``(w + S - v) x B`` of the ``N(w)`` may be left (earliest deadline
first).

- It stays feasible: if that holds after the step at ``v``, taking the ``B`` oldest keeps it at ``v + 1``, because
  admission lets at most ``(S + 1) x B`` groups be outstanding, and those issued meanwhile carry a version >= ``v``.
- No deadlock: where even the ``B`` oldest would leave more than the formula allows, what they leave is the limit. So a
  step waits for unfinished groups only; a lease ends at its deadline, and from then on its group counts as fresh.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping


def choose_groups(
    ready: Mapping[int, int],
    unfinished: Iterable[int],
    version: int,
    groups_per_step: int,
    max_staleness: int,
) -> list[int] | None:
    """The groups of the step that consumes at ``version``.

    Among all sets of ``groups_per_step`` ready groups that leave every outstanding group trainable in time, the first
    in issue order (its sorted ids are lexicographically smallest). What may be left behind forms a laminar matroid, so
    leaving the latest groups first, while the limits hold, finds it.

    Args:
        ready: group_id -> version of its oldest token.
        unfinished: for each leased group the version it was leased at.
    Returns:
        Ascending group ids; None when too few are ready, or when unfinished groups must be waited for.
    """
    surplus = len(ready) - groups_per_step
    if surplus < 0:
        return None
    unfinished_versions = sorted(unfinished)
    outstanding = sorted([*ready.values(), *unfinished_versions])
    levels = sorted(set(outstanding))
    may_be_left = []
    for level in levels:
        number = bisect_right(outstanding, level)
        limit = max((level + max_staleness - version) * groups_per_step, number - groups_per_step, 0)
        may_be_left.append(limit - bisect_right(unfinished_versions, level))
    if any(number < 0 for number in may_be_left):
        return None
    left: set[int] = set()
    for group_id in sorted(ready, reverse=True):
        if len(left) == surplus:
            break
        first = bisect_left(levels, ready[group_id])
        if all(number > 0 for number in may_be_left[first:]):
            left.add(group_id)
            for index in range(first, len(levels)):
                may_be_left[index] -= 1
    if len(left) < surplus:
        return None
    return sorted(group_id for group_id in ready if group_id not in left)
