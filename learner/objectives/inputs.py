"""What an objective's formula sees: clean tensors, and the sums of which formulas are made.

Everything outside the mask is 0, and rows that take no part are masked, so a formula may sum freely. ``logprobs`` and
what comes of it (``log_ratio``, ``ratio``) are all that carries a gradient. What a formula does not read is never
computed. Made by ``Objective.__call__`` for each batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from learner.advantages import Denominators
from learner.corrections import Correction
from learner.kl import LOG_RATIO_LIMIT, bounded_exp
from learner.numbering import Numbering
from learner.objectives.masking import Mask
from learner.objectives.settings import Aggregation


@dataclass(frozen=True, eq=False)
class Trajectories:
    """The trajectories of a batch that take part, numbered in ascending (group, trajectory) order."""

    index: Tensor
    """[rows] int64, each row's trajectory; -1 for rows that take no part."""
    groups: Tensor
    """[trajectories] int64, each trajectory's group, numbered from 0 in ascending group_id order."""
    sizes: Tensor
    """[groups] trajectories that take part in each group, over the whole update."""
    advantages: Tensor
    """[trajectories]."""
    rewards: Tensor | None
    """[trajectories]; None when the batch has none."""

    @property
    def group_count(self) -> int:
        return int(self.groups.max()) + 1 if self.groups.numel() else 0

    def group_sum(self, values: Tensor) -> Tensor:
        """[trajectories] -> [groups]."""
        return values.new_zeros(self.group_count).index_add(0, self.groups, values)

    def group_mean(self, values: Tensor) -> Tensor:
        """[trajectories] -> [groups]."""
        return self.group_sum(values) / self.group_sum(torch.ones_like(values))


@dataclass(frozen=True, eq=False)
class Size:
    """How large log-ratios are that are 0 outside their mask."""

    rows: Tensor
    """[rows] sum of their magnitudes."""
    largest: float

    @staticmethod
    def of(log_ratio: Tensor) -> Size:
        magnitude = log_ratio.abs()
        return Size(magnitude.sum(dim=1), float(magnitude.amax()) if magnitude.numel() else 0.0)

    def exp(self, log_ratio: Tensor) -> Tensor:
        """``bounded_exp`` of these log-ratios, which as a rule need no bound."""
        return torch.exp(log_ratio) if self.largest <= LOG_RATIO_LIMIT else bounded_exp(log_ratio)

    def within(self, log_ratio: Tensor) -> Tensor | None:
        """Which of them need no bound, bool; None: all."""
        return None if self.largest <= LOG_RATIO_LIMIT else log_ratio.detach().abs() <= LOG_RATIO_LIMIT

    def beyond(self, log_ratio: Tensor) -> Tensor | float:
        """How many of them are clamped."""
        within = self.within(log_ratio)
        return 0.0 if within is None else torch.count_nonzero(~within)


