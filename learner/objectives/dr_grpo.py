"""Dr.GRPO (2503.20783): GRPO without the std of the group and without the length of the completion below it."""

from __future__ import annotations

from typing import ClassVar

from learner.objectives.grpo import Grpo, GrpoSettings
from learner.objectives.settings import Aggregation, MaxTokens, ObjectiveSettings


class DrGrpoSettings(GrpoSettings):
    """Options of dr_grpo."""

    advantage: str = "group_mean"
    aggregation: Aggregation = "sequence_sum_norm"
    max_tokens: MaxTokens = None
    """Required: the constant length that the sum is divided by, as a rule rollout.max_tokens."""


class DrGrpo(Grpo):
    """Clipped surrogate over a constant length, advantages centred only.

    L = sum_it m PPO(rho, a) / (B max_tokens), a_i = R_i - mean. The advantage is (G - 1) / G of the leave-one-out one,
    half of it for pairs: a change of group_size wants a change of the learning rate. Source: 2503.20783 and its code.
    """

    name = "dr_grpo"
    Options: ClassVar[type[ObjectiveSettings]] = DrGrpoSettings
