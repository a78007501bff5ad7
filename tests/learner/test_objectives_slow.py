"""What holds for every objective whatever its options: a slow loop, finite differences, any cut, and no NaN.

A new objective joins by its entries in ``SLOW`` (objective_slow.py, objective_slow_groups.py) and ``OWN_OPTIONS``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from learner.kl import reward_kl
from learner.objectives import build_objective, objective_class, objective_names
from tests.learner import objective_slow, objective_slow_groups
from tests.learner.objective_cases import Case, random_case, rows_of, wild_case

SLOW = objective_slow.SLOW | objective_slow_groups.SLOW_GROUPS
SEEDS = st.integers(0, 100_000)
CLIPS = {
    "clip_low": st.sampled_from([None, 0.1, 0.2]),
    "clip_high": st.sampled_from([None, 0.2, 0.28]),
}
AGGREGATED = {"aggregation": st.sampled_from(["token_mean", "sequence_mean_token_mean", "sequence_sum"])}
PPO = CLIPS | AGGREGATED | {"dual_clip": st.sampled_from([None, 1.5, 3.0])}
F_GRPO = {
    "divergence": st.sampled_from(sorted(objective_slow_groups.CURVES)),
    "kappa": st.sampled_from([None, 1.0]),
    "gamma": st.sampled_from([0.0, 0.5]),
    "level": st.sampled_from(["sequence", "token"]),
    "weights": st.sampled_from(["none", "snis", "snis_paper"]),
    "weight_cap": st.sampled_from([0.5, 4.0]),
}
ANCHORED = {"anchor": st.sampled_from(["old", "reference"]), "beta": st.sampled_from([0.1, 1.0])}
OWN_OPTIONS = {
    "grpo": PPO,
    "two_grpo": PPO,
    "dr_grpo": CLIPS | {"max_tokens": st.sampled_from([7, 40])},
    "dapo": PPO,
    "rloo": AGGREGATED,
    "reinforce_pp": PPO | {"unbiased_variance": st.booleans()},
    "gspo": CLIPS,
    "cispo": CLIPS | AGGREGATED,
    "sapo": AGGREGATED | {"tau_positive": st.sampled_from([0.5, 1.0]), "tau_negative": st.sampled_from([1.05, 2.0])},
    "f_grpo": F_GRPO,
    "f_hal": F_GRPO | {"lambda_offline": st.sampled_from([0.0, 0.5])},
    "gift": ANCHORED
    | {"statistics": st.sampled_from(["detached", "graph"]), "std_floor": st.sampled_from([0.0, 0.5, 3.0])},
    "gvpo": ANCHORED,
    "online_dpo": {"beta": st.sampled_from([0.1, 1.0])},
    "ipo": {"beta": st.sampled_from([0.1, 1.0])},
    "opd": PPO | {"level": st.sampled_from(["token", "sequence"]), "reward_weight": st.sampled_from([0.0, 0.5])},
}
"""Options of each objective's own; those of all are drawn for every one of them."""
LEARNS_FROM_EQUAL_REWARDS = {"opd"}
ALWAYS_DETACHED = {"cispo", "gvpo"}
"""Their loss is not the integral of their coefficients: a ratio as weight, a group's mean."""
BOUNDS = {
    "token_tis": {"correction_high": 1.05},
    "icepop": {"correction_low": 0.9, "correction_high": 1.1},
    "sequence_tis": {"correction_high": 1.1},
    "sequence_mask": {"correction_low": 0.8, "correction_high": 1.25},
    "geometric_mask": {"correction_low": 0.97, "correction_high": 1.03},
    "k3_mask": {"correction_high": 0.002},
    "opsm": {"correction_high": 0.05},
}
CORRECTIONS = ["none", "decoupled", "bypass", *BOUNDS]


