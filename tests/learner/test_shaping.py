"""Rewards before the baseline, soft advantages, and which groups say enough."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import ESTIMATORS, Scale, StepRows, count_groups, step_advantages
from learner.objectives import build_objective
from learner.shaping import SoftOverlong, confident_margin
from system.core.errors import ConfigError
from tests.learner.objective_cases import VECTORS, random_case


def pair(difference, **options):
    rows = StepRows([0.5 + difference, 0.5], [0, 0], [0, 1], [1, 1])
    return build_objective("two_grpo", **options).prepare(rows).advantages


@pytest.mark.parametrize("vector", ["SF-0.02", "SF-0.2", "SF-1"])
def test_pairs_have_the_published_soft_advantages(vector):
    given_numbers, expected = VECTORS[vector]["inputs"], VECTORS[vector]["expected"]
    temperature, difference = given_numbers["T"], given_numbers["D"]
    plain = {"ddof": 0, "eps": 0.0}
    found = {
        "hard": pair(difference, **plain),
        "bt_tanh": pair(difference, advantage="soft_margin", reward_temperature=temperature),
        "shrunk_std": pair(difference, reward_std_floor=given_numbers["sigma0"], **plain),
        "probit_erf": pair(difference, advantage="probit", reward_noise=given_numbers["s_noise"]),
        "drgrpo": pair(difference, advantage="group_mean"),
    }
    for name, (first, second) in found.items():
        assert (first, second) == pytest.approx((expected[name], -expected[name]), abs=1e-11)
    margin = {"margin": given_numbers["delta"]}
    confidence = {"margin_confidence": given_numbers["kappa"], "reward_temperature": temperature}
    assert (pair(difference, **margin)[0] != 0) == expected["margin_pass"]
    assert (pair(difference, **confidence)[0] != 0) == expected["conf_pass"]


@given(difference=st.floats(1e-3, 5.0), temperature=st.floats(0.05, 5.0))
@settings(deadline=None)
def test_a_soft_margin_is_the_expected_sign_of_a_bradley_terry_preference(difference, temperature):
    first, _ = pair(difference, advantage="soft_margin", reward_temperature=temperature)
    preference = 1 / (1 + math.exp(-difference / temperature))
    assert first == pytest.approx(2 * preference - 1, abs=1e-9)


@given(confidence=st.floats(0.01, 0.95), temperature=st.floats(0.05, 5.0))
@settings(deadline=None)
def test_a_confident_margin_is_where_the_preference_is_that_sure(confidence, temperature):
    margin = confident_margin(confidence, temperature)
    assert 2 / (1 + math.exp(-margin / temperature)) - 1 == pytest.approx(confidence)


@pytest.mark.parametrize("estimator", ["soft_margin", "probit", "group_zscore"])
@given(rewards=st.lists(st.floats(-3, 3), min_size=3, max_size=9), scale=st.floats(0.1, 2.0))
@settings(deadline=None)
def test_soft_advantages_keep_the_order_and_stay_below_hard_ones(estimator, rewards, scale):
    scales = Scale(ddof=0, eps=0.0, std_floor=scale, temperature=scale, noise=scale)
    if max(rewards) - min(rewards) < 1e-3:
        return
    values = ESTIMATORS[estimator](np.array(rewards), scales)
    order = np.argsort(rewards, kind="stable")
    assert (np.diff(values[order]) >= -1e-12).all()
    assert (np.abs(values) <= math.sqrt(len(rewards)) + 1e-9).all()


def test_the_overlong_penalty_is_the_published_one():
    overlong = SoftOverlong(max_tokens=20480, cache_tokens=4096)
    expected = VECTORS["OL-1"]["expected"]["R"]
    assert [overlong.penalty(length) for length in VECTORS["OL-1"]["inputs"]["len"]] == pytest.approx(expected)


@pytest.mark.parametrize("cache", [0, 11])
def test_a_penalty_that_starts_before_the_first_token_is_refused(cache):
    with pytest.raises(ConfigError, match=r"must be in 1\.\.10"):
        SoftOverlong(max_tokens=10, cache_tokens=cache)


def test_the_penalty_counts_generated_tokens_of_the_whole_trajectory_and_not_the_mask():
    options = {"advantage": "group_mean", "overlong_max_tokens": 10, "overlong_cache_tokens": 4}
    rows = StepRows([1.0, 1.0, 0.0], [0, 0, 0], [0, 0, 1], [1, 1, 2], lengths=[4, 4, 2])
    plan = build_objective("grpo", **options).prepare(rows)
    assert list(plan.advantages) == pytest.approx([0.25, 0.25, -0.25])
    assert plan.sums.means()["overlong_penalty_mean"] == -0.25


def test_which_groups_carry_signal_is_judged_before_the_penalty():
    rows = StepRows([1.0, 1.0], [0, 0], [0, 1], [2, 2], lengths=[10, 2])
    options = {"advantage": "group_mean", "overlong_max_tokens": 10, "overlong_cache_tokens": 4}
    assert build_objective("grpo", **options).prepare(rows).advantages == (0.0, 0.0)
    assert build_objective("grpo", zero_variance="drop", **options).prepare(rows).advantages == (None, None)
    as_is = build_objective("grpo", zero_variance="as_is", **options).prepare(rows).advantages
    assert as_is == pytest.approx((-0.5, 0.5))


def test_lists_know_their_lengths_whatever_is_masked():
    case = random_case(4)
    assert list(case.batch().step_rows().lengths) == [len(row) for row in case.logprobs]


def test_a_margin_is_reported_with_the_share_of_groups_it_keeps():
    rows = StepRows([1.0, 0.0, 0.5, 0.45, 0.2, 0.2, 1.0, None], [0, 0, 1, 1, 2, 2, 3, 3], [0, 1] * 4, [1] * 8)
    plan = build_objective("grpo", margin=0.2).prepare(rows)
    assert plan.advantages[2:6] == (0.0, 0.0, 0.0, 0.0)
    assert plan.sums.means()["margin_kept_share"] == pytest.approx(1 / 3)
    assert plan.sums.means()["zero_signal_share"] == pytest.approx(1 / 4)
    counts = count_groups(rows, 0.2)
    assert (counts.zero_signal, counts.below_margin, counts.too_few_scored) == (1, 1, 1)


def test_a_difference_of_just_the_margin_is_kept_though_float32_leaves_a_residue():
    rows = StepRows([float(np.float32(0.3)), float(np.float32(0.1))], [0, 0], [0, 1], [1, 1])
    assert step_advantages(rows, estimator="group_mean", margin=0.2)[0] == pytest.approx(0.1)


def test_leave_one_out_is_the_u_statistic_and_the_group_mean_falls_short_of_it():
    scores, expected = np.array(VECTORS["US-1"]["inputs"]["score"]), VECTORS["US-1"]["expected"]
    rewards = np.array(VECTORS["US-1"]["inputs"]["Z"])
    gradients = {name: float((ESTIMATORS[name](rewards, Scale()) * scores).mean()) for name in ESTIMATORS}
    pairs = [(i, j) for i in range(3) for j in range(i)]
    u_statistic = sum((scores[i] - scores[j]) * (rewards[i] - rewards[j]) / 2 for i, j in pairs) / len(pairs)
    assert gradients["leave_one_out"] == pytest.approx(u_statistic) == pytest.approx(expected["U"])
    assert gradients["group_mean"] == pytest.approx(expected["group_mean_baseline"])


def test_the_error_of_leave_one_out_over_group_sizes_is_the_published_one():
    """Exactly, over all outcomes of the Bernoulli bandit of US-2."""
    given_numbers, expected = VECTORS["US-2"]["inputs"], VECTORS["US-2"]["expected"]
    errors = {}
    for size in map(int, expected["MSE"]):
        means, squares = [], []
        for p in given_numbers["p"]:
            first = second = 0.0
            for right in range(size + 1):
                chance = math.comb(size, right) * p**right * (1 - p) ** (size - right)
                rewards = np.array([1.0] * right + [0.0] * (size - right))
                estimate = float((ESTIMATORS["leave_one_out"](rewards, Scale()) * (rewards - p)).mean())
                first, second = first + chance * estimate, second + chance * estimate**2
            means.append(first)
            squares.append(second)
        variance = np.mean(squares) - np.mean(means) ** 2
        errors[str(size)] = variance / (given_numbers["N"] / size)
    assert errors == pytest.approx(expected["MSE"], rel=1e-9)
    assert min(errors, key=errors.get) == str(expected["best"])
