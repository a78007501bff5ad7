"""Packing and spreading: nothing lost, nothing twice, within the budget, and always the same answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from learner.packing import PackItem, pack_rows, split_in_order, spread_over_ranks

items = st.lists(
    st.builds(PackItem, tokens=st.integers(1, 300), group=st.integers(0, 6), trajectory=st.integers(0, 9)),
    min_size=1,
    max_size=40,
)


def padded_size(items_: list[PackItem], members: list[int]) -> int:
    return len(members) * max(items_[index].tokens for index in members)


@given(items, st.integers(1, 1000), st.booleans())
def test_every_row_is_in_exactly_one_microbatch_within_the_budget(rows, budget, keep_groups):
    packed = pack_rows(rows, budget, keep_groups)
    assert sorted(index for members in packed for index in members) == list(range(len(rows)))
    assert all(len(members) == 1 or padded_size(rows, members) <= budget for members in packed)


@given(items, st.integers(1, 1000), st.booleans())
def test_a_group_or_trajectory_that_fits_the_budget_is_not_cut(rows, budget, keep_groups):
    def unit(row: PackItem) -> object:
        return row.group if keep_groups else (row.group, row.trajectory)

    packed = pack_rows(rows, budget, keep_groups)
    place = {index: number for number, members in enumerate(packed) for index in members}
    for whole in {unit(row) for row in rows}:
        members = [index for index, row in enumerate(rows) if unit(row) == whole]
        if padded_size(rows, members) <= budget:
            assert len({place[index] for index in members}) == 1


@given(items, st.integers(1, 5))
def test_every_row_is_on_exactly_one_rank_and_the_answer_is_always_the_same(rows, ranks):
    spread = spread_over_ranks(rows, ranks)
    assert len(spread) == ranks
    assert sorted(index for rank in spread for index in rank) == list(range(len(rows)))
    assert spread == spread_over_ranks(list(rows), ranks)


@given(items, st.integers(2, 5))
def test_no_rank_has_more_than_its_share_and_one_trajectory(rows, ranks):
    loads = [sum(rows[index].tokens for index in rank) for rank in spread_over_ranks(rows, ranks)]
    share = sum(loads) / ranks
    longest: dict[object, int] = {}
    for row in rows:
        longest[row.group, row.trajectory] = longest.get((row.group, row.trajectory), 0) + row.tokens
    assert max(loads) <= max(share * 1.1, share + max(longest.values()))


def test_rows_of_similar_length_share_a_microbatch():
    rows = [PackItem(tokens, 0, index) for index, tokens in enumerate((100, 10, 98, 12))]
    assert pack_rows(rows, 200) == [[0, 2], [1, 3]]


def test_groups_stay_together_on_a_rank_where_that_balances():
    rows = [PackItem(50, group, index) for index, group in enumerate((1, 1, 2, 2))]
    assert sorted(spread_over_ranks(rows, 2)) == [[0, 1], [2, 3]]


def test_one_large_group_is_cut_rather_than_leaving_a_rank_idle():
    rows = [PackItem(50, 1, index) for index in range(8)]
    assert [len(rank) for rank in spread_over_ranks(rows, 2)] == [4, 4]


@given(st.lists(st.integers(0, 30), min_size=1), st.integers(1, 8))
def test_minibatches_are_runs_of_ascending_ids_of_nearly_equal_size(ids, parts):
    cut = split_in_order(ids, parts)
    assert [group for part in cut for group in part] == sorted(set(ids))
    sizes = [len(part) for part in cut]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
