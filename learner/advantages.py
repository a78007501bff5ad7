"""Advantages and denominators of a whole step, computed once over all ranks and handed to its micro-batches.

Baselines count trajectories, not rows, and only scored ones. ``None`` as an advantage means that the row takes no part:
its reward is null, its group has fewer than two scored trajectories, or the recipe drops groups without signal. Such
rows count in no denominator. Groups whose task rewards are equal have advantage exactly 0 unless the recipe asks for
``as_is``. All arithmetic is in float64, so the result does not depend on ranks, devices or order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np

from learner.shaping import SoftOverlong
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
    """Per row, the KL to the reference over its trained tokens (``learner.kl.reward_kl``): for KL in the reward."""
    lengths: Sequence[int] | None = None
    """Generated tokens of each row, masked or not; None: ``token_counts``."""
    reference_logprobs: Sequence[float] | None = None
    """Per row, sum over trained tokens of log pi_ref; None: not known. For objectives that shape rewards with it."""
    offline: Sequence[bool] | None = None
    """Rows of offline pairs, which no policy of the run sampled; None: there are none."""

    def __post_init__(self) -> None:
        lengths = {name: len(values) for name, values in self._columns().items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"StepRows: entries of different length: {lengths}")

    def __len__(self) -> int:
        return len(self.group_ids)

    def _columns(self) -> dict[str, Sequence[Any]]:
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        return {name: values for name, values in columns.items() if values is not None}

    def select(self, indices: Sequence[int]) -> StepRows:
        """Some of the rows, in the given order: those of one update, for its denominators."""
        return StepRows(**{name: [values[index] for index in indices] for name, values in self._columns().items()})

    @staticmethod
    def joined(parts: Sequence[StepRows]) -> StepRows:
        """The rows of all parts in order; an optional column is kept when every part with rows has it."""
        filled = [part._columns() for part in parts if len(part)] or [part._columns() for part in parts]
        names = [name for name in filled[0] if all(name in columns for columns in filled)]
        return StepRows(**{name: [value for columns in filled for value in columns[name]] for name in names})

    @staticmethod
    def from_rows(rows: Sequence[Row], kl: Sequence[float] | None = None) -> StepRows:
        """The facts of recorded rows."""
        masks = [np.ones(row.length, bool) if row.loss_mask is None else row.loss_mask for row in rows]
        reference: list[float] | None = []
        for row, mask in zip(rows, masks, strict=True):
            if reference is not None and row.reference_logprobs is not None:
                reference.append(float(row.reference_logprobs[mask].sum(dtype=np.float64)))
            else:
                reference = None
        return StepRows(
            rewards=[row.reward for row in rows],
            group_ids=[row.group_id for row in rows],
            trajectory_ids=[row.trajectory_id for row in rows],
            token_counts=[int(mask.sum()) for mask in masks],
            kl=kl,
            lengths=[row.length for row in rows],
            reference_logprobs=reference,
            offline=[row.offline for row in rows],
        )


@dataclass(frozen=True)
class Denominators:
    """Counts over all micro-batches and ranks of one optimiser update; a row without trained tokens counts nowhere."""

    tokens: int
    completions: int
    """Rows: one completion each, or one segment of a trajectory."""
    trajectories: int
    groups: int
    pairs: int = 0
    """Offline pairs, which count nowhere else."""
    group_sizes: Mapping[int, int] = field(default_factory=dict, compare=False)
    """Trajectories of each group, by group_id: what a mean over one group divides by, however the group is cut."""

    def __add__(self, other: Denominators) -> Denominators:
        sizes = Counter(self.group_sizes)
        sizes.update(other.group_sizes)
        return Denominators(
            self.tokens + other.tokens,
            self.completions + other.completions,
            self.trajectories + other.trajectories,
            self.groups + other.groups,
            self.pairs + other.pairs,
            dict(sizes),
        )


@dataclass(frozen=True)
class GroupCounts:
    """What became of the groups of a step."""

    groups: int
    zero_signal: int
    """Groups of two or more scored trajectories whose rewards are equal."""
    below_margin: int
    """Groups of two or more scored trajectories, not equal, whose rewards differ by less than the margin."""
    too_few_scored: int
    null_trajectories: int


@dataclass(eq=False)
class _Trajectory:
    reward: float | None
    tokens: int = 0
    length: int = 0
    kl: float = 0.0
    advantage: float | None = None
    zeroed: bool = False


@dataclass(frozen=True)
class Scale:
    """What an estimator measures differences of rewards by; each reads what its formula has."""

    ddof: int = 1
    eps: float = 1e-6
    std_floor: float = 0.0
    temperature: float = 1.0
    noise: float = 1.0


DEFAULT_SCALE = Scale()

Estimator = Callable[[np.ndarray, Scale], np.ndarray]
"""The rewards of a group's scored trajectories, [n >= 2] float64 and not all equal -> their advantages, [n]. NaN: that
trajectory takes no part."""


def group_zscore(rewards: np.ndarray, scale: Scale) -> np.ndarray:
    """(R - mean) / (sqrt(var + std_floor^2) + eps) (DeepSeekMath, 2402.03300; the floor is the noise of R)."""
    return (rewards - rewards.mean()) / (np.hypot(rewards.std(ddof=scale.ddof), scale.std_floor) + scale.eps)


def group_mean(rewards: np.ndarray, scale: Scale) -> np.ndarray:
    """R - mean within the group (Dr.GRPO, 2503.20783)."""
    return rewards - rewards.mean()


def leave_one_out(rewards: np.ndarray, scale: Scale) -> np.ndarray:
    """R_i - mean of the others (RLOO, 2402.14740)."""
    return group_mean(rewards, scale) * (len(rewards) / (len(rewards) - 1))


def soft_margin(rewards: np.ndarray, scale: Scale) -> np.ndarray:
    """tanh((R - mean) / temperature); of a pair 2 sigma(difference / temperature) - 1, the expected
    Bradley-Terry sign."""
    return np.tanh(group_mean(rewards, scale) / scale.temperature)


def probit(rewards: np.ndarray, scale: Scale) -> np.ndarray:
    """erf((R - mean) / noise); of a pair the expected sign of its difference under Gaussian noise of each
    reward."""
    return np.array([math.erf(value) for value in group_mean(rewards, scale) / scale.noise])


ESTIMATORS: dict[str, Estimator] = {
    "group_zscore": group_zscore,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "batch_whitened": group_mean,
    "soft_margin": soft_margin,
    "probit": probit,
}
"""By name. ``batch_whitened`` is whitened over the step afterwards."""


def step_advantages(
    rows: StepRows,
    *,
    estimator: str | Estimator = "group_zscore",
    scale: Scale = DEFAULT_SCALE,
    zero_variance: ZeroVariance = "keep",
    margin: float = 0.0,
    unbiased_variance: bool = True,
    kl_coefficient: float = 0.0,
    overlong: SoftOverlong | None = None,
) -> list[float | None]:
    """The advantage of every row; rows of a trajectory share theirs. None: the row takes no part.

    Args:
        estimator: a key of ``ESTIMATORS``, or a function like them.
        scale: the estimator's numbers.
        zero_variance: what becomes of groups without signal. ``keep``: advantage 0. ``drop`` and ``refill``: None
            (refilling is the stream's work). ``as_is``: whatever the estimator says.
        margin: groups whose task rewards differ by less carry no signal either.
        unbiased_variance: of ``batch_whitened``: n - 1 below the variance and eps added to it (verl), else n and
            the variance floored at eps (OpenRLHF).
        kl_coefficient: nats of ``rows.kl`` times this come off each trajectory's reward before the baseline.
        overlong: a penalty on ``rows.lengths``, added to each trajectory's reward before the baseline. Whether a
            group has signal is decided on the task reward alone.
    Raises:
        ValueError: two rewards for one trajectory, or a KL coefficient without ``rows.kl``.
    """
    if kl_coefficient and rows.kl is None:
        raise ValueError("step_advantages: kl_coefficient is set, so rows.kl is needed (learner.kl.reward_kl)")
    estimate = ESTIMATORS[estimator] if isinstance(estimator, str) else estimator
    trajectories = _trajectories(rows)
    for members in _by_group(trajectories).values():
        scored = [member for member in members if member.reward is not None]
        if len(scored) < 2:
            continue
        silent = _have_equal_rewards(scored, margin)
        if silent and zero_variance in ("drop", "refill"):
            continue
        penalties = [overlong.penalty(member.length) if overlong else 0.0 for member in scored]
        shaped = [
            _number(member.reward) - kl_coefficient * member.kl + penalty
            for member, penalty in zip(scored, penalties, strict=True)
        ]
        values = [0.0] * len(shaped)
        if not rewards_are_equal(shaped):
            values = estimate(np.array(shaped, dtype=np.float64), scale).tolist()
        for member, value in zip(scored, values, strict=True):
            member.advantage = None if math.isnan(value) else value
            member.zeroed = silent and zero_variance == "keep"
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
    offline = rows.offline or [False] * len(rows)
    part = [
        index
        for index, (tokens, advantage) in enumerate(zip(rows.token_counts, advantages, strict=True))
        if takes_part(advantage) and tokens > 0
    ]
    sampled = [index for index in part if not offline[index]]
    trajectories = {(rows.group_ids[index], rows.trajectory_ids[index]) for index in sampled}
    group_sizes = dict(Counter(group for group, _ in trajectories))
    return Denominators(
        tokens=sum(rows.token_counts[index] for index in sampled),
        completions=len(sampled),
        trajectories=len(trajectories),
        groups=len(group_sizes),
        pairs=len({rows.group_ids[index] for index in part if offline[index]}),
        group_sizes=group_sizes,
    )


def pair_signs(rows: StepRows) -> list[float | None]:
    """+1 for the chosen row of each offline pair, -1 for the rejected one; None where the rewards do not say.

    Args:
        rows: of offline pairs alone: two rows per group, the chosen one with the higher reward.
    """
    rewards: dict[int, list[float]] = {}
    for group, reward in zip(rows.group_ids, rows.rewards, strict=True):
        if reward is not None:
            rewards.setdefault(group, []).append(reward)
    signs: list[float | None] = []
    for group, reward in zip(rows.group_ids, rows.rewards, strict=True):
        pair = rewards.get(group, [])
        differ = len(pair) == 2 and not rewards_are_equal(pair)
        signs.append(None if reward is None or not differ else 1.0 if reward == max(pair) else -1.0)
    return signs


def count_groups(rows: StepRows, margin: float = 0.0) -> GroupCounts:
    """How many groups carry no signal, differ by less than ``margin``, or have too few scores, by the task reward."""
    trajectories = _trajectories(rows)
    zero_signal = below_margin = too_few = 0
    groups = _by_group(trajectories)
    for members in groups.values():
        scored = [member for member in members if member.reward is not None]
        if len(scored) < 2:
            too_few += 1
        elif _have_equal_rewards(scored):
            zero_signal += 1
        elif _have_equal_rewards(scored, margin):
            below_margin += 1
    null = sum(member.reward is None for member in trajectories.values())
    return GroupCounts(len(groups), zero_signal, below_margin, too_few, null)


def trajectory_lengths(rows: StepRows) -> list[int]:
    """Generated tokens of each scored trajectory, over all its rows."""
    return [member.length for member in _trajectories(rows).values() if member.reward is not None]


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
        trajectory.length += (rows.token_counts if rows.lengths is None else rows.lengths)[index]
        if rows.kl is not None:
            trajectory.kl += rows.kl[index]
    return trajectories


def _by_group(trajectories: dict[tuple[int, int], _Trajectory]) -> dict[int, list[_Trajectory]]:
    groups: dict[int, list[_Trajectory]] = {}
    for (group_id, _), trajectory in trajectories.items():
        groups.setdefault(group_id, []).append(trajectory)
    return groups


def _have_equal_rewards(scored: Sequence[_Trajectory], margin: float = 0.0) -> bool:
    return rewards_are_equal([_number(member.reward) for member in scored], margin)


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