@st.composite
def objective_options(draw, name):
    """Options that go together, of those that all objectives have and of the objective's own."""
    options = {key: draw(values) for key, values in OWN_OPTIONS.get(name, {}).items()}
    available = objective_class(name).Options
    options["eps"] = draw(st.sampled_from([0.0, 1e-6, 1e-2]))
    options["ddof"] = draw(st.sampled_from([0, 1]))
    options["zero_variance"] = draw(st.sampled_from(["keep", "drop", "refill", "as_is"]))
    correction = draw(st.sampled_from([each for each in CORRECTIONS if each not in available.refused_corrections]))
    options |= {"correction": correction} | BOUNDS.get(correction, {})
    if correction in ("sequence_mask", "geometric_mask", "k3_mask", "opsm"):
        options["lone_responses"] = draw(st.sampled_from(["keep", "drop"]))
    options["denominator"] = draw(st.sampled_from(["kept_all", "survivors"]))
    if draw(st.booleans()):
        where = draw(st.sampled_from(["loss", "reward"]))
        estimators = ["k2", "k3", "k3_weighted"] + (["k1"] if where == "reward" else [])
        options |= {"kl_coefficient": 0.04, "kl_where": where, "kl_estimator": draw(st.sampled_from(estimators))}
    return options


@st.composite
def shaping_options(draw):
    """Advantages and shaping of rewards; the objective itself does not matter here."""
    advantage = draw(st.sampled_from(["group_zscore", "group_mean", "leave_one_out", "soft_margin", "probit"]))
    options = {"advantage": advantage}
    if advantage == "group_zscore":
        options["reward_std_floor"] = draw(st.sampled_from([0.0, 0.1]))
    if advantage == "soft_margin":
        options["reward_temperature"] = 0.2
    if advantage == "probit":
        options["reward_noise"] = 0.1
    if draw(st.booleans()):
        options["margin"] = draw(st.sampled_from([0.155, 0.805]))
    if draw(st.booleans()):
        options |= {"overlong_max_tokens": 8, "overlong_cache_tokens": draw(st.sampled_from([3, 8]))}
    return options


def assert_equals_the_slow_loop(name, case: Case, options):
    objective = build_objective(name, **options)
    result = objective(case.batch())
    loss, gradient = SLOW[name](case, objective.settings.model_dump())
    scale = max(1.0, abs(loss), *(abs(value) for row in gradient for value in row))
    ratios = [
        objective_slow.bounded(old - mu)[0]
        for rows in zip(case.old, case.rollout, strict=True)
        for old, mu in zip(*rows, strict=True)
    ]
    rounding = 1e-15 * max(ratios, default=1.0)  # a correction without a cap multiplies it by as much as e^20
    assert result.loss == pytest.approx(loss, rel=1e-9, abs=max(1e-10, rounding) * scale)
    for row, expected in zip(rows_of(result.coefficients, gradient), gradient, strict=True):
        assert row == pytest.approx(expected, rel=1e-9, abs=max(1e-12, rounding) * scale)


def test_every_objective_has_a_slow_loop():
    assert set(objective_names()) <= set(SLOW)


@pytest.mark.parametrize("name", sorted(SLOW))
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_every_objective_equals_its_slow_loop(name, data, seed):
    options = data.draw(objective_options(name))
    assert_equals_the_slow_loop(name, data.draw(st.sampled_from([random_case, wild_case]))(seed), options)


@given(shaping=shaping_options(), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_shaped_rewards_and_soft_advantages_equal_their_slow_loop(shaping, seed):
    assert_equals_the_slow_loop("grpo", wild_case(seed), shaping)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", objective_names())
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=15, deadline=None)
def test_nothing_is_ever_nan_and_nothing_moves_under_the_mask(name, dtype, data, seed):
    options = data.draw(objective_options(name))
    case = wild_case(seed)
    batch = case.batch(dtype)
    result = build_objective(name, **options)(batch)
    assert math.isfinite(result.loss)
    assert result.coefficients.isfinite().all()
    unscored = torch.tensor([reward is None for reward in case.rewards])
    assert not result.coefficients[~batch.mask | unscored[:, None]].any()
    assert all(math.isfinite(value) for value in result.metrics.values())


