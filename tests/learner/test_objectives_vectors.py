"""Objectives, KL estimators and corrections against the published float64 vectors."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.divergences import BUILT_IN
from learner.kl import bounded_exp, kl_estimate
from learner.objectives import ObjectiveBatch, build_objective
from tests.learner.objective_cases import VECTORS, fixture_batch, rows_of

UNIT = {"ddof": 0, "eps": 0.0, "dual_clip": None}
ICEPOP = UNIT | {"correction": "icepop", "correction_low": 0.95, "correction_high": 1.05}


def test_no_published_vector_is_left_untested():
    tests = Path(__file__).parent.parent
    text = "".join(path.read_text(encoding="utf-8") for path in tests.rglob("test_*.py"))
    named = set(re.findall(r'"([A-Z]+-[A-Za-z0-9_.-]+)"', text))
    of_divergences = {f"FD-{name}" for name in (*BUILT_IN, "pearson_exact", "hellinger_half")}
    assert set(VECTORS) - named - of_divergences == {"FIX_A", "FIX_B"}


def assert_matches(vector, result, lists, tolerance=1e-11):
    expected = VECTORS[vector]["expected"]
    assert result.loss == pytest.approx(expected["loss"], abs=tolerance)
    for row, values in zip(rows_of(result.coefficients, lists), expected["grad_logp"], strict=True):
        assert row == pytest.approx(values, abs=tolerance)


@pytest.mark.parametrize(
    ("vector", "fixture", "name", "options"),
    [
        ("TG-A-token-mean", "FIX_A", "two_grpo", UNIT),
        ("TG-A-seq-mean-token-mean", "FIX_A", "two_grpo", UNIT | {"aggregation": "sequence_mean_token_mean"}),
        ("TG-A-seq-mean-token-sum", "FIX_A", "two_grpo", UNIT | {"aggregation": "sequence_sum"}),
        ("TG-A-verl", "FIX_A", "two_grpo", {}),
        ("GR-B", "FIX_B", "grpo", {}),
        ("GR-B-kl", "FIX_B", "grpo", {"kl_coefficient": 0.04}),
        (
            "DR-B",
            "FIX_B",
            "grpo",
            {"advantage": "group_mean", "aggregation": "sequence_sum_norm", "max_tokens": 4},
        ),
        ("DA-B", "FIX_B", "grpo", {"aggregation": "token_mean", "clip_high": 0.28}),
        ("OP-A-TIS", "FIX_A", "two_grpo", UNIT | {"correction": "token_tis", "correction_high": 1.05}),
        ("OP-A-IcePop", "FIX_A", "two_grpo", ICEPOP),
        (
            "OP-A-geoMIS",
            "FIX_A",
            "two_grpo",
            UNIT | {"correction": "geometric_mask", "correction_low": 0.99, "correction_high": 1.01},
        ),
        ("OP-A-bypass", "FIX_A", "two_grpo", UNIT | {"correction": "bypass"}),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-6)])
def test_objective_has_the_published_loss_and_coefficients(vector, fixture, name, options, dtype, tolerance):
    result = build_objective(name, **options)(fixture_batch(fixture, dtype=dtype))
    assert_matches(vector, result, VECTORS[fixture]["inputs"]["new"], tolerance)


@pytest.mark.parametrize("old", ["given", "left out"])
def test_on_policy_the_coefficient_is_the_advantage_over_the_tokens(old):
    changes = {} if old == "given" else {"old_logprobs": None}
    result = build_objective("two_grpo", **UNIT)(fixture_batch("FIX_A", new="old", **changes))
    assert_matches("TG-A-onpolicy", result, VECTORS["FIX_A"]["inputs"]["new"])


def test_clipped_tokens_have_no_gradient():
    given = VECTORS["TG-A-clip"]["inputs"]
    old = torch.tensor(given["old"], dtype=torch.float64)
    batch = ObjectiveBatch(
        logprobs=old + torch.tensor(given["ratios"], dtype=torch.float64).log(),
        old_logprobs=old,
        mask=torch.ones(2, 2, dtype=torch.bool),
        group_ids=torch.zeros(2, dtype=torch.int64),
        rewards=torch.tensor([1.0, 0.0]),
    )
    result = build_objective("two_grpo", **UNIT)(batch)
    assert_matches("TG-A-clip", result, given["old"])
    assert result.metrics["clip_share_low"] == 0.25
    assert result.metrics["clip_share_high"] == 0.25
    assert result.metrics["clip_share"] == 0.5


def test_reinforce_gradient_of_leave_one_out_is_the_surrogate_on_policy():
    objective = build_objective("grpo", advantage="leave_one_out", aggregation="sequence_sum")
    result = objective(fixture_batch("FIX_B", old_logprobs=None))
    rows = rows_of(result.coefficients, VECTORS["FIX_B"]["inputs"]["new"])
    for row, values in zip(rows, VECTORS["RL-B"]["expected"]["grad_logp"], strict=True):
        assert row == pytest.approx(values, abs=1e-11)


@pytest.mark.parametrize("vector", ["KL--1", "KL--0.2", "KL-0", "KL-1"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimators_have_their_values_and_analytic_gradients(vector, estimator):
    delta = torch.tensor(VECTORS[vector]["inputs"]["delta"], dtype=torch.float64, requires_grad=True)
    value = kl_estimate(estimator, delta, torch.ones_like(delta))
    (slope,) = torch.autograd.grad(value, delta)
    assert value.item() == pytest.approx(VECTORS[vector]["expected"][estimator], abs=1e-11)
    assert slope.item() == pytest.approx(VECTORS[vector]["expected"]["d" + estimator], abs=1e-11)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", "E_grad_k1"),
        ("k2", "E_grad_k2"),
        ("k3", "E_grad_k3"),
        ("k2", "grad_reverse_kl"),
        ("k3", "grad_forward_kl"),
        ("k3_weighted", "grad_reverse_kl"),
    ],
)
def test_expected_gradients_of_kl_losses_are_those_of_their_divergence(estimator, expected):
    case = VECTORS["KL-expect"]
    policy = torch.tensor(case["inputs"]["pi"], dtype=torch.float64)
    reference = torch.tensor(case["inputs"]["ref"], dtype=torch.float64)
    logits = policy.log().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    values = kl_estimate(estimator, logprobs - reference.log(), torch.exp(logprobs - logprobs.detach()))
    (gradient,) = torch.autograd.grad((policy * values).sum(), logits)
    assert gradient.tolist() == pytest.approx(case["expected"][expected], abs=1e-11)


def test_ratios_to_the_sampler_are_the_published_ones():
    given, expected = VECTORS["FIX_A"]["inputs"], VECTORS["OP-A-ratios"]["expected"]
    for old, sampler, ratios in zip(given["old"], given["mu"], expected["token"], strict=True):
        log_ratio = torch.tensor(old, dtype=torch.float64) - torch.tensor(sampler, dtype=torch.float64)
        assert bounded_exp(log_ratio).tolist() == pytest.approx(ratios, abs=1e-10)


def test_survivors_divide_by_what_the_correction_keeps_over_all_micro_batches():
    objective = build_objective("two_grpo", denominator="survivors", **ICEPOP)
    assert objective.needs_logprobs_first
    batch = fixture_batch("FIX_A")
    whole = objective(batch)
    assert whole.loss == pytest.approx(VECTORS["OP-A-IcePop"]["expected"]["loss"] * 5 / 3, abs=1e-11)
    advantages = fixture_batch("FIX_A", advantages=[1.0, -1.0])
    pieces = [advantages.select([0]), advantages.select([1])]
    tokens = sum(objective.surviving(piece).tokens for piece in pieces)
    counts = replace(objective.surviving(batch), tokens=tokens)
    parts = [objective(replace(piece, denominators=counts)) for piece in pieces]
    torch.testing.assert_close(torch.cat([part.coefficients for part in parts]), whole.coefficients)


def test_the_mean_of_a_completion_is_over_its_survivors():
    options = ICEPOP | {"aggregation": "sequence_mean_token_mean"}
    kept_all = build_objective("two_grpo", **options)(fixture_batch("FIX_A")).coefficients
    survivors = build_objective("two_grpo", denominator="survivors", **options)(fixture_batch("FIX_A")).coefficients
    torch.testing.assert_close(survivors, kept_all * torch.tensor([[3 / 2], [2 / 1]], dtype=torch.float64))


@pytest.mark.parametrize("name", ["two_grpo", "grpo"])
def test_without_corrections_survivors_are_all_tokens(name):
    options = {"correction": "token_tis", "aggregation": "token_mean"}
    kept_all = build_objective(name, **options)(fixture_batch("FIX_A"))
    survivors = build_objective(name, denominator="survivors", **options)(fixture_batch("FIX_A"))
    assert torch.equal(kept_all.coefficients, survivors.coefficients)
