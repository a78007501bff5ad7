"""On-policy distillation: the teacher's log-ratio as advantage of each token."""

from __future__ import annotations

import pytest
import torch

from learner.objectives import build_objective
from tests.learner.objective_cases import fixture_batch, random_case


def test_on_policy_a_tokens_coefficient_is_the_teachers_log_ratio_over_all_tokens():
    batch = fixture_batch("FIX_A", old_logprobs=None)
    result = build_objective("opd")(batch)
    expected = -(batch.reference_logprobs - batch.logprobs) / 5 * batch.mask
    torch.testing.assert_close(result.coefficients, expected)
    assert result.metrics["teacher_kl"] == pytest.approx(expected.sum().item())
    assert build_objective("opd").needs == {"reference", "old"}


def test_the_advantage_is_taken_at_the_policy_of_the_start_and_carried_by_the_ratio():
    batch = fixture_batch("FIX_A")
    ratio = torch.exp(batch.logprobs - batch.old_logprobs)
    advantage = batch.reference_logprobs - batch.old_logprobs
    torch.testing.assert_close(build_objective("opd")(batch).coefficients, -ratio * advantage / 5 * batch.mask)
    clipped = build_objective("opd", clip_low=0.05, clip_high=0.05)(batch)
    lost = ((ratio > 1.05) & (advantage > 0)) | ((ratio < 0.95) & (advantage < 0))
    torch.testing.assert_close(clipped.coefficients, (-ratio * advantage / 5 * batch.mask).masked_fill(lost, 0.0))
    assert clipped.metrics["clip_share"] == pytest.approx((lost & batch.mask).sum().item() / 5)


def test_at_sequence_level_every_token_has_the_sum_of_its_completion():
    batch = fixture_batch("FIX_A", old_logprobs=None)
    objective = build_objective("opd", level="sequence")
    sums = ((batch.reference_logprobs - batch.logprobs) * batch.mask).sum(dim=1, keepdim=True)
    torch.testing.assert_close(objective(batch).coefficients, -sums / 5 * batch.mask)
    assert (objective.unit, build_objective("opd").unit) == ("trajectory", "row")


def test_rewards_are_not_needed_and_equal_ones_are_no_reason_to_leave_a_group_out():
    without = build_objective("opd")(fixture_batch("FIX_B", rewards=None))
    equal = build_objective("opd")(fixture_batch("FIX_B", rewards=[0.5] * 4))
    mixed = build_objective("opd")(fixture_batch("FIX_B"))
    assert torch.equal(without.coefficients, equal.coefficients)
    assert torch.equal(without.coefficients, mixed.coefficients)
    with pytest.raises(ValueError, match="opd needs rewards"):
        build_objective("opd", reward_weight=0.5)(fixture_batch("FIX_B", rewards=None))


def test_a_reward_adds_its_group_advantage():
    batch = fixture_batch("FIX_B", old_logprobs=None)
    plain = build_objective("opd")(batch).coefficients
    weighed = build_objective("opd", reward_weight=0.5)(batch).coefficients
    policy_gradient = build_objective("grpo", aggregation="token_mean")(batch).coefficients
    torch.testing.assert_close(weighed, plain + 0.5 * policy_gradient)


@pytest.mark.parametrize("reward_weight", [0.0, 1.0])
def test_a_lone_completion_learns_from_its_teacher(reward_weight):
    batch = fixture_batch("FIX_A", rewards=[1.0, None])
    objective = build_objective("opd", reward_weight=reward_weight)
    result = objective(batch)
    assert result.coefficients[0].all()
    assert not result.coefficients[1].any()
    assert objective.prepare(batch.step_rows()).denominators.tokens == 3


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_distillation_can_be_cut_between_trajectories(level):
    case = random_case(4)
    objective = build_objective("opd", level=level)
    plan = objective.prepare(case.batch().step_rows())
    batch = case.batch(advantages=list(plan.advantages), denominators=plan.denominators)
    whole = objective(batch).coefficients
    for key in set(zip(case.group_ids, case.trajectory_ids, strict=True)):
        keys = zip(case.group_ids, case.trajectory_ids, strict=True)
        rows = [row for row, other in enumerate(keys) if other == key]
        torch.testing.assert_close(objective(batch.select(rows)).coefficients, whole[rows])