@pytest.mark.parametrize("zero_variance", ["keep", "drop", "refill"])
@pytest.mark.parametrize("name", sorted(set(objective_names()) - LEARNS_FROM_EQUAL_REWARDS))
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=10, deadline=None)
def test_a_group_without_signal_has_no_gradient(name, zero_variance, data, seed):
    own = {key: data.draw(values) for key, values in OWN_OPTIONS.get(name, {}).items()}
    case = wild_case(seed)
    case.rewards = [None if reward is None else 0.25 for reward in case.rewards]
    result = build_objective(name, zero_variance=zero_variance, **own)(case.batch())
    assert not result.coefficients.any()


def has_detached_part(name, options):
    """The same of options: weights of tokens on a curve of sequences, statistics of a group."""
    if name in ("f_grpo", "f_hal"):
        by_token = options["correction"] in ("token_tis", "icepop", "decoupled")
        return by_token and options["level"] == "sequence"
    return name == "gift" and options["statistics"] == "detached"


@pytest.mark.parametrize("name", sorted(set(objective_names()) - ALWAYS_DETACHED))
@given(data=st.data(), seed=SEEDS)
@settings(max_examples=8, deadline=None)
def test_coefficients_are_the_finite_differences_of_the_loss(name, data, seed):
    case = random_case(seed, groups=2, group_size=3, longest=3)
    options = data.draw(objective_options(name))
    assume(not has_detached_part(name, options))
    objective = build_objective(name, **options)
    batch = case.batch()
    coefficients = objective(batch).coefficients
    step = 1e-6
    for row, values in enumerate(case.logprobs):
        for token in range(len(values)):
            moved = []
            for sign in (1, -1):
                logprobs = batch.logprobs.clone()
                logprobs[row, token] += sign * step
                moved.append(objective(replace(batch, logprobs=logprobs)).loss)
            slope = (moved[0] - moved[1]) / (2 * step)
            assert coefficients[row, token].item() == pytest.approx(slope, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("name", objective_names())
@given(data=st.data(), seed=SEEDS, parts=st.sampled_from([2, 4]))
@settings(max_examples=12, deadline=None)
def test_cutting_a_step_into_micro_batches_changes_nothing(name, data, seed, parts):
    objective = build_objective(name, **data.draw(objective_options(name)))
    case = random_case(seed)
    whole = objective(case.batch())
    plan = objective.prepare(_step_rows(objective, case))
    counts = plan.denominators
    if objective.settings.denominator == "survivors":
        counts = objective.surviving(case.batch(advantages=list(plan.advantages)))
    batch = case.batch(advantages=list(plan.advantages), denominators=counts)
    unit = (
        case.group_ids if objective.coupling == "group" else list(zip(case.group_ids, case.trajectory_ids, strict=True))
    )
    order = sorted(set(unit))
    pieces = [[row for row in range(len(batch)) if order.index(unit[row]) % parts == part] for part in range(parts)]
    results = [objective(batch.select(rows)) for rows in pieces]
    assert math.fsum(result.loss for result in results) == pytest.approx(whole.loss, rel=1e-9, abs=1e-12)
    together = torch.zeros_like(whole.coefficients)
    for rows, result in zip(pieces, results, strict=True):
        together[rows] = result.coefficients
    torch.testing.assert_close(together, whole.coefficients, rtol=1e-9, atol=1e-12)
    combined = sum((result.sums for result in results), plan.sums).means()
    assert combined == pytest.approx(whole.metrics, rel=1e-9)


def _step_rows(objective, case):
    batch = case.batch()
    if not objective.settings.has_kl_in_reward:
        return batch.step_rows()
    estimator = objective.settings.kl_estimator
    return batch.step_rows(reward_kl(batch.old_logprobs, batch.reference_logprobs, batch.mask, estimator))
