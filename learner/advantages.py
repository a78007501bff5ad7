"""Advantages and denominators of a whole step, computed once over all ranks and handed to its micro-batches.

Baselines count trajectories, not rows, and only scored ones. ``None`` as an advantage means that the row takes no part:
its reward is null, its group has fewer than two scored trajectories, or the recipe drops groups without signal. Such
rows count in no denominator. Groups whose task rewards are equal have advantage exactly 0 unless the recipe asks for
``as_is``. All arithmetic is in float64, so the result does not depend on ranks, devices or order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from system.core.records import Row, rewards_are_equal

ZeroVariance = Literal["keep", "drop", "refill", "as_is"]

WHITENING_EPS = 1e-8
"""Added to, or floor of, the variance in batch whitening (verl, OpenRLHF)."""


@dataclass(frozen=True)
class StepRows:
    """What advantages and denominators depend on: one entry per completion, in any order."""

    rewards: Sequence[float | None]
    """None or a number that is not finite: could not be scored. Equal on all rows of a trajectory."""
    group_ids: Sequence[int]
    trajectory_ids: Sequence[int]
    token_counts: Sequence[int]
    """Trained tokens (under the loss mask) of each row."""
    kl: Sequence[float] | None = None
    """Per row, sum over trained tokens of log pi_old - log pi_ref (``learner.kl.reward_kl``): for KL in the reward."""

    def __post_init__(self) -> None:
        lengths = {
            "rewards": len(self.rewards),
            "group_ids": len(self.group_ids),
            "trajectory_ids": len(self.trajectory_ids),
            "token_counts": len(self.token_counts),
            "kl": len(self.group_ids if self.kl is None else self.kl),
        }
        if len(set(lengths.values())) != 1:
            raise ValueError(f"StepRows: entries of different length: {lengths}")

    def __len__(self) -> int:
        return len(self.group_ids)

    def select(self, indices: Sequence[int]) -> StepRows:
        """Some of the rows, in the given order: those of one update, for its denominators."""
        return StepRows(
            rewards=[self.rewards[index] for index in indices],
            group_ids=[self.group_ids[index] for index in indices],
            trajectory_ids=[self.trajectory_ids[index] for index in indices],
            token_counts=[self.token_counts[index] for index in indices],
            kl=None if self.kl is None else [self.kl[index] for index in indices],
        )

    @staticmethod
    def from_rows(rows: Sequence[Row], kl: Sequence[float] | None = None) -> StepRows:
        """The facts of recorded rows."""
        return StepRows(
            rewards=[row.reward for row in rows],
            group_ids=[row.group_id for row in rows],
            trajectory_ids=[row.trajectory_id for row in rows],
            token_counts=[0 if row.loss_mask is None else int(row.loss_mask.sum()) for row in rows],
            kl=kl,
        )


@dataclass(frozen=True)
class Denominators:
    """Counts over all micro-batches and ranks of one optimiser update; a row without trained tokens counts nowhere."""

    tokens: int
    completions: int
    """Rows: one completion each, or one segment of a trajectory."""
    trajectories: int
    groups: int


@dataclass(frozen=True)
class GroupCounts:
    """What became of the groups of a step."""

    groups: int
    zero_signal: int
    """Groups of two or more scored trajectories whose rewards are equal."""
    too_few_scored: int
    null_trajectories: int


@dataclass(eq=False)
class _Trajectory:
    reward: float | None
    tokens: int = 0
    kl: float = 0.0
    advantage: float | None = None
    zeroed: bool = False


def group_zscore(rewards: np.ndarray, ddof: int, eps: float) -> np.ndarray:
    """(R - mean) / (std + eps) within the group (DeepSeekMath, 2402.03300); 0 when the rewards are equal."""
    if rewards_are_equal(rewards.tolist()):
        return np.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(ddof=ddof) + eps)


def group_mean(rewards: np.ndarray, ddof: int, eps: float) -> np.ndarray:
    """R - mean within the group (Dr.GRPO, 2503.20783)."""
    if rewards_are_equal(rewards.tolist()):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def leave_one_out(rewards: np.ndarray, ddof: int, eps: float) -> np.ndarray:
    """R_i - mean of the others (RLOO, 2402.14740)."""
    return group_mean(rewards, ddof, eps) * (len(rewards) / (len(rewards) - 1))


ESTIMATORS: dict[str, Callable[[np.ndarray, int, float], np.ndarray]] = {
    "group_zscore": group_zscore,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_whitened": group_mean,
}
"""Per group: (rewards [n >= 2] float64, ddof, eps) -> [n]. ``batch_whitened`` is whitened over the step afterwards."""

ANNOUNCED = (*ESTIMATORS, "soft_margin", "probit")
"""All names a recipe may one day use; those without an estimator are refused by name."""


def step_advantages(
    rows: StepRows,
    *,
    estimator: str = "group_zscore",
    ddof: int = 1,
    eps: float = 1e-6,
    zero_variance: ZeroVariance = "keep",
    unbiased_variance: bool = True,
    kl_coefficient: float = 0.0,
) -> list[float | None]:
    """The advantage of every row; rows of a trajectory share theirs. None: the row takes no part.

    Args:
        estimator: a key of ``ESTIMATORS``.
        ddof: degrees of freedom taken off in the group's std, 0 or 1.
        eps: added to the group's std; 0 is legal.
        zero_variance: what becomes of groups with equal task rewards. ``keep``: advantage 0. ``drop`` and ``refill``:
            None (refilling is the stream's work). ``as_is``: whatever the estimator says.
        unbiased_variance: of ``batch_whitened``: n - 1 below the variance and eps added to it (verl), else n and
            the variance floored at eps (OpenRLHF).
        kl_coefficient: nats of ``rows.kl`` times this come off each trajectory's reward before the baseline; whether
            a group has signal is decided on the task reward alone.
    Raises:
        ValueError: two rewards for one trajectory, or a KL coefficient without ``rows.kl``.
    """
    if kl_coefficient and rows.kl is None:
        raise ValueError("step_advantages: kl_coefficient is set, so rows.kl is needed (learner.kl.reward_kl)")
    trajectories = _trajectories(rows)
    for members in _by_group(trajectories).values():
        scored = [member for member in members if member.reward is not None]
        if len(scored) < 2:
            continue
        equal = _have_equal_rewards(scored)
        if equal and zero_variance in ("drop", "refill"):
            continue
        shaped = np.array([_number(member.reward) - kl_coefficient * member.kl for member in scored], dtype=np.float64)
        for member, value in zip(scored, ESTIMATORS[estimator](shaped, ddof, eps).tolist(), strict=True):
            member.advantage = value
            member.zeroed = equal and zero_variance == "keep"
    taking_part = [member for member in trajectories.values() if member.advantage is not None]
    if estimator == "batch_whitened":
        _whiten(taking_part, unbiased_variance)
    for member in taking_part:
        if member.zeroed:
            member.advantage = 0.0
    return [trajectories[key].advantage for key in zip(rows.group_ids, rows.trajectory_ids, strict=True)]


def step_denominators(rows: StepRows, advantages: Sequence[float | None]) -> Denominators:
    """Counts of the rows that take part, as one optimiser update divides by them.

    Args:
        rows: every row of the update, over all micro-batches and ranks.
        advantages: as ``step_advantages`` gave them, one per row.
    """
    part = [
        (group, trajectory, tokens)
        for group, trajectory, tokens, advantage in zip(
            rows.group_ids, rows.trajectory_ids, rows.token_counts, advantages, strict=True
        )
        if takes_part(advantage) and tokens > 0
    ]
    return Denominators(
        tokens=sum(tokens for _, _, tokens in part),
        completions=len(part),
        trajectories=len({(group, trajectory) for group, trajectory, _ in part}),
        groups=len({group for group, _, _ in part}),
    )


def count_groups(rows: StepRows) -> GroupCounts:
    """How many groups carry no signal or too few scores, by the task reward."""
    trajectories = _trajectories(rows)
    zero_signal = too_few = 0
    groups = _by_group(trajectories)
    for members in groups.values():
        scored = [member for member in members if member.reward is not None]
        if len(scored) < 2:
            too_few += 1
        elif _have_equal_rewards(scored):
            zero_signal += 1
    null = sum(member.reward is None for member in trajectories.values())
    return GroupCounts(len(groups), zero_signal, too_few, null)


def takes_part(advantage: float | None) -> bool:
    """Whether a row with this advantage enters the loss; None and NaN do not."""
    return advantage is not None and not math.isnan(advantage)


def _trajectories(rows: StepRows) -> dict[tuple[int, int], _Trajectory]:
    trajectories: dict[tuple[int, int], _Trajectory] = {}
    for index, key in enumerate(zip(rows.group_ids, rows.trajectory_ids, strict=True)):
        reward = rows.rewards[index]
        if reward is not None and not math.isfinite(reward):
            reward = None
        trajectory = trajectories.setdefault(key, _Trajectory(reward))
        if trajectory.reward != reward:
            raise ValueError(f"group {key[0]}: trajectory {key[1]} has two rewards, {trajectory.reward} and {reward}")
        trajectory.tokens += rows.token_counts[index]
        if rows.kl is not None:
            trajectory.kl += rows.kl[index]
    return trajectories


def _by_group(trajectories: dict[tuple[int, int], _Trajectory]) -> dict[int, list[_Trajectory]]:
    groups: dict[int, list[_Trajectory]] = {}
    for (group_id, _), trajectory in trajectories.items():
        groups.setdefault(group_id, []).append(trajectory)
    return groups


def _have_equal_rewards(scored: Sequence[_Trajectory]) -> bool:
    return rewards_are_equal([_number(member.reward) for member in scored])


def _number(value: float | None) -> float:
    assert value is not None
    return value


def _whiten(trajectories: Sequence[_Trajectory], unbiased_variance: bool) -> None:
    """Token-weighted whitening over the step (REINFORCE++, 2501.03262)."""
    values = np.array([_number(member.advantage) for member in trajectories], dtype=np.float64)
    weights = np.array([member.tokens for member in trajectories], dtype=np.float64)
    total = float(weights.sum())
    if total == 0 or rewards_are_equal(values.tolist()):
        whitened = np.zeros_like(values)
    else:
        mean = float((weights * values).sum()) / total
        squares = float((weights * (values - mean) ** 2).sum())
        if unbiased_variance:
            whitened = (values - mean) / math.sqrt(squares / max(total - 1.0, 1.0) + WHITENING_EPS)
        else:
            whitened = (values - mean) / math.sqrt(max(squares / total, WHITENING_EPS))
    for member, value in zip(trajectories, whitened.tolist(), strict=True):
        member.advantage = value
