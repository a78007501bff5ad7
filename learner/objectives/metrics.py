"""Metrics that add up: over micro-batches, minibatches and ranks, before anything is divided.

A ``MetricSums`` holds sums with their counts, totals, maxima, and the moments of importance weights; ``+`` combines
two of them exactly, ``means()`` divides at the end. Objectives fill a ``MetricCollector`` with tensors, which reads
them from the device once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from learner.objectives.masking import Mask


@dataclass(frozen=True)
class MetricSums:
    """Additive metrics. ``sum(parts, MetricSums())`` combines those of a step."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """name -> (sum, count); becomes their quotient."""
    totals: dict[str, float] = field(default_factory=dict)
    """name -> a count; parts are added."""
    maxima: dict[str, float] = field(default_factory=dict)
    """name -> largest value; parts take the larger."""
    moments: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """name -> (n, sum w, sum w^2); becomes the effective sample size as a share, (sum w)^2 / (n sum w^2)."""

    def __add__(self, other: MetricSums) -> MetricSums:
        return MetricSums(
            _merged(self.sums, other.sums, lambda a, b: (a[0] + b[0], a[1] + b[1])),
            _merged(self.totals, other.totals, lambda a, b: a + b),
            _merged(self.maxima, other.maxima, max),
            _merged(self.moments, other.moments, lambda a, b: (a[0] + b[0], a[1] + b[1], a[2] + b[2])),
        )

    def means(self) -> dict[str, float]:
        """One number per metric; a mean over nothing is left out."""
        values = {name: total / count for name, (total, count) in self.sums.items() if count > 0}
        values |= {
            name: first**2 / (n * second) for name, (n, first, second) in self.moments.items() if n and second > 0
        }
        return values | self.totals | self.maxima


def _merged(left, right, combine):
    merged = dict(left)
    for name, value in right.items():
        merged[name] = combine(merged[name], value) if name in merged else value
    return merged


Number: TypeAlias = Tensor | float


class MetricCollector:
    """Gathers metrics of one batch as tensors.

    A mask is bool or a ``Mask``, of the values' shape. What ends in ``_of`` takes numbers that are 0 outside the mask,
    of which every dimension is summed.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Number, Number]] = {}
        self._totals: dict[str, Number] = {}
        self._maxima: dict[str, Number] = {}
        self._moments: dict[str, tuple[Number, Number, Number]] = {}

    def mean(self, name: str, values: Tensor, mask: Tensor | Mask) -> None:
        """Mean of ``values`` where ``mask`` holds; bool values give a share."""
        where = mask if isinstance(mask, Mask) else Mask(mask)
        if values.dtype == torch.bool:
            self._sums[name] = torch.count_nonzero(values & where.where), torch.count_nonzero(where.where)
        else:
            self.mean_of(name, where.keep(values.detach()), torch.count_nonzero(where.where))

    def mean_of(self, name: str, values: Tensor, count: Number) -> None:
        """Sum of ``values`` over ``count``."""
        self._sums[name] = _by_row(values), count

    def total(self, name: str, values: Number) -> None:
        """Sum of ``values``."""
        self._totals[name] = _by_row(values) if isinstance(values, Tensor) else values

    def maximum(self, name: str, values: Tensor, mask: Tensor | Mask) -> None:
        """Largest of non-negative ``values`` where ``mask`` holds; 0 over nothing."""
        where = mask if isinstance(mask, Mask) else Mask(mask)
        chosen = where.keep(values.detach())
        self.maximum_of(name, chosen.amax() if chosen.numel() else 0.0)

    def maximum_of(self, name: str, value: Number) -> None:
        """A single number."""
        self._maxima[name] = value

    def effective_share(self, name: str, weights: Tensor, mask: Tensor | Mask) -> None:
        """Effective sample size of importance weights, as a share of their number."""
        where = mask if isinstance(mask, Mask) else Mask(mask)
        kept = where.keep(weights.detach())
        squares = torch.linalg.vector_norm(kept, dim=-1).square()
        self.effective_share_of(name, kept, squares, torch.count_nonzero(where.where))

    def effective_share_of(self, name: str, weights: Tensor, squares: Tensor, count: Number) -> None:
        """Of weights and of their squares."""
        self._moments[name] = count, _by_row(weights), _by_row(squares)

    def read(self) -> MetricSums:
        """Everything collected, in one transfer from the device."""
        numbers: list[Number] = [number for pair in self._sums.values() for number in pair]
        numbers += [*self._totals.values(), *self._maxima.values()]
        numbers += [number for triple in self._moments.values() for number in triple]
        values = iter(_added(numbers))
        return MetricSums(
            sums={name: (next(values), next(values)) for name in self._sums},
            totals={name: next(values) for name in self._totals},
            maxima={name: next(values) for name in self._maxima},
            moments={name: (next(values), next(values), next(values)) for name in self._moments},
        )


def _by_row(values: Tensor) -> Tensor:
    """Rows are summed in their own precision, and added in float64 later."""
    numbers = values.detach()
    return numbers.sum(dim=-1) if numbers.ndim > 1 else numbers


def _added(numbers: list[Number]) -> list[float]:
    """The sum of each tensor, float64, few operations for all; plain numbers as they are."""
    tensors = {id(number): number for number in numbers if isinstance(number, Tensor)}
    alike: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}
    for tensor in tensors.values():
        alike.setdefault((tensor.dtype, tensor.shape), []).append(tensor)
    if not tensors:
        return [float(number) for number in numbers]
    added = [torch.stack(group).reshape(len(group), -1).sum(dim=1, dtype=torch.float64) for group in alike.values()]
    order = [id(tensor) for group in alike.values() for tensor in group]
    values = dict(zip(order, torch.cat(added).tolist(), strict=True))
    return [values[id(number)] if isinstance(number, Tensor) else float(number) for number in numbers]
