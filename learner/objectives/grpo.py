"""GRPO (DeepSeekMath, 2402.03300): a clipped probability ratio times an advantage relative to the group."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.kl import LOG_RATIO_LIMIT
from learner.objectives.base import TokenObjective
from learner.objectives.inputs import LossInputs
from learner.objectives.metrics import MetricCollector
from learner.objectives.settings import Aggregation, ClippedSettings, ObjectiveSettings


def clipped_surrogate(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
    limit: float = LOG_RATIO_LIMIT,
) -> Tensor:
    """-min(rho a, clip(rho, 1 - low, 1 + high) a); for a < 0 at most -dual_clip a (PPO; Ye et al. 2020).

    That is -a rho with rho held below 1 + high where a > 0, and between 1 - low and dual_clip where a < 0.

    Args:
        log_ratio: log rho = log pi - log pi_old, of tokens or of sequences; clamped to -20..limit.
        advantages: broadcastable to it.
    Returns:
        As ``log_ratio``.
    """
    low, high = _bounds(advantages, clip_low, clip_high, dual_clip, limit)
    losses: Tensor = _HeldRatio.apply(log_ratio, advantages, low, high)
    return losses


def within_clip(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float | None,
    clip_high: float | None,
    dual_clip: float | None = None,
    limit: float = LOG_RATIO_LIMIT,
) -> Tensor:
    """1 where the surrogate has a gradient, 0 where the clip took it away; as ``log_ratio``."""
    low, high = _bounds(advantages, clip_low, clip_high, dual_clip, limit)
    return torch.eq(_held(log_ratio, low, high), log_ratio, out=torch.empty_like(log_ratio))


def clip_ratio(ratio: Tensor, clip_low: float | None, clip_high: float | None) -> Tensor:
    """clip(ratio, 1 - low, 1 + high); None: no bound on that side."""
    if clip_low is None and clip_high is None:
        return ratio
    return ratio.clamp(
        min=None if clip_low is None else 1.0 - clip_low, max=None if clip_high is None else 1.0 + clip_high
    )


def _bounds(
    advantages: Tensor, clip_low: float | None, clip_high: float | None, dual_clip: float | None, limit: float
) -> tuple[Tensor, Tensor]:
    """Between which log-ratios each advantage lets its ratio move; as ``advantages``."""
    floor = -LOG_RATIO_LIMIT if clip_low is None or clip_low >= 1.0 else max(math.log1p(-clip_low), -LOG_RATIO_LIMIT)
    good = limit if clip_high is None else min(math.log1p(clip_high), limit)
    bad = limit if dual_clip is None else min(math.log(dual_clip), limit)
    low = torch.full_like(advantages, -LOG_RATIO_LIMIT).masked_fill(advantages < 0, floor)
    high = torch.full_like(advantages, limit).masked_fill(advantages > 0, good).masked_fill(advantages < 0, bad)
    return low, high


def _held(log_ratio: Tensor, low: Tensor, high: Tensor) -> Tensor:
    held = torch.maximum(log_ratio, low)
    return torch.minimum(held, high, out=held)


class _HeldRatio(torch.autograd.Function):
    """-a exp(log_ratio held between low and high), whose derivative is itself inside and 0 beyond."""

    @staticmethod
    def forward(ctx: Any, log_ratio: Tensor, advantages: Tensor, low: Tensor, high: Tensor) -> Tensor:
        held = _held(log_ratio, low, high)
        inside = torch.eq(held, log_ratio, out=torch.empty_like(log_ratio))
        losses = held.exp_().mul_(advantages).neg_()
        ctx.save_for_backward(losses, inside)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        losses, inside = ctx.saved_tensors
        return (inside * losses).mul_(gradient), None, None, None


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
            inputs.log_ratio, inputs.advantages, options.clip_low, options.clip_high, options.dual_clip
        )

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Shares of trained tokens whose gradient the clip takes away, judged on the ratio before clamping: above
        where the advantage is positive (high), below or by the dual clip where it is negative (low)."""
        options, log_ratio, advantages = self.settings, inputs.log_ratio.detach(), inputs.advantages
        inside = within_clip(log_ratio, advantages, options.clip_low, options.clip_high, options.dual_clip)
        clipped = inside.shape[1] - inside.sum(dim=1)  # outside the mask the log-ratio is 0, which is inside
        good = advantages[:, 0] > 0
        metrics.mean_of("clip_share", clipped, inputs.tokens.total)
        metrics.mean_of("clip_share_high", clipped.masked_fill(~good, 0.0), inputs.tokens.total)
        metrics.mean_of("clip_share_low", clipped.masked_fill(good, 0.0), inputs.tokens.total)
