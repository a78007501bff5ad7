"""A verifier that errs at known rates, corrected (2510.18924): the expected reward is that of a perfect one.

    objective: {name: corrected_grpo, file: examples/plugins/noise_correction.py,
                false_positive_rate: 0.1, false_negative_rate: 0.3}

The rates are measured on answers whose truth is known. Division by the group's std would cancel the correction, so
advantages are centred only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field, model_validator

from learner.advantages import StepRows
from learner.objectives.grpo import Grpo, GrpoSettings
from learner.objectives.settings import ObjectiveSettings


class CorrectedSettings(GrpoSettings):
    """Options of corrected_grpo."""

    advantage: str = "group_mean"
    false_positive_rate: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of wrong answers that the verifier accepts."""
    false_negative_rate: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of right answers that the verifier rejects."""

    @model_validator(mode="after")
    def _the_verifier_says_something(self) -> CorrectedSettings:
        if self.false_positive_rate + self.false_negative_rate >= 1.0:
            raise ValueError(
                "false_positive_rate + false_negative_rate must be below 1: beyond that the verifier is no better "
                "than a coin"
            )
        if self.advantage == "group_zscore":
            raise ValueError("advantage: group_zscore divides by the std, which cancels the correction; use group_mean")
        return self


class CorrectedGrpo(Grpo):
    """GRPO with R = (r - false_positive_rate) / (1 - false_positive_rate - false_negative_rate)."""

    name = "corrected_grpo"
    Options: ClassVar[type[ObjectiveSettings]] = CorrectedSettings
    settings: CorrectedSettings

    def advantages(self, rows: StepRows) -> list[float | None]:
        rewards = [None if reward is None else self.corrected(reward) for reward in rows.rewards]
        return super().advantages(replace(rows, rewards=rewards))

    def corrected(self, reward: float) -> float:
        """Of a reward of 0 or 1; its expectation is 1 for right answers and 0 for wrong ones."""
        options = self.settings
        return (reward - options.false_positive_rate) / (
            1.0 - options.false_positive_rate - options.false_negative_rate
        )
