"""Slow loops of the objectives of whole sequences, pairs and groups, and of distillation; see objective_slow.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tests.learner.objective_cases import Case, slow_advantages
from tests.learner.objective_slow import (
    Loss,
    Options,
    SlowObjective,
    Weights,
    add_kl,
    aggregation_share,
    slow_correction,
    slow_counts,
    slow_kl,
    slow_surrogate,
    trajectories_of,
)

Key = tuple[int, int]
Scalar = Callable[[float], float]


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def _tangent(value: Scalar, slope: Scalar) -> tuple[Scalar, Scalar]:
    """Beyond +-10 a straight line with the slope there."""

    def inside(r: float) -> float:
        return min(max(r, -10.0), 10.0)

    return lambda r: value(inside(r)) + slope(inside(r)) * (r - inside(r)), lambda r: slope(inside(r))


_TANH = (lambda r: math.tanh(r) / 2, lambda r: (1 - math.tanh(r) ** 2) / 2)
CURVES: dict[str, tuple[tuple[Scalar, Scalar], tuple[Scalar, Scalar]]] = {
    "kl": ((lambda r: -r, lambda r: -1.0), _tangent(lambda r: math.exp(r - 1), lambda r: math.exp(r - 1))),
    "kl_ratio_link": ((lambda r: -1 - r, lambda r: -1.0), _tangent(math.exp, math.exp)),
    "reverse_kl": (_tangent(lambda r: math.exp(-r), lambda r: -math.exp(-r)), (lambda r: r - 1, lambda r: 1.0)),
    "pearson": (
        (lambda r: -r, lambda r: -1.0),
        (lambda r: r + r * r / 4 if r >= -2 else -1.0, lambda r: 1 + r / 2 if r >= -2 else 0.0),
    ),
    "pearson_polynomial": ((lambda r: -r, lambda r: -1.0), (lambda r: r + r * r / 4, lambda r: 1 + r / 2)),
    "hellinger": (
        _tangent(lambda r: math.exp(-r) - 1, lambda r: -math.exp(-r)),
        _tangent(lambda r: math.exp(r) - 1, math.exp),
    ),
    "hellinger_ratio_link": (
        _tangent(lambda r: math.exp(-r / 2) - 1, lambda r: -math.exp(-r / 2) / 2),
        _tangent(lambda r: math.exp(r / 2) - 1, lambda r: math.exp(r / 2) / 2),
    ),
    "js": (
        (lambda r: _softplus(-r) - math.log(2), lambda r: -_sigmoid(-r)),
        (lambda r: _softplus(r) - math.log(2), _sigmoid),
    ),
    "gan": ((lambda r: _softplus(-r), lambda r: -_sigmoid(-r)), (_softplus, _sigmoid)),
    "tv": ((lambda r: -_TANH[0](r), lambda r: -_TANH[1](r)), _TANH),
}
"""(-g, its slope), (f* of g, its slope)."""


def _trajectory_sum(places: Sequence[tuple[int, int]], left: Any, right: Any) -> float:
    return math.fsum(left[row][token] - right[row][token] for row, token in places)


def _group_sizes(case: Case, options: Options, advantages: Sequence[float | None], weights: Weights) -> dict[int, int]:
    counted = case if options["denominator"] == "kept_all" else Case(**{**vars(case), "mask": weights.kept})
    sizes: dict[int, int] = {}
    for group, _ in trajectories_of(counted, advantages):
        sizes[group] = sizes.get(group, 0) + 1
    return sizes


def _importance(case: Case, options: Options, advantages: Sequence[float | None]) -> dict[Key, float]:
    """softmax of (+-R - log pi_old) over each side of the group's mean; tempered and capped for ``snis``."""
    trajectories = trajectories_of(case, advantages)
    if options["weights"] == "none":
        return dict.fromkeys(trajectories, 1.0)
    sides: dict[tuple[int, bool], dict[Key, float]] = {}
    for key, places in trajectories.items():
        row = places[0][0]
        above, reward = (advantages[row] or 0.0) > 0, case.rewards[row]
        assert reward is not None
        logprob = math.fsum(case.old[row][token] for row, token in places)
        temperature = 1.0
        if options["weights"] == "snis":
            logprob, temperature = logprob / len(places), options["weight_temperature"]
        exponent = ((reward if above else -reward) - logprob) / temperature
        sides.setdefault((key[0], above), {})[key] = exponent
    weights = {}
    for members in sides.values():
        highest = max(members.values())
        total = math.fsum(math.exp(value - highest) for value in members.values())
        for key, value in members.items():
            weights[key] = math.exp(value - highest) / total
            if options["weights"] == "snis":
                weights[key] = min(weights[key], options["weight_cap"] / len(members))
    return weights


