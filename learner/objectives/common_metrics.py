"""The metrics that all objectives have: of a step's groups and rewards, and of how far the policy has moved."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.advantages import StepRows, count_groups, takes_part, trajectory_lengths
from learner.kl import k3_row_sums
from learner.objectives.inputs import LossInputs, Size
from learner.objectives.masking import Mask
from learner.objectives.metrics import MetricCollector, MetricSums
from learner.objectives.settings import ObjectiveSettings


def measure_groups(rows: StepRows, advantages: Sequence[float | None], options: ObjectiveSettings) -> MetricSums:
    """The metrics of a step's groups and rewards."""
    counts = count_groups(rows, options.reward_margin)
    part = [abs(value) for value in advantages if value is not None and takes_part(value)]
    means: dict[str, tuple[float, float]] = {
        "zero_signal_share": (counts.zero_signal, counts.groups),
        "advantage_abs_mean": (sum(part), len(part)),
    }
    if options.reward_margin > 0.0:
        scored = counts.groups - counts.too_few_scored
        means["margin_kept_share"] = (scored - counts.zero_signal - counts.below_margin, scored)
    if options.overlong is not None:
        penalties = [options.overlong.penalty(length) for length in trajectory_lengths(rows)]
        means["overlong_penalty_mean"] = (sum(penalties), len(penalties))
    return MetricSums(
        sums=means,
        totals={
            "too_few_scored": counts.too_few_scored,
            "null_trajectories": counts.null_trajectories,
            "rows_left_out": len(rows) - len(part),
        },
    )


def measure_ratios(inputs: LossInputs, metrics: MetricCollector) -> None:
    """The common metrics.

    ratio_mean and ess compare the current policy with whoever sampled: the engine where its log-probs are known,
    else the policy at the start of the pass. The latter's drift is update_log_ratio_*.
    """
    tokens, rollout = inputs.tokens, inputs.given_rollout
    _measure_size("update_log_ratio_abs", inputs.drift, tokens, metrics)
    if rollout is not None:
        log_ratio = tokens.difference(inputs.leaf.detach(), rollout)
        size = Size.of(log_ratio)
        _measure_weights(size.exp(log_ratio), size, log_ratio, tokens, metrics)
    elif inputs.given_old is not None:
        _measure_weights(inputs.ratio_values, inputs.drift, inputs.log_ratio, tokens, metrics)
    if inputs.given_reference is not None:
        log_ratio = _sampled(inputs.reference_log_ratio(), inputs)
        k3, clamped = k3_row_sums(log_ratio)
        metrics.mean_of("kl_reference", k3, tokens.total)
        metrics.total("kl_clamped", clamped)
    if inputs.correction is not None:
        metrics.mean("correction_truncated_share", inputs.correction.truncated, tokens)
        metrics.mean("correction_masked_share", ~inputs.correction.kept, tokens)
        weights = inputs.correction.weights.expand(inputs.mask.shape)
        metrics.mean("correction_weight_mean", weights, tokens)
        metrics.effective_share("correction_ess", weights, tokens)


def _sampled(log_ratio: Tensor, inputs: LossInputs) -> Tensor:
    """[rows, T] without those of offline pairs, detached."""
    return log_ratio.detach() if inputs.pairs is None else inputs.tokens.keep(log_ratio.detach())


def _measure_weights(weights: Tensor, size: Size, log_ratio: Tensor, tokens: Mask, metrics: MetricCollector) -> None:
    """Of importance weights, which are 1 outside the mask."""
    _measure_size("log_ratio_abs", size, tokens, metrics)
    metrics.total("ratio_clamped", size.beyond(log_ratio))
    beside = weights.shape[1] - tokens.counts
    sums, squares = weights.sum(dim=1), torch.linalg.vector_norm(weights, dim=1).square()
    metrics.mean_of("ratio_mean", sums - beside, tokens.total)
    metrics.effective_share_of("ess", sums - beside, squares - beside, tokens.total)


def _measure_size(name: str, size: Size, tokens: Mask, metrics: MetricCollector) -> None:
    metrics.mean_of(f"{name}_mean", size.rows, tokens.total)
    metrics.maximum_of(f"{name}_max", size.largest)
