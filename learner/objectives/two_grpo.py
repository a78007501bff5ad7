"""2-GRPO (2510.00977): GRPO with two rollouts per prompt, as its runs set it (asymmetric clip, dual clip, no KL)."""

from __future__ import annotations

from typing import ClassVar

from learner.objectives.grpo import Grpo, GrpoSettings
from learner.objectives.settings import Aggregation, ClipWidth, DualClip, ObjectiveSettings
from system.core.errors import ConfigError


class TwoGrpoSettings(GrpoSettings):
    """Options of two_grpo. Advantages are +-0.7071 with ddof 1 (the paper's runs), +-1 with ddof 0 (its theory)."""

    aggregation: Aggregation = "token_mean"
    clip_high: ClipWidth = 0.28
    dual_clip: DualClip = 3.0


class TwoGrpo(Grpo):
    """GRPO on pairs.

    L = sum_it m PPO(rho, a) / sum_it m, clip 0.2 / 0.28, dual clip 3, no KL; a = +-0.7071 with ddof 1 (the runs of the
    paper), +-1 with ddof 0 (its theory). A pair of equal rewards has advantage 0 and stays in the denominator. With 8
    times the prompts of a G = 16 batch the paper takes 8 times its learning rate. Source: 2510.00977.
    """

    name = "two_grpo"
    Options: ClassVar[type[ObjectiveSettings]] = TwoGrpoSettings

    def check(self, group_size: int) -> None:
        if group_size != 2:
            raise ConfigError(
                f"rollout.group_size: {group_size}: objective two_grpo learns from pairs; "
                "set it to 2, or use objective grpo"
            )
