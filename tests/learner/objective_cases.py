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


def wild_case(seed: int) -> Case:
    """Groups of 1 to 9 in one step, 1 to 40 tokens, and log-probs that now and then are a hundred nats apart."""
    source = random.Random(seed)
    case = Case()
    rows: list[tuple[int, int, float | None]] = []
    for group in range(source.randint(1, 4)):
        equal, nulls = source.random() < 1 / 4, source.choice([0.0, 0.15, 0.5])
        for trajectory in range(source.randint(1, 9)):
            reward: float | None = 0.1 if equal else round(source.uniform(-1, 1), 2)
            if source.random() < nulls:
                reward = None
            rows += [(group * 3, trajectory, reward)] * (2 if source.random() < 0.1 else 1)
    source.shuffle(rows)

    def moved(values: list[float], width: float) -> list[float]:
        return [
            value + (source.choice([-100.0, 100.0]) if source.random() < 0.02 else source.gauss(0, width))
            for value in values
        ]

    for group, trajectory, reward in rows:
        new = [source.uniform(-3, -0.1) for _ in range(source.choice([1, 2, 5, 40]))]
        case.logprobs.append(new)
        case.old.append(moved(new, 0.3))
        case.reference.append(moved(new, 0.5))
        case.rollout.append(moved(case.old[-1], 0.05))
        case.mask.append([source.random() > 0.15 for _ in new])
        case.rewards.append(reward)
        case.group_ids.append(group)
        case.trajectory_ids.append(trajectory)
    return case


def slow_advantages(case: Case, options: dict[str, Any]) -> list[float | None]:
    """Advantages by their definitions, trajectory by trajectory; ``options`` may leave out what is not used."""
    rewards: dict[tuple[int, int], float] = {}
    shaped: dict[tuple[int, int], float] = {}
    tokens: dict[tuple[int, int], int] = {}
    for row, reward in enumerate(case.rewards):
        if reward is not None:
            key = case.group_ids[row], case.trajectory_ids[row]
            rewards[key] = reward
            tokens[key] = tokens.get(key, 0) + sum(case.mask[row])
            shaped[key] = shaped.get(key, reward) - slow_reward_kl(case, row, options)
    for key in shaped:
        length = sum(
            len(case.logprobs[row])
            for row in range(len(case.rewards))
            if (case.group_ids[row], case.trajectory_ids[row]) == key
        )
        shaped[key] += slow_overlong(length, options)
    found: dict[tuple[int, int], float | None] = {}
    silent: set[tuple[int, int]] = set()
    for group in set(case.group_ids):
        keys = [key for key in rewards if key[0] == group]
        task, values = [rewards[key] for key in keys], [shaped[key] for key in keys]
        if len(keys) < 2:
            continue
        equal = max(task) == min(task) or max(task) - min(task) < (options.get("margin") or 0.0)
        if equal and options["zero_variance"] in ("drop", "refill"):
            continue
        if equal:
            silent |= set(keys)
        for key in keys:
            found[key] = 0.0 if nearly_equal(values) else slow_baseline(shaped[key], values, options)
    if options["advantage"] == "batch_whitened":
        _whiten_slowly(found, tokens, options)
    for key in silent if options["zero_variance"] == "keep" else ():
        found[key] = 0.0
    return [
        None if reward is None else found.get(key)
        for reward, key in zip(case.rewards, zip(case.group_ids, case.trajectory_ids, strict=True), strict=True)
    ]


def nearly_equal(values: Sequence[float]) -> bool:
    """The zero-variance test: not on the std, which rounding leaves above 0."""
    return max(values) - min(values) <= 1e-6 * max(1.0, max(map(abs, values)))


def slow_baseline(reward: float, group: Sequence[float], options: dict[str, Any]) -> float:
    """One reward against those of its group."""
    mean, name = math.fsum(group) / len(group), options["advantage"]
    if name in ("group_mean", "batch_whitened"):
        return reward - mean
    if name == "leave_one_out":
        return reward - (math.fsum(group) - reward) / (len(group) - 1)
    if name == "soft_margin":
        return math.tanh((reward - mean) / options["reward_temperature"])
    if name == "probit":
        return math.erf((reward - mean) / options["reward_noise"])
    variance = math.fsum((value - mean) ** 2 for value in group) / (len(group) - options["ddof"])
    return (reward - mean) / (math.sqrt(variance + options.get("reward_std_floor", 0.0) ** 2) + options["eps"])


def slow_overlong(length: int, options: dict[str, Any]) -> float:
    longest, cache = options.get("overlong_max_tokens"), options.get("overlong_cache_tokens")
    if longest is None or cache is None or length <= longest - cache:
        return 0.0
    return -1.0 if length > longest else (longest - cache - length) / cache


def slow_reward_kl(case: Case, row: int, options: dict[str, Any]) -> float:
    if not options.get("kl_coefficient") or options.get("kl_where") != "reward":
        return 0.0
    total = 0.0
    for token, trained in enumerate(case.mask[row]):
        delta = case.old[row][token] - case.reference[row][token] if trained else 0.0
        exponential = math.exp(min(max(-delta, -20.0), 20.0))
        total += {"k1": delta, "k2": delta**2 / 2}.get(options["kl_estimator"], exponential - 1 + delta)
    return options["kl_coefficient"] * total


def _whiten_slowly(found: dict[Any, float | None], tokens: dict[Any, int], options: dict[str, Any]) -> None:
    part = {key: value for key, value in found.items() if value is not None}
    total = sum(tokens[key] for key in part)
    if total == 0 or nearly_equal(list(part.values())):
        found.update(dict.fromkeys(part, 0.0))
        return
    mean = math.fsum(tokens[key] * value for key, value in part.items()) / total
    squares = math.fsum(tokens[key] * (value - mean) ** 2 for key, value in part.items())
    if options.get("unbiased_variance", True):
        deviation = math.sqrt(squares / max(total - 1, 1) + 1e-8)
    else:
        deviation = math.sqrt(max(squares / total, 1e-8))
    found.update({key: (value - mean) / deviation for key, value in part.items()})


def slow_denominators(case: Case, advantages: Sequence[float | None]) -> Denominators:
    counted = [row for row, value in enumerate(advantages) if value is not None and any(case.mask[row])]
    return Denominators(
        tokens=sum(sum(case.mask[row]) for row in counted),
        completions=len(counted),
        trajectories=len({(case.group_ids[row], case.trajectory_ids[row]) for row in counted}),
        groups=len({case.group_ids[row] for row in counted}),
    )
