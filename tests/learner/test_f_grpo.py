"""f-GRPO and f-HAL: the published vectors, their weights, levels, corrections and offline pairs."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import pytest
import torch

from learner.divergences import find_divergence, slope
from learner.objectives import ObjectiveBatch, build_objective
from learner.objectives.f_grpo import self_normalised_weights
from system.core.errors import ConfigError
from tests.learner.objective_cases import VECTORS, fixture_batch, random_case, rows_of

UNIT = {"ddof": 0, "eps": 0.0, "kappa": 1.0}
PRECISIONS = pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])


def assert_vector(vector, result, fixture, within):
    expected = VECTORS[vector]["expected"]
    assert result.loss == pytest.approx(expected["loss"], abs=within, rel=within)
    rows = rows_of(result.coefficients, VECTORS[fixture]["inputs"]["new"])
    for row, values in zip(rows, expected["grad_logp"], strict=True):
        assert row == pytest.approx(values, abs=within, rel=within)


@PRECISIONS
@pytest.mark.parametrize(
    ("vector", "options"),
    [
        ("FG-A-kl", {"divergence": "kl"}),
        ("FG-A-reverse_kl", {"divergence": "reverse_kl"}),
        ("FG-A-pearson", {"divergence": "pearson"}),
        ("FG-A-pearson", {"divergence": "pearson_polynomial"}),
        ("FG-A-hellinger", {"divergence": "hellinger"}),
        ("FG-A-js", {"divergence": "js"}),
        ("FG-A-tv", {"divergence": "tv"}),
        ("FG-A-gamma", {"divergence": "reverse_kl", "gamma": 1.0}),
        ("FG-A-notetoken", {"divergence": "pearson", "level": "token"}),
    ],
)
def test_f_grpo_has_the_published_loss_and_coefficients(vector, options, dtype, within):
    result = build_objective("f_grpo", **UNIT, **options)(fixture_batch("FIX_A", dtype=dtype))
    assert_vector(vector, result, "FIX_A", within)


@PRECISIONS
def test_at_the_reference_f_grpo_is_the_policy_gradient_scaled_by_its_slope(dtype, within):
    result = build_objective("f_grpo", divergence="js", **UNIT)(fixture_batch("FIX_A", new="ref", dtype=dtype))
    assert_vector("FG-A-ref", result, "FIX_A", within)


@PRECISIONS
@pytest.mark.parametrize(
    ("vector", "lambda_offline", "rows"),
    [("FDO-A-js", 1.0, "both"), ("FDO-A-js", 1.0, "pair"), ("FHAL-A-js", 0.5, "both"), ("FG-A-js", 0.0, "both")],
)
def test_f_hal_has_the_published_loss_and_coefficients(vector, lambda_offline, rows, dtype, within):
    """The same two sequences as a group and as an offline pair; their coefficients add up."""
    batch = fixture_batch("FIX_A", dtype=dtype, rollout_logprobs=None)
    twice = batch.select([0, 1, 0, 1] if rows == "both" else [0, 1])
    offline = torch.tensor([False, False, True, True] if rows == "both" else [True, True])
    batch = replace(twice, offline=offline, group_ids=offline.long())
    result = build_objective("f_hal", divergence="js", lambda_offline=lambda_offline, **UNIT)(batch)
    together = result.coefficients.reshape(-1, 2, 3).sum(dim=0)
    assert_vector(vector, replace(result, coefficients=together), "FIX_A", within)


def test_importance_weights_are_normalised_within_each_side_of_the_mean():
    given = VECTORS["FG-B-w"]["inputs"]
    rewards = torch.tensor(VECTORS["FIX_B"]["inputs"]["rewards"], dtype=torch.float64)
    above = torch.tensor(given["a"], dtype=torch.float64) > 0
    weights = self_normalised_weights(rewards, torch.tensor(given["logpi_old"], dtype=torch.float64), above.long())
    assert torch.where(above, weights, 0.0).tolist() == pytest.approx(VECTORS["FG-B-w"]["expected"]["w_plus"], abs=1e-9)
    minus = torch.where(above, 0.0, weights).tolist()
    assert minus == pytest.approx(VECTORS["FG-B-w"]["expected"]["w_minus"], abs=1e-9)


def test_importance_weights_of_whole_sequences_collapse_on_the_unlikeliest():
    given = VECTORS["FG-w-collapse"]["inputs"]
    rewards, logprobs = (torch.tensor(given[name], dtype=torch.float64) for name in ("rewards", "logpi_old"))
    weights = self_normalised_weights(rewards, logprobs, torch.ones(2, dtype=torch.int64))
    assert weights.tolist() == pytest.approx(VECTORS["FG-w-collapse"]["expected"]["w_plus"], rel=1e-9)
    tempered = self_normalised_weights(rewards, logprobs / 100.0, torch.ones(2, dtype=torch.int64))
    assert tempered.tolist() == pytest.approx([1 / (1 + math.exp(0.4)), 1 / (1 + math.exp(-0.4))])


def test_the_papers_weights_multiply_the_coefficients():
    plain = build_objective("f_grpo", kappa=1.0)(fixture_batch("FIX_B")).coefficients
    weighted = build_objective("f_grpo", kappa=1.0, weights="snis_paper")(fixture_batch("FIX_B")).coefficients
    expected = VECTORS["FG-B-w"]["expected"]
    weights = torch.tensor([expected["w_plus"][0], *expected["w_minus"][1:]], dtype=torch.float64)
    torch.testing.assert_close(weighted, plain * weights[:, None], rtol=1e-9, atol=1e-12)


def test_tempered_weights_are_capped_per_side():
    """Seven good completions of one token; the rarest would take nearly all the weight of their side."""
    logprobs = [[-9.0]] + [[-1.0]] * 6 + [[-1.0]]
    batch = ObjectiveBatch.from_lists(
        logprobs=logprobs,
        reference_logprobs=logprobs,
        rewards=[1.0] * 7 + [0.0],
        group_ids=[0] * 8,
        dtype=torch.float64,
    )
    options = {"divergence": "js", "kappa": 1.0}
    plain = build_objective("f_grpo", **options)(batch).coefficients[:, 0]
    capped = build_objective("f_grpo", **options, weights="snis")(batch).coefficients[:, 0]
    free = build_objective("f_grpo", **options, weights="snis", weight_cap=100.0)(batch).coefficients[:, 0]
    assert (capped / plain)[0].item() == pytest.approx(4 / 7)
    assert (free / plain)[0].item() == pytest.approx(math.exp(8) / (math.exp(8) + 6))
    assert (capped / plain)[7].item() == pytest.approx(1.0)


def test_weights_couple_the_group_and_read_the_policy_of_the_start():
    plain, weighted = build_objective("f_grpo"), build_objective("f_grpo", weights="snis")
    assert (plain.coupling, plain.needs) == ("completion", {"reference"})
    assert (weighted.coupling, weighted.needs) == ("group", {"reference", "old"})
    assert build_objective("f_grpo", gamma=1.0).needs == {"reference", "old"}
    assert build_objective("f_grpo", correction="sequence_mask").needs == {"reference", "old", "rollout"}
    with pytest.raises(ValueError, match="weights: snis needs rewards"):
        weighted(replace(fixture_batch("FIX_B", advantages=[1.0, -1.0, 0.0, 0.5]), rewards=None))


def test_kappa_defaults_to_the_factor_of_the_algorithm():
    by_default = build_objective("f_grpo", beta=0.1)(fixture_batch("FIX_B")).coefficients
    by_hand = build_objective("f_grpo", beta=0.1, kappa=11.0)(fixture_batch("FIX_B")).coefficients
    assert torch.equal(by_default, by_hand)


def test_on_policy_the_released_code_and_the_algorithm_agree():
    """gamma 1 with kappa 1 has the gradient of gamma 0 with kappa 1 + 1/beta, where the policy is still the old one."""
    batch = fixture_batch("FIX_B", old_logprobs=None)
    algorithm = build_objective("f_grpo", divergence="hellinger")(batch).coefficients
    code = build_objective("f_grpo", divergence="hellinger", gamma=1.0, kappa=1.0)(batch).coefficients
    torch.testing.assert_close(code, algorithm)


def test_a_mean_over_prompts_gives_small_groups_the_weight_of_large_ones():
    given = {"reference_logprobs": [[-1.0]] * 5, "logprobs": [[-1.0]] * 5, "group_ids": [0, 0, 1, 1, 1]}
    batch = ObjectiveBatch.from_lists(rewards=[1.0, 0.0, 1.0, 0.0, None], **given, dtype=torch.float64)
    same = build_objective("f_grpo", **UNIT)(batch).coefficients[:, 0]
    assert same.tolist() == pytest.approx([-0.025, 0.025, -0.025, 0.025, 0.0])
    batch = ObjectiveBatch.from_lists(rewards=[1.0, 0.0, 1.0, 0.0, 0.5], **given, dtype=torch.float64)
    larger = build_objective("f_grpo", **UNIT)(batch).coefficients[:, 0]
    assert larger.tolist() == pytest.approx([-0.025, 0.025, *(1.5**0.5 * value / 6 for value in (-0.1, 0.1)), 0.0])


@pytest.mark.parametrize("divergence", ["js", "reverse_kl"])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_f_grpo_can_be_cut_anywhere(divergence, level):
    case = random_case(21)
    objective = build_objective("f_grpo", divergence=divergence, level=level)
    whole = objective(case.batch())
    plan = objective.prepare(case.batch().step_rows())
    batch = case.batch(advantages=list(plan.advantages), denominators=plan.denominators)
    keys = list(dict.fromkeys(zip(case.group_ids, case.trajectory_ids, strict=True)))
    of_key = [keys.index(key) for key in zip(case.group_ids, case.trajectory_ids, strict=True)]
    together = torch.zeros_like(whole.coefficients)
    loss = 0.0
    for part in range(3):
        rows = [row for row, key in enumerate(of_key) if key % 3 == part]
        piece = objective(batch.select(rows))
        together[rows] = piece.coefficients
        loss += piece.loss
    torch.testing.assert_close(together, whole.coefficients, rtol=1e-12, atol=1e-14)
    assert loss == pytest.approx(whole.loss)


def test_weights_of_tokens_act_on_the_gradient_alone():
    batch = fixture_batch("FIX_A")
    plain = build_objective("f_grpo", **UNIT)(batch)
    corrected = build_objective("f_grpo", correction="token_tis", **UNIT)(batch)
    ratios = torch.exp(batch.old_logprobs - batch.rollout_logprobs).clamp(max=2.0)
    assert corrected.loss == pytest.approx(plain.loss)
    torch.testing.assert_close(corrected.coefficients, plain.coefficients * ratios * batch.mask)


@pytest.mark.parametrize(
    ("correction", "weight"),
    [
        ("sequence_tis", lambda product: min(product, 1.05)),
        ("sequence_mask", lambda product: product * (product <= 1.05)),
    ],
)
def test_weights_of_sequences_multiply_the_loss(correction, weight):
    batch = fixture_batch("FIX_A")
    plain = build_objective("f_grpo", **UNIT)(batch).coefficients
    corrected = build_objective("f_grpo", **UNIT, correction=correction, correction_high=1.05)(batch).coefficients
    products = torch.exp(((batch.old_logprobs - batch.rollout_logprobs) * batch.mask).sum(dim=1)).tolist()
    assert products == pytest.approx([math.exp(0.02), math.exp(0.08)])
    weights = torch.tensor([weight(product) for product in products], dtype=torch.float64)
    torch.testing.assert_close(corrected, plain * weights[:, None])


def test_implicit_rewards_out_of_range_are_finite_and_counted():
    batch = ObjectiveBatch.from_lists(
        logprobs=[[-900.0], [-1.0]],
        reference_logprobs=[[-1.0], [-900.0]],
        rewards=[1.0, 0.0],
        group_ids=[0, 0],
    )
    result = build_objective("f_grpo", divergence="hellinger", kappa=1.0)(batch)
    assert math.isfinite(result.loss)
    steepest = slope(find_divergence("hellinger").negative, torch.tensor([10.0], dtype=torch.float64)).item()
    assert result.coefficients[1, 0].item() == pytest.approx(0.1 * 2**-0.5 * steepest / 2, rel=1e-4)
    assert result.metrics["tangent_share"] == 1.0
    assert result.metrics["implicit_reward_abs_max"] == pytest.approx(89.9, rel=1e-5)
    assert build_objective("f_grpo", divergence="js")(batch).metrics["tangent_share"] == 0.0


def test_further_passes_need_the_policy_of_the_start():
    build_objective("f_grpo").check_passes(1, 4)
    build_objective("f_grpo", gamma=1.0).check_passes(3, 1)
    for name in ("f_grpo", "f_hal"):
        with pytest.raises(ConfigError, match=rf"learner\.epochs_per_step: 2: {name} with gamma 0"):
            build_objective(name).check_passes(2, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "pearsonn"}, "unknown divergence 'pearsonn'; did you mean 'pearson'"),
        ({"correction": "bypass"}, "correction: bypass: it has no clipped ratio"),
        ({"beta": 0.0}, r"objective\.beta"),
        ({"kappa": 0.0}, r"objective\.kappa"),
        ({"aggregation": "token_mean"}, "level chooses"),
    ],
)
def test_what_f_grpo_cannot_do_is_refused(options, message):
    for name in ("f_grpo", "f_hal"):
        with pytest.raises(ConfigError, match=message):
            build_objective(name, **options)


def test_offline_rows_without_a_use_for_them_are_refused():
    batch = fixture_batch("FIX_A", offline=[True, True])
    with pytest.raises(ValueError, match="grpo learns from no offline pairs"):
        build_objective("grpo")(batch)


def test_offline_pairs_touch_neither_groups_nor_kl_nor_metrics():
    """FIX_A as a pair beside the groups of a random case."""
    case = random_case(5)
    given = VECTORS["FIX_A"]["inputs"]
    options = {"divergence": "js", "lambda_offline": 0.25, "kl_coefficient": 0.1, "correction": "token_tis"}
    mixed = case.batch()
    pair = case.batch(
        logprobs=case.logprobs + given["new"],
        old_logprobs=case.old + given["old"],
        reference_logprobs=case.reference + given["ref"],
        rollout_logprobs=case.rollout + [[math.nan] * len(row) for row in given["new"]],
        loss_mask=case.mask + [[True] * len(row) for row in given["new"]],
        rewards=[*case.rewards, 1.0, 0.0],
        group_ids=[*case.group_ids, -1, -1],
        trajectory_ids=[*case.trajectory_ids, 0, 1],
        offline=[False] * len(case.rewards) + [True, True],
    )
    alone = build_objective("f_hal", **options)(mixed)
    both = build_objective("f_hal", **options)(pair)
    own, width = len(case.rewards), alone.coefficients.shape[1]
    torch.testing.assert_close(both.coefficients[:own, :width], alone.coefficients)
    pair_only = fixture_batch("FIX_A", offline=[True, True])
    of_pair = build_objective("f_hal", divergence="js", lambda_offline=0.25)(pair_only)
    torch.testing.assert_close(both.coefficients[own:, :3], of_pair.coefficients)
    assert both.loss == pytest.approx(alone.loss + of_pair.loss)
    assert both.metrics == pytest.approx(alone.metrics | {"offline_margin": 0.05})


def test_a_pair_whose_rewards_do_not_say_which_was_chosen_takes_no_part():
    for rewards in ([1.0, 1.0], [1.0, None]):
        result = build_objective("f_hal")(fixture_batch("FIX_A", offline=[True, True], rewards=rewards))
        assert result.loss == 0.0
        assert not result.coefficients.any()


def test_an_objective_with_a_users_divergence_travels_between_processes(tmp_path):
    path = tmp_path / "curves.py"
    path.write_text(
        "from learner.divergences import Divergence\n"
        "flat = Divergence('flat', positive_loss=lambda r: -r, negative_loss=lambda r: r)\n"
    )
    objective = build_objective("f_grpo", divergence=f"{path}:flat")
    copy = pickle.loads(pickle.dumps(objective))
    assert torch.equal(copy(fixture_batch("FIX_B")).coefficients, objective(fixture_batch("FIX_B")).coefficients)
