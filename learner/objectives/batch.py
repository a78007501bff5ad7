"""What an objective is given: per-token log-probs of some completions, and the facts of their groups.

Padded tensors [rows, T]; the mask says where tokens are, and nothing is read outside it (NaN there is harmless).
``from_lists`` pads lists; the fast path is the constructor itself, with tensors on any device. Advantages and
denominators of a step are computed once over all ranks (``Objective.prepare``) and handed in with every micro-batch;
left out, they are taken from this batch alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from learner.advantages import Denominators, StepRows
from learner.objectives.masking import Mask

TokenLists = Sequence[Sequence[float]]


@dataclass(frozen=True, eq=False)
class ObjectiveBatch:
    """Completions to compute coefficients for. ``coupling: group`` objectives need whole groups here."""

    logprobs: Tensor
    """[rows, T] float32 or float64, current policy. Not differentiated through: it may carry a graph or not."""
    mask: Tensor
    """[rows, T] bool, trained tokens."""
    group_ids: Tensor
    """[rows] int64."""
    old_logprobs: Tensor | None = None
    """[rows, T], policy at the start of the pass; None: the current one (ratio 1)."""
    reference_logprobs: Tensor | None = None
    """[rows, T]."""
    rollout_logprobs: Tensor | None = None
    """[rows, T], as the engine reported them."""
    rewards: Tensor | None = None
    """[rows], equal on all rows of a trajectory; NaN: could not be scored."""
    trajectory_ids: Tensor | None = None
    """[rows] int64; None: every row is a trajectory."""
    advantages: Tensor | None = None
    """[rows]; NaN: takes no part. None: from the rewards of this batch."""
    denominators: Denominators | None = None
    """Counts of the whole update; None: counted in this batch."""
    offline: Tensor | None = None
    """[rows] bool, rows of offline pairs."""
    lengths: Tensor | None = None
    """[rows] int64, generated tokens, masked or not; None: those under the mask."""

    def __post_init__(self) -> None:
        if self.logprobs.ndim != 2:
            raise ValueError(f"ObjectiveBatch: logprobs must be [rows, T], got {tuple(self.logprobs.shape)}")
        rows = self.logprobs.shape[:1]
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, Tensor):
                continue
            per_token = field.name == "mask" or field.name.endswith("logprobs")
            expected = self.logprobs.shape if per_token else rows
            if value.shape != expected:
                raise ValueError(
                    f"ObjectiveBatch: {field.name} is {tuple(value.shape)}, expected {tuple(expected)} as logprobs"
                )
        if self.mask.dtype != torch.bool:
            raise ValueError(f"ObjectiveBatch: mask must be bool, got {self.mask.dtype}")
        if self.trajectory_ids is None:
            object.__setattr__(self, "trajectory_ids", torch.arange(rows[0]))

    def __len__(self) -> int:
        return self.logprobs.shape[0]

    @staticmethod
    def from_lists(
        *,
        logprobs: TokenLists,
        group_ids: Sequence[int],
        rewards: Sequence[float | None] | None = None,
        old_logprobs: TokenLists | None = None,
        reference_logprobs: TokenLists | None = None,
        rollout_logprobs: TokenLists | None = None,
        trajectory_ids: Sequence[int] | None = None,
        loss_mask: Sequence[Sequence[bool]] | None = None,
        advantages: Sequence[float | None] | None = None,
        denominators: Denominators | None = None,
        offline: Sequence[bool] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> ObjectiveBatch:
        """Pads lists on the right.

        Args:
            logprobs: one list per completion, current policy; the other log-probs have the same lengths.
            group_ids: one per completion.
            rewards: None for a completion that could not be judged. May be left out when advantages are handed in.
            trajectory_ids: within the group; default: one trajectory per row.
            loss_mask: False for tokens the policy did not write; default: all tokens.
            advantages: None for a completion that takes no part; default: from the rewards.
            denominators: of the whole update; default: counted from the lists.
            offline: True for the rows of offline pairs: groups of two, the chosen row with the higher reward.
            dtype: of all log-probs.
        Raises:
            ValueError: lists of different lengths, with the argument and the row.
        """
        lengths = [len(row) for row in logprobs]

        def padded(name: str, lists: TokenLists | None) -> Tensor | None:
            return None if lists is None else _padded(name, lists, lengths, dtype)

        def numbers(name: str, values: Sequence[float | None] | None) -> Tensor | None:
            if values is None:
                return None
            _check_count(name, len(values), len(lengths))
            return torch.tensor([math.nan if value is None else float(value) for value in values], dtype=torch.float64)

        def integers(name: str, values: Sequence[int]) -> Tensor:
            _check_count(name, len(values), len(lengths))
            return torch.tensor([int(value) for value in values], dtype=torch.int64)

        written = [[True] * length for length in lengths] if loss_mask is None else loss_mask
        return ObjectiveBatch(
            logprobs=_padded("logprobs", logprobs, lengths, dtype),
            mask=_padded("loss_mask", written, lengths, torch.bool),
            group_ids=integers("group_ids", group_ids),
            old_logprobs=padded("old_logprobs", old_logprobs),
            reference_logprobs=padded("reference_logprobs", reference_logprobs),
            rollout_logprobs=padded("rollout_logprobs", rollout_logprobs),
            rewards=numbers("rewards", rewards),
            trajectory_ids=None if trajectory_ids is None else integers("trajectory_ids", trajectory_ids),
            advantages=numbers("advantages", advantages),
            denominators=denominators,
            offline=None if offline is None else integers("offline", offline).bool(),
            lengths=torch.tensor(lengths, dtype=torch.int64),
        )

    def select(self, rows: Sequence[int]) -> ObjectiveBatch:
        """The batch of some rows, in the given order, with the same width and denominators."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        chosen = {
            field.name: value.index_select(0, index.to(value.device))
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return replace(self, **chosen)

    def step_rows(self, kl: Tensor | None = None) -> StepRows:
        """The facts from which advantages and denominators follow, read from the device."""
        assert self.trajectory_ids is not None
        rewards = [math.nan] * len(self) if self.rewards is None else self.rewards.tolist()
        mask, reference = Mask(self.mask), self.reference_logprobs
        if reference is not None and reference.dtype.itemsize < 4:
            reference = reference.float()
        return StepRows(
            rewards=[value if math.isfinite(value) else None for value in rewards],
            group_ids=self.group_ids.tolist(),
            trajectory_ids=self.trajectory_ids.tolist(),
            token_counts=mask.counts.tolist(),
            kl=None if kl is None else kl.tolist(),
            lengths=None if self.lengths is None else self.lengths.tolist(),
            offline=None if self.offline is None else self.offline.tolist(),
            reference_logprobs=None if reference is None else mask.row_sums(reference).tolist(),
        )


def _check_count(name: str, count: int, rows: int) -> None:
    if count != rows:
        raise ValueError(f"ObjectiveBatch: {name} has {count} entries for {rows} completions")


def _padded(name: str, lists: Sequence[Sequence[float]], lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    _check_count(name, len(lists), len(lengths))
    padded = torch.zeros(len(lengths), max(lengths, default=0), dtype=dtype)
    for index, (values, length) in enumerate(zip(lists, lengths, strict=True)):
        if len(values) != length:
            raise ValueError(f"ObjectiveBatch: {name}[{index}] has {len(values)} entries for {length} tokens")
        padded[index, :length] = torch.as_tensor(values, dtype=dtype)
    return padded
