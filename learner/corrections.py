"""Off-policy corrections: detached weights for tokens that an older or slightly different policy sampled.

Three policies stand behind a step: mu sampled (older weights, another engine), old starts the step, pi moves. A rule
compares old with mu by rho = exp(log pi_old - log pi_mu), per token or per sequence, and turns it into weights that
multiply the policy loss outside its min and clip, and into tokens that leave the loss. A sequence is a trajectory with
all its rows. Rules live in ``RULES``; a new one is a function and an entry there. ``bypass`` is no rule: the ratio is
taken against mu itself. Group baselines never see any of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from learner.kl import bounded_exp
from learner.numbering import Numbering

TOKEN_TRUNCATION = 2.0
"""Cap of the token weights that a geometric mask leaves standing: token_tis's own."""


@dataclass(frozen=True, eq=False)
class Drift:
    """How far the policy has moved from whoever sampled: what a rule judges. Detached, 0 outside the mask."""

    old: Tensor
    """[rows, T] log pi_old - log pi_mu."""
    policy: Tensor
    """[rows, T] log pi - log pi_mu."""
    mask: Tensor
    """[rows, T] bool, trained tokens."""
    advantages: Tensor
    """[rows, 1]."""
    group_ids: Tensor
    """[rows]."""
    trajectory_ids: Tensor
    """[rows], within the group."""

    @cached_property
    def _numbering(self) -> Numbering:
        return Numbering.of(self.group_ids, self.trajectory_ids)

    def sequence_sum(self, per_token: Tensor) -> Tensor:
        """[rows, T] -> [rows, 1], over the trained tokens of the row's whole sequence."""
        sums = torch.where(self.mask, per_token, torch.zeros_like(per_token)).sum(dim=1)
        of_row = self._numbering.of_row
        return torch.zeros_like(sums).index_add(0, of_row, sums)[of_row][:, None]

    def sequence_mean(self, per_token: Tensor) -> Tensor:
        """[rows, T] -> [rows, 1]."""
        return self.sequence_sum(per_token) / self.sequence_sum(self.mask.to(per_token.dtype)).clamp(min=1.0)

    def lone(self, kept: Tensor) -> Tensor:
        """[rows] bool, the rows of a group of two sequences of which at most one is kept: a sign without its other."""
        before, after = self._sequences_per_group(self.mask), self._sequences_per_group(kept & self.mask)
        return (before == 2) & (after < 2)

    def _sequences_per_group(self, tokens: Tensor) -> Tensor:
        """[rows] how many sequences of the row's group have any of ``tokens`` ([rows, T] bool)."""
        of_row, groups = self._numbering.of_row, self._numbering.groups
        present = torch.zeros_like(groups).index_add(0, of_row, tokens.any(dim=1).long()) > 0
        return torch.bincount(groups[present], minlength=len(groups))[groups[of_row]]


@dataclass(frozen=True, eq=False)
class Correction:
    """What a rule says about every token."""

    weights: Tensor
    """[rows, T] or [rows, 1], detached; multiplies the policy loss."""
    kept: Tensor
    """[rows, T] bool, within the mask; False where the rule takes the token out of the loss."""
    truncated: Tensor
    """[rows, T] bool, within the mask; True where the weight is a cap in place of the ratio."""
    sequence_weights: Tensor | None = None
    """[rows, 1], for losses of whole sequences; None: the rule weighs tokens only."""


@dataclass(frozen=True)
class CorrectionRule:
    """A rule with the bounds it uses; a bound whose default is None is not used and may not be set."""

    apply: Callable[[Drift, float | None, float | None], Correction]
    """(drift, low, high) -> Correction."""
    low: float | None = None
    high: float | None = None
    scope: Literal["token", "sequence"] = "token"
    """What it judges. A rule of scope ``sequence`` gives ``sequence_weights``."""
    masks: bool = False
    """Whether it takes tokens out, so that surviving tokens differ from trained tokens."""


def _decoupled(drift: Drift, low: float | None, high: float | None) -> Correction:
    """rho per token (decoupled PPO, 2110.00641; AReaL, 2505.24298)."""
    return Correction(bounded_exp(drift.old), drift.mask, torch.zeros_like(drift.mask))


def _token_tis(drift: Drift, low: float | None, high: float | None) -> Correction:
    """Truncated importance sampling per token: min(rho, high) (verl, slime, TRL)."""
    ratio = bounded_exp(drift.old)
    return Correction(ratio.clamp(max=high), drift.mask, (ratio > high) & drift.mask)


def _icepop(drift: Drift, low: float | None, high: float | None) -> Correction:
    """rho per token where low <= rho <= high, else nothing (IcePop)."""
    ratio = bounded_exp(drift.old)
    return _masked(drift, (ratio >= low) & (ratio <= high), ratio)


