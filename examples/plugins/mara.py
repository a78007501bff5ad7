"""MARA (2510.20817): good answers that the reference finds unlikely are lifted to the likeliest good one.

    objective: {name: mara, file: examples/plugins/mara.py, kl_coefficient: 0.01, threshold: 1.0}

The optimum of a KL-regularised reward weighs good answers by the reference, so the rarer ones are never lifted. Adding
beta times the gap of their log-probs to the reward makes the optimum weigh all good answers alike. beta is the KL
coefficient really used; it comes before the baseline, and the advantage may not be divided by the group's std.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from pydantic import Field, model_validator

from learner.advantages import StepRows
from learner.objectives.base import LogprobKind, StepPlan
from learner.objectives.grpo import Grpo, GrpoSettings
from learner.objectives.metrics import MetricSums
from learner.objectives.settings import ObjectiveSettings

Trajectory = tuple[int, int]
"""(group_id, trajectory_id)."""


def lifted_rewards(
    rewards: Sequence[float], logprobs: Sequence[float], beta: float, threshold: float, cap: float = math.inf
) -> tuple[list[float], int]:
    """Rewards of a group (MARA, eq. 11), and how many bonuses were capped.

    With z the likeliest of those with R >= threshold, each of them gets R(z) + beta (log pi_ref(z) - log pi_ref(y)).

    Args:
        logprobs: log pi_ref of each whole completion.
        cap: largest beta (log pi_ref(z) - log pi_ref(y)).
    """
    good = [index for index, reward in enumerate(rewards) if reward >= threshold]
    if not good:
        return list(rewards), 0
    likeliest = max(good, key=lambda index: logprobs[index])
    bonuses = {index: beta * (logprobs[likeliest] - logprobs[index]) for index in good}
    lifted = [
        rewards[likeliest] + min(bonuses[index], cap) if index in bonuses else reward
        for index, reward in enumerate(rewards)
    ]
    return lifted, sum(bonus > cap for bonus in bonuses.values())


class MaraSettings(GrpoSettings):
    """Options of mara."""

    advantage: str = "group_mean"
    threshold: float = 1.0
    """Answers with at least this reward are good."""
    bonus_cap: float = Field(default=1.0, gt=0.0)
    """Largest bonus: long answers are unlikely by hundreds of nats."""

    @model_validator(mode="after")
    def _has_something_to_correct(self) -> MaraSettings:
        if self.kl_coefficient == 0.0:
            raise ValueError("kl_coefficient is 0, so there is no KL for mara to make up for; set it, or use grpo")
        if self.advantage == "group_zscore":
            raise ValueError("advantage: group_zscore divides by the std, which rescales the bonus; use group_mean")
        return self


class Mara(Grpo):
    """GRPO with the rewards of good answers lifted by what the reference takes from them."""

    name = "mara"
    Options: ClassVar[type[ObjectiveSettings]] = MaraSettings
    settings: MaraSettings

    @property
    def policy_needs(self) -> frozenset[LogprobKind]:
        return frozenset({"old", "reference"})

    def prepare(self, rows: StepRows) -> StepPlan:
        plan = super().prepare(rows)
        _, capped = self._lifted(rows)
        return replace(plan, sums=plan.sums + MetricSums(totals={"mara_bonuses_capped": float(capped)}))

    def advantages(self, rows: StepRows) -> list[float | None]:
        return super().advantages(replace(rows, rewards=self._lifted(rows)[0]))

    def _lifted(self, rows: StepRows) -> tuple[list[float | None], int]:
        if rows.reference_logprobs is None:
            raise ValueError("mara needs reference_logprobs; hand them in")
        rewards: dict[Trajectory, float] = {}
        logprobs: dict[Trajectory, float] = {}
        keys = list(zip(rows.group_ids, rows.trajectory_ids, strict=True))
        for key, reward, logprob in zip(keys, rows.rewards, rows.reference_logprobs, strict=True):
            if reward is not None:
                rewards[key] = reward
                logprobs[key] = logprobs.get(key, 0.0) + logprob
        capped = 0
        for group_id in dict.fromkeys(rows.group_ids):
            members = [key for key in rewards if key[0] == group_id]
            lifted, number = lifted_rewards(
                [rewards[key] for key in members],
                [logprobs[key] for key in members],
                self.settings.kl_coefficient,
                self.settings.threshold,
                self.settings.bonus_cap,
            )
            rewards.update(zip(members, lifted, strict=True))
            capped += number
        return [rewards.get(key) for key in keys], capped
