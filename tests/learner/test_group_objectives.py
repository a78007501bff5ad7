"""GIFT, GVPO, online DPO and IPO: the published vectors, degenerate groups, masks and pairs."""

from __future__ import annotations

import math

import pytest
import torch

from learner.objectives import ObjectiveBatch, build_objective
from system.core.errors import ConfigError
from tests.learner.objective_cases import VECTORS, fixture_batch, rows_of

PRECISIONS = pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
PAPER = {"anchor": "reference", "std_floor": 0.0}
ALL = ("gift", "gvpo", "online_dpo", "ipo")
DEFAULTS = {
    "f_grpo": {
        "advantage": "group_zscore", "level": "sequence", "divergence": "pearson", "beta": 0.1, "kappa": None,
        "gamma": 0.0, "weights": "none",
    },
    "f_hal": {"lambda_offline": 0.5, "divergence": "pearson", "beta": 0.1},
    "gift": {"advantage": "group_zscore", "beta": 1.0, "anchor": "old", "statistics": "detached", "std_floor": 0.5},
    "gvpo": {"advantage": "group_mean", "beta": 0.1, "anchor": "old"},
    "online_dpo": {"beta": 0.1},
    "ipo": {"beta": 0.1},
    "opd": {
        "aggregation": "token_mean", "clip_low": None, "clip_high": None, "dual_clip": None, "level": "token",
        "reward_weight": 0.0,
    },
}  # fmt: skip


@PRECISIONS
@pytest.mark.parametrize(
    ("vector", "name", "options"),
    [
        ("GI-B-official", "gift", {"std_floor": 0.0}),
        ("GI-B-ref-detach", "gift", PAPER),
        ("GI-B-note", "gift", PAPER | {"statistics": "graph", "eps": 1e-8}),
        ("GI-B-step0", "gift", {"std_floor": 0.0}),
        ("GI-B-step0-floor1", "gift", {"std_floor": 1.0}),
        ("GI-B-floor1", "gift", {"anchor": "reference", "std_floor": 1.0}),
        ("GI-A-G2", "gift", PAPER | {"statistics": "graph", "eps": 0.0}),
        ("GI-A-G2-wrong", "gift", PAPER | {"statistics": "graph", "eps": 0.0}),
        ("GI-B-zerovar", "gift", PAPER | {"zero_variance": "as_is"}),
        ("GV-B", "gvpo", {}),
        ("DP-A", "online_dpo", {}),
        ("DP-A-ref", "online_dpo", {}),
        ("IP-A", "ipo", {}),
    ],
)
def test_loss_and_coefficients_are_the_published_ones(vector, name, options, dtype, within):
    given, expected = VECTORS[vector]["inputs"], VECTORS[vector]["expected"]
    changes = {"rewards": given["rewards"]} if "rewards" in given else {}
    batch = fixture_batch(given["fixture"], new=given.get("new", "new"), dtype=dtype, **changes)
    result = build_objective(name, **options)(batch)
    assert result.loss == pytest.approx(expected["loss"], abs=within, rel=within)
    rows = rows_of(result.coefficients, VECTORS[given["fixture"]]["inputs"]["new"])
    for row, values in zip(rows, expected["grad_logp"], strict=True):
        assert row == pytest.approx(values, abs=within, rel=within)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_those_of_the_contract(name):
    common = {"ddof": 1, "eps": 1e-6, "zero_variance": "keep", "kl_coefficient": 0.0, "kl_estimator": "k3"}
    common |= {"kl_where": "loss", "correction": "none", "denominator": "kept_all"}
    settings = build_objective(name).settings.model_dump()
    assert {key: settings[key] for key in common | DEFAULTS[name]} == common | DEFAULTS[name]


def of_log_ratios(log_ratios: list[float], rewards: list[float | None], **changes) -> ObjectiveBatch:
    """One group of completions of one token each, the log-ratio to every anchor given."""
    arguments = {
        "logprobs": [[value - 5.0] for value in log_ratios],
        "old_logprobs": [[-5.0]] * len(log_ratios),
        "reference_logprobs": [[-5.0]] * len(log_ratios),
        "rewards": rewards,
        "group_ids": [0] * len(log_ratios),
        "dtype": torch.float64,
    }
    return ObjectiveBatch.from_lists(**(arguments | changes))


