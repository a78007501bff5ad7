"""One learner rank with the real DeepSpeed: gradients, updates, what is left out, checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from learner.deepspeed_engine import NonFiniteError
from learner.objectives import build_objective
from learner.rank import LearnerPlan, LearnerRank
from learner.settings import LearnerSettings
from learner.step import is_silent_at_zero_advantage
from learner.token_batch import ScoredRow
from system.core.errors import CheckpointDamaged, ConfigError
from system.core.model import ModelSettings
from system.core.records import Group
from tests.learner.conftest import coupled_objective, make_groups, make_row
from tests.learner.test_logprobs import plain_logprobs

pytestmark = pytest.mark.engine

Weights = dict[str, torch.Tensor]
OTHER_STAGES = [("float32", 0), ("float32", 2), ("float32", 3), ("bfloat16", 0), ("bfloat16", 1), ("bfloat16", 2)]


def make_rank(
    folder: Path, objective: dict[str, Any] | None = None, dtype: str = "float32", **learner: Any
) -> LearnerRank:
    """Adam's epsilon is large enough that it does not blow up the rounding of gradients near zero."""
    settings = LearnerSettings(**{"learning_rate": 1e-3, "epsilon": 1e-4, "threads": 1, **learner})
    plan = LearnerPlan(
        ModelSettings(path=str(folder), dtype=dtype), settings, objective or {"name": "grpo"}, total_updates=100
    )
    rank = LearnerRank(plan)
    rank.setup()
    return rank


def weights_of(rank: LearnerRank) -> Weights:
    source = rank.weight_source()
    names = [info.name for info in source.parameters()]
    weights = {name: tensor.clone() for name, tensor in zip(names, source.gather(names), strict=True)}
    source.release()
    return weights


def trained(
    folder: Path, groups: list[Group], steps: int = 1, objective: dict[str, Any] | None = None, **learner: Any
) -> Weights:
    rank = make_rank(folder, objective, **learner)
    for step in range(steps):
        rank.step(groups, step, step)
    weights = weights_of(rank)
    rank.close()
    return weights


def assert_same(left: Weights, right: Weights, atol: float = 0.0) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], atol=atol, rtol=0.0, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_the_gradient_is_that_of_the_formula_written_out(tiny_llama):
    """GRPO on-policy: the mean over completions of the mean over tokens of -advantage * logprob."""
    groups = make_groups()
    rank = make_rank(tiny_llama)
    report = rank.step(groups, 0, 0)
    rank.close()
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    rows = [row for group in groups for row in group.rows]
    loss = torch.zeros(())
    for group in groups:
        rewards = np.array([row.reward for row in group.rows])
        for row, advantage in zip(group.rows, (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6), strict=True):
            logprobs = plain_logprobs(model, ScoredRow(row.prompt_tokens, row.completion_tokens), 1.0)
            loss = loss - advantage * logprobs.mean() / len(rows)
            assert report.advantages[row.group_id, row.trajectory_id] == pytest.approx(advantage)
    loss.backward()
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))
    assert report.grad_norm == pytest.approx(norm, rel=1e-4)
    assert report.updates == 1
    assert report.completion_tokens == sum(row.length for row in rows)


@pytest.mark.parametrize(
    "objective", [{"name": "grpo", "kl_coefficient": 0.1}, {"name": "grpo", "aggregation": "token_mean"}]
)
def test_the_update_does_not_depend_on_microbatches_and_padding(tiny_llama, objective):
    groups = make_groups()
    one = trained(tiny_llama, groups, 3, objective, tokens_per_microbatch=100_000)
    many = trained(tiny_llama, groups, 3, objective, tokens_per_microbatch=20)
    assert_same(one, many, atol=1e-5)


