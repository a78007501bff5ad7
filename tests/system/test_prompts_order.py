"""The order of prompts: exact quotas and permutations, both pure."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from system.prompts.permutation import permuted_index
from system.prompts.quotas import SourceQuotas

WEIGHTS = st.lists(st.sampled_from([0.01, 0.1, 0.25, 0.3, 0.7, 1.0, 2.0, 3.0, 5.0]), min_size=1, max_size=7)


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, positions=st.integers(1, 500))
def test_after_every_position_each_source_has_its_share_rounded_down_or_up(weights, positions):
    quotas = SourceQuotas(weights)
    counts: Counter[int] = Counter()
    for position in range(positions):
        source, ordinal = quotas.place(position)
        assert ordinal == counts[source]
        counts[source] += 1
        for index, share in enumerate(quotas.shares):
            exact = share * (position + 1)
            assert floor(exact) <= counts[index] <= ceil(exact)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.integers(1, 6), min_size=1, max_size=5), unit=st.sampled_from([0.1, 1.0, 2.5]), data=st.data())
def test_whole_shares_are_exact_in_every_window_wherever_it_begins(parts, unit, data):
    groups_per_step = sum(parts)
    quotas = SourceQuotas([float(Fraction(str(unit)) * part) for part in parts])
    begin = data.draw(st.integers(0, 1000))
    window = Counter(quotas.place(position)[0] for position in range(begin, begin + groups_per_step))
    assert [window[index] for index in range(len(parts))] == parts


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, groups_per_step=st.integers(1, 16))
def test_uneven_shares_carry_their_debt_from_step_to_step(weights, groups_per_step):
    quotas = SourceQuotas(weights)
    total: Counter[int] = Counter()
    for step in range(30):
        window = Counter(
            quotas.place(position)[0] for position in range(step * groups_per_step, (step + 1) * groups_per_step)
        )
        total.update(window)
        for index, share in enumerate(quotas.shares):
            assert abs(window[index] - share * groups_per_step) < 2
            assert abs(total[index] - share * (step + 1) * groups_per_step) < 1


def test_the_first_step_of_two_thirds_and_one_third_is_the_largest_remainder():
    quotas = SourceQuotas([2.0, 1.0])
    assert Counter(quotas.place(position)[0] for position in range(4)) == {0: 3, 1: 1}


@settings(max_examples=30, deadline=None)
@given(weights=WEIGHTS, positions=st.lists(st.integers(0, 5000), min_size=1, max_size=8))
def test_a_place_does_not_depend_on_what_was_asked_before(weights, positions):
    asked_in_turn = SourceQuotas(weights)
    in_turn = [asked_in_turn.place(position) for position in positions]
    assert in_turn == [SourceQuotas(weights).place(position) for position in positions]


def test_positions_far_beyond_the_period_need_no_more_memory():
    quotas = SourceQuotas([3.0, 1.0])
    source, ordinal = quotas.place(4 * 10**12 + 1)
    assert ordinal == (3 if source == 0 else 1) * 10**12 + quotas.place(1)[1]
    assert quotas.place(1)[0] == source


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [-1.0], [float("inf")], [float("nan")]])
def test_weights_that_are_no_shares_are_refused(weights):
    with pytest.raises(ValueError, match="weights must be positive"):
        SourceQuotas(weights)


@settings(max_examples=60, deadline=None)
@given(key=st.text(max_size=8), size=st.integers(1, 300))
def test_a_permutation_visits_every_index_once(key, size):
    assert sorted(permuted_index(key, index, size) for index in range(size)) == list(range(size))


def test_permutations_of_different_keys_differ():
    orders = {tuple(permuted_index(f"epoch {epoch}", index, 20) for index in range(20)) for epoch in range(50)}
    assert len(orders) == 50


def test_no_index_is_preferred_at_the_first_place():
    size, draws = 5, 2000
    first = Counter(permuted_index(f"{draw}", 0, size) for draw in range(draws))
    chi_squared = sum((first[index] - draws / size) ** 2 / (draws / size) for index in range(size))
    assert chi_squared < 23.5, "four degrees of freedom: exceeded once in ten thousand by chance"
