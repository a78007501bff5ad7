"""Numbers under a mask: exact zeros outside, gradients inside, whatever stood there."""

from __future__ import annotations

import math

import pytest
import torch

from learner.objectives.masking import Mask

WHERE = torch.tensor([[True, False, True], [False, False, False], [True, True, True]])
OUTSIDE = [math.nan, math.inf, -math.inf, -0.0, 7.0]


def numbers(dtype, outside):
    values = torch.arange(1.0, 10.0, dtype=dtype).reshape(3, 3)
    return values.masked_fill(~WHERE, outside)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("outside", OUTSIDE)
def test_what_is_outside_becomes_zero_and_what_is_inside_stays_bit_by_bit(dtype, outside):
    values, expected = numbers(dtype, outside), torch.where(WHERE, numbers(dtype, 7.0), 0.0)
    mask = Mask(WHERE)
    assert torch.equal(mask.keep(values), expected)
    assert not torch.signbit(mask.keep(values)[~WHERE]).any()
    assert torch.equal(mask.row_sums(values), expected.sum(dim=1))
    assert torch.equal(mask.difference(values, torch.ones_like(values)), torch.where(WHERE, expected - 1, 0.0))
    assert torch.equal(mask.keep_(values), expected)
    assert torch.equal(values, expected)


@pytest.mark.parametrize("outside", OUTSIDE)
def test_gradients_end_at_the_mask(outside):
    values = numbers(torch.float64, outside).requires_grad_()
    mask = Mask(WHERE)
    weights = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
    (gradient,) = torch.autograd.grad((mask.row_sums(values) * weights).sum(), values)
    assert torch.equal(gradient, torch.where(WHERE, weights[:, None], 0.0).double())
    (gradient,) = torch.autograd.grad(mask.keep(values).square().sum(), values)
    assert torch.equal(gradient, torch.where(WHERE, 2 * numbers(torch.float64, 7.0), 0.0))


def test_one_number_per_row_is_counted_as_often_as_the_mask_says():
    per_row = torch.tensor([[2.0], [3.0], [5.0]], requires_grad=True)
    sums = Mask(WHERE).row_sums(per_row)
    assert sums.tolist() == [4.0, 0.0, 15.0]
    (gradient,) = torch.autograd.grad(sums.sum(), per_row)
    assert gradient.flatten().tolist() == [2.0, 0.0, 3.0]


def test_a_mask_counts_its_numbers():
    assert Mask(WHERE).counts.tolist() == [2, 0, 3]
    assert Mask(WHERE).total.item() == 5
    assert Mask(torch.zeros(0, 4, dtype=torch.bool)).total.item() == 0
