"""Advantages and denominators of a step."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import ESTIMATORS, Scale, StepRows, count_groups, step_advantages, step_denominators
from system.core.records import Row
from tests.learner.objective_cases import VECTORS, random_case, slow_advantages

PER_GROUP = ("group_zscore", "group_mean", "leave_one_out")
REWARD = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e6, 1e6, allow_nan=False, width=32))


def one_group(rewards, ddof=1, eps=1e-6, **options):
    size = len(rewards)
    options = {"scale": Scale(ddof, eps)} | options
    return step_advantages(StepRows(rewards, [5] * size, list(range(size)), [1] * size), **options)


@pytest.mark.parametrize("vector", ["TG-adv-10", "TG-adv-86", "TG-adv-eq", "TG-adv-00"])
@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("ddof0_eps0", {"ddof": 0, "eps": 0.0}),
        ("ddof0_eps1e_6", {"ddof": 0}),
        ("ddof1_eps1e_6_verl", {}),
        ("ddof1_eps1e_8_note", {"eps": 1e-8}),
        ("ddof1_eps1e_4_TRL", {"eps": 1e-4}),
        ("centred_only_DrGRPO", {"estimator": "group_mean"}),
    ],
)
def test_pairs_have_the_published_advantages(vector, key, options):
    case = VECTORS[vector]
    assert one_group(case["inputs"]["rewards"], **options) == pytest.approx(case["expected"][key], abs=1e-11)


@pytest.mark.parametrize(
    ("vector", "options"),
    [
        ("GR-B", {}),
        ("DR-B", {"estimator": "group_mean"}),
        ("RL-B", {"estimator": "leave_one_out"}),
    ],
)
def test_a_group_of_four_has_the_published_advantages(vector, options):
    rewards = VECTORS["FIX_B"]["inputs"]["rewards"]
    assert one_group(rewards, **options) == pytest.approx(VECTORS[vector]["inputs"]["A"], abs=1e-9)


@pytest.mark.parametrize(("vector", "unbiased"), [("RP-AB-verl", True), ("RP-AB-openrlhf", False)])
def test_whitening_is_token_weighted_over_the_whole_step(vector, unbiased):
    case = VECTORS[vector]
    rewards = [reward for name in case["inputs"]["fixtures"] for reward in VECTORS[name]["inputs"]["rewards"]]
    rows = StepRows(rewards, [0] * 4 + [1] * 2, [0, 1, 2, 3, 0, 1], case["inputs"]["lens"])
    advantages = step_advantages(rows, estimator="batch_whitened", unbiased_variance=unbiased)
    assert advantages == pytest.approx(case["expected"]["A"], abs=1e-10)


@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
@given(value=REWARD, size=st.integers(2, 16))
def test_equal_rewards_give_exactly_zero(estimator, value, size):
    assert one_group([value] * size, estimator=estimator, eps=0.0) == [0.0] * size


def test_rewards_equal_up_to_float32_residue_give_exactly_zero():
    residue = float(np.float32(0.1))
    assert one_group([0.1, residue, 0.1], eps=0.0) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("ddof", [0, 1])
@given(rewards=st.lists(REWARD, min_size=2, max_size=32))
def test_a_zscore_never_exceeds_the_root_of_the_group_size(ddof, rewards):
    bound = math.sqrt(len(rewards)) * (1 + 1e-9)
    assert all(abs(value) <= bound for value in one_group(rewards, ddof=ddof, eps=0.0))


@pytest.mark.parametrize("zero_variance", ["keep", "drop", "refill", "as_is"])
@pytest.mark.parametrize("estimator", PER_GROUP)
@pytest.mark.parametrize("seed", range(8))
def test_advantages_equal_a_slow_loop_over_definitions(estimator, zero_variance, seed):
    case = random_case(seed)
    rows = StepRows(case.rewards, case.group_ids, case.trajectory_ids, [len(row) for row in case.logprobs])
    expected = slow_advantages(
        case, {"advantage": estimator, "ddof": seed % 2, "eps": 1e-6, "zero_variance": zero_variance}
    )
    found = step_advantages(rows, estimator=estimator, scale=Scale(ddof=seed % 2), zero_variance=zero_variance)
    assert [value is None for value in found] == [value is None for value in expected]
    assert [value for value in found if value is not None] == pytest.approx(
        [value for value in expected if value is not None], abs=1e-12
    )


@given(seed=st.integers(0, 10_000), estimator=st.sampled_from(sorted(ESTIMATORS)))
@settings(max_examples=40)
def test_the_order_of_rows_changes_nothing(seed, estimator):
    case = random_case(seed)
    order = list(range(len(case.rewards)))
    random.Random(seed).shuffle(order)
    tokens = [sum(mask) for mask in case.mask]
    rows = StepRows(case.rewards, case.group_ids, case.trajectory_ids, tokens)
    shuffled = rows.select(order)
    straight = step_advantages(rows, estimator=estimator)
    for value, row in zip(step_advantages(shuffled, estimator=estimator), order, strict=True):
        assert value == (None if straight[row] is None else pytest.approx(straight[row], abs=1e-12))


def test_an_equal_group_is_whitened_to_zero_unless_taken_as_is():
    rows = StepRows([1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1], [0, 1, 0, 1], [1, 3, 2, 2])
    kept = step_advantages(rows, estimator="batch_whitened")
    as_is = step_advantages(rows, estimator="batch_whitened", zero_variance="as_is")
    assert kept[2:] == [0.0, 0.0]
    assert kept[:2] == as_is[:2]
    assert as_is[2] == as_is[3] != 0.0


def test_baselines_count_trajectories_and_not_their_rows():
    rows = StepRows([1.0, 1.0, 1.0, 0.0], [3, 3, 3, 3], [0, 0, 0, 1], [1, 2, 3, 4])
    assert step_advantages(rows, estimator="group_mean") == [0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize("unscored", [None, math.nan, math.inf])
def test_a_reward_that_is_no_number_leaves_the_baseline(unscored):
    assert one_group([1.0, unscored, 0.0], estimator="group_mean") == [0.5, None, -0.5]


def test_a_group_with_fewer_than_two_scores_takes_no_part():
    assert one_group([1.0, None]) == [None, None]
    assert one_group([1.0]) == [None]


def test_a_kl_in_the_reward_comes_off_before_the_baseline():
    rows = StepRows([1.0, 0.0, 0.0], [0, 0, 0], [0, 1, 1], [1, 1, 1], kl=[2.0, -0.5, -0.5])
    shaped = step_advantages(rows, estimator="group_mean", kl_coefficient=0.1)
    assert shaped == pytest.approx([0.35, -0.35, -0.35])


def test_signal_is_judged_on_the_task_reward_and_not_on_the_kl():
    rows = StepRows([1.0, 1.0], [0, 0], [0, 1], [1, 1], kl=[2.0, -1.0])
    arguments = {"estimator": "group_mean", "kl_coefficient": 0.1}
    assert step_advantages(rows, zero_variance="keep", **arguments) == [0.0, 0.0]
    assert step_advantages(rows, zero_variance="drop", **arguments) == [None, None]
    assert step_advantages(rows, zero_variance="as_is", **arguments) == pytest.approx([-0.15, 0.15])


def test_a_kl_coefficient_without_kl_terms_is_refused():
    with pytest.raises(ValueError, match=r"rows\.kl"):
        one_group([1.0, 0.0], kl_coefficient=0.1)


def test_two_rewards_for_one_trajectory_are_refused():
    with pytest.raises(ValueError, match="trajectory 1 has two rewards"):
        step_advantages(StepRows([1.0, 0.0], [0, 0], [1, 1], [1, 1]))


def test_denominators_count_only_rows_that_take_part_and_have_trained_tokens():
    rows = StepRows([1.0, 0.0, 0.0, None, 1.0], [0, 0, 0, 0, 1], [0, 1, 1, 2, 0], [3, 2, 0, 5, 7])
    counts = step_denominators(rows, step_advantages(rows))
    assert (counts.tokens, counts.completions, counts.trajectories, counts.groups) == (5, 2, 2, 1)


@pytest.mark.parametrize(("zero_variance", "groups"), [("keep", 2), ("as_is", 2), ("drop", 1), ("refill", 1)])
def test_an_equal_group_stays_in_the_denominator_as_the_recipe_says(zero_variance, groups):
    rows = StepRows([1.0, 0.0, 0.5, 0.5], [0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 1, 1])
    counts = step_denominators(rows, step_advantages(rows, zero_variance=zero_variance))
    assert (counts.groups, counts.tokens) == (groups, 2 * groups)


def test_groups_are_counted_by_what_became_of_them():
    rows = StepRows([1.0, 0.0, 0.5, 0.5, 1.0, None], [0, 0, 1, 1, 2, 2], [0, 1] * 3, [1] * 6)
    counts = count_groups(rows)
    assert (counts.groups, counts.zero_signal, counts.too_few_scored, counts.null_trajectories) == (3, 1, 1, 1)


def test_recorded_rows_give_their_rewards_ids_and_trained_tokens():
    row = Row(
        group_id=4, trajectory_id=2, prompt_id="p", source="s", prompt_tokens=[1], completion_tokens=[5, 6, 7],
        rollout_logprobs=[-1.0, -1.0, -1.0], versions=[0, 0, 0], finish_reason="stop", seed=1, worker="w0",
        completion_text="", loss_mask=[True, False, True], reward=0.5,
    )  # fmt: skip
    rows = StepRows.from_rows([row])
    assert (rows.rewards, rows.group_ids, rows.trajectory_ids, rows.token_counts) == ([0.5], [4], [2], [2])
