"""Win rates within a group: published figures, both orders, and what a judge may answer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reward_service.win_rate import judged_win_rates
from tests.reward_service.conftest import request_of, score_once

PUBLISHED = {
    vector["id"]: vector for vector in json.loads((Path(__file__).parents[1] / "learner" / "vectors.json").read_text())
}
SCORES = st.lists(st.floats(-5, 5), min_size=2, max_size=9)


def soft(temperature: float) -> Any:
    return lambda first, second: 1 / (1 + math.exp((second - first) / temperature))


def hard(first: float, second: float) -> float | None:
    return None if first == second else float(first > second)


def test_win_rates_of_scores_are_the_published_ones() -> None:
    given_scores, expected = PUBLISHED["PG-1"]["inputs"], PUBLISHED["PG-1"]["expected"]
    rates = judged_win_rates(given_scores["scores"], soft(given_scores["T"]))
    assert rates == pytest.approx(expected["soft_win_rate"], abs=1e-11)
    assert [rate - sum(rates) / 4 for rate in rates] == pytest.approx(expected["soft_centred"], abs=1e-11)
    assert judged_win_rates(given_scores["scores"], hard) == pytest.approx(expected["hard_win_rate"], abs=1e-11)


def test_of_a_pair_only_the_winner_is_left() -> None:
    assert judged_win_rates([0.8, 0.1], hard) == PUBLISHED["PG-G2"]["inputs"]["win_rate"] == [1, 0]


@given(scores=SCORES, bias=st.floats(-0.2, 0.2))
@settings(deadline=None)
def test_a_liking_for_one_place_cancels(scores: list[float], bias: float) -> None:
    fair = lambda first, second: 0.25 + 0.5 * soft(1.0)(first, second)  # noqa: E731
    biased = lambda first, second: fair(first, second) + bias  # noqa: E731
    assert judged_win_rates(scores, biased) == pytest.approx(judged_win_rates(scores, fair))


@given(scores=SCORES)
@settings(deadline=None)
def test_win_rates_of_a_group_average_to_one_half(scores: list[float]) -> None:
    rates = judged_win_rates(scores, hard)
    assert sum(rates) / len(rates) == pytest.approx(0.5)


def test_what_cannot_be_told_is_half_a_win_for_each_and_a_lone_completion_is_undecided() -> None:
    assert judged_win_rates([3.0, 3.0, 3.0], hard) == [0.5, 0.5, 0.5]
    assert judged_win_rates([3.0], hard) == [0.5]


def test_an_answer_that_is_no_probability_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the judge said 2\.0 of completions 0 and 1"):
        judged_win_rates([1.0, 0.0], lambda first, second: 2.0)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_judge_in_a_reward_file_rewards_the_whole_group(reward_file: Any, kind: str) -> None:
    reward = reward_file(
        f"""
        from reward_service.win_rate import pairwise_win_rate

        {kind} longer(first, second, *, sure=1.0):
            if len(first.completion) == len(second.completion):
                return None
            return sure if len(first.completion) > len(second.completion) else 1 - sure

        reward = pairwise_win_rate(longer)
        """,
        options={"sure": 0.9},
    )
    scores = score_once([reward], request_of(["a", "aaa", "aa", "aa"]))
    assert [scores[f"c{index}"].reward for index in range(4)] == pytest.approx([0.1, 0.9, 0.5, 0.5])
