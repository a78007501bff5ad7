"""Shared by the tests of objectives: the published vectors, random cases, and slow loops written from the formulas."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from learner.objectives import Denominators, ObjectiveBatch

VECTORS: dict[str, dict[str, Any]] = {
    vector["id"]: vector for vector in json.loads((Path(__file__).parent / "vectors.json").read_text())
}


def fixture_batch(name: str, *, new: str = "new", **changes: Any) -> ObjectiveBatch:
    """FIX_A or FIX_B as one group in float64; ``changes`` replace arguments of ``from_lists``."""
    given = VECTORS[name]["inputs"]
    arguments: dict[str, Any] = {
        "logprobs": given[new],
        "old_logprobs": given["old"],
        "reference_logprobs": given["ref"],
        "rollout_logprobs": given.get("mu"),
        "rewards": given["rewards"],
        "group_ids": [0] * len(given["rewards"]),
        "dtype": torch.float64,
    }
    return ObjectiveBatch.from_lists(**(arguments | changes))


def rows_of(tensor: torch.Tensor, lists: Sequence[Sequence[float]]) -> list[list[float]]:
    """A padded tensor as lists of the lengths of ``lists``; what lies beyond them must be 0."""
    for row, values in zip(tensor, lists, strict=True):
        assert (row[len(values) :] == 0).all()
    return [row[: len(values)].tolist() for row, values in zip(tensor, lists, strict=True)]


@dataclass
class Case:
    """A random step: several groups, null rewards, masked tokens, trajectories of more than one row."""

    logprobs: list[list[float]] = field(default_factory=list)
    old: list[list[float]] = field(default_factory=list)
    reference: list[list[float]] = field(default_factory=list)
    rollout: list[list[float]] = field(default_factory=list)
    mask: list[list[bool]] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    group_ids: list[int] = field(default_factory=list)
    trajectory_ids: list[int] = field(default_factory=list)

    def batch(self, dtype: torch.dtype = torch.float64, **changes: Any) -> ObjectiveBatch:
        arguments: dict[str, Any] = {
            "logprobs": self.logprobs,
            "old_logprobs": self.old,
            "reference_logprobs": self.reference,
            "rollout_logprobs": self.rollout,
            "loss_mask": self.mask,
            "rewards": self.rewards,
            "group_ids": self.group_ids,
            "trajectory_ids": self.trajectory_ids,
            "dtype": dtype,
        }
        return ObjectiveBatch.from_lists(**(arguments | changes))


def random_case(seed: int, groups: int = 4, group_size: int = 4, longest: int = 5) -> Case:
    """Rows in shuffled order; about one reward in eight is null, one group in three has equal rewards."""
    source = random.Random(seed)
    case = Case()
    rows = []
    for group in range(groups):
        equal = source.random() < 1 / 3
        for trajectory in range(group_size):
            reward: float | None = 0.1 if equal else round(source.uniform(-1, 1), 2)
            if source.random() < 1 / 8:
                reward = None
            rows += [(group * 7, trajectory, reward)] * (2 if source.random() < 0.2 else 1)
    source.shuffle(rows)
    for group, trajectory, reward in rows:
        length = source.randint(1, longest)
        new = [source.uniform(-3, -0.1) for _ in range(length)]
        case.logprobs.append(new)
        case.old.append([value + source.gauss(0, 0.3) for value in new])
        case.reference.append([value + source.gauss(0, 0.5) for value in new])
        case.rollout.append([value + source.gauss(0, 0.5) for value in new])
        case.mask.append([source.random() > 0.15 for _ in range(length)])
        case.rewards.append(reward)
        case.group_ids.append(group)
        case.trajectory_ids.append(trajectory)
    return case


def slow_advantages(case: Case, options: dict[str, Any]) -> list[float | None]:
    """Group baselines over scored trajectories, row by row from the definitions."""
    advantages: list[float | None] = []
    for row, reward in enumerate(case.rewards):
        if reward is None:
            advantages.append(None)
            continue
        members: dict[int, float] = {}
        for other, value in enumerate(case.rewards):
            if case.group_ids[other] == case.group_ids[row] and value is not None:
                members[case.trajectory_ids[other]] = value
        values = list(members.values())
        if len(values) < 2:
            advantages.append(None)
            continue
        if max(values) == min(values):
            advantages.append(None if options["zero_variance"] in ("drop", "refill") else 0.0)
            continue
        mean = sum(values) / len(values)
        if options["advantage"] == "group_mean":
            advantages.append(reward - mean)
        elif options["advantage"] == "leave_one_out":
            advantages.append(reward - (sum(values) - reward) / (len(values) - 1))
        else:
            variance = sum((value - mean) ** 2 for value in values) / (len(values) - options["ddof"])
            advantages.append((reward - mean) / (math.sqrt(variance) + options["eps"]))
    return advantages


def slow_denominators(case: Case, advantages: Sequence[float | None]) -> Denominators:
    counted = [row for row, value in enumerate(advantages) if value is not None and any(case.mask[row])]
    return Denominators(
        tokens=sum(sum(case.mask[row]) for row in counted),
        completions=len(counted),
        trajectories=len({(case.group_ids[row], case.trajectory_ids[row]) for row in counted}),
        groups=len({case.group_ids[row] for row in counted}),
    )


def slow_grpo(case: Case, options: dict[str, Any]) -> tuple[float, list[list[float]]]:
    """Loss and dL/dlogp of the clipped surrogate with KL and token_tis, one token at a time."""
    advantages = slow_advantages(case, options)
    counts = slow_denominators(case, advantages)
    loss, gradient = 0.0, [[0.0] * len(row) for row in case.logprobs]
    for row, advantage in enumerate(advantages):
        if advantage is None:
            continue
        weight = {
            "token_mean": 1 / max(counts.tokens, 1),
            "sequence_mean_token_mean": 1 / (max(counts.completions, 1) * max(sum(case.mask[row]), 1)),
            "sequence_sum": 1 / max(counts.completions, 1),
            "sequence_sum_norm": 1 / (max(counts.completions, 1) * (options["max_tokens"] or 1)),
        }[options["aggregation"]]
        for token, trained in enumerate(case.mask[row]):
            if not trained:
                continue
            new, old = case.logprobs[row][token], case.old[row][token]
            value, slope = slow_surrogate(math.exp(new - old), advantage, options)
            if options["correction"] == "token_tis":
                correction = min(math.exp(old - case.rollout[row][token]), options["correction_high"])
                value, slope = value * correction, slope * correction
            if options["kl_coefficient"] and options["kl_where"] == "loss":
                kl, kl_slope = slow_kl(options["kl_estimator"], new - case.reference[row][token], math.exp(new - old))
                value, slope = value + options["kl_coefficient"] * kl, slope + options["kl_coefficient"] * kl_slope
            loss += weight * value
            gradient[row][token] = weight * slope
    return loss, gradient


def slow_surrogate(ratio: float, advantage: float, options: dict[str, Any]) -> tuple[float, float]:
    low = -math.inf if options["clip_low"] is None else 1 - options["clip_low"]
    high = math.inf if options["clip_high"] is None else 1 + options["clip_high"]
    unclipped, clipped = ratio * advantage, min(max(ratio, low), high) * advantage
    value, slope = (-unclipped, -unclipped) if unclipped <= clipped else (-clipped, 0.0)
    bound = options["dual_clip"]
    if bound is not None and advantage < 0 and value > -bound * advantage:
        value, slope = -bound * advantage, 0.0
    return value, slope


def slow_kl(estimator: str, delta: float, ratio: float) -> tuple[float, float]:
    if estimator == "k2":
        return delta**2 / 2, delta
    k3 = math.exp(-delta) - 1 + delta
    if estimator == "k3":
        return k3, 1 - math.exp(-delta)
    return ratio * k3, ratio * delta
