"""Rewards from comparisons: how often a completion beats the others of its group (Pref-GRPO, 2508.20751).

A judge says how likely the first of two completions is the better one. It is asked about every pair in both orders, so
that a liking for the first place cancels; what it cannot tell counts one half to each side. Imports the standard
library only. In a reward file::

    from reward_service.win_rate import pairwise_win_rate

    def better(first, second, *, prompt_weight=1.0) -> float | None: ...     # also: async def

    reward = pairwise_win_rate(better)                                       # use: FILE.py:reward

For pairs, or with advantages divided by the group's std, win rates say no more than who won: take them in larger
groups, with ``advantage: group_mean`` and a judge whose answers are probabilities.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, TypeVar

from reward_service.functions import RewardItem

Item = TypeVar("Item")
UNDECIDED = 0.5

Judge = Callable[..., Any]
"""(first, second, **options) -> probability that ``first`` is better, in [0, 1], or None; may be asynchronous."""


def win_rates(preferences: dict[tuple[int, int], float | None], size: int) -> list[float]:
    """The share of the others that each of ``size`` completions beats.

    Args:
        preferences: for every ordered pair (i, j) the probability that i is better, asked with i in the first place;
            None: cannot tell.
    Raises:
        ValueError: a probability outside [0, 1].
    """
    first = {pair: UNDECIDED if value is None else float(value) for pair, value in preferences.items()}
    for (i, j), value in first.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"the judge said {value} of completions {i} and {j}; a probability in 0..1 is needed")

    def wins(i: int, j: int) -> float:
        return 0.5 * (first[i, j] + 1.0 - first[j, i])

    return [sum(wins(i, j) for j in range(size) if j != i) / (size - 1) if size > 1 else UNDECIDED for i in range(size)]


def judged_win_rates(items: Sequence[Item], judge: Callable[[Item, Item], float | None]) -> list[float]:
    """``win_rates`` of ``items`` by a judge that answers at once."""
    pairs = permutations(range(len(items)), 2)
    return win_rates({(i, j): judge(items[i], items[j]) for i, j in pairs}, len(items))


def pairwise_win_rate(judge: Judge) -> Callable[..., Any]:
    """A group reward of ``judge``'s preferences; an asynchronous judge is asked about all pairs at once."""
    if not inspect.iscoroutinefunction(judge):

        def reward(items: list[RewardItem], **options: Any) -> list[float]:
            return judged_win_rates(items, lambda first, second: judge(first, second, **options))

        return reward

    async def reward_of_all(items: list[RewardItem], **options: Any) -> list[float]:
        pairs = list(permutations(range(len(items)), 2))
        answers = await asyncio.gather(*(judge(items[i], items[j], **options) for i, j in pairs))
        return win_rates(dict(zip(pairs, answers, strict=True)), len(items))

    return reward_of_all
