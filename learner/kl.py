"""Estimators of KL(policy || reference) from the log-probs of sampled tokens.

With delta = log pi - log pi_ref of the sampled token: k1 = delta, k2 = delta^2 / 2, k3 = exp(-delta) - 1 + delta
(Schulman 2020), k3_weighted = ratio x k3 (DeepSeek-V3.2). As a loss on on-policy samples k1 has zero expected gradient,
k2 and k3_weighted have the gradient of the reverse KL, k3 that of the forward KL; as a reward term k1 is the unbiased
one, and k3_weighted is k3 because the ratio is 1 there. The exponent is clamped to +-20: the value stays finite, and
the gradient keeps its sign outside.
Called by the objectives, and by the learner for KL terms in the reward.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3", "k3_weighted"]

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-this before ``exp`` (as verl and OpenRLHF do)."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """``exp`` of log-ratios clamped to +-20; zero gradient outside, as the clamped value has."""
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def kl_k3(delta: Tensor) -> Tensor:
    """k3 = exp(-delta) - 1 + delta, elementwise, non-negative up to rounding.

    The gradient 1 - exp(-clamp(delta)) passes straight through the clamp: a token far below the reference is pulled
    up as hard as the limit allows, where the derivative of the clamped value would push it down.
    """
    clamped = (-delta).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    exponent = (clamped + delta).detach() - delta
    return torch.exp(exponent) - 1.0 + delta


@torch.no_grad()
def k3_row_sums(delta: Tensor) -> tuple[Tensor, float]:
    """Sums over the last dimension of ``kl_k3``, for a metric, and how many log-ratios are clamped.

    k3 is at least 19 where |delta| > 20, so smaller sums show that nothing is.
    """
    sums = torch.neg(delta).exp_().sub_(1.0).add_(delta).sum(dim=-1)
    if not sums.numel() or float(sums.amax()) < LOG_RATIO_LIMIT - 1.0:
        return sums, 0.0
    return kl_k3(delta).sum(dim=-1), float(torch.count_nonzero(delta.abs() > LOG_RATIO_LIMIT))


def kl_estimate(estimator: KlEstimator, delta: Tensor, ratio: Tensor) -> Tensor:
    """The estimator's value per token.

    Args:
        delta: log pi - log pi_ref of the sampled tokens, any shape.
        ratio: pi / pi_old of the same tokens, with its gradient; only k3_weighted uses it.
    """
    if estimator == "k1":
        return delta
    if estimator == "k2":
        return 0.5 * delta.square()
    if estimator == "k3":
        return kl_k3(delta)
    return ratio * kl_k3(delta)


def reward_kl(
    policy_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, estimator: KlEstimator = "k1"
) -> Tensor:
    """The estimate for each completion, detached: what ``kl_where: reward`` takes off its reward, per coefficient.

    Args:
        policy_logprobs: [rows, T] of the policy at the start of the step.
        reference_logprobs: [rows, T].
        mask: [rows, T] bool, the trained tokens; NaN elsewhere does not matter.
    Returns:
        [rows] sum over trained tokens of the estimator's values (k1: log pi - log pi_ref), in nats.
    """
    delta = policy_logprobs.detach() - reference_logprobs.detach()
    delta = torch.where(mask, delta, torch.zeros_like(delta))
    return kl_estimate(estimator, delta, torch.ones_like(delta)).sum(dim=1)
