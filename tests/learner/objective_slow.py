"""Every objective once more as a loop over plain Python floats, written from its formula and nothing else.

``SLOW[name](case, options)`` gives the loss and dL/dlogp of each token. ``options`` are resolved settings, as
``settings.model_dump()`` gives them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.learner.objective_cases import Case, slow_advantages, slow_denominators

Options = dict[str, Any]
Loss = tuple[float, list[list[float]]]
SlowObjective = Callable[[Case, Options], Loss]


def bounded(log_ratio: float, ceiling: float = 20.0) -> tuple[float, float]:
    """exp of the log-ratio clamped to -20..ceiling, and its slope."""
    value = math.exp(min(max(log_ratio, -20.0), ceiling))
    return value, value if -20.0 <= log_ratio <= ceiling else 0.0


@dataclass
class Weights:
    """What a correction says: a factor per token, a factor per row for losses of sequences, and what is kept."""

    tokens: list[list[float]]
    sequences: list[float]
    kept: list[list[bool]]


def slow_correction(case: Case, options: Options, advantages: Sequence[float | None]) -> Weights:
    weights = Weights([[1.0] * len(row) for row in case.mask], [1.0] * len(case.mask), [list(row) for row in case.mask])
    part = [value is not None and any(case.mask[row]) for row, value in enumerate(advantages)]
    for row, advantage in enumerate(advantages):
        if advantage is not None and part[row] and options["correction"] not in ("none", "bypass"):
            _correct_row(case, options, row, advantage, part, weights)
    if options["lone_responses"] == "drop":
        _drop_lone(case, weights, part)
    return weights


def _correct_row(
    case: Case, options: Options, row: int, advantage: float, part: Sequence[bool], weights: Weights
) -> None:
    name, low, high = options["correction"], options["correction_low"], options["correction_high"]
    ratios = [bounded(old - sampler)[0] for old, sampler in zip(case.old[row], case.rollout[row], strict=True)]
    same = [other for other in range(len(part)) if part[other] and _key(case, other) == _key(case, row)]
    places = [(other, t) for other in same for t in range(len(case.mask[other])) if case.mask[other][t]]
    drifts = [case.old[other][t] - case.rollout[other][t] for other, t in places]
    product, geometric = bounded(math.fsum(drifts))[0], bounded(math.fsum(drifts) / len(drifts))[0]
    if name == "decoupled":
        weights.tokens[row] = ratios
    elif name == "token_tis":
        weights.tokens[row] = [min(ratio, high) for ratio in ratios]
    elif name == "icepop":
        inside = [low <= ratio <= high for ratio in ratios]
        weights.kept[row] = [mask and kept for mask, kept in zip(case.mask[row], inside, strict=True)]
        weights.tokens[row] = [ratio if kept else 0.0 for ratio, kept in zip(ratios, inside, strict=True)]
    elif name == "sequence_tis":
        _set_row(weights, row, [min(product, high)] * len(ratios), min(product, high))
    elif name == "sequence_mask":
        _set_row(weights, row, [product] * len(ratios) if low <= product <= high else None, product)
    elif name == "geometric_mask":
        _set_row(weights, row, [min(ratio, 2.0) for ratio in ratios] if low <= geometric <= high else None, 1.0)
    elif name == "k3_mask":
        k3 = math.fsum(bounded(drift)[0] - 1.0 - drift for drift in drifts) / len(drifts)
        _set_row(weights, row, [1.0] * len(ratios) if k3 <= high else None, 1.0)
    elif name == "opsm":
        distance = math.fsum(case.rollout[other][t] - case.logprobs[other][t] for other, t in places) / len(places)
        _set_row(weights, row, [1.0] * len(ratios) if advantage >= 0 or distance <= high else None, 1.0)
    else:
        raise AssertionError(f"no slow loop for correction {name}")


def _set_row(weights: Weights, row: int, per_token: list[float] | None, per_sequence: float) -> None:
    if per_token is None:
        weights.kept[row] = [False] * len(weights.kept[row])
        weights.tokens[row], weights.sequences[row] = [0.0] * len(weights.kept[row]), 0.0
    else:
        weights.tokens[row], weights.sequences[row] = per_token, per_sequence


def _drop_lone(case: Case, weights: Weights, part: Sequence[bool]) -> None:
    for group in set(case.group_ids):
        rows = [row for row in range(len(part)) if part[row] and case.group_ids[row] == group]
        before = {case.trajectory_ids[row] for row in rows}
        after = {case.trajectory_ids[row] for row in rows if any(weights.kept[row])}
        if len(before) == 2 and len(after) < 2:
            for row in rows:
                _set_row(weights, row, None, 0.0)


def _key(case: Case, row: int) -> tuple[int, int]:
    return case.group_ids[row], case.trajectory_ids[row]


def slow_counts(case: Case, options: Options, advantages: Sequence[float | None], weights: Weights) -> Any:
    """Denominators of the loss: all trained tokens, or the survivors of the correction."""
    if options["denominator"] == "kept_all":
        return slow_denominators(case, advantages)
    return slow_denominators(Case(**{**vars(case), "mask": weights.kept}), advantages)


def slow_kl(estimator: str, delta: float, log_ratio: float) -> tuple[float, float]:
    """Value and slope of a KL estimator; the exponent of k3 is clamped, its slope goes straight through."""
    if estimator == "k1":
        return delta, 1.0
    if estimator == "k2":
        return delta**2 / 2, delta
    exponential = math.exp(min(max(-delta, -20.0), 20.0))
    k3, slope = exponential - 1 + delta, 1 - exponential
    if estimator == "k3":
        return k3, slope
    ratio, ratio_slope = bounded(log_ratio)
    return ratio * k3, ratio_slope * k3 + ratio * slope


def slow_surrogate(log_ratio: float, advantage: float, options: Options, ceiling: float = 20.0) -> tuple[float, float]:
    """-min(rho a, clip(rho) a), for a < 0 at most -dual_clip a; and its slope."""
    low = -math.inf if options["clip_low"] is None else 1 - options["clip_low"]
    high = math.inf if options["clip_high"] is None else 1 + options["clip_high"]
    ratio, ratio_slope = bounded(log_ratio, ceiling)
    unclipped, clipped = ratio * advantage, min(max(ratio, low), high) * advantage
    inside = low <= ratio <= high
    value, slope = (-unclipped, -ratio_slope * advantage) if unclipped <= clipped else (-clipped, 0.0)
    if inside:
        slope = -ratio_slope * advantage
    bound = options.get("dual_clip")
    if bound is not None and advantage < 0 and value > -bound * advantage:
        value, slope = -bound * advantage, 0.0
    return value, slope


def _clipped(log_ratio: float, advantage: float, logprob: float, options: Options) -> tuple[float, float]:
    return slow_surrogate(log_ratio, advantage, options)


def _reinforce(log_ratio: float, advantage: float, logprob: float, options: Options) -> tuple[float, float]:
    return -advantage * logprob, -advantage


def _capped_weight(log_ratio: float, advantage: float, logprob: float, options: Options) -> tuple[float, float]:
    low = -math.inf if options["clip_low"] is None else 1 - options["clip_low"]
    high = math.inf if options["clip_high"] is None else 1 + options["clip_high"]
    weight = min(max(bounded(log_ratio)[0], low), high)
    return -weight * advantage * logprob, -weight * advantage


def _soft_gate(log_ratio: float, advantage: float, logprob: float, options: Options) -> tuple[float, float]:
    tau = options["tau_positive"] if advantage > 0 else options["tau_negative"]
    ratio, ratio_slope = bounded(log_ratio)
    gate = _sigmoid(tau * (ratio - 1))
    return -4 / tau * gate * advantage, -4 * gate * (1 - gate) * ratio_slope * advantage


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


TokenLoss = Callable[[float, float, float, Options], tuple[float, float]]
"""(log ratio, advantage, log-prob, options) -> loss of the token and its slope."""


def token_objective(token_loss: TokenLoss) -> SlowObjective:
    """The mean of a token loss, with correction and KL."""

    def slow(case: Case, options: Options) -> Loss:
        advantages = slow_advantages(case, options)
        weights = slow_correction(case, options, advantages)
        counts = slow_counts(case, options, advantages, weights)
        losses, gradient = [], [[0.0] * len(row) for row in case.logprobs]
        anchor = case.rollout if options["correction"] == "bypass" else case.old
        for row, advantage in enumerate(advantages):
            if advantage is None:
                continue
            share = aggregation_share(case, row, options, counts, weights, options["aggregation"])
            for token, trained in enumerate(case.mask[row]):
                if not trained:
                    continue
                new = case.logprobs[row][token]
                log_ratio = new - anchor[row][token]
                value, slope = token_loss(log_ratio, advantage, new, options)
                factor = weights.tokens[row][token]
                value, slope = value * factor, slope * factor
                if options["kl_coefficient"] and options["kl_where"] == "loss":
                    kl, kl_slope = slow_kl(options["kl_estimator"], new - case.reference[row][token], log_ratio)
                    value += options["kl_coefficient"] * kl
                    slope += options["kl_coefficient"] * kl_slope
                losses.append(share * value)
                gradient[row][token] = share * slope
        return math.fsum(losses), gradient

    return slow


def aggregation_share(case: Case, row: int, options: Options, counts: Any, weights: Weights, how: str) -> float:
    """What a token of ``row`` contributes to the mean, per unit of its loss."""
    counted = weights.kept[row] if options["denominator"] == "survivors" else case.mask[row]
    completions = max(counts.completions, 1)
    return {
        "token_mean": 1 / max(counts.tokens, 1),
        "sequence_mean_token_mean": 1 / (completions * max(sum(counted), 1)),
        "sequence_sum": 1 / completions,
        "sequence_sum_norm": 1 / (completions * (options.get("max_tokens") or 1)),
    }[how]


def add_kl(case: Case, options: Options, advantages: Sequence[float | None], weights: Weights, loss: Loss) -> Loss:
    """The KL of objectives that are no mean over tokens: averaged per completion, then over completions."""
    if not options["kl_coefficient"] or options["kl_where"] == "reward":
        return loss
    counts = slow_counts(case, options, advantages, weights)
    value, gradient = loss
    anchor = case.rollout if options["correction"] == "bypass" else case.old
    terms = [value]
    for row, advantage in enumerate(advantages):
        if advantage is None:
            continue
        share = aggregation_share(case, row, options, counts, weights, "sequence_mean_token_mean")
        for token, trained in enumerate(case.mask[row]):
            if trained:
                new = case.logprobs[row][token]
                delta, log_ratio = new - case.reference[row][token], new - anchor[row][token]
                kl, slope = slow_kl(options["kl_estimator"], delta, log_ratio)
                terms.append(options["kl_coefficient"] * share * kl)
                gradient[row][token] += options["kl_coefficient"] * share * slope
    return math.fsum(terms), gradient


def trajectories_of(case: Case, advantages: Sequence[float | None]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(group, trajectory) -> its trained (row, token) places, of trajectories that take part."""
    places: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, advantage in enumerate(advantages):
        for token, trained in enumerate(case.mask[row]):
            if trained and advantage is not None:
                places.setdefault(_key(case, row), []).append((row, token))
    return places


