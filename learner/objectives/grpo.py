"""GRPO (DeepSeekMath, 2402.03300): a clipped probability ratio times an advantage relative to the group."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from learner.objectives.base import TokenObjective
from learner.objectives.inputs import LossInputs
from learner.objectives.metrics import MetricCollector
from learner.objectives.settings import Aggregation, ClippedSettings, ObjectiveSettings


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float | None, clip_high: float | None, dual_clip: float | None = None
) -> Tensor:
    """-min(ratio a, clip(ratio, 1 - low, 1 + high) a); for a < 0 at most -dual_clip a (PPO; Ye et al. 2020).

    Args:
        ratio: pi / pi_old, of tokens or of sequences.
        advantages: broadcastable to it.
    Returns:
        As ``ratio``.
    """
    clipped = clip_ratio(ratio, clip_low, clip_high)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is None:
        return losses
    return torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)


def clip_ratio(ratio: Tensor, clip_low: float | None, clip_high: float | None) -> Tensor:
    """clip(ratio, 1 - low, 1 + high); None: no bound on that side."""
    if clip_low is None and clip_high is None:
        return ratio
    return ratio.clamp(
        min=None if clip_low is None else 1.0 - clip_low, max=None if clip_high is None else 1.0 + clip_high
    )


class GrpoSettings(ClippedSettings):
    """Options of grpo."""

    refused: ClassVar[dict[str, str]] = {"beta": "the weight of the KL to the reference is kl_coefficient"}

    aggregation: Aggregation = "sequence_mean_token_mean"


class Grpo(TokenObjective[ClippedSettings]):
    """Clipped surrogate with group-relative advantages.

    L = (1/B) sum_i (1/T_i) sum_t m PPO(rho, a), PPO = -min(rho a, clip(rho, 1 - low, 1 + high) a),
    rho = exp(lp - lp_old), a_i = (R_i - mean) / (std + eps). The KL of the paper is kl_coefficient: 0.04 with k3.
    Source: DeepSeekMath, 2402.03300.
    """

    name = "grpo"
    Options: ClassVar[type[ObjectiveSettings]] = GrpoSettings

    def token_loss(self, inputs: LossInputs) -> Tensor:
        options = self.settings
        return clipped_surrogate(
            inputs.ratio, inputs.advantages, options.clip_low, options.clip_high, options.dual_clip
        )

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Shares of trained tokens whose gradient the clip takes away, judged on the ratio before clamping."""
        options, ratio, advantages = self.settings, inputs.ratio.detach(), inputs.advantages
        nowhere = torch.zeros_like(inputs.mask)
        low = nowhere if options.clip_low is None else (ratio < 1.0 - options.clip_low) & (advantages < 0)
        high = nowhere if options.clip_high is None else (ratio > 1.0 + options.clip_high) & (advantages > 0)
        dual = nowhere if options.dual_clip is None else (ratio > options.dual_clip) & (advantages < 0)
        metrics.mean("clip_share", low | high | dual, inputs.mask)
        metrics.mean("clip_share_low", low, inputs.mask)
        metrics.mean("clip_share_high", high, inputs.mask)
        metrics.mean("clip_share_dual", dual, inputs.mask)
