"""Off-policy corrections: their published figures, whole sequences, pairs, and what they report."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.corrections import CORRECTIONS, RULES, Drift, correct, masks_sequences
from learner.kl import reward_kl
from learner.objectives import build_objective
from learner.objectives.settings import ObjectiveSettings
from system.core.errors import ConfigError
from tests.learner.objective_cases import VECTORS, fixture_batch, random_case, rows_of

UNIT = {"ddof": 0, "eps": 0.0, "dual_clip": None}


def drift_of(batch, advantages=None):
    old = batch.old_logprobs - batch.rollout_logprobs
    policy = batch.logprobs - batch.rollout_logprobs
    zeros = torch.zeros(len(batch), 1, dtype=old.dtype) if advantages is None else advantages
    return Drift(old, policy, batch.mask, zeros, batch.group_ids, batch.trajectory_ids)


def test_sequence_statistics_are_the_published_ones():
    drift, expected = drift_of(fixture_batch("FIX_A")), VECTORS["OP-A-ratios"]["expected"]
    assert drift.sequence_sum(drift.old).exp()[:, 0].tolist() == pytest.approx(expected["sequence"], abs=1e-11)
    assert drift.sequence_mean(drift.old).exp()[:, 0].tolist() == pytest.approx(expected["geometric"], abs=1e-11)
    k3 = drift.sequence_mean(drift.old.exp() - 1 - drift.old)
    assert k3[:, 0].tolist() == pytest.approx(expected["k3_seq"], abs=1e-11)


def test_sequence_tis_has_the_loss_that_is_printed_for_a_cap_of_two():
    result = build_objective("two_grpo", correction="sequence_tis", **UNIT)(fixture_batch("FIX_A"))
    assert result.loss == pytest.approx(-0.222852606457, abs=1e-11)


@pytest.mark.parametrize(
    ("name", "options", "kept"),
    [
        ("sequence_mask", {"correction_high": 1.05}, [True, False]),
        ("sequence_mask", {"correction_low": 1.05}, [False, True]),
        ("geometric_mask", {"correction_low": 0.99, "correction_high": 1.01}, [True, False]),
        ("k3_mask", {"correction_high": 0.001}, [True, False]),
        ("k3_mask", {}, [True, True]),
        ("opsm", {"correction_high": 0.1}, [True, False]),
        ("opsm", {}, [True, True]),
    ],
)
def test_a_sequence_mask_takes_whole_responses(name, options, kept):
    result = build_objective("two_grpo", correction=name, **options, **UNIT)(fixture_batch("FIX_A"))
    plain = build_objective("two_grpo", **UNIT)(fixture_batch("FIX_A"))
    moved = (result.coefficients[:, 0] != 0).tolist()
    assert moved == kept
    assert result.metrics["correction_masked_share"] == pytest.approx(0.0 if all(kept) else 0.4 if kept[0] else 0.6)
    if name in ("k3_mask", "opsm"):
        assert torch.equal(result.coefficients[kept], plain.coefficients[kept])


@pytest.mark.parametrize("name", sorted(name for name in RULES if masks_sequences(name)))
def test_a_pair_that_loses_one_response_goes_as_a_whole_when_asked(name):
    options = {"correction": name, "correction_high": 1e-6} if name in ("k3_mask", "opsm") else {"correction": name}
    if "correction_high" not in options:
        options |= {"correction_low": 1.0001, "correction_high": 1.0227}
    batch = fixture_batch("FIX_A")
    kept = build_objective("two_grpo", **options, **UNIT)
    dropped = build_objective("two_grpo", lone_responses="drop", **options, **UNIT)
    assert (kept.coupling, dropped.coupling) == ("completion", "group")
    if name != "k3_mask":  # which masks both here
        assert kept(batch).coefficients.any(dim=1).tolist() == [True, False]
    assert not dropped(batch).coefficients.any()
    assert dropped(batch).metrics["correction_masked_share"] == 1.0


def test_larger_groups_go_on_without_what_is_masked():
    options = {"correction": "sequence_mask", "correction_low": 0.9, "correction_high": 1.1, "lone_responses": "drop"}
    given = VECTORS["FIX_B"]["inputs"]
    sampler = [[value - (0.0 if row else 1.0) for value in values] for row, values in enumerate(given["old"])]
    result = build_objective("grpo", **options)(fixture_batch("FIX_B", rollout_logprobs=sampler))
    assert not result.coefficients[0].any()
    assert result.coefficients[1].any()


def test_the_baseline_does_not_see_what_a_correction_masks():
    options = {"correction": "sequence_mask", "correction_low": 0.9, "correction_high": 1.1}
    given = VECTORS["FIX_B"]["inputs"]
    sampler = [[value - (0.0 if row else 1.0) for value in values] for row, values in enumerate(given["old"])]
    masked = build_objective("grpo", **options)(fixture_batch("FIX_B", rollout_logprobs=sampler))
    plain = build_objective("grpo")(fixture_batch("FIX_B"))
    torch.testing.assert_close(masked.coefficients[1:], plain.coefficients[1:])


@pytest.mark.parametrize("name", sorted(RULES))
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_a_trajectory_cut_into_rows_is_weighed_as_one(name, seed):
    case = random_case(seed)
    case.trajectory_ids = list(range(len(case.rewards)))
    whole = case.batch()
    cut = replace(
        whole,
        **{
            key: torch.cat([getattr(whole, key), getattr(whole, key)])
            for key in ("logprobs", "old_logprobs", "rollout_logprobs", "group_ids", "trajectory_ids", "rewards")
        },
        mask=torch.cat([whole.mask.clone().index_fill(1, torch.tensor([0]), False), _first_only(whole.mask)]),
        reference_logprobs=None,
        lengths=None,
    )
    rule, rows = RULES[name], len(whole)
    together, apart = (correct(name, drift_of(batch), rule.low, rule.high) for batch in (whole, cut))
    inside = whole.mask
    for which in ("weights", "kept"):
        full = getattr(together, which).expand_as(inside)
        rest, first = getattr(apart, which).expand_as(cut.mask).split(rows)
        joined = torch.where(_first_only(inside), first, rest)
        torch.testing.assert_close(joined[inside], full[inside])


def _first_only(mask):
    first = torch.zeros_like(mask)
    first[:, :1] = mask[:, :1]
    return first


def test_weights_report_their_effective_sample_size_and_what_they_truncate():
    metrics = build_objective("two_grpo", correction="token_tis", correction_high=1.03, **UNIT)(
        fixture_batch("FIX_A")
    ).metrics
    ratios = [ratio for row in VECTORS["OP-A-ratios"]["expected"]["token"] for ratio in row]
    weights = [min(ratio, 1.03) for ratio in ratios]
    assert metrics["correction_truncated_share"] == pytest.approx(2 / 5)
    assert metrics["correction_weight_mean"] == pytest.approx(sum(weights) / 5)
    assert metrics["correction_ess"] == pytest.approx(sum(weights) ** 2 / (5 * sum(weight**2 for weight in weights)))


def test_bypass_takes_the_sampler_for_the_old_policy():
    case = random_case(21)
    bypassed = build_objective("grpo", correction="bypass")(case.batch())
    plain = build_objective("grpo")(case.batch(old_logprobs=case.rollout))
    assert torch.equal(bypassed.coefficients, plain.coefficients)
    assert torch.equal(
        build_objective("grpo", correction="bypass")(case.batch(old_logprobs=None)).coefficients, plain.coefficients
    )


def test_without_old_logprobs_the_ratio_to_the_sampler_is_that_of_the_current_policy():
    batch = fixture_batch("FIX_A", old_logprobs=None)
    coefficients = build_objective("rloo", correction="decoupled")(batch).coefficients
    plain = build_objective("rloo")(batch).coefficients
    ratio = (batch.logprobs - batch.rollout_logprobs).exp()
    torch.testing.assert_close(coefficients, torch.where(batch.mask, plain * ratio, 0.0))


@pytest.mark.parametrize(
    "name", [name for name in CORRECTIONS if name not in ("none", "decoupled", "token_tis", "icepop", "bypass")]
)
def test_gspo_weighs_whole_sequences(name):
    case = random_case(5)
    result = build_objective("gspo", correction=name, clip_low=None, clip_high=None)(case.batch())
    plain = build_objective("gspo", clip_low=None, clip_high=None)(case.batch())
    rows = zip(rows_of(result.coefficients, case.logprobs), rows_of(plain.coefficients, case.logprobs), strict=True)
    for weighed, unweighed in rows:
        factors = {round(a / b, 9) for a, b in zip(weighed, unweighed, strict=True) if b}
        assert len(factors) <= 1


def test_a_recipe_gets_the_correction_that_its_objective_bears():
    defaults = ObjectiveSettings.recipe_defaults
    gspo = build_objective("gspo").Options.recipe_defaults
    assert defaults({}, 8, 4) == {"correction": "token_tis"}
    assert defaults({}, 8, 0) == {"correction": "none"}
    assert gspo({}, 8, 4) == {"correction": "sequence_tis"}
    assert defaults({"correction": "icepop"}, 2, 4) == {}
    assert defaults({"correction": "k3_mask"}, 2, 4) == {"lone_responses": "drop"}
    assert defaults({"correction": "k3_mask"}, 4, 4) == {}
    assert defaults({"correction": "k3_mask", "lone_responses": "keep"}, 2, 4) == {}


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_weighted"])
def test_every_estimator_can_be_taken_off_the_reward(estimator):
    case = random_case(31)
    batch = case.batch()
    objective = build_objective("grpo", kl_coefficient=0.1, kl_where="reward", kl_estimator=estimator)
    terms = reward_kl(batch.old_logprobs, batch.reference_logprobs, batch.mask, estimator)
    delta = batch.old_logprobs - batch.reference_logprobs
    by_hand = {"k1": delta, "k2": delta**2 / 2}.get(estimator, torch.exp(-delta) - 1 + delta)
    assert terms.tolist() == pytest.approx((by_hand * batch.mask).sum(dim=1).tolist())
    plan = objective.prepare(batch.step_rows(terms))
    assert objective(batch).loss == pytest.approx(
        objective(case.batch(advantages=list(plan.advantages), denominators=plan.denominators)).loss
    )


def test_k1_in_the_loss_must_be_wanted_for_comparison():
    with pytest.raises(ConfigError, match="k1_for_comparison: true allows it"):
        build_objective("two_grpo", kl_coefficient=0.04, kl_estimator="k1")
    batch = fixture_batch("FIX_A")
    wanted = build_objective("two_grpo", kl_coefficient=0.04, kl_estimator="k1", k1_for_comparison=True)(batch)
    plain = build_objective("two_grpo")(batch)
    added = torch.where(batch.mask, 0.04 / 5, 0.0).double()
    torch.testing.assert_close(wanted.coefficients - plain.coefficients, added)
    assert math.isfinite(wanted.loss)