@dataclass(frozen=True, eq=False)
class LossInputs:
    """One batch, ready for a formula."""

    leaf: Tensor
    """[rows, T] log-probs as given, which the loss is differentiated by; formulas read ``logprobs``."""
    given_old: Tensor | None
    """[rows, T] as given, like the next two; formulas read ``old``, ``reference`` and ``rollout``."""
    given_reference: Tensor | None
    given_rollout: Tensor | None
    trained: Mask
    """Trained tokens of rows that take part, those of offline pairs among them."""
    tokens: Mask
    """``trained`` without those of offline pairs."""
    counted: Mask
    """[rows, T] bool, tokens in the denominators: those under the mask, or what the correction keeps of them."""
    advantages: Tensor
    """[rows, 1]; 0 for rows that take no part."""
    rewards: Tensor | None
    """[rows]."""
    group_ids: Tensor
    trajectory_ids: Tensor
    lengths: Tensor | None
    """[rows] generated tokens, masked or not; None: not known."""
    denominators: Denominators
    correction: Correction | None
    noted: dict[str, Tensor] = field(default_factory=dict)
    """What a formula leaves for its metrics."""
    pairs: LossInputs | None = None
    """The rows of offline pairs, which the other fields leave out; advantages +1 (chosen) and -1 (rejected)."""

    @property
    def mask(self) -> Tensor:
        """[rows, T] bool, trained tokens that the policy sampled, of rows that take part."""
        return self.tokens.where

    @cached_property
    def logprobs(self) -> Tensor:
        """[rows, T] log pi, with its gradient."""
        return self.trained.keep(self.leaf)

    @cached_property
    def old(self) -> Tensor:
        """[rows, T] log pi_old, detached; the current policy when the batch has none."""
        return self.trained.keep(self.leaf.detach() if self.given_old is None else self.given_old)

    @cached_property
    def reference(self) -> Tensor | None:
        """[rows, T] log pi_ref."""
        return None if self.given_reference is None else self.trained.keep(self.given_reference)

    @cached_property
    def rollout(self) -> Tensor | None:
        """[rows, T] log pi_mu, of the engine that sampled."""
        return None if self.given_rollout is None else self.tokens.keep(self.given_rollout)

    @cached_property
    def log_ratio(self) -> Tensor:
        """[rows, T] log pi - log pi_old with its gradient; 0 also where rows are of offline pairs."""
        return self.tokens.difference(self.leaf, self.leaf.detach() if self.given_old is None else self.given_old)

    @cached_property
    def drift(self) -> Size:
        """How far the policy is from old."""
        if self.given_old is None:
            return Size(self.leaf.new_zeros(len(self.leaf)), 0.0)
        return Size.of(self.log_ratio.detach())

    @cached_property
    def ratio_values(self) -> Tensor:
        """[rows, T] pi / pi_old without gradient, log-ratio clamped to +-20; not to be changed."""
        return self.drift.exp(self.log_ratio.detach())

    @cached_property
    def ratio(self) -> Tensor:
        """[rows, T] pi / pi_old with its gradient, log-ratio clamped to +-20."""
        return bounded_exp(self.log_ratio)

    @property
    def required_reference(self) -> Tensor:
        """[rows, T] log pi_ref."""
        if self.reference is None:
            raise ValueError("this objective needs reference_logprobs; hand them in")
        return self.reference

    @cached_property
    def _reference_log_ratio(self) -> Tensor:
        if self.given_reference is None:
            raise ValueError("this objective needs reference_logprobs; hand them in")
        return self.trained.difference(self.leaf, self.given_reference)

    def reference_log_ratio(self) -> Tensor:
        """[rows, T] log pi - log pi_ref with its gradient."""
        return self._reference_log_ratio

    @cached_property
    def gradient_weighted(self) -> Tensor:
        """[rows, T] log pi whose gradient, not its value, carries the token weights of the correction."""
        if self.correction is None or self.correction.sequence_weights is not None:
            return self.logprobs
        value = self.logprobs.detach()
        return value + self.correction.weights * (self.logprobs - value)

    def sloped_rows(self, values: Tensor, slopes: Tensor) -> Tensor:
        """[rows] sums, under correction, of values whose derivative by their own token's log-prob is known.

        Args:
            values: [rows, T], 0 outside the mask; detached.
            slopes: the same; used up. May be ``values`` themselves.
        """
        if self.correction is not None:
            values, slopes = values * self.correction.weights, slopes * self.correction.weights
        sums: Tensor = _SlopedRows.apply(self.leaf, values, slopes)
        return sums

    def unbounded(self, slopes: Tensor) -> Tensor:
        """Slopes of a function of ``ratio_values``, 0 where the ratio is a bound."""
        within = self.drift.within(self.log_ratio)
        return slopes if within is None else slopes * within

    def corrected(self, per_token: Tensor) -> Tensor:
        """A policy loss per token under the off-policy correction."""
        return per_token if self.correction is None else per_token * self.correction.weights

    def corrected_trajectories(self, per_trajectory: Tensor) -> Tensor:
        """A policy loss per trajectory, [trajectories], under a correction that weighs whole sequences.

        Raises:
            ValueError: the correction weighs tokens only.
        """
        if self.correction is None:
            return per_trajectory
        weights = self.correction.sequence_weights
        if weights is None:
            raise ValueError("this correction weighs tokens; the loss is one of whole sequences")
        index = self.trajectories.index
        part = index >= 0
        per_row = weights[part, 0].to(per_trajectory.dtype)
        return per_trajectory * torch.zeros_like(per_trajectory).index_copy(0, index[part], per_row).detach()

    def kept_trajectories(self) -> Tensor:
        """[trajectories] bool, of which the correction keeps at least one token."""
        if self.correction is None:
            return torch.ones_like(self.trajectories.advantages, dtype=torch.bool)
        return self.trajectory_sum(self.correction.kept.to(self.leaf.dtype)) > 0

    def aggregate(self, per_token: Tensor, how: Aggregation, max_tokens: int | None = None) -> Tensor:
        """[rows, T] -> scalar, this batch's share of the mean over the whole update.

        Raises:
            ValueError: sequence_sum_norm without max_tokens.
        """
        return self.aggregate_rows(self.tokens.row_sums(per_token), how, max_tokens)

    def aggregate_rows(self, losses: Tensor, how: Aggregation, max_tokens: int | None = None) -> Tensor:
        """The same of losses that are summed over each row's tokens, [rows]."""
        if how == "token_mean":
            return losses.sum() / max(self.denominators.tokens, 1)
        completions = max(self.denominators.completions, 1)
        if how == "sequence_mean_token_mean":
            return (losses / self.counted.counts.clamp(min=1)).sum() / completions
        if how == "sequence_sum":
            return losses.sum() / completions
        if max_tokens is None:
            raise ValueError("sequence_sum_norm needs max_tokens")
        return losses.sum() / (completions * max_tokens)

    @cached_property
    def trajectories(self) -> Trajectories:
        part = (self.tokens.counts > 0).nonzero()[:, 0]
        numbering = Numbering.of(self.group_ids[part], self.trajectory_ids[part])
        index = torch.full_like(self.group_ids, -1).index_copy(0, part, numbering.of_row)
        first = torch.zeros_like(numbering.groups).index_copy(0, numbering.of_row, part)
        rewards = None if self.rewards is None else self.rewards[first]
        sizes = self._group_sizes(numbering.group_ids, numbering.groups)
        return Trajectories(index, numbering.groups, sizes, self.advantages[first, 0], rewards)

    def _group_sizes(self, group_ids: Tensor, groups: Tensor) -> Tensor:
        here = torch.bincount(groups, minlength=len(group_ids)).tolist()
        known = self.denominators.group_sizes
        sizes = [known.get(group_id, count) for group_id, count in zip(group_ids.tolist(), here, strict=True)]
        return self.leaf.new_tensor(sizes)

    def trajectory_sum(self, per_token: Tensor) -> Tensor:
        """[rows, T] -> [trajectories], sum over the trained tokens of all rows of each."""
        return self._over_rows(self.tokens.row_sums(per_token))

    @cached_property
    def trajectory_log_ratio(self) -> Tensor:
        """[trajectories] sum of ``log_ratio``, with its gradient."""
        return self._over_rows(self.log_ratio.sum(dim=1))

    @cached_property
    def trajectory_reference_log_ratio(self) -> Tensor:
        """[trajectories] sum of ``reference_log_ratio``, with its gradient."""
        log_ratio = self.reference_log_ratio()
        whole = self.tokens is self.trained  # so that there is nothing of other rows in it
        return self._over_rows(log_ratio.sum(dim=1) if whole else self.tokens.row_sums(log_ratio))

    @cached_property
    def trajectory_tokens(self) -> Tensor:
        """[trajectories] trained tokens of each, as floats."""
        return self._over_rows(self.tokens.counts.to(self.leaf.dtype))

    def of_trajectory(self, per_trajectory: Tensor) -> Tensor:
        """[trajectories] -> [rows, 1], each row that of its trajectory; 0 on rows that take no part."""
        return torch.cat([per_trajectory, per_trajectory.new_zeros(1)])[self._slots][:, None]

    def trajectory_lengths(self) -> Tensor:
        """[trajectories] generated tokens, masked or not.

        Raises:
            ValueError: the batch does not know them.
        """
        if self.lengths is None:
            raise ValueError("this objective needs the lengths of completions; hand them in")
        return self._over_rows(self.lengths)

    def _over_rows(self, per_row: Tensor) -> Tensor:
        number = len(self.trajectories.groups)
        return per_row.new_zeros(number + 1).index_add(0, self._slots, per_row)[:number]

    @cached_property
    def _slots(self) -> Tensor:
        """[rows] each row's trajectory; one more than the last for rows that take no part."""
        index = self.trajectories.index
        return torch.where(index >= 0, index, len(self.trajectories.groups))


class _SlopedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        ctx.slopes = slopes
        return values.sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.slopes.mul_(gradient[:, None]), None, None  # a loss is differentiated once
