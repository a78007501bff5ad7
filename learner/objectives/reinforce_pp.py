"""REINFORCE++-baseline (2501.03262): rewards centred in the group, whitened over all tokens of the batch, then PPO."""

from __future__ import annotations

from typing import ClassVar

from learner.objectives.grpo import Grpo, GrpoSettings
from learner.objectives.settings import Aggregation, ObjectiveSettings


class ReinforcePpSettings(GrpoSettings):
    """Options of reinforce_pp. The paper's KL is kl_where: reward with kl_estimator: k1."""

    advantage: str = "batch_whitened"
    aggregation: Aggregation = "token_mean"


class ReinforcePp(Grpo):
    """Clipped surrogate with advantages whitened over the step.

    L = sum_it m PPO(rho, a) / sum_it m, a = (A - mean) / std of A_i = R_i - group mean, mean and variance weighted by
    tokens over the whole step. Differences of rewards keep their size between groups. A group of equal rewards, which
    whitening would move off 0, stays at 0 unless zero_variance: as_is. Source: 2501.03262.
    """

    name = "reinforce_pp"
    Options: ClassVar[type[ObjectiveSettings]] = ReinforcePpSettings