def slow_gspo(case: Case, options: Options) -> Loss:
    """Clipped geometric-mean ratio of each trajectory."""
    advantages = slow_advantages(case, options)
    weights = slow_correction(case, options, advantages)
    trajectories = max(slow_counts(case, options, advantages, weights).trajectories, 1)
    losses, gradient = [], [[0.0] * len(row) for row in case.logprobs]
    for places in trajectories_of(case, advantages).values():
        advantage = advantages[places[0][0]]
        assert advantage is not None
        mean = math.fsum(case.logprobs[row][t] - case.old[row][t] for row, t in places) / len(places)
        value, slope = slow_surrogate(mean, advantage, options, ceiling=10.0)
        factor = weights.sequences[places[0][0]] / trajectories
        losses.append(value * factor)
        for row, token in places:
            gradient[row][token] = slope * factor / len(places)
    return add_kl(case, options, advantages, weights, (math.fsum(losses), gradient))


SLOW: dict[str, SlowObjective] = {
    **dict.fromkeys(("grpo", "two_grpo", "dr_grpo", "dapo", "reinforce_pp"), token_objective(_clipped)),
    "rloo": token_objective(_reinforce),
    "cispo": token_objective(_capped_weight),
    "sapo": token_objective(_soft_gate),
    "gspo": slow_gspo,
}
