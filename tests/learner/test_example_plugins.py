"""The plug-ins of ``examples/plugins``: their papers' figures, and that a recipe can name them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.plugins.agreement_penalty import least_penalty, with_agreement_penalty
from examples.plugins.mara import lifted_rewards
from learner.advantages import Scale, StepRows
from learner.objectives import build_objective
from reward_service.functions import RewardItem
from system.core.errors import ConfigError
from tests.learner.objective_cases import VECTORS, fixture_batch

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
MEDIAN, NOISE, MARA = (PLUGINS / name for name in ("median_baseline.py", "noise_correction.py", "mara.py"))


def rows_of(rewards, **columns):
    size = len(rewards)
    return StepRows(rewards, [0] * size, list(range(size)), [1] * size, **columns)


def test_a_median_baseline_has_the_published_advantages():
    case = VECTORS["MC-cont"]
    objective = build_objective("median_grpo", file=MEDIAN)
    found = objective.from_the_median(np.array(case["inputs"]["rewards"]), Scale())
    assert (found * (2 / 3)).tolist() == pytest.approx(case["expected"]["A"], abs=1e-11)
    assert list(objective.prepare(rows_of(case["inputs"]["rewards"])).advantages) == pytest.approx(found.tolist())


def test_binary_rewards_want_the_median_without_its_deviation():
    blown_up = build_objective("median_grpo", file=MEDIAN).prepare(rows_of([1.0, 0.0, 0.0])).advantages
    assert blown_up == pytest.approx((3000.0, 0.0, 0.0))
    assert build_objective("median_grpo", file=MEDIAN, deviation="none").prepare(
        rows_of([1.0, 0.0, 0.0])
    ).advantages == pytest.approx((3.0, 0.0, 0.0))


def test_a_median_needs_an_odd_group():
    build_objective("median_grpo", file=MEDIAN).check(3)
    with pytest.raises(ConfigError, match=r"group_size: 2: .* 3 for the signal of 2"):
        build_objective("median_grpo", file=MEDIAN).check(2)


@given(positive=st.floats(0.0, 0.45), negative=st.floats(0.0, 0.45))
@settings(deadline=None)
def test_a_corrected_reward_is_right_on_average(positive, negative):
    objective = build_objective(
        "corrected_grpo", file=NOISE, false_positive_rate=positive, false_negative_rate=negative
    )
    accepted, rejected = objective.corrected(1.0), objective.corrected(0.0)
    assert (1 - negative) * accepted + negative * rejected == pytest.approx(1.0)
    assert positive * accepted + (1 - positive) * rejected == pytest.approx(0.0, abs=1e-12)


def test_the_correction_widens_the_advantages():
    plain = build_objective("grpo", advantage="group_mean")(fixture_batch("FIX_A"))
    corrected = build_objective("corrected_grpo", file=NOISE, false_positive_rate=0.1, false_negative_rate=0.3)(
        fixture_batch("FIX_A")
    )
    np.testing.assert_allclose(corrected.coefficients, plain.coefficients / 0.6, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"false_positive_rate": 0.5, "false_negative_rate": 0.5}, "no better than a coin"),
        ({"advantage": "group_zscore"}, "cancels the correction"),
        ({"false_positive": 0.1}, "did you mean 'false_positive_rate'"),
    ],
)
def test_rates_that_cannot_be_corrected_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_objective("corrected_grpo", file=NOISE, **options)


@pytest.mark.parametrize("vector", ["MA-1", "MA-none"])
def test_mara_has_the_published_rewards(vector):
    given_numbers = VECTORS[vector]["inputs"]
    arguments = (given_numbers["R"], given_numbers["log_ref"], given_numbers["beta"], given_numbers["tau"])
    lifted, capped = lifted_rewards(*arguments)
    expected = VECTORS[vector]["expected"]
    assert lifted == pytest.approx(expected["Rbar"], abs=1e-11)
    assert capped == 0
    if "log_target_unnorm" in expected:
        target = [
            reward / given_numbers["beta"] + logprob - given_numbers["R"][expected["anchor"]] / given_numbers["beta"]
            for reward, logprob in zip(lifted, given_numbers["log_ref"], strict=True)
        ]
        offset = target[expected["anchor"]]
        assert [value - offset for value in target if value > -15] == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)


def test_mara_caps_its_bonus_and_counts_it():
    case = VECTORS["MA-1"]["inputs"]
    assert lifted_rewards(case["R"], case["log_ref"], 0.1, 1.0, cap=1.0) == (pytest.approx([1.0, 1.4, 0.0, 2.0]), 1)
    objective = build_objective("mara", file=MARA, kl_coefficient=0.1)
    plan = objective.prepare(rows_of(case["R"], reference_logprobs=case["log_ref"]))
    assert plan.sums.totals["mara_bonuses_capped"] == 1
    assert plan.advantages == pytest.approx((-0.1, 0.3, -1.1, 0.9))


def test_mara_gives_signal_where_all_answers_are_right():
    objective = build_objective("mara", file=MARA, kl_coefficient=0.1)
    advantages = objective.prepare(rows_of([1.0, 1.0], reference_logprobs=[-3.0, -5.0])).advantages
    assert advantages == pytest.approx((-0.1, 0.1))


def test_mara_reads_the_reference_of_whole_trajectories_from_the_batch():
    objective = build_objective("mara", file=MARA, kl_coefficient=0.1, threshold=0.0)
    assert objective.needs == {"old", "reference"}
    batch = fixture_batch("FIX_A")
    rows = batch.step_rows()
    assert list(rows.reference_logprobs) == pytest.approx([-2.7, -2.4])
    coefficients = objective(batch).coefficients
    whole = build_objective("grpo", kl_coefficient=0.1, advantage="group_mean")
    by_hand = whole(replace(batch, rewards=batch.rewards.new_tensor([0.03, 0.0]))).coefficients
    np.testing.assert_allclose(coefficients, by_hand, rtol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no KL for mara to make up for"),
        ({"kl_coefficient": 0.1, "advantage": "group_zscore"}, "rescales the bonus"),
    ],
)
def test_mara_without_a_kl_or_with_a_std_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_objective("mara", file=MARA, **options)


def test_the_agreement_penalty_is_the_published_one_and_keeps_agreement_where_it_was():
    given_numbers, expected = VECTORS["SY-1"]["inputs"], VECTORS["SY-1"]["expected"]
    agreeing, others, beta = given_numbers["r_agree"], given_numbers["r_correct"], given_numbers["beta"]
    penalty = least_penalty(agreeing + others, [True] * 2 + [False] * 2, beta)
    assert penalty == pytest.approx(expected["lambda_star"], abs=1e-11)
    assert tilted(given_numbers, 0.0) == pytest.approx(expected["p_after"], abs=1e-11)
    assert tilted(given_numbers, penalty) == pytest.approx(expected["p_after_penalty"], abs=1e-11)


def tilted(case, penalty):
    """Probability of agreement after the tilt e^(r / beta)."""
    p, beta = case["p_agree"], case["beta"]
    agreeing = p * np.mean([math.exp((reward - penalty) / beta) for reward in case["r_agree"]])
    return agreeing / (agreeing + (1 - p) * np.mean([math.exp(reward / beta) for reward in case["r_correct"]]))


def test_agreement_that_is_not_rewarded_more_costs_nothing():
    case = VECTORS["SY-neg"]["inputs"]
    assert least_penalty(case["r_agree"] + case["r_correct"], [True, False], case["beta"]) == 0.0
    assert tilted(case, 0.0) == pytest.approx(VECTORS["SY-neg"]["expected"]["p_after"], abs=1e-11)
    assert least_penalty([1.0, 0.5], [True, True], 1.0) == 0.0


def items_saying(*completions, stance_is_false=True):
    label = {"answer": "Canberra", "stance": "Sydney", "stance_is_false": stance_is_false}
    return [RewardItem(f"c{index}", text, "?", label, {}, "stop", 3) for index, text in enumerate(completions)]


def test_only_agreement_with_a_false_stance_pays_the_penalty():
    reward = with_agreement_penalty(
        lambda item: 1.0 if "Sydney" in item.completion else 0.5,
        lambda item: "Sydney" in item.completion,
        lambda item: item.label["stance_is_false"],
    )
    said = ["Sydney"] * 4 + ["Canberra"] * 4
    judged = reward(items_saying(*said), beta=1.0)
    assert [entry["reward"] for entry in judged] == pytest.approx([0.5] * 8)
    assert [entry["parts"]["penalty"] for entry in judged] == pytest.approx([0.5] * 4 + [0.0] * 4)
    assert [entry["reward"] for entry in reward(items_saying(*said, stance_is_false=False), beta=1.0)] == [1.0] * 4 + [
        0.5
    ] * 4
    assert [entry["reward"] for entry in reward(items_saying(*said[2:6]), beta=1.0)] == [1.0, 1.0, 0.5, 0.5]


def test_the_penalty_works_as_a_reward_of_a_recipe():
    """In a process of its own, as rewards run."""
    program = (
        "import json; from reward_service.scorer import *; import asyncio\n"
        "from reward_service.settings import RewardSettings\n"
        "from system.core.protocols import ScoreItem, ScoreRequest\n"
        "reward = RewardSettings(name='answer', use='examples/plugins/agreement_penalty.py:reward',"
        " options={'beta': 1.0, 'least_samples': 2}, workers=1)\n"
        "label = {'answer': 'Canberra', 'stance': 'Sydney', 'stance_is_false': True}\n"
        "items = tuple(ScoreItem(id=text, prompt='?', completion=text, finish_reason='stop', label=label)"
        " for text in ('Canberra, not Sydney', 'Canberra', 'Perth'))\n"
        "async def run():\n"
        "    scorer = LocalScorer([reward])\n"
        "    try:\n"
        "        return await asyncio.wait_for(scorer.score(ScoreRequest('r', 's', 0, items)), 60)\n"
        "    finally:\n"
        "        await scorer.close()\n"
        "print(json.dumps([score.reward for score in asyncio.run(run())]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=True, cwd=PLUGINS.parents[1]
    )
    penalty = 1.0 - math.log((math.e + 1.0) / 2.0)
    assert json.loads(done.stdout) == pytest.approx([1.0 - penalty, 1.0, 0.0])
