"""The families of GRPO's kind: published vectors, defaults of the contract, and what each refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.advantages import StepRows, step_advantages
from learner.objectives import build_objective
from learner.objectives.settings import TOKEN_CORRECTIONS
from system.core.errors import ConfigError
from tests.learner.objective_cases import VECTORS, fixture_batch, random_case, rows_of, wild_case
from tests.learner.test_objectives_slow import objective_options

FAMILY_VECTORS = [
    ("DR-B", "dr_grpo", {"max_tokens": 4}),
    ("DA-B", "dapo", {}),
    ("RL-B", "rloo", {}),
    ("GS-B", "gspo", {"clip_low": 0.2, "clip_high": 0.2}),
    ("GS-B-paperclip", "gspo", {}),
    ("CI-B", "cispo", {}),
    ("SA-B", "sapo", {}),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("vector", "name", "options"), FAMILY_VECTORS)
def test_a_family_has_its_published_loss_and_coefficients(vector, name, options, dtype, tolerance):
    result = build_objective(name, **options)(fixture_batch("FIX_B", dtype=dtype))
    expected = VECTORS[vector]["expected"]
    assert result.loss == pytest.approx(expected["loss"], abs=tolerance)
    rows = rows_of(result.coefficients, VECTORS["FIX_B"]["inputs"]["new"])
    for row, values in zip(rows, expected["grad_logp"], strict=True):
        assert row == pytest.approx(values, abs=tolerance)


@pytest.mark.parametrize(("vector", "unbiased"), [("RP-AB-verl", True), ("RP-AB-openrlhf", False)])
def test_reinforce_pp_has_the_published_advantages_over_two_groups(vector, unbiased):
    given = [VECTORS[name]["inputs"] for name in VECTORS[vector]["inputs"]["fixtures"]]
    rewards = [reward for inputs in given for reward in inputs["rewards"]]
    lengths = [len(row) for inputs in given for row in inputs["new"]]
    rows = StepRows(rewards, [0] * 4 + [1] * 2, [0, 1, 2, 3, 0, 1], lengths)
    plan = build_objective("reinforce_pp", unbiased_variance=unbiased).prepare(rows)
    assert list(plan.advantages) == pytest.approx(VECTORS[vector]["expected"]["A"], abs=1e-9)


def test_reinforce_pp_is_ppo_with_whitened_advantages():
    case = random_case(12)
    rows = case.batch().step_rows()
    whitened = step_advantages(rows, estimator="batch_whitened")
    grpo = build_objective("grpo", aggregation="token_mean")(case.batch(advantages=whitened))
    assert torch.equal(build_objective("reinforce_pp")(case.batch()).coefficients, grpo.coefficients)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dr_grpo", {"max_tokens": 9}, ("group_mean", "sequence_sum_norm", 0.2, 0.2, None, "keep")),
        ("dapo", {}, ("group_zscore", "token_mean", 0.2, 0.28, None, "refill")),
        ("rloo", {}, ("leave_one_out", "sequence_sum", None, None, None, "keep")),
        ("reinforce_pp", {}, ("batch_whitened", "token_mean", 0.2, 0.2, None, "keep")),
        ("gspo", {}, ("group_zscore", None, 3e-4, 4e-4, None, "keep")),
        ("cispo", {}, ("group_zscore", "token_mean", None, 0.28, None, "keep")),
        ("sapo", {}, ("group_zscore", "sequence_mean_token_mean", None, None, None, "keep")),
    ],
)
def test_defaults_are_those_of_the_contract(name, options, expected):
    settings = build_objective(name, **options).settings
    keys = ("advantage", "aggregation", "clip_low", "clip_high", "dual_clip", "zero_variance")
    assert tuple(getattr(settings, key, None) for key in keys) == expected
    common = (settings.ddof, settings.eps, settings.correction, settings.denominator, settings.kl_coefficient)
    assert common == (1, 1e-6, "none", "kept_all", 0.0)


def test_sapo_has_a_steeper_gate_for_bad_answers():
    settings = build_objective("sapo").settings
    assert (settings.tau_positive, settings.tau_negative) == (1.0, 1.05)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dr_grpo", {}, "max_tokens; set it to rollout.max_tokens"),
        ("gspo", {"aggregation": "token_mean"}, "gspo has no such option; the loss is one of whole sequences"),
        ("cispo", {"epsilon_high": 5.0}, r"the cap is 1 \+ clip_high"),
        ("rloo", {"correction": "bypass"}, "rloo has no ratio"),
        ("gspo", {"correction": "bypass"}, "its anchor is recomputed"),
        ("sapo", {"tau_positive": 0.0}, r"objective\.tau_positive"),
        *(("gspo", {"correction": name}, "weights of single tokens do not fit") for name in TOKEN_CORRECTIONS),
    ],
)
def test_what_a_family_cannot_be_is_refused_with_the_mend(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_objective(name, **options)


@pytest.mark.parametrize("passes", [(2, 1), (1, 2)])
def test_rloo_learns_once_from_a_step_unless_it_is_corrected(passes):
    build_objective("rloo").check_passes(1, 1)
    build_objective("rloo", correction="token_tis").check_passes(*passes)
    build_objective("grpo").check_passes(*passes)
    with pytest.raises(ConfigError, match="right for one update per step"):
        build_objective("rloo").check_passes(*passes)


def test_only_objectives_with_a_ratio_have_the_old_logprobs_recomputed():
    assert build_objective("rloo").needs == frozenset()
    assert build_objective("rloo", correction="token_tis").needs == {"rollout"}
    for name in ("dapo", "reinforce_pp", "gspo", "cispo", "sapo"):
        assert build_objective(name).needs == {"old"}


def test_a_sequence_ratio_is_bounded_before_it_overflows():
    batch = fixture_batch("FIX_A", old_logprobs=[[-500.0] * 3, [-500.0] * 2], rewards=[0.0, 1.0])
    result = build_objective("gspo", clip_low=None, clip_high=None)(batch)
    assert result.coefficients.isfinite().all()
    assert result.loss == pytest.approx(0.0, abs=1e-6)


def test_clip_shares_count_what_lost_its_gradient():
    batch = fixture_batch("FIX_B")
    clipped = build_objective("gspo")(batch)
    lost = (clipped.coefficients == 0).all(dim=1) & (torch.tensor([1.36, -1.02, 0.0, -0.34]) != 0)
    assert clipped.metrics["clip_share"] == lost.float().mean().item() == 0.5
    ratio = (batch.logprobs - batch.old_logprobs).exp()
    capped = build_objective("cispo", clip_high=0.1)(batch)
    assert capped.metrics["clip_share"] == pytest.approx((ratio > 1.1)[batch.mask].double().mean().item())


@pytest.mark.parametrize("name", ["grpo", "two_grpo", "dapo", "reinforce_pp", "rloo", "cispo", "sapo", "opd"])
@given(data=st.data(), seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_what_is_written_with_slopes_equals_the_formula_differentiated(name, data, seed):
    options = data.draw(objective_options(name))
    plain, quick = build_objective(name, **options), build_objective(name, **options)
    plain.row_losses = lambda inputs: inputs.tokens.row_sums(inputs.corrected(plain.token_loss(inputs)))
    plain.measure = lambda inputs, metrics: None
    batch = data.draw(st.sampled_from([random_case, wild_case]))(seed).batch()
    differentiated, written = plain(batch), quick(batch)
    assert written.loss == pytest.approx(differentiated.loss, rel=1e-9, abs=1e-9)
    torch.testing.assert_close(written.coefficients, differentiated.coefficients, rtol=1e-9, atol=1e-9)
