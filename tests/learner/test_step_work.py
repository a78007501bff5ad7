"""What an update is expected to compute, against the passes that the learner makes of the same rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.packing import Layout, pack_rows, spread_over_ranks
from learner.step_work import MOST_ROWS, mean_work, prompt_share, update_work
from learner.token_batch import ScoredRow, token_batch

LAYOUTS = st.sampled_from(["padded", "shared_prefix"])
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 12), st.integers(1, 3), st.integers(1, 120), LAYOUTS)
def test_the_expected_tokens_are_those_that_batches_of_these_rows_compute(
    prompts: list[int], size: int, completion: int, ranks: int, budget: int, layout: Layout
):
    rows = [  # the first token tells the prompts apart
        ScoredRow(np.array([group, *range(length - 1)]), np.arange(completion))
        for group, length in enumerate(prompts)
        for _ in range(size)
    ]
    items = [row.pack_item(number // size, number % size) for number, row in enumerate(rows)]
    batches = []
    for indices in spread_over_ranks(items, ranks, layout=layout):
        own = [rows[index] for index in indices]
        packed = pack_rows([items[index] for index in indices], budget, layout=layout)
        batches.append([token_batch([own[place] for place in members], layout=layout) for members in packed])
    computed = [batch.tokens.numel() for rank in batches for batch in rank]
    work = update_work(prompts, size, completion, ranks, budget, layout)
    assert work.tokens == sum(computed)
    assert work.microbatches == max(len(rank) for rank in batches)
    assert work.microbatch_tokens == pytest.approx(sum(computed) / len(computed))


def test_shared_prefixes_save_the_prompts_of_all_completions_but_one():
    shared = update_work([58] * 6, 8, 20, 1, 10**6, "shared_prefix")
    padded = update_work([58] * 6, 8, 20, 1, 10**6, "padded")
    assert padded.tokens == 6 * 8 * (58 + 19)
    assert shared.tokens == 6 * (58 + 8 * 19)
    assert (shared.microbatches, shared.microbatch_tokens) == (1, shared.tokens)
    assert prompt_share([58] * 6, 20) == pytest.approx(58 / 77)


def test_of_a_large_update_a_part_is_packed_and_the_rest_is_like_it():
    groups = 10 * MOST_ROWS // 8
    work = update_work([58] * groups, 8, 20, 4, 4096, "shared_prefix")
    assert work.tokens == pytest.approx(groups * (58 + 8 * 19))
    assert work.microbatches == pytest.approx(groups * (58 + 8 * 19) / 4096 / 4, rel=0.3)


def test_several_updates_have_a_mean():
    one, other = (update_work([length], 2, 5, 1, 100, "padded") for length in (10, 20))
    assert mean_work([one, other]).tokens == (one.tokens + other.tokens) / 2
    with pytest.raises(ValueError, match="no prompts"):
        update_work([], 2, 5, 1, 100, "padded")
