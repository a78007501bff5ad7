"""Packing and spreading: nothing lost, nothing twice, within the budget, and always the same answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from learner.packing import Layout, PackItem, _ExactLoad, pack_rows, split_in_order, spread_over_ranks


def item(own: int, group: int, trajectory: int, segment: int = 0) -> PackItem:
    """A row of a group whose prompts have 3 tokens, more in later segments."""
    prefix_tokens = 3 + 20 * group + 5 * segment
    return PackItem(prefix_tokens + own, group, trajectory, (group, segment), prefix_tokens)


items = st.lists(
    st.builds(item, st.integers(0, 200), st.integers(0, 6), st.integers(0, 9), st.integers(0, 1)),
    min_size=1,
    max_size=40,
)
layouts = st.sampled_from(["padded", "shared_prefix"])


def padded_size(items_: list[PackItem], members: list[int]) -> int:
    return len(members) * max(items_[index].tokens for index in members)


def shared_size(items_: list[PackItem], members: list[int]) -> int:
    """Each distinct prompt once, and what stands behind it."""
    prompts = {items_[index].prefix: items_[index].prefix_tokens for index in members}
    return sum(prompts.values()) + sum(items_[index].tokens - items_[index].prefix_tokens for index in members)


def size_of(layout: Layout, items_: list[PackItem], members: list[int]) -> int:
    return (shared_size if layout == "shared_prefix" else padded_size)(items_, members)


@given(items, st.integers(1, 1000), st.booleans(), layouts)
def test_every_row_is_in_exactly_one_microbatch_within_the_budget(rows, budget, keep_groups, layout):
    packed = pack_rows(rows, budget, keep_groups, layout)
    assert sorted(index for members in packed for index in members) == list(range(len(rows)))
    assert all(len(members) == 1 or size_of(layout, rows, members) <= budget for members in packed)


@given(items, st.integers(1, 1000))
def test_with_shared_prefixes_a_group_is_cut_only_where_it_must_be(rows, budget):
    packed = pack_rows(rows, budget, layout="shared_prefix")
    place = {index: number for number, members in enumerate(packed) for index in members}
    for key in (lambda row: row.group, lambda row: (row.group, row.trajectory)):
        for whole in {key(row) for row in rows}:
            members = [index for index, row in enumerate(rows) if key(row) == whole]
            if shared_size(rows, members) <= budget:
                assert len({place[index] for index in members}) == 1


@given(st.integers(2, 30), st.integers(1, 50), st.integers(1, 100), st.integers(1, 8))
def test_a_group_that_does_not_fit_is_cut_into_as_few_parts_as_can_be(rows, own, prefix_tokens, at_once):
    group = [PackItem(prefix_tokens + own, 0, index, 0, prefix_tokens) for index in range(rows)]
    packed = pack_rows(group, prefix_tokens + at_once * own, layout="shared_prefix")
    assert len(packed) == -(-rows // at_once)


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


@given(items, st.integers(1, 5), layouts)
def test_every_row_is_on_exactly_one_rank_and_the_answer_is_always_the_same(rows, ranks, layout):
    spread = spread_over_ranks(rows, ranks, layout=layout)
    assert len(spread) == ranks
    assert sorted(index for rank in spread for index in rank) == list(range(len(rows)))
    assert spread == spread_over_ranks(list(rows), ranks, layout=layout)


@given(items, st.integers(2, 5))
def test_with_shared_prefixes_cutting_never_makes_the_heaviest_rank_heavier(rows, ranks):
    """A prompt costs once per rank that has rows of it, which is what a cut pays."""

    def heaviest(spread: list[list[int]]) -> int:
        return max(shared_size(rows, members) for members in spread)

    whole = spread_over_ranks(rows, ranks, 1e9, "shared_prefix")
    assert heaviest(spread_over_ranks(rows, ranks, layout="shared_prefix")) <= heaviest(whole)
    for group in {row.group for row in rows}:
        assert sum(any(rows[index].group == group for index in members) for members in whole) == 1


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


def test_a_shared_prompt_counts_once_when_ranks_are_weighed():
    """The group of eight is the cheapest where its prompt is computed once, and the dearest where it is not."""
    rows = [PackItem(100 + 5, 0, index, "a", 100) for index in range(8)]
    rows += [PackItem(10 + 200, group, 0, group, 10) for group in (1, 2, 3)]
    assert [0, 1, 2, 3, 4, 5, 6, 7] in spread_over_ranks(rows, 2, 1e9)
    assert sorted(len(rank) for rank in spread_over_ranks(rows, 2, 1e9, "shared_prefix")) == [2, 9]


def test_ranks_are_weighed_by_attention_where_it_counts():
    """By tokens one long row is worth ten short ones; its attention makes it as dear as nineteen."""
    rows = [PackItem(1000, 0, 0, "a", 10)]
    rows += [PackItem(100, group, 0, group, 10) for group in range(1, 31)]
    for layout in ("padded", "shared_prefix"):
        spread = [spread_over_ranks(rows, 2, layout=layout, keys_per_token=keys) for keys in (None, 450.0)]
        assert [[len(rank) for rank in ranks if 0 in rank] for ranks in spread] == [[11], [7]]


@given(items, layouts, st.integers(1, 1000))
def test_a_rows_cost_is_that_of_its_tokens_and_of_what_they_see(rows, layout, keys_per_token):
    shared = layout == "shared_prefix"
    load = _ExactLoad(rows, shared, keys_per_token)
    load.add(list(range(len(rows))))
    runs = [(0, row.prefix_tokens, row.prefix) for row in rows] if not shared else []
    runs += [(0, tokens, key) for key, tokens in {row.prefix: row.prefix_tokens for row in rows}.items() if shared]
    runs += [(row.prefix_tokens, row.tokens, None) for row in rows]
    seen = [place + 1 for first, end, _ in runs for place in range(first, end)]
    assert (load.tokens, load.pairs) == (len(seen), sum(seen))
    assert load.cost == load.tokens + load.pairs / keys_per_token


def test_one_group_with_a_shared_prompt_is_cut_rather_than_leaving_a_rank_idle():
    rows = [PackItem(10 + 100, 0, index, "a", 10) for index in range(4)]
    assert [len(rank) for rank in spread_over_ranks(rows, 2, layout="shared_prefix")] == [2, 2]


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