def test_gift_with_statistics_in_the_graph_cannot_move_a_pair():
    batch = of_log_ratios([-3.0, 2.0], [1.0, 0.0])
    dead = build_objective("gift", statistics="graph", std_floor=0.0)(batch)
    assert dead.loss == pytest.approx(2.0, rel=1e-5)
    assert dead.coefficients.abs().max() < 1e-5
    alive = build_objective("gift")(batch)
    assert alive.coefficients[0, 0] < -0.1


def test_the_floor_bounds_the_first_gradient_of_gift():
    batch = of_log_ratios([0.0, 0.0], [1.0, 0.0])
    coefficient = build_objective("gift")(batch).coefficients[0, 0].item()
    assert coefficient == pytest.approx(-math.sqrt(0.5) / 0.5, rel=1e-5)
    assert build_objective("gift")(batch).metrics["std_floor_share"] == 1.0
    steep = build_objective("gift", std_floor=0.0, eps=0.0)(batch)
    assert steep.coefficients.isfinite().all()
    assert math.isfinite(steep.loss)


def test_gift_at_its_optimum_spreads_a_group_by_the_floor():
    """Below the floor the loss is a regression of D - mean on std_floor / beta x A."""
    zscores = [math.sqrt(0.5), -math.sqrt(0.5)]
    batch = of_log_ratios([0.3 * value for value in zscores], [1.0, 0.0])
    result = build_objective("gift", std_floor=0.6, beta=2.0, eps=0.0)(batch)
    assert result.loss == pytest.approx(0.0, abs=1e-12)
    assert result.metrics["group_log_ratio_std"] == pytest.approx(0.3)


def test_one_lost_completion_does_not_hide_the_others_from_gift():
    """Log-ratios are clamped to +-50 for the statistics, so that a spread of thousands is not the group's scale."""
    result = build_objective("gift")(of_log_ratios([0.0, 0.1, -5000.0], [1.0, 0.0, 0.5]))
    assert result.metrics["group_log_ratio_std"] < 30.0
    assert result.coefficients.isfinite().all()


@pytest.mark.parametrize("name", ["gift", "gvpo"])
def test_groups_of_equal_rewards_are_counted_and_not_regressed_unless_asked(name):
    changes = {"group_ids": [0, 0, 1, 1]}
    batch = of_log_ratios([0.3, -0.2, 0.4, 0.1], [1.0, 0.0, 0.5, 0.5], **changes)
    alone = build_objective(name)(of_log_ratios([0.3, -0.2], [1.0, 0.0]))
    kept = build_objective(name)(batch)
    torch.testing.assert_close(kept.coefficients[:2], alone.coefficients / 2)
    assert not kept.coefficients[2:].any()
    dropped = build_objective(name, zero_variance="drop")(batch)
    torch.testing.assert_close(dropped.coefficients[:2], alone.coefficients)
    as_is = build_objective(name, zero_variance="as_is")(batch).coefficients
    assert as_is[2, 0] > 0.0 > as_is[3, 0]


@pytest.mark.parametrize("name", ["gift", "gvpo"])
def test_survivors_of_a_mask_are_regressed_among_themselves(name):
    """The third completion drifted 3 nats from its sampler; the others form a group of their own, count kept."""
    ratios, rewards = [0.3, -0.2, 0.1], [1.0, 0.0, 0.7]
    rollout = [[-5.0], [-5.0], [-8.0]]
    options = {"correction": "sequence_mask"}
    masked = build_objective(name, **options)(of_log_ratios(ratios, rewards, rollout_logprobs=rollout))
    alone = build_objective(name)(of_log_ratios(ratios[:2], rewards[:2]))
    share = 2 / 3 if name == "gift" else 1.0
    torch.testing.assert_close(masked.coefficients[:2], share * alone.coefficients)
    assert masked.coefficients[2, 0] == 0.0
    pair = of_log_ratios(ratios[1:], rewards[1:], rollout_logprobs=rollout[1:])
    assert not build_objective(name, **options)(pair).coefficients.any()
    survivors = build_objective(name, **options, denominator="survivors")
    counted = survivors(of_log_ratios(ratios, rewards, rollout_logprobs=rollout))
    torch.testing.assert_close(counted.coefficients[:2], alone.coefficients)