def slow_f_grpo(case: Case, options: Options) -> Loss:
    """A curve of the implicit reward of each trajectory, or of each token."""
    advantages = slow_advantages(case, options)
    weights = slow_correction(case, options, advantages)
    counts = slow_counts(case, options, advantages, weights)
    sizes = _group_sizes(case, options, advantages, weights)
    importance = _importance(case, options, advantages)
    kappa = 1 + 1 / options["beta"] if options["kappa"] is None else options["kappa"]
    beta, gamma = options["beta"], options["gamma"]
    by_sequence = options["correction"] in ("sequence_tis", "sequence_mask", "geometric_mask", "k3_mask", "opsm")
    positive, negative = CURVES[options["divergence"]]
    losses, gradient = [], [[0.0] * len(row) for row in case.logprobs]
    for key, places in trajectories_of(case, advantages).items():
        first = places[0][0]
        advantage = advantages[first] or 0.0
        kept = any(weights.kept[row][token] for row, token in places)
        if advantage == 0.0 or not kept:
            continue
        value, slope = positive if advantage > 0 else negative
        scale = abs(advantage) * importance[key] * kappa
        if options["level"] == "sequence":
            reward = beta * _trajectory_sum(places, case.logprobs, case.reference)
            reward += gamma * _trajectory_sum(places, case.logprobs, case.old)
            scale *= weights.sequences[first] / (sizes[key[0]] * max(counts.groups, 1))
            losses.append(scale * value(reward))
            for row, token in places:
                factor = 1.0 if by_sequence else weights.tokens[row][token]
                gradient[row][token] = scale * slope(reward) * (beta + gamma) * factor
            continue
        for row, token in places:
            new = case.logprobs[row][token]
            reward = beta * (new - case.reference[row][token]) + gamma * (new - case.old[row][token])
            share = scale * weights.tokens[row][token] / max(counts.tokens, 1)
            losses.append(share * value(reward))
            gradient[row][token] = share * slope(reward) * (beta + gamma)
    if options["level"] == "token":
        return _add_token_kl(case, options, advantages, weights, (math.fsum(losses), gradient))
    return add_kl(case, options, advantages, weights, (math.fsum(losses), gradient))


def _add_token_kl(
    case: Case, options: Options, advantages: Sequence[float | None], weights: Weights, loss: Loss
) -> Loss:
    if not options["kl_coefficient"] or options["kl_where"] == "reward":
        return loss
    counts = slow_counts(case, options, advantages, weights)
    value, gradient = loss
    for places in trajectories_of(case, advantages).values():
        for row, token in places:
            share = options["kl_coefficient"] * aggregation_share(case, row, options, counts, weights, "token_mean")
            new = case.logprobs[row][token]
            kl, slope = slow_kl(options["kl_estimator"], new - case.reference[row][token], new - case.old[row][token])
            value += share * kl
            gradient[row][token] += share * slope
    return value, gradient


def slow_f_hal(case: Case, options: Options) -> Loss:
    """Without offline pairs: the policy's own share of the loss. The KL is not shared."""
    share = 1 - options["lambda_offline"]
    loss, gradient = slow_f_grpo(case, {**options, "kl_coefficient": 0.0} if options["kl_where"] == "loss" else options)
    advantages = slow_advantages(case, options)
    weights = slow_correction(case, options, advantages)
    own = share * loss, [[share * value for value in row] for row in gradient]
    if options["level"] == "token":
        return _add_token_kl(case, options, advantages, weights, own)
    return add_kl(case, options, advantages, weights, own)


