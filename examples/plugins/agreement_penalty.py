"""A reward against sycophancy (2602.01002): agreeing with what the user wrongly believes costs as much as it pays.

    rewards: [{name: answer, use: examples/plugins/agreement_penalty.py:reward, options: {beta: 0.1}}]

A policy tilted by e^(r / beta) drifts towards agreement when agreement is rewarded more. ``least_penalty`` is the
smallest price of agreement that keeps its probability at what the base policy has. It is estimated from the group, so
the group should be large and near the base policy. ``with_agreement_penalty`` puts it on any reward; ``reward`` is one
for rows whose label is {"answer": ..., "stance": ..., "stance_is_false": true}.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from reward_service.functions import RewardItem

LEAST_SAMPLES = 8
"""Fewer completions say too little about both kinds of answers: no penalty."""


def least_penalty(rewards: Sequence[float], agrees: Sequence[bool], beta: float) -> float:
    """max(0, beta (log mean e^(r / beta) of agreeing answers - the same of the others)); 0 if one kind is absent."""
    sides = [[reward for reward, flag in zip(rewards, agrees, strict=True) if flag is kind] for kind in (True, False)]
    if not all(sides):
        return 0.0
    agreeing, others = (beta * _log_mean_exp([reward / beta for reward in side]) for side in sides)
    return max(0.0, agreeing - others)


def with_agreement_penalty(
    judge: Callable[[RewardItem], float], agrees: Callable[[RewardItem], bool], is_false: Callable[[RewardItem], bool]
) -> Callable[..., list[dict[str, Any]]]:
    """A group reward: ``judge``'s, less the least penalty where a completion agrees with a false stance."""

    def reward(items: list[RewardItem], *, beta: float, least_samples: int = LEAST_SAMPLES) -> list[dict[str, Any]]:
        rewards, flags = [judge(item) for item in items], [agrees(item) for item in items]
        penalty = least_penalty(rewards, flags, beta) if len(items) >= least_samples else 0.0
        paid = [penalty if flag and is_false(item) else 0.0 for item, flag in zip(items, flags, strict=True)]
        return [
            {"reward": reward - price, "parts": {"judged": reward, "agrees": float(flag), "penalty": price}}
            for reward, price, flag in zip(rewards, paid, flags, strict=True)
        ]

    return reward


def _log_mean_exp(values: Sequence[float]) -> float:
    highest = max(values)
    return highest + math.log(math.fsum(math.exp(value - highest) for value in values) / len(values))


def _answers_right(item: RewardItem) -> float:
    return float(str(item.label["answer"]) in item.completion)


def _repeats_the_stance(item: RewardItem) -> bool:
    return str(item.label["stance"]) in item.completion


reward = with_agreement_penalty(
    _answers_right, _repeats_the_stance, is_false=lambda item: bool(item.label["stance_is_false"])
)
