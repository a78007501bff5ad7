"""A median for a baseline (MC-GRPO, 2601.22582): with few rollouts one outlier moves a mean, but not a median.

objective: {name: median_grpo, file: examples/plugins/median_baseline.py}
rollout: {group_size: 3}                 # G + 1: one completion is the median itself and learns nothing
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np

from learner.advantages import Scale, StepRows, step_advantages
from learner.objectives.grpo import Grpo, GrpoSettings
from learner.objectives.settings import ObjectiveSettings
from system.core.errors import ConfigError

DEVIATION_EPS = 1e-3
"""Added to the median deviation, as in the authors' code."""


class MedianSettings(GrpoSettings):
    """Options of median_grpo."""

    deviation: Literal["median", "none"] = "median"
    """Divide by the median absolute deviation, or not at all. With rewards of 0 and 1 it is 0 whenever most agree, and
    the advantage a thousand: use none there."""


class MedianGrpo(Grpo):
    """GRPO with a_i = (R_i - median) / (MAD + 1e-3), scaled by G / (how many are not 0)."""

    name = "median_grpo"
    Options: ClassVar[type[ObjectiveSettings]] = MedianSettings
    settings: MedianSettings

    def check(self, group_size: int) -> None:
        super().check(group_size)
        if group_size % 2 == 0:
            raise ConfigError(
                f"rollout.group_size: {group_size}: objective {self.name} takes a completion for the median; "
                f"use an odd number, {group_size + 1} for the signal of {group_size}"
            )

    def advantages(self, rows: StepRows) -> list[float | None]:
        return step_advantages(rows, **(self.settings.advantage_options | {"estimator": self.from_the_median}))

    def from_the_median(self, rewards: np.ndarray, scale: Scale) -> np.ndarray:
        """[n] rewards of a group -> [n] advantages."""
        differences = rewards - np.median(rewards)
        if self.settings.deviation == "median":
            differences = differences / (np.median(np.abs(differences)) + DEVIATION_EPS)
        return differences * (len(rewards) / max(int(np.count_nonzero(differences)), 1))
