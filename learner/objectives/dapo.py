"""DAPO (2503.14476): GRPO over all tokens of the batch, a higher upper clip, and only groups that carry signal."""

from __future__ import annotations

from typing import ClassVar

from learner.advantages import ZeroVariance
from learner.objectives.grpo import Grpo, GrpoSettings
from learner.objectives.settings import Aggregation, ClipWidth, ObjectiveSettings


class DapoSettings(GrpoSettings):
    """Options of dapo. The soft overlong penalty is overlong_max_tokens (20480 in the paper), overlong_cache_tokens
    (4096); its script runs dual_clip 10."""

    aggregation: Aggregation = "token_mean"
    clip_high: ClipWidth = 0.28
    zero_variance: ZeroVariance = "refill"


class Dapo(Grpo):
    """Clipped surrogate over all tokens, with dynamic sampling.

    L = sum_it m PPO(rho, a) / sum_it m, clip 0.2 / 0.28, a_i = (R_i - mean) / (std + eps), no KL. Groups of equal
    rewards are replaced by the next prompts, in prompt order. Source: 2503.14476, eq. 8 and 11 to 13.
    """

    name = "dapo"
    Options: ClassVar[type[ObjectiveSettings]] = DapoSettings