def _sequence_tis(drift: Drift, low: float | None, high: float | None) -> Correction:
    """Truncated importance sampling per sequence: min(product of rho, high)."""
    ratio = bounded_exp(drift.sequence_sum(drift.old))
    weights = ratio.clamp(max=high)
    return Correction(weights, drift.mask, (ratio > high) & drift.mask, weights)


def _sequence_mask(drift: Drift, low: float | None, high: float | None) -> Correction:
    """Product of rho where low <= product <= high, else nothing (Seq-MIS)."""
    ratio = bounded_exp(drift.sequence_sum(drift.old))
    kept = (ratio >= low) & (ratio <= high)
    return _masked(drift, kept, ratio, sequence_weights=ratio)


def _geometric_mask(drift: Drift, low: float | None, high: float | None) -> Correction:
    """1{low <= exp(mean of log rho) <= high}, times token TIS where the loss is one of tokens."""
    mean = bounded_exp(drift.sequence_mean(drift.old))
    kept = (mean >= low) & (mean <= high)
    ratio = bounded_exp(drift.old)
    correction = _masked(drift, kept, ratio.clamp(max=TOKEN_TRUNCATION), sequence_weights=torch.ones_like(mean))
    return Correction(
        correction.weights, correction.kept, (ratio > TOKEN_TRUNCATION) & correction.kept, correction.sequence_weights
    )


def _k3_mask(drift: Drift, low: float | None, high: float | None) -> Correction:
    """1{mean of (rho - 1 - log rho) <= high}."""
    k3 = drift.sequence_mean(bounded_exp(drift.old) - 1.0 - drift.old)
    return _masked(drift, k3 <= high, torch.ones_like(k3), sequence_weights=torch.ones_like(k3))


def _opsm(drift: Drift, low: float | None, high: float | None) -> Correction:
    """0 where a < 0 and the mean of log pi_mu - log pi is above high (off-policy sequence mask of DeepSeek-V3.2)."""
    distance = drift.sequence_mean(-drift.policy)
    kept = (drift.advantages >= 0) | (distance <= high)
    return _masked(drift, kept, torch.ones_like(distance), sequence_weights=torch.ones_like(distance))


RULES: dict[str, CorrectionRule] = {
    "decoupled": CorrectionRule(_decoupled),
    "token_tis": CorrectionRule(_token_tis, high=2.0),
    "icepop": CorrectionRule(_icepop, low=0.5, high=5.0, masks=True),
    "sequence_tis": CorrectionRule(_sequence_tis, high=2.0, scope="sequence"),
    "sequence_mask": CorrectionRule(_sequence_mask, low=0.5, high=2.0, scope="sequence", masks=True),
    "geometric_mask": CorrectionRule(_geometric_mask, low=0.999, high=1.001, scope="sequence", masks=True),
    "k3_mask": CorrectionRule(_k3_mask, high=0.01, scope="sequence", masks=True),
    "opsm": CorrectionRule(_opsm, high=0.5, scope="sequence", masks=True),
}

CORRECTIONS = ("none", *RULES, "bypass")
"""All names a recipe can use."""


def masks_sequences(name: str) -> bool:
    """Whether a correction can take whole sequences out, so that a pair may lose one of its two."""
    rule = RULES.get(name)
    return rule is not None and rule.masks and rule.scope == "sequence"


@torch.no_grad()
def correct(name: str, drift: Drift, low: float | None, high: float | None, drop_lone: bool = False) -> Correction:
    """Applies a rule.

    Args:
        name: a key of ``RULES``.
        low: lower bound on the ratio, where the rule has one.
        high: upper bound on the ratio, or the threshold, where the rule has one.
        drop_lone: a pair of which a sequence mask takes one response goes as a whole.
    """
    correction = RULES[name].apply(drift, low, high)
    if not drop_lone or correction.sequence_weights is None:
        return correction
    lone = drift.lone(correction.kept)[:, None]
    return Correction(
        correction.weights.masked_fill(lone, 0.0),
        correction.kept & ~lone,
        correction.truncated & ~lone,
        correction.sequence_weights.masked_fill(lone, 0.0),
    )


def _masked(drift: Drift, kept: Tensor, weights: Tensor, sequence_weights: Tensor | None = None) -> Correction:
    """The weights where ``kept`` ([rows, T] or [rows, 1]) holds, 0 elsewhere."""
    return Correction(
        torch.where(kept, weights, torch.zeros_like(weights)),
        kept & drift.mask,
        torch.zeros_like(drift.mask),
        None if sequence_weights is None else torch.where(kept, sequence_weights, torch.zeros_like(sequence_weights)),
    )