@pytest.mark.parametrize("name", ["online_dpo", "ipo"])
def test_the_best_is_preferred_to_the_worst_and_the_middle_is_left_alone(name):
    batch = of_log_ratios([0.3, -0.2, 0.1, 0.5], [0.2, 1.0, 0.0, None])
    pair = build_objective(name)(of_log_ratios([-0.2, 0.1], [1.0, 0.0]))
    result = build_objective(name)(batch)
    torch.testing.assert_close(result.coefficients[1:3], pair.coefficients)
    assert result.coefficients[0, 0] == result.coefficients[3, 0] == 0.0
    assert result.metrics["preference_accuracy"] == 0.0
    assert result.metrics["margin_mean"] == pytest.approx(-0.03)


@pytest.mark.parametrize("name", ["online_dpo", "ipo"])
@pytest.mark.parametrize("zero_variance", ["keep", "as_is"])
def test_ties_have_no_preference(name, zero_variance):
    result = build_objective(name, zero_variance=zero_variance)(of_log_ratios([0.3, -0.2], [0.5, 0.5]))
    assert result.loss == 0.0
    assert not result.coefficients.any()


@pytest.mark.parametrize("name", ["online_dpo", "ipo"])
def test_a_pair_is_weighed_by_both_of_its_completions(name):
    rollout = [[-5.1], [-5.3]]
    batch = of_log_ratios([0.3, -0.2], [1.0, 0.0], rollout_logprobs=rollout)
    plain = build_objective(name)(batch).coefficients
    weighed = build_objective(name, correction="sequence_tis", correction_high=1.2)(batch).coefficients
    torch.testing.assert_close(weighed, plain * math.exp(0.1) * 1.2)
    masked = build_objective(name, correction="sequence_mask", correction_high=1.2)(batch)
    assert not masked.coefficients.any()


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        ("gift", {}, {"old"}),
        ("gift", {"anchor": "reference"}, {"reference"}),
        ("gvpo", {}, {"old"}),
        ("online_dpo", {}, {"reference"}),
        ("ipo", {}, {"reference"}),
        ("ipo", {"correction": "sequence_tis"}, {"reference", "old", "rollout"}),
        ("gift", {"anchor": "reference", "correction": "k3_mask"}, {"reference", "old", "rollout"}),
    ],
)
def test_needs_name_the_anchor_and_nothing_else(name, options, needs):
    objective = build_objective(name, **options)
    assert objective.needs == needs
    assert (objective.coupling, objective.unit) == ("group", "group")


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("correction", ["decoupled", "token_tis", "icepop", "bypass"])
def test_weights_of_tokens_do_not_fit_losses_of_sequences(name, correction):
    with pytest.raises(ConfigError, match=rf"correction: {correction}: .*(use|anchor)"):
        build_objective(name, correction=correction)


def test_weights_do_not_fit_group_statistics():
    for name in ("gift", "gvpo"):
        with pytest.raises(ConfigError, match="weights inside group statistics are ill-defined; use sequence_mask"):
            build_objective(name, correction="sequence_tis")


@pytest.mark.parametrize(("name", "most"), [("gift", 1), ("gvpo", 1), ("online_dpo", 2), ("ipo", 2)])
def test_more_passes_than_the_loss_bears_are_refused(name, most):
    objective = build_objective(name)
    objective.check_passes(most, 4)
    with pytest.raises(ConfigError, match=rf"learner\.epochs_per_step: {most + 1}: {name}"):
        objective.check_passes(most + 1, 1)
