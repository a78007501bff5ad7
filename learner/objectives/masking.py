"""A mask over [rows, T] numbers, applied in few passes over memory.

Outside the mask numbers become exactly 0, whatever stood there, NaN included. On CPUs a select by booleans costs ten
times a multiplication, so the mask is also kept as bits, and numbers are masked by a bitwise and. Differentiable.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers that hold a number of as many bytes."""


class Mask:
    """Which of [rows, T] numbers count. Immutable."""

    def __init__(self, where: Tensor) -> None:
        self.where = where
        """[rows, T] bool."""
        self._bits: dict[torch.dtype, Tensor] = {}

    def keep(self, values: Tensor) -> Tensor:
        """The numbers under the mask, 0 elsewhere; ``values`` may be narrower than the mask."""
        kept: Tensor = _Keep.apply(values.expand(self.where.shape), self)
        return kept

    def difference(self, left: Tensor, right: Tensor) -> Tensor:
        """``keep(left - right)`` in one pass less; ``right`` is a constant."""
        kept: Tensor = _KeptDifference.apply(left, right, self)
        return kept

    def row_sums(self, values: Tensor) -> Tensor:
        """[rows] ``keep(values).sum(dim=1)``."""
        sums: Tensor = _RowSums.apply(values.expand(self.where.shape), self)
        return sums

    @cached_property
    def counts(self) -> Tensor:
        """[rows] int32, numbers under the mask."""
        return self.bits(torch.float32).sum(dim=1, dtype=torch.int32).neg_()

    @cached_property
    def total(self) -> Tensor:
        """Scalar int64, of them all."""
        return self.counts.sum()

    def bits(self, dtype: torch.dtype) -> Tensor:
        """[rows, T] integers as wide as ``dtype``: all bits set under the mask, none elsewhere."""
        integer = BITS[dtype.itemsize]
        if integer not in self._bits:
            self._bits[integer] = self.where.view(torch.int8).neg().to(integer)
        return self._bits[integer]

    def keep_(self, values: Tensor) -> Tensor:
        """``keep`` in place, for numbers that nobody differentiates through or needs otherwise."""
        values.view(BITS[values.dtype.itemsize]).bitwise_and_(self.bits(values.dtype))
        return values

    def _kept(self, values: Tensor) -> Tensor:
        integers = values.view(BITS[values.dtype.itemsize])
        return torch.bitwise_and(integers, self.bits(values.dtype)).view(values.dtype)


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask
        return mask._kept(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.mask._kept(gradient), None


class _KeptDifference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask
        return mask.keep_(left - right)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.mask._kept(gradient), None, None


class _RowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask
        return mask._kept(values).sum(dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.mask._kept(gradient[:, None].expand(ctx.mask.where.shape)), None
