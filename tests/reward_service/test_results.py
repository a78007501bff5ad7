"""What a reward function may return."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_service.results import FLOAT32_MAX, CannotJudge, InvalidResult, match_results, read_result

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda children: (
        st.lists(children) | st.dictionaries(st.text() | st.sampled_from(["reward", "parts", "info"]), children)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.25), 0.25),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (Fraction(1, 2), 0.5),
    ],
)
def test_numbers_are_rewards(value: Any, reward: float) -> None:
    assert read_result(value).reward == reward


@pytest.mark.parametrize(
    "value",
    [
        "1.0",
        "",
        b"1",
        math.nan,
        math.inf,
        -math.inf,
        1e39,
        10**400,
        np.float64("nan"),
        np.array([1.0]),
        [1.0],
        (1.0,),
        1j,
        object(),
    ],
)
def test_what_is_not_a_finite_float32_number_is_invalid(value: Any) -> None:
    with pytest.raises(InvalidResult):
        read_result(value)
    with pytest.raises(InvalidResult):
        read_result({"reward": value})
    with pytest.raises(InvalidResult, match="part 'x'"):
        read_result({"reward": 1.0, "parts": {"x": value}})


@pytest.mark.parametrize("value", [None, {"reward": None}])
def test_none_means_cannot_be_judged(value: Any) -> None:
    with pytest.raises(CannotJudge):
        read_result(value)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"score": 1.0},
        {"reward": 1.0, "extra": 1},
        {"reward": 1.0, "parts": [1.0]},
        {"reward": 1.0, "parts": {1: 1.0}},
        {"reward": 1.0, "info": "text"},
        {"reward": 1.0, "info": {"x": math.nan}},
        {"reward": 1.0, "info": {"x": object()}},
        {"reward": 1.0, "info": {"x": "y" * 100_000}},
    ],
)
def test_a_dictionary_of_another_form_is_invalid(value: Any) -> None:
    with pytest.raises(InvalidResult):
        read_result(value)


def test_a_dictionary_carries_parts_and_info() -> None:
    judged = read_result({"reward": 1, "parts": {"style": 0.5}, "info": {"why": "short"}})
    assert (judged.reward, judged.parts, judged.info) == (1.0, {"style": 0.5}, '{"why": "short"}')


@given(anything)
def test_any_value_is_a_finite_reward_or_a_named_refusal(value: Any) -> None:
    try:
        judged = read_result(value)
    except (InvalidResult, CannotJudge):
        return
    assert all(
        math.isfinite(number) and abs(number) <= FLOAT32_MAX for number in (judged.reward, *judged.parts.values())
    )
    assert np.isfinite(np.float32(judged.reward))


def test_group_results_are_matched_by_id_whatever_their_order() -> None:
    assert match_results(["a", "b"], {"b": 2.0, "a": 1.0}) == {"a": 1.0, "b": 2.0}
    by_id = match_results(["a", "b"], [{"id": "b", "reward": 2.0}, {"id": "a", "reward": 1.0}])
    assert {key: entry["reward"] for key, entry in by_id.items()} == {"a": 1.0, "b": 2.0}
    assert match_results(["a", "b"], np.array([1.0, 2.0])) == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    "value",
    [
        [1.0],
        [1.0, 2.0, 3.0],
        {"a": 1.0},
        {"a": 1.0, "c": 2.0},
        [{"id": "a"}, {"id": "a"}],
        [{"id": "a"}, 1.0],
        "ab",
        2.0,
        None,
        np.array(2.0),
    ],
)
def test_group_results_that_do_not_fit_the_group_are_never_zipped(value: Any) -> None:
    with pytest.raises(InvalidResult):
        match_results(["a", "b"], value)


@given(st.lists(st.text(), unique=True, min_size=1), st.lists(st.floats(allow_nan=False), max_size=6))
def test_a_list_is_matched_only_at_the_groups_own_length(ids: list[str], values: list[float]) -> None:
    if len(values) == len(ids):
        assert list(match_results(ids, values).items()) == list(zip(ids, values, strict=True))
    else:
        with pytest.raises(InvalidResult):
            match_results(ids, values)