@pytest.mark.parametrize("budget_tokens", [100_000, 20])
def test_the_entropy_of_a_step_is_the_mean_over_its_trained_tokens(tiny_llama, budget_tokens):
    groups = [*make_groups(), Group(tuple(make_row(np.random.default_rng(5), 9, place, 1.0) for place in range(2)))]
    rank = make_rank(tiny_llama, entropy=True, tokens_per_microbatch=budget_tokens)
    report = rank.step(groups, 0, 0)
    silent = rank.step(groups[-1:], 1, 1)
    rank.close()
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    entropies = []
    for row in (row for group in groups[:-1] for row in group.rows):
        tokens = torch.tensor(np.concatenate([row.prompt_tokens, row.completion_tokens])[None], dtype=torch.int64)
        with torch.no_grad():
            logits = model(input_ids=tokens).logits[0, len(row.prompt_tokens) - 1 : -1]
        entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    assert report.figures()["learner/entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)
    assert math.isnan(silent.figures()["learner/entropy"])  # nothing was computed


def test_a_step_says_nothing_of_entropy_unless_asked(tiny_llama):
    rank = make_rank(tiny_llama)
    assert set(rank.step(make_groups(), 0, 0).figures()) == {"learner/padding_share", "learner/shared_prompt_share"}
    rank.close()


def test_activation_checkpointing_changes_memory_only(tiny_llama):
    groups = make_groups()
    assert_same(trained(tiny_llama, groups), trained(tiny_llama, groups, activation_checkpointing=True), atol=1e-6)


@pytest.mark.parametrize(("dtype", "zero"), [("float32", 1), *OTHER_STAGES])
def test_every_trainable_parameter_moves_and_all_stages_agree(tiny_llama, dtype, zero):
    groups = make_groups()
    rank = make_rank(tiny_llama, dtype=dtype, zero=zero)
    before = weights_of(rank)
    reports = [rank.step(groups, step, step) for step in range(3)]
    after = weights_of(rank)
    rank.close()
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert not still or (dtype == "bfloat16" and all("norm" in name for name in still))
    assert all(math.isfinite(report.loss) and report.grad_norm > 0 for report in reports)
    if dtype == "float32":
        assert_same(after, trained(tiny_llama, groups, 3, zero=1), atol=1e-5)
    else:
        exact = trained(tiny_llama, groups, 3, zero=1)
        assert all((after[name].float() - exact[name]).abs().mean() < 5e-3 for name in exact)


def test_a_completion_without_a_score_changes_nothing(tiny_llama):
    def groups(reward: float | None, seed: int) -> list[Group]:
        generator = np.random.default_rng(1)
        rows = [make_row(generator, 3, trajectory, float(trajectory), length=6) for trajectory in range(3)]
        return [Group((*rows, make_row(np.random.default_rng(seed), 3, 3, reward)))]

    nulls = [trained(tiny_llama, groups(None, seed)) for seed in (10, 11)]
    assert_same(*nulls)
    scored = trained(tiny_llama, groups(5.0, 10))
    assert any(not torch.equal(scored[name], nulls[0][name]) for name in scored)


def test_masked_tokens_are_not_trained(tiny_llama):
    def groups(masked_logprob: float) -> list[Group]:
        generator = np.random.default_rng(1)
        rows = []
        for trajectory in range(2):
            row = make_row(generator, 0, trajectory, float(trajectory), length=4)
            logprobs = row.rollout_logprobs.copy()
            logprobs[2:] = masked_logprob
            rows.append(dataclasses.replace(row, rollout_logprobs=logprobs, loss_mask=[True, True, False, False]))
        return [Group(tuple(rows))]

    objective = {"name": "grpo", "correction": "token_tis"}
    assert_same(
        trained(tiny_llama, groups(-1.0), objective=objective),
        trained(tiny_llama, groups(float("nan")), objective=objective),
    )


@pytest.mark.parametrize("zero_variance", ["keep", "drop"])
def test_a_step_without_signal_makes_no_update_and_says_so(tiny_llama, zero_variance):
    generator = np.random.default_rng(0)
    groups = [Group(tuple(make_row(generator, 0, trajectory, 1.0) for trajectory in range(3)))]
    rank = make_rank(tiny_llama, {"name": "grpo", "zero_variance": zero_variance})
    before = weights_of(rank)
    report = rank.step(groups, 0, 0)
    after = weights_of(rank)
    rank.close()
    assert report.updates == 0
    assert math.isnan(report.grad_norm)
    assert report.metrics["zero_signal_share"] == 1.0
    assert_same(before, after)


def test_groups_without_signal_count_in_the_denominator_though_they_are_not_computed(tiny_llama):
    generator = np.random.default_rng(0)
    flat = [Group(tuple(make_row(generator, 50 + index, t, 1.0) for t in range(4))) for index in range(2)]
    rank = make_rank(tiny_llama)
    kept = rank.step(make_groups() + flat, 0, 0)
    rank.close()
    rank = make_rank(tiny_llama)
    alone = rank.step(make_groups(), 0, 0)
    rank.close()
    assert kept.grad_norm == pytest.approx(alone.grad_norm * 4 / 6, rel=1e-4)
    assert kept.advantages[50, 0] == 0.0


@pytest.mark.parametrize(
    ("options", "silent"), [({}, True), ({"correction": "token_tis"}, True), ({"kl_coefficient": 0.1}, False)]
)
def test_an_objective_is_asked_whether_zero_advantage_means_zero_gradient(options, silent):
    assert is_silent_at_zero_advantage(build_objective("grpo", **options)) == silent


def test_a_first_pass_is_on_policy_and_a_second_is_not(tiny_llama):
    rank = make_rank(tiny_llama, epochs_per_step=2, minibatches_per_step=2)
    report = rank.step(make_groups(), 0, 0)
    rank.close()
    assert report.updates == 4
    assert report.metrics["update_log_ratio_abs_max"] > 0.0
    rank = make_rank(tiny_llama)
    report = rank.step(make_groups(), 0, 0)
    rank.close()
    assert report.metrics["update_log_ratio_abs_max"] == 0.0


def test_kl_in_the_reward_is_taken_from_the_policy_at_the_start(tiny_llama):
    objective = {"name": "grpo", "kl_coefficient": 0.5, "kl_where": "reward", "kl_estimator": "k1"}
    rank = make_rank(tiny_llama, objective)
    report = rank.step(make_groups(), 0, 0)
    rank.close()
    plain = make_rank(tiny_llama)
    without = plain.step(make_groups(), 0, 0)
    plain.close()
    assert report.advantages != without.advantages
    assert abs(sum(value for key, value in report.advantages.items() if key[0] == 0)) < 1e-6


def test_missing_reference_logprobs_are_an_error_not_zeros(tiny_llama):
    generator = np.random.default_rng(0)
    rank = make_rank(tiny_llama, {"name": "grpo", "kl_coefficient": 0.1})
    with pytest.raises(ConfigError, match=r"kl_coefficient"):
        rank.step([Group(tuple(make_row(generator, 7, t, float(t)) for t in range(2)))], 0, 0)
    rank.close()


def test_a_loss_that_is_not_finite_is_named_and_changes_nothing(tiny_llama):
    rank = make_rank(tiny_llama)
    with torch.no_grad():
        rank.model.causal_lm.lm_head.weight[9] = float("nan")
    before = weights_of(rank)
    with pytest.raises(NonFiniteError, match=r"groups \[0, 1, 2, 3\]"):
        rank.step(make_groups(), 0, 0)
    for name, weight in weights_of(rank).items():
        assert torch.equal(weight.nan_to_num(), before[name].nan_to_num())
    rank.close()


@pytest.mark.parametrize(("dtype", "zero"), [("float32", 1), *OTHER_STAGES])
def test_a_resumed_rank_goes_on_bit_by_bit(tiny_llama, tmp_path, dtype, zero):
    options: dict[str, Any] = {
        "dtype": dtype,
        "zero": zero,
        "schedule": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
    }
    rank = make_rank(tiny_llama, **options)
    for step in range(2):
        rank.step(make_groups(seed=step), step, step)
    rank.save(tmp_path)
    whole = rank.step(make_groups(seed=2), 2, 2)
    expected = weights_of(rank)
    rank.close()
    rank = make_rank(tiny_llama, **options)
    rank.step(make_groups(seed=9), 0, 0)
    rank.load(tmp_path)
    resumed = rank.step(make_groups(seed=2), 2, 2)
    assert_same(weights_of(rank), expected)
    rank.close()
    assert (resumed.loss, resumed.grad_norm, resumed.learning_rate) == (
        whole.loss,
        whole.grad_norm,
        whole.learning_rate,
    )


def test_a_checkpoint_that_does_not_fit_or_is_damaged_is_refused(tiny_llama, tmp_path):
    rank = make_rank(tiny_llama)
    rank.save(tmp_path)
    state = json.loads((tmp_path / "learner.json").read_text())
    (tmp_path / "learner.json").write_text(json.dumps({**state, "ranks": 2}))
    with pytest.raises(ConfigError, match=r"learner\.workers = 2"):
        rank.load(tmp_path)
    (tmp_path / "learner.json").write_text(json.dumps(state))
    for part in (tmp_path / "engine").iterdir():
        part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(CheckpointDamaged):
        rank.load(tmp_path)
    with pytest.raises(CheckpointDamaged, match=r"learner\.json"):
        rank.load(tmp_path / "nowhere")
    rank.close()


@pytest.mark.parametrize("zero", [1, 3])
def test_the_saved_folder_is_a_model_that_transformers_loads(tied_llama, tmp_path, zero):
    rank = make_rank(tied_llama, zero=zero)
    rank.step(make_groups(), 0, 0)
    rank.save_hf(tmp_path)
    probe = rank.probe([10, 11, 12, 13])
    rank.close()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = plain_logprobs(plain, ScoredRow(np.array([10]), np.array([11, 12, 13])), 1.0)
    np.testing.assert_allclose(probe, expected.numpy(), atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [5, 2]


def test_the_learning_rate_of_each_update_is_the_schedules(tiny_llama):
    rank = make_rank(tiny_llama, warmup_steps=4, schedule="linear")
    rates = [rank.step(make_groups(), step, step).learning_rate for step in range(5)]
    rank.close()
    np.testing.assert_allclose(rates, [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_a_group_coupled_objective_learns_the_same_in_one_pass_and_in_two(tiny_llama, tmp_path):
    objective = coupled_objective(tmp_path)
    groups = make_groups()
    one_pass = trained(tiny_llama, groups, 2, objective, tokens_per_microbatch=100_000)
    by_group = trained(tiny_llama, groups, 2, objective, tokens_per_microbatch=80)
    two_pass = trained(tiny_llama, groups, 2, objective, tokens_per_microbatch=20)
    assert_same(one_pass, by_group, atol=1e-5)
    assert_same(one_pass, two_pass, atol=1e-5)


def test_a_rank_starts_in_a_process_whose_former_world_was_ended_by_others(tiny_llama):
    first = trained(tiny_llama, make_groups())
    torch.distributed.destroy_process_group()
    assert_same(trained(tiny_llama, make_groups()), first)


def test_a_single_rank_opens_no_port_beyond_loopback():
    script = (
        "import psutil, torch; from learner.world import World; World.open(0, 1, torch.device('cpu'), 30.0);"
        "print([entry.laddr.ip for entry in psutil.Process().net_connections('inet') if entry.status == 'LISTEN'])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert set(json.loads(found.stdout.replace("'", '"'))) <= {"127.0.0.1", "::1"}