def _regressed(case: Case, options: Options, weights: Weights, advantages: Sequence[float | None]) -> dict[Key, float]:
    """Advantages of the trajectories that enter: survivors of a mask, two or more per group, with signal."""
    trajectories = trajectories_of(case, advantages)
    survivors = {
        key: places for key, places in trajectories.items() if any(weights.kept[row][token] for row, token in places)
    }
    lost = {group for group, _ in trajectories.keys() - survivors.keys()}
    keys = list(zip(case.group_ids, case.trajectory_ids, strict=True))
    rewards = [
        None if key[0] in lost and key not in survivors else reward
        for reward, key in zip(case.rewards, keys, strict=True)
    ]
    advantages = slow_advantages(Case(**{**vars(case), "rewards": rewards}), options)
    found: dict[Key, float] = {}
    for key, places in survivors.items():
        advantage = advantages[places[0][0]]
        if advantage is not None:
            found[key] = advantage
    for group in {group for group, _ in found}:
        members = [key for key in found if key[0] == group]
        silent = options["zero_variance"] != "as_is" and not any(found[key] for key in members)
        if len(members) < 2 or silent:
            for key in members:
                del found[key]
    return found


def slow_gift(case: Case, options: Options) -> Loss:
    """(A - beta (D - mean) / (max(std, floor) + eps))^2 over trajectories, with the statistics' slopes written out."""
    everyone = slow_advantages(case, options)
    weights = slow_correction(case, options, everyone)
    counts = slow_counts(case, options, everyone, weights)
    found = _regressed(case, options, weights, everyone)
    places = trajectories_of(case, everyone)
    anchor = case.old if options["anchor"] == "old" else case.reference
    losses, gradient = [], [[0.0] * len(row) for row in case.logprobs]
    share = 1 / max(counts.trajectories, 1)
    for group in {group for group, _ in found}:
        keys = [key for key in found if key[0] == group]
        ratios = [_trajectory_sum(places[key], case.logprobs, anchor) for key in keys]
        clamped = [min(max(ratio, -50.0), 50.0) for ratio in ratios]
        number = len(keys)
        mean = math.fsum(clamped) / number
        freedom = max(number - options["ddof"], 1)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in clamped) / freedom)
        scale = max(max(std, options["std_floor"]) + options["eps"], 1e-12)
        errors = [
            found[key] - options["beta"] * (ratio - mean) / scale for key, ratio in zip(keys, ratios, strict=True)
        ]
        losses += [share * error**2 for error in errors]
        for j, key in enumerate(keys):
            slope = 0.0
            for i, error in enumerate(errors):
                moved = (i == j) / scale
                if options["statistics"] == "graph" and abs(ratios[j]) <= 50.0:
                    moved -= 1 / number / scale
                    if std >= options["std_floor"] and std > 0:
                        moved -= (ratios[i] - mean) / scale**2 * (clamped[j] - mean) / (freedom * std)
                slope -= 2 * options["beta"] * error * moved
            for row, token in places[key]:
                gradient[row][token] = share * slope
    return add_kl(case, options, everyone, weights, (math.fsum(losses), gradient))


def slow_gvpo(case: Case, options: Options) -> Loss:
    """((beta D - mean) - A)^2 / (2 (G - 1)) over trajectories, the mean detached."""
    everyone = slow_advantages(case, options)
    weights = slow_correction(case, options, everyone)
    counts = slow_counts(case, options, everyone, weights)
    found = _regressed(case, options, weights, everyone)
    places = trajectories_of(case, everyone)
    anchor = case.old if options["anchor"] == "old" else case.reference
    losses, gradient = [], [[0.0] * len(row) for row in case.logprobs]
    for group in {group for group, _ in found}:
        keys = [key for key in found if key[0] == group]
        rewards = [options["beta"] * _trajectory_sum(places[key], case.logprobs, anchor) for key in keys]
        mean = math.fsum(rewards) / len(keys)
        share = 1 / (2 * (len(keys) - 1) * max(counts.groups, 1))
        for key, reward in zip(keys, rewards, strict=True):
            error = reward - mean - found[key]
            losses.append(share * error**2)
            for row, token in places[key]:
                gradient[row][token] = share * 2 * error * options["beta"]
    return add_kl(case, options, everyone, weights, (math.fsum(losses), gradient))


