"""What holds for every objective: slow loops, finite differences, cuts, masks, metrics."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.kl import kl_estimate, reward_kl
from learner.objectives import Denominators, MetricSums, ObjectiveBatch, build_objective
from tests.learner.objective_cases import random_case, slow_denominators

SEEDS = st.integers(0, 100_000)


@pytest.mark.parametrize("name", ["grpo", "two_grpo"])
def test_float32_agrees_with_float64(name):
    objective = build_objective(name, kl_coefficient=0.04, correction="token_tis")
    case = random_case(11)
    narrow, wide = objective(case.batch(torch.float32)), objective(case.batch())
    assert narrow.coefficients.dtype == torch.float32
    assert wide.coefficients.dtype == torch.float64
    torch.testing.assert_close(narrow.coefficients.double(), wide.coefficients, rtol=1e-5, atol=1e-7)


def test_bfloat16_logprobs_are_computed_in_float32():
    result = build_objective("grpo")(random_case(3).batch(torch.bfloat16))
    assert result.coefficients.dtype == torch.float32


def test_padding_on_the_left_gives_the_same_coefficients():
    objective = build_objective("grpo", kl_coefficient=0.04)
    batch = random_case(5).batch()
    names = ["logprobs", "mask", "old_logprobs", "reference_logprobs", "rollout_logprobs"]
    flipped = replace(batch, **{name: getattr(batch, name).flip(1) for name in names})
    right, left = objective(batch), objective(flipped)
    assert left.loss == pytest.approx(right.loss, rel=1e-12)
    torch.testing.assert_close(left.coefficients.flip(1), right.coefficients)


@given(seed=SEEDS)
@settings(max_examples=20, deadline=None)
def test_nan_under_a_mask_does_not_leak(seed):
    case = random_case(seed)
    objective = build_objective("grpo", kl_coefficient=0.04, correction="token_tis")
    batch = case.batch()
    unscored = torch.tensor([reward is None for reward in case.rewards])
    hidden = ~batch.mask | unscored[:, None]
    poisoned = replace(
        batch,
        **{
            name: getattr(batch, name).masked_fill(hidden, value)
            for name, value in [
                ("logprobs", math.nan),
                ("old_logprobs", math.inf),
                ("reference_logprobs", math.nan),
                ("rollout_logprobs", -math.inf),
            ]
        },
    )
    clean, dirty = objective(batch), objective(poisoned)
    assert torch.equal(clean.coefficients, dirty.coefficients)
    assert (dirty.coefficients[hidden] == 0).all()
    assert dirty.metrics == clean.metrics


@pytest.mark.parametrize("correction", ["none", "token_tis", "sequence_mask"])
@pytest.mark.parametrize("name", ["grpo", "rloo", "cispo", "sapo", "gspo", "opd"])
def test_a_masked_token_stays_still_also_where_every_row_has_one(name, correction):
    if correction in build_objective(name).Options.refused_corrections:
        return
    one = [[-1.0], [-2.0], [-1.5]]
    batch = ObjectiveBatch.from_lists(
        logprobs=one, old_logprobs=one, reference_logprobs=[[-1.2], [-1.9], [-1.4]], rollout_logprobs=one,
        loss_mask=[[True], [False], [True]], rewards=[1.0, 0.0, 0.5], group_ids=[0, 0, 0],
    )  # fmt: skip
    moved = build_objective(name, correction=correction)(batch).coefficients[:, 0] != 0
    assert moved[0]
    assert not moved[1]


def test_a_null_reward_leaves_the_loss_also_when_advantages_are_handed_in():
    batch = random_case(2).batch(rewards=None)
    rewards = torch.ones(len(batch))
    rewards[1] = math.nan
    advantages = torch.ones(len(batch), dtype=torch.float64)
    result = build_objective("grpo")(replace(batch, rewards=rewards, advantages=advantages))
    assert (result.coefficients[1] == 0).all()
    assert result.coefficients[0].abs().sum() > 0


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_coefficients_are_made_where_gradients_are_off(mode):
    objective = build_objective("grpo", kl_coefficient=0.04, correction="token_tis")
    expected = objective(random_case(4).batch()).coefficients
    with getattr(torch, mode)():
        assert torch.equal(objective(random_case(4).batch()).coefficients, expected)


def test_a_graph_behind_the_logprobs_is_left_alone():
    batch = random_case(4).batch()
    weights = torch.ones((), dtype=torch.float64, requires_grad=True)
    logprobs = batch.logprobs * weights
    result = build_objective("grpo")(replace(batch, logprobs=logprobs))
    assert not result.coefficients.requires_grad
    (result.coefficients * logprobs).sum().backward()
    assert weights.grad == pytest.approx((result.coefficients * batch.logprobs).sum().item())


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (2, 0)])
def test_a_batch_without_tokens_changes_nothing(shape):
    rows = shape[0]
    batch = ObjectiveBatch(
        logprobs=torch.zeros(shape),
        mask=torch.ones(shape, dtype=torch.bool),
        group_ids=torch.zeros(rows, dtype=torch.int64),
        reference_logprobs=torch.zeros(shape),
        rollout_logprobs=torch.zeros(shape),
        rewards=torch.arange(rows).float(),
        denominators=Denominators(10, 4, 4, 2),
    )
    result = build_objective("grpo", kl_coefficient=0.04, correction="token_tis")(batch)
    assert result.loss == 0.0
    assert result.coefficients.shape == shape
    assert "ratio_mean" not in result.metrics


def test_a_step_in_which_every_group_is_dropped_has_no_loss():
    batch = ObjectiveBatch.from_lists(
        logprobs=[[-1.0], [-2.0]], rewards=[1.0, 1.0], group_ids=[0, 0], dtype=torch.float64
    )
    result = build_objective("grpo", zero_variance="drop")(batch)
    assert result.loss == 0.0
    assert (result.coefficients == 0).all()
    assert result.metrics["zero_signal_share"] == 1.0


def test_equal_rewards_feel_only_the_kl_and_only_while_kept():
    arguments = {
        "logprobs": [[-1.0, -0.5], [-2.0]],
        "reference_logprobs": [[-1.2, -0.4], [-1.0]],
        "rewards": [1.0, 1.0],
        "group_ids": [0, 0],
    }
    batch = ObjectiveBatch.from_lists(**arguments)
    assert (build_objective("grpo")(batch).coefficients == 0).all()
    assert (build_objective("grpo", kl_coefficient=0.04)(batch).coefficients[batch.mask] != 0).all()
    assert (build_objective("grpo", kl_coefficient=0.04, zero_variance="drop")(batch).coefficients == 0).all()


@pytest.mark.parametrize("distance", [100.0, -100.0])
@pytest.mark.parametrize("estimator", ["k2", "k3", "k3_weighted"])
def test_a_log_ratio_of_a_hundred_stays_finite_and_is_counted(estimator, distance):
    batch = ObjectiveBatch.from_lists(
        logprobs=[[-120.0, -1.0], [-120.0]],
        reference_logprobs=[[-120.0 - distance, -1.0], [-120.0]],
        rewards=[1.0, 1.0],
        group_ids=[0, 0],
    )
    result = build_objective("grpo", kl_coefficient=0.1, kl_estimator=estimator)(batch)
    assert math.isfinite(result.loss)
    assert result.coefficients.isfinite().all()
    assert result.coefficients[0, 0].sign() == math.copysign(1, distance)
    assert result.metrics["kl_clamped"] == 1


def test_a_ratio_beyond_the_limit_stays_finite_and_is_counted():
    batch = ObjectiveBatch.from_lists(
        logprobs=[[-1.0], [-1.0]], old_logprobs=[[-200.0], [-1.0]], rewards=[0.0, 1.0], group_ids=[0, 0]
    )
    result = build_objective("grpo")(batch)
    assert math.isfinite(result.loss)
    assert result.coefficients.isfinite().all()
    assert result.metrics["ratio_clamped"] == 1


def test_a_kl_in_the_reward_shapes_the_advantage_and_not_the_loss():
    case = random_case(8)
    options = {"kl_coefficient": 0.1, "kl_estimator": "k1", "kl_where": "reward", "zero_variance": "as_is"}
    objective = build_objective("grpo", **options)
    batch = case.batch()
    terms = reward_kl(batch.old_logprobs, batch.reference_logprobs, batch.mask)
    expected = [
        sum(
            old - reference
            for old, reference, trained in zip(case.old[row], case.reference[row], case.mask[row], strict=True)
            if trained
        )
        for row in range(len(batch))
    ]
    assert terms.tolist() == pytest.approx(expected)
    plan = objective.prepare(batch.step_rows(terms))
    plain = build_objective("grpo")
    handed_in = case.batch(advantages=list(plan.advantages), denominators=plan.denominators)
    assert torch.equal(objective(batch).coefficients, plain(handed_in).coefficients)
    assert not torch.equal(objective(batch).coefficients, plain(batch).coefficients)
    without_reference = replace(handed_in, reference_logprobs=None)
    assert torch.equal(objective(without_reference).coefficients, plain(handed_in).coefficients)


def test_denominators_are_taken_from_the_lists_unless_handed_in():
    case = random_case(9)
    objective = build_objective("two_grpo")
    own = objective(case.batch())
    counts = slow_denominators(case, objective.prepare(case.batch().step_rows()).advantages)
    assert counts == objective.prepare(case.batch().step_rows()).denominators
    doubled = objective(case.batch(denominators=replace(counts, tokens=2 * counts.tokens)))
    torch.testing.assert_close(doubled.coefficients * 2, own.coefficients)


def test_metrics_compare_the_policy_with_whoever_sampled():
    arguments = {"logprobs": [[-1.0, -2.0], [-1.0]], "rewards": [1.0, 0.0], "group_ids": [0, 0]}
    old = [[-1.5, -2.0], [-1.0]]
    by_old = build_objective("grpo")(ObjectiveBatch.from_lists(old_logprobs=old, dtype=torch.float64, **arguments))
    ratios = [math.exp(0.5), 1.0, 1.0]
    assert by_old.metrics["ratio_mean"] == pytest.approx(sum(ratios) / 3)
    assert by_old.metrics["ess"] == pytest.approx(sum(ratios) ** 2 / (3 * sum(ratio**2 for ratio in ratios)))
    assert by_old.metrics["log_ratio_abs_max"] == pytest.approx(0.5)
    by_engine = build_objective("grpo", correction="token_tis", correction_high=1.1)(
        ObjectiveBatch.from_lists(rollout_logprobs=old, dtype=torch.float64, **arguments)
    )
    assert by_engine.metrics["ratio_mean"] == pytest.approx(sum(ratios) / 3)
    assert by_engine.metrics["update_log_ratio_abs_max"] == 0.0
    assert by_engine.metrics["correction_truncated_share"] == pytest.approx(1 / 3)
    assert by_engine.metrics["correction_weight_mean"] == pytest.approx(3.1 / 3)


def test_the_reported_reference_kl_is_k3_whatever_the_loss_uses():
    case = random_case(6)
    batch = case.batch()
    mask = batch.mask & torch.tensor([reward is not None for reward in case.rewards])[:, None]
    delta = batch.logprobs - batch.reference_logprobs
    expected = kl_estimate("k3", delta, delta)[mask].mean().item()
    for options in ({}, {"kl_coefficient": 0.1, "kl_estimator": "k2"}):
        assert build_objective("grpo", **options)(batch).metrics["kl_reference"] == pytest.approx(expected)


def test_metric_sums_of_nothing_are_neutral():
    sums = build_objective("grpo")(random_case(1).batch()).sums
    assert (MetricSums() + sums).means() == (sums + MetricSums()).means() == sums.means()
    assert MetricSums().means() == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"old_logprobs": [[-1.0], [-1.0, -1.0]]}, r"old_logprobs\[0\] has 1 entries for 2 tokens"),
        ({"rewards": [1.0]}, "rewards has 1 entries for 2 completions"),
        ({"loss_mask": [[True, True]]}, "loss_mask has 1 entries for 2 completions"),
    ],
)
def test_lists_of_different_length_are_refused_by_name(changes, message):
    arguments = {"logprobs": [[-1.0, -1.0], [-1.0, -1.0]], "rewards": [1.0, 0.0], "group_ids": [0, 0]}
    with pytest.raises(ValueError, match=message):
        ObjectiveBatch.from_lists(**(arguments | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask": torch.ones(2, 3)}, "mask must be bool"),
        ({"old_logprobs": torch.zeros(2, 2)}, r"old_logprobs is \(2, 2\), expected \(2, 3\)"),
        ({"advantages": torch.zeros(3)}, r"advantages is \(3,\), expected \(2,\)"),
    ],
)
def test_tensors_of_the_wrong_shape_are_refused_by_name(changes, message):
    tensors = {
        "logprobs": torch.zeros(2, 3),
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "group_ids": torch.zeros(2, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        ObjectiveBatch(**(tensors | changes))


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"kl_coefficient": 0.1}, "reference_logprobs"),
        ({"correction": "token_tis"}, "rollout_logprobs"),
        ({}, "rewards"),
    ],
)
def test_missing_inputs_are_refused_by_name(options, missing):
    batch = replace(random_case(0).batch(), **{missing: None})
    with pytest.raises(ValueError, match=missing):
        build_objective("grpo", **options)(batch)
