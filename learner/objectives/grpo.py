"""GRPO (DeepSeekMath, 2402.03300): a clipped probability ratio times an advantage relative to the group."""

from __future__ import annotations

import math
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


@torch.no_grad()
def held_ratio(ratio: Tensor, advantages: Tensor, options: ClippedSettings) -> tuple[Tensor, Tensor]:
    """The ratio as the clipped surrogate holds it, and 1 where it does not, 0 where it does; both as ``ratio``.

    The surrogate is -a times this: below 1 + high where a > 0, between 1 - low and dual_clip where a < 0.
    """
    good, bad = advantages > 0, advantages < 0
    low, high = torch.zeros_like(advantages), torch.full_like(advantages, math.inf)
    if options.clip_low is not None:
        low = low.masked_fill(bad, 1.0 - options.clip_low)
    if options.clip_high is not None:
        high = high.masked_fill(good, 1.0 + options.clip_high)
    if options.dual_clip is not None:
        high = high.masked_fill(bad, options.dual_clip)
    held = torch.maximum(ratio, low)
    torch.minimum(held, high, out=held)
    return held, torch.eq(held, ratio, out=torch.empty_like(ratio))


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
            inputs.ratio, self.token_advantages(inputs), options.clip_low, options.clip_high, options.dual_clip
        )

    def row_losses(self, inputs: LossInputs) -> Tensor:
        advantages = self.token_advantages(inputs)
        held, free = held_ratio(inputs.ratio_values, advantages, self.settings)
        inputs.noted["clipped"] = free.shape[1] - free.sum(dim=1)  # outside the mask the ratio is 1, which is free
        gains = inputs.tokens.keep_(held.mul_(advantages))
        return -inputs.sloped_rows(gains, inputs.unbounded(free.mul_(gains)))

    def token_advantages(self, inputs: LossInputs) -> Tensor:
        """[rows, 1] or [rows, T], detached."""
        return inputs.advantages

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Shares of trained tokens whose gradient the clip takes away, judged on the ratio before clamping: above
        where the advantage is positive (high), below or by the dual clip where it is negative (low)."""
        clipped, good = inputs.noted["clipped"], inputs.advantages[:, 0] > 0
        metrics.mean_of("clip_share", clipped, inputs.tokens.total)
        metrics.mean_of("clip_share_high", clipped * good, inputs.tokens.total)
        metrics.mean_of("clip_share_low", clipped * ~good, inputs.tokens.total)