def pair_objective(margin_loss: Callable[[float, float], tuple[float, float]]) -> SlowObjective:
    """A loss (margin, beta) -> value, slope of the best against the worst completion of a group."""

    def slow(case: Case, options: Options) -> Loss:
        advantages = slow_advantages(case, options)
        weights = slow_correction(case, options, advantages)
        groups = max(slow_counts(case, options, advantages, weights).groups, 1)
        trajectories = trajectories_of(case, advantages)
        losses, gradient = [], [[0.0] * len(row) for row in case.logprobs]
        for group in {group for group, _ in trajectories}:
            keys = sorted(key for key in trajectories if key[0] == group)
            value_of = {key: advantages[trajectories[key][0][0]] or 0.0 for key in keys}
            best = max(keys, key=lambda key: value_of[key])
            worst = min(keys, key=lambda key: value_of[key])
            if value_of[best] == value_of[worst]:
                continue
            weight = 1 / groups
            for key in (best, worst):
                weight *= weights.sequences[trajectories[key][0][0]]
            margin = _trajectory_sum(trajectories[best], case.logprobs, case.reference)
            margin -= _trajectory_sum(trajectories[worst], case.logprobs, case.reference)
            value, slope = margin_loss(margin, options["beta"])
            losses.append(weight * value)
            for key, sign in ((best, 1.0), (worst, -1.0)):
                for row, token in trajectories[key]:
                    gradient[row][token] = sign * weight * slope
        return add_kl(case, options, advantages, weights, (math.fsum(losses), gradient))

    return slow


def slow_opd(case: Case, options: Options) -> Loss:
    """The clipped ratio times the teacher's log-ratio, of the token or summed over its completion."""
    everyone = _distilled(case, options)
    weights = slow_correction(case, options, everyone)
    counts = slow_counts(case, options, everyone, weights)
    anchor = case.rollout if options["correction"] == "bypass" else case.old
    losses, gradient = [], [[0.0] * len(row) for row in case.logprobs]
    for places in trajectories_of(case, everyone).values():
        whole = _trajectory_sum(places, case.reference, anchor)
        for row, token in places:
            teacher = case.reference[row][token] - anchor[row][token] if options["level"] == "token" else whole
            advantage = teacher + options["reward_weight"] * (everyone[row] or 0.0)
            log_ratio = case.logprobs[row][token] - anchor[row][token]
            value, slope = slow_surrogate(log_ratio, advantage, options)
            share = aggregation_share(case, row, options, counts, weights, options["aggregation"])
            if options["kl_coefficient"] and options["kl_where"] == "loss":
                delta = case.logprobs[row][token] - case.reference[row][token]
                kl, kl_slope = slow_kl(options["kl_estimator"], delta, log_ratio)
                losses.append(options["kl_coefficient"] * share * kl)
                gradient[row][token] += options["kl_coefficient"] * share * kl_slope
            losses.append(share * weights.tokens[row][token] * value)
            gradient[row][token] += share * weights.tokens[row][token] * slope
    return math.fsum(losses), gradient


def _distilled(case: Case, options: Options) -> list[float | None]:
    """Advantages of the rewards, 0 for those that have nothing to compare with or are not read."""
    found = slow_advantages(case, options)
    scored = {
        key
        for key, reward in zip(zip(case.group_ids, case.trajectory_ids, strict=True), case.rewards, strict=True)
        if reward is not None
    }
    for row, reward in enumerate(case.rewards):
        alone = sum(group == case.group_ids[row] for group, _ in scored) == 1
        if found[row] is not None or (reward is not None and alone):
            found[row] = (found[row] or 0.0) if options["reward_weight"] else 0.0
        if not scored and not options["reward_weight"]:
            found[row] = None
    return found


def _logistic(margin: float, beta: float) -> tuple[float, float]:
    return _softplus(-beta * margin), -beta * _sigmoid(-beta * margin)


def _squared(margin: float, beta: float) -> tuple[float, float]:
    return (margin - 0.5 / beta) ** 2, 2 * (margin - 0.5 / beta)


SLOW_GROUPS: dict[str, SlowObjective] = {
    "f_grpo": slow_f_grpo,
    "f_hal": slow_f_hal,
    "gift": slow_gift,
    "gvpo": slow_gvpo,
    "online_dpo": pair_objective(_logistic),
    "ipo": pair_objective(_squared),
    "opd": slow_opd,
}
