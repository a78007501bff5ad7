"""Off-policy corrections: detached weights for tokens that an older or slightly different policy sampled.

rho = exp(log pi_old - log pi_mu) compares the policy at the start of the step with the sampler (other weights, another
engine). A rule turns the log-ratios into weights that multiply the policy loss outside its min and clip, and says which
tokens it keeps. Rules live in ``RULES``; a new one is a function and an entry there. Group baselines never see them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.kl import bounded_exp

ANNOUNCED = (
    "none",
    "decoupled",
    "token_tis",
    "icepop",
    "sequence_tis",
    "sequence_mask",
    "geometric_mask",
    "k3_mask",
    "opsm",
    "bypass",
)
"""All names a recipe may one day use; those without a rule are refused by name."""


@dataclass(frozen=True, eq=False)
class Correction:
    """What a rule says about every token."""

    weights: Tensor
    """[rows, T], detached; multiplies the policy loss."""
    kept: Tensor
    """[rows, T] bool; False where the rule takes the token out of the loss."""
    truncated: Tensor
    """[rows, T] bool; True where the weight is not the ratio itself."""


@dataclass(frozen=True)
class CorrectionRule:
    """A rule with the bounds it uses; a bound whose default is None is not used and may not be set."""

    apply: Callable[[Tensor, Tensor, float | None, float | None], Correction]
    """(log_ratio [rows, T], mask [rows, T] bool, low, high) -> Correction."""
    low: float | None = None
    high: float | None = None
    masks: bool = False
    """Whether it takes tokens out, so that surviving tokens differ from trained tokens."""


def _token_tis(log_ratio: Tensor, mask: Tensor, low: float | None, high: float | None) -> Correction:
    """Truncated importance sampling per token: min(rho, high)."""
    ratio = bounded_exp(log_ratio)
    return Correction(ratio.clamp(max=high), mask, (ratio > high) & mask)


RULES: dict[str, CorrectionRule] = {
    "token_tis": CorrectionRule(_token_tis, high=2.0),
}


def available_corrections() -> tuple[str, ...]:
    """Names a recipe can use now."""
    return ("none", *RULES)


@torch.no_grad()
def correct(
    name: str, old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, low: float | None, high: float | None
) -> Correction:
    """Applies a rule.

    Args:
        name: a key of ``RULES``.
        old_logprobs: [rows, T] of the policy at the start of the step.
        rollout_logprobs: [rows, T] as the engine reported them, each under the version its token carries.
        mask: [rows, T] bool, trained tokens. Both log-probs are finite under it and elsewhere.
        low: lower bound on the ratio, where the rule has one.
        high: upper bound on the ratio, where the rule has one.
    """
    return RULES[name].apply(old_logprobs - rollout_logprobs, mask, low, high)
