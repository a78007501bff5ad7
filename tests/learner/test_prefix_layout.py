"""Packed rows and their tiles: every token once, every query once, exactly the keys that a plain mask shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner import prefix_layout
from learner.prefix_layout import KEY_MULTIPLE, PrefixLayout, SharedRow, lay_out, tiles_of

prompts = st.dictionaries(st.integers(0, 5), st.integers(1, 40), min_size=1, max_size=6)


@st.composite
def shared_rows(draw: st.DrawFn) -> list[SharedRow]:
    lengths = draw(prompts)
    chosen = draw(st.lists(st.tuples(st.sampled_from(sorted(lengths)), st.integers(0, 30)), min_size=1, max_size=12))
    return [SharedRow(prefix, lengths[prefix], own) for prefix, own in chosen]


windows = st.one_of(st.none(), st.integers(1, 80))


def row_places(layout: PrefixLayout, rows: list[SharedRow], index: int) -> list[int]:
    """Where the tokens of a row stand, in order."""
    prompt, own = layout.places[index]
    return [*range(prompt, prompt + rows[index].prefix_tokens), *range(own, own + rows[index].own_tokens)]


@given(shared_rows())
def test_each_prompt_stands_once_and_every_completion_has_its_own_place(rows):
    layout = lay_out(rows)
    prompts = {row.prefix: row.prefix_tokens for row in rows}
    assert layout.tokens == sum(prompts.values()) + sum(row.own_tokens for row in rows)
    covered = sorted(place for run in layout.runs for place in range(run.start, run.start + run.length))
    assert covered == list(range(layout.tokens))
    starts = {row.prefix: layout.places[index][0] for index, row in enumerate(rows)}
    assert len(set(starts.values())) == len(prompts)
    assert all(layout.places[index][0] == starts[row.prefix] for index, row in enumerate(rows))


@given(shared_rows(), windows)
def test_a_row_sees_what_it_would_see_by_itself(rows, window):
    layout = lay_out(rows)
    visible, positions = layout.visible(window), layout.positions()
    for index in range(len(rows)):
        places = row_places(layout, rows, index)
        assert positions[places].tolist() == list(range(len(places)))
        alone = np.tri(len(places), dtype=bool)
        if window is not None:
            alone &= ~np.tri(len(places), k=-window, dtype=bool)
        assert (visible[np.ix_(places, places)] == alone).all()
        for place in places:
            assert set(np.flatnonzero(visible[place])) <= set(places)


@given(shared_rows(), windows, st.integers(1, 24), st.integers(1, 4000))
def test_tiles_show_every_query_exactly_the_visible_keys(rows, window, block, scores):
    kept = prefix_layout.QUERY_BLOCK_TOKENS, prefix_layout.TILE_SCORES
    prefix_layout.QUERY_BLOCK_TOKENS, prefix_layout.TILE_SCORES = block, scores
    try:
        layout = lay_out(rows)
        seen = np.zeros((layout.tokens, layout.tokens), int)
        asked = np.zeros(layout.tokens, int)
        for tile in tiles_of(layout, window):
            assert tile.keys % KEY_MULTIPLE == 0
            assert len(tile.runs) == 1 or len(tile.runs) * (tile.last - tile.first) * tile.keys <= scores
            queries = tile.query_places()
            keys = np.concatenate([tile.prefix_places(), tile.own_key_places()], axis=1)
            assert keys.shape == (len(tile.runs), tile.keys)
            for run in range(len(tile.runs)):
                for place, row in zip(queries[run], tile.seen(), strict=True):
                    assert row.any()
                    if place < 0:
                        continue
                    asked[place] += 1
                    shown = keys[run][row]
                    assert (shown >= 0).all()
                    np.add.at(seen[place], shown, 1)
        assert (asked == 1).all()
        assert (seen == layout.visible(window)).all()
    finally:
        prefix_layout.QUERY_BLOCK_TOKENS, prefix_layout.TILE_SCORES = kept


@given(shared_rows())
def test_a_token_is_predicted_by_the_one_before_it(rows):
    layout = lay_out(rows)
    for index, row in enumerate(rows):
        places = row_places(layout, rows, index)
        columns = np.arange(row.own_tokens + 1)
        expected = places[row.prefix_tokens - 1 :]
        assert layout.predictors(index, row.prefix_tokens, columns).tolist() == expected


def test_completions_of_equal_groups_share_one_tile_with_the_prompts_in_another():
    layout = lay_out([SharedRow(group, 58, 19) for group in range(4) for _ in range(8)])
    tiles = tiles_of(layout)
    assert [len(tile.runs) for tile in tiles] == [4, 32]
    assert [tile.keys for tile in tiles] == [64, 96]


@pytest.mark.parametrize("length", [1, 2, 300, 1000])
def test_the_share_of_padded_queries_is_bounded(length):
    generator = np.random.default_rng(length)
    rows = [SharedRow(0, 50, int(own)) for own in generator.integers(1, length + 1, 64)]
    batches = prefix_layout._similar(lay_out(rows).runs)
    assert sum(len(batch) for batch in batches) == 65
    for batch in batches:
        lengths = [run.length for run in batch]
        assert sum(lengths) >= (1 - prefix_layout.PADDED_SHARE) * len(batch) * max(lengths)
