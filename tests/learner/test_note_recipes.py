"""``recipes/note``: each is the note's own form, held against a loop written from the note."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pytest

from learner.objectives import ObjectiveBatch
from system.recipe import build_objective_of, load_recipe
from tests.learner.objective_cases import Case, random_case, rows_of

FOLDER = Path(__file__).parents[2] / "recipes" / "note"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def objective_of(name):
    return build_objective_of(load_recipe(FOLDER / f"{name}.yaml"))


def plain_case(seed, group_size) -> Case:
    """Rows are trajectories, all tokens are trained, all rewards are known."""
    case = random_case(seed, groups=5, group_size=group_size)
    case.trajectory_ids = [index for index, _ in enumerate(case.rewards)]
    case.rewards = [0.5 if reward is None else reward for reward in case.rewards]
    case.mask = [[True] * len(row) for row in case.mask]
    return case


def groups_with_signal(case, size=None):
    groups = {}
    for row, group in enumerate(case.group_ids):
        groups.setdefault(group, []).append(row)
    rewards = case.rewards
    return [
        rows
        for rows in groups.values()
        if max(rewards[row] for row in rows) > min(rewards[row] for row in rows) and size in (None, len(rows))
    ]


def zscores(values, eps=1e-8):
    deviation = statistics.stdev(values) + eps
    return [(value - statistics.mean(values)) / deviation for value in values]


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_can_be_read_and_says_in_a_comment_why_it_is_no_default(name):
    recipe = load_recipe(FOLDER / f"{name}.yaml")
    objective = build_objective_of(recipe)
    assert "reference" in objective.needs
    assert recipe.stream.max_staleness == 0
    assert recipe.run.name == f"note_{name}"
    text = (FOLDER / f"{name}.yaml").read_text()
    assert text.startswith("# ")
    assert "default" in text


@pytest.mark.parametrize("seed", range(6))
def test_two_grpo_is_the_clipped_surrogate_plus_k1(seed):
    case = plain_case(seed, 2)
    rows = [(row, a) for pair in groups_with_signal(case) for row, a in zip(pair, zscores_of(case, pair), strict=True)]
    terms = []
    for row, advantage in rows:
        for new, old, reference in zip(case.logprobs[row], case.old[row], case.reference[row], strict=True):
            ratio = math.exp(new - old)
            surrogate = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
            terms.append(-surrogate + 0.04 * (new - reference))
    result = objective_of("two_grpo")(case.batch(trajectory_ids=case.trajectory_ids))
    assert result.loss == pytest.approx(math.fsum(terms) / max(len(terms), 1), rel=1e-9, abs=1e-12)


def zscores_of(case, rows):
    return zscores([case.rewards[row] for row in rows])


CURVES = {
    "f_grpo_pearson": (lambda r: -r, lambda r: r + r**2 / 4),
    "f_grpo_hellinger": (lambda r: -(1 - math.exp(-r)), lambda r: (1 - math.exp(-r)) / math.exp(-r)),
    "f_grpo_reverse_kl": (lambda r: math.exp(-r), lambda r: r - 1),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", sorted(CURVES))
def test_f_grpo_bends_each_token_and_averages_over_all(name, seed):
    case, (good, bad) = plain_case(seed, 4), CURVES[name]
    total, tokens = [], sum(len(row) for row in case.logprobs)
    for rows in groups_with_signal(case):
        for row, advantage in zip(rows, zscores([case.rewards[row] for row in rows], eps=1e-6), strict=True):
            for new, reference in zip(case.logprobs[row], case.reference[row], strict=True):
                implicit = 0.1 * (new - reference)
                total.append(abs(advantage) * (good if advantage > 0 else bad)(implicit))
    result = objective_of(name)(case.batch(trajectory_ids=case.trajectory_ids))
    assert result.loss == pytest.approx(math.fsum(total) / tokens, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_gift_regresses_normalised_log_ratios_on_normalised_rewards_one_prompt_at_a_time(seed):
    case, objective = plain_case(seed, 4), objective_of("gift")
    assert load_recipe(FOLDER / "gift.yaml").learner.minibatches_per_step == 6
    for rows in groups_with_signal(case):
        distances = [sum(case.logprobs[row]) - sum(case.reference[row]) for row in rows]
        rewards = zscores([case.rewards[row] for row in rows])
        loss = statistics.mean((a - b) ** 2 for a, b in zip(zscores(distances), rewards, strict=True))
        result = objective(
            ObjectiveBatch.from_lists(
                logprobs=[case.logprobs[row] for row in rows],
                reference_logprobs=[case.reference[row] for row in rows],
                rewards=[case.rewards[row] for row in rows],
                group_ids=[0] * len(rows),
                dtype=case.batch().logprobs.dtype,
            )
        )
        assert result.loss == pytest.approx(loss, rel=1e-6)
        first = rows_of(result.coefficients, [case.logprobs[row] for row in rows])
        slopes = [row[0] for row in first]
        assert sum(slopes) == pytest.approx(0.0, abs=1e-6)
        assert sum(a * b for a, b in zip(slopes, distances, strict=True)) == pytest.approx(0.0, abs=1e-6)
