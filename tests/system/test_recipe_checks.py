"""What only the whole recipe shows: contradictions, missing models, too many GPUs; and the plan's derived numbers."""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from system.core.errors import ConfigError, DataError
from system.recipe import check_recipe, load_recipe, print_plan
from system.recipe.model_facts import read_model
from system.recipe.placement import Machine, _ranges, largest_micro_batch, place
from tests.learner.model_families import save_family
from tests.tiny_models import save_tiny_llama

RECIPE = """
run: {{steps: 10, folder: {folder}/runs/r}}
model: {{path: {folder}/model, dtype: float32}}
data:
  - source: reasoning_gym
    task: chain_sum
    options: {{min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1, size: 50}}
    max_prompt_tokens: 128
rewards: [{{name: answer, use: exact_last_integer}}]
rollout: {{group_size: 4, max_tokens: 32}}
stream: {{groups_per_step: 6}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checks")
    save_tiny_llama(folder / "model")
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder), encoding="utf-8")
    return folder


@pytest.fixture
def check(folder):
    def checked(*overrides, assume_gpus=0, local=False):
        return check_recipe(load_recipe(folder / "recipe.yaml", overrides), assume_gpus=assume_gpus, local=local)

    return checked


def test_the_plan_holds_every_derived_number_with_its_unit(check):
    lines = {line.label: line.value for line in check().lines}
    assert lines["prompts per step"] == "6 prompts"
    assert lines["completions per step"] == "24 completions (6 groups of 4)"
    assert lines["generated per step"] == "at most 768 tokens (32 each)"
    assert lines["learned per step"] == "at most 3,840 tokens, prompts included"
    assert lines["prompts in the run"] == "60 prompts, 240 completions"
    assert lines["groups outstanding"] == "at most 30 groups ((max_staleness 4 + 1) x 6)"
    assert lines["longest prompt"] == "128 tokens (the context leaves 480 beside a completion)"
    assert lines["  correction"] == "token_tis"
    assert lines["data chain_sum"].startswith("50 prompts, 100.0% of the stream, chat template, at most 128 tokens")
    assert lines["reference worker"] == "not started: the objective needs no reference log-probs"
    assert "gloo" in lines["weight sync"]


def test_the_plan_is_printed_whole(check):
    console = Console(width=200, record=True, file=io.StringIO())
    plan = check("data.0.name='[bold]sums'")
    print_plan(plan, console)
    printed = console.export_text()
    assert all(line.label in printed for line in plan.lines)
    assert "data [bold]sums" in printed


def test_a_reference_worker_is_planned_only_when_the_objective_needs_one(check):
    assert not check().needs_reference
    with_kl = check("objective.kl_coefficient=0.04")
    assert with_kl.needs_reference
    assert [role.processes for role in with_kl.placement.roles] == [1, 1, 1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rollout.group_size=1"], "group_size"),
        (["objective.name=two_grpo"], "rollout.group_size: 4: objective two_grpo learns from pairs"),
        (["objective.name=grop"], "unknown objective 'grop'; did you mean 'grpo'"),
        (["objective.beta=0.1"], "objective.beta: .*kl_coefficient"),
        (["objective.clip_hihg=0.1"], "objective.clip_hihg: unknown key; did you mean 'clip_high'"),
        (["objective.correction=none"], "correction: none with stream.max_staleness: 4"),
        (
            ["objective.name=gspo", "objective.correction=token_tis"],
            "correction: token_tis: gspo's ratio is that of a whole sequence",
        ),
        (
            ["objective.name=rloo", "stream.max_staleness=0", "learner.epochs_per_step=2"],
            "rloo without a ratio is right for one update per step",
        ),
        (
            ["objective.overlong_max_tokens=40", "objective.overlong_cache_tokens=8"],
            "overlong_max_tokens: 40 with overlong_cache_tokens 8 has no effect",
        ),
        (["rollout.workers=0"], "nothing would generate"),
        (["learner.minibatches_per_step=4"], "does not divide stream.groups_per_step 6; possible: 1, 2, 3, 6"),
        (["rollout.max_tokens=512"], "leaves no room for a prompt: the model's context is 512 tokens"),
        (["rollout.max_tokens=400"], "data.0.max_prompt_tokens: 128 .* exceed the model's context of 512 tokens; 112"),
        (["rollout.engine.max_model_len=100"], "exceed rollout.engine.max_model_len of 100 tokens; 68 are left"),
        (["rewards.0.sources=[chain_sums]"], "no data source 'chain_sums'; did you mean 'chain_sum'"),
        (["rewards.0.weight=0"], "nothing judges the data source 'chain_sum'"),
        (["rewards.0.use=nowhere.py:f"], "nowhere.py does not exist"),
        (["sync.backend=nccl_checked"], "from GPU to GPU, but learners and rollout workers have none; use auto"),
        (["sync.backend=nccl"], "sync.backend: nccl, .* carries no checksums .* use nccl_checked"),
        (["rollout.tensor_parallel=2"], "tensor_parallel: 2 needs GPUs"),
        (["placement.threads.learner=1", "learner.threads=2"], "placement.threads.learner is 1 and learner.threads"),
        (["model.lora={r: 8}"], "LoRA is not yet available"),
        (["run.folder=/proc/nowhere/r"], "run.folder: "),
        (["data.0.chat_template=false", "data.0.system_prompt=x"], "system_prompt needs a chat template"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(check, overrides, message):
    with pytest.raises(ConfigError, match=message) as failure:
        check(*overrides)
    assert failure.value.exit_code == 2


def test_an_environment_that_hides_the_weight_transfer_is_refused(check, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "another_plugin")
    with pytest.raises(ConfigError, match="hides 'triptych_weight_transfer' from vLLM"):
        check()


def test_asynchronous_training_with_an_anchor_and_synchronous_training_without_are_allowed(check):
    assert check("objective.correction=token_tis").lines
    assert check("objective.correction=none", "stream.max_staleness=0").lines


def test_data_errors_have_an_exit_code_of_their_own(check, tmp_path):
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 600, "label": 1}) + "\n")
    with pytest.raises(DataError, match="none of 1 prompts fits in 480 tokens") as failure:
        check(f"data=[{{source: {tmp_path / 'long.jsonl'}}}]")
    assert failure.value.exit_code == 3


def test_one_process_takes_one_worker_of_each_role(check):
    assert check(local=True).lines
    with pytest.raises(ConfigError, match="--local is one process"):
        check("learner.workers=2", local=True)


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "it has no config.json"),
        ("model.safetensors", "holds no weights"),
        ("tokenizer*", "holds no tokenizer"),
    ],
)
def test_an_incomplete_model_folder_is_named(folder, tmp_path, missing, message):
    shutil.copytree(folder / "model", tmp_path / "model")
    for file in (tmp_path / "model").glob(missing):
        file.unlink()
    with pytest.raises(ConfigError, match=message):
        read_model(str(tmp_path / "model"))


def test_a_missing_model_folder_comes_with_the_command_that_makes_it():
    with pytest.raises(
        ConfigError, match="no model folder at models/absent; `triptych model import SRC models/absent`"
    ):
        read_model("models/absent")


def test_a_damaged_weights_file_is_named(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x05\x00\x00\x00\x00\x00\x00\x00hello")
    with pytest.raises(ConfigError, match=r"model.safetensors is not a safetensors file"):
        read_model(str(tmp_path / "model"))


def test_the_models_sizes_are_those_of_the_loaded_model(folder):
    from transformers import AutoModelForCausalLM

    facts = read_model(str(folder / "model"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert facts.context_tokens == 512
    assert (facts.shape.layers, facts.shape.hidden, facts.shape.key_value_width) == (2, 64, 32)


def test_gpus_are_counted_per_role_and_compared_with_those_there_are(check):
    placement = check("rollout.workers=4", "learner.workers=3", assume_gpus=8).placement
    assert placement.gpus == 7
    assert (placement.rollout_gpus_each, placement.learner_gpus_each) == (1, 1)
    assert (
        check("rollout.tensor_parallel=2", "rollout.workers=3", "learner.workers=2", assume_gpus=8).placement.gpus == 8
    )
    with pytest.raises(ConfigError, match=r"8 GPUs are asked for .4 x 1 for rollout workers, 4 x 1") as failure:
        check("rollout.workers=4", "learner.workers=4", assume_gpus=7)
    assert failure.value.exit_code == 2
    with pytest.raises(ConfigError, match="1 GPUs are asked for"):
        check("placement.gpus_per_learner_worker=1")


@pytest.mark.parametrize(
    ("overrides", "backend"),
    [
        ([], "nccl_checked"),
        (["sync.backend=nccl_checked"], "nccl_checked"),
        (["sync.backend=gloo"], "gloo"),
        (["placement.gpus_per_learner_worker=0"], "gloo"),
        (["placement.gpus_per_rollout_worker=0"], "gloo"),
    ],
)
def test_weights_go_from_gpu_to_gpu_where_both_sides_have_them(check, overrides, backend):
    assert check(*overrides, assume_gpus=8).placement.sync_backend == backend


def test_nccl_is_refused_while_one_side_has_no_gpus(check):
    with pytest.raises(ConfigError, match="but learners have none"):
        check("sync.backend=nccl_checked", "placement.gpus_per_learner_worker=0", assume_gpus=8)


def test_without_gpus_the_roles_share_the_cores(folder):
    recipe = load_recipe(folder / "recipe.yaml")
    machine = Machine(gpus=0, cores=(0, 1, 2, 3, 6), memory_bytes=10**11)
    placement = place(recipe, read_model(recipe.model.path), machine, needs_reference=True)
    assert (placement.engine_cores, placement.learner_threads, placement.reference_threads) == ("0-3,6", 5, 2)
    assert placement.gpus == 0
    assert placement.sync_backend == "gloo"


@pytest.mark.parametrize("cores", ["3-0", "0-4", "9", "0,7"])
def test_cores_that_the_machine_lacks_are_refused(folder, cores):
    recipe = load_recipe(folder / "recipe.yaml", [f"placement.threads.engine='{cores}'"])
    machine = Machine(gpus=0, cores=(0, 1, 2, 3), memory_bytes=10**11)
    with pytest.raises(ConfigError, match=r"is not a range of this machine's cores .0-3."):
        place(recipe, read_model(recipe.model.path), machine, needs_reference=False)


@pytest.mark.parametrize(("cores", "written"), [((0,), "0"), ((0, 1), "0-1"), ((1, 3, 4, 9), "1,3-4,9"), ((), "")])
def test_cores_are_written_as_ranges(cores, written):
    assert _ranges(cores) == written


def test_what_does_not_fit_into_memory_is_refused_with_the_sum(folder):
    recipe = load_recipe(folder / "recipe.yaml", ["rollout.workers=3"])
    machine = Machine(gpus=0, cores=(0,), memory_bytes=5 * 10**9)
    with pytest.raises(ConfigError, match=r"3 x 2.6 GB for rollout workers.* this machine has 5.0 GB"):
        place(recipe, read_model(recipe.model.path), machine, needs_reference=False)
    assert place(
        recipe, read_model(recipe.model.path), replace(machine, assumed=True), needs_reference=False
    ).roles  # fmt: skip


def test_the_plan_says_what_a_learner_rank_holds_and_why(check):
    lines = {line.label.strip(): line.value for line in check().lines}
    assert lines["parameters"] == "0.1 M, 0.1 M of them trained"
    assert lines["micro-batch"].startswith(
        "at most 3,840 tokens, padding included, rows of at most 160; with this data "
    )
    for cause in ("weights", "gradients", "float32 masters", "optimiser state", "logits"):
        assert lines[cause].split()[1] == "GB"
    assert lines["activations"].endswith("with activation_checkpointing)")
    checkpointed = {line.label.strip(): line.value for line in check("learner.activation_checkpointing=true").lines}
    assert checkpointed["activations"].endswith("without activation_checkpointing)")
    first = ["learner", "  parameters", "  micro-batch", "  shared prefixes"]
    assert [line.label for line in check().learner_lines][:4] == first
    assert check().learner_lines[-1].label == "  logits"


def test_the_plan_says_what_shared_prefixes_save_on_this_data(check):
    plan = check("stream.groups_per_step=5")
    stream = plan.prompts()
    lengths = [len(stream.prompt(position).tokens) for position in range(50)]
    rows = 4 * (sum(lengths[:40]) / 8 + 5 * 31)  # the mean of eight updates of five prompts
    shared = sum(lengths[:40]) / 8 + 4 * 5 * 31
    line = next(line.value for line in plan.learner_lines if line.label == "  shared prefixes")
    padded = int(line.split()[3].replace(",", ""))
    assert rows <= padded < 1.2 * rows
    assert f"{shared:,.0f} with each prompt once: {1 - shared / padded:.0%} fewer. Of the first 50 prompts" in line
    micro_batch = next(line.value for line in plan.learner_lines if line.label == "  micro-batch")
    assert f"about 1 for a rank's update, of {shared:,.0f} tokens" in micro_batch


def test_the_plan_says_that_shared_prefixes_are_not_used(check):
    lines = {line.label: line.value for line in check("learner.layout=padded").lines}
    assert " fewer (not used: learner.layout is padded). Of the first 60 prompts" in lines["  shared prefixes"]
    assert lines["row layout"].startswith("padded: every completion")


def test_a_model_that_cannot_share_prompts_is_known_before_it_is_loaded(folder, check, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "model")
    save_family("mamba", tmp_path / "model")
    plan = {line.label: line.value for line in check(f"model.path={tmp_path / 'model'}").lines}
    assert plan["row layout"] == "padded: models of type 'mamba' have layers of kind linear_attention"
    assert "(not used: models of type 'mamba' have layers" in plan["  shared prefixes"]
    for key in ("learner", "reference"):
        overrides = [f"model.path={tmp_path / 'model'}", f"{key}.layout=shared_prefix", "objective.kl_coefficient=0.1"]
        with pytest.raises(ConfigError, match=rf"{key}\.layout: shared_prefix is not possible for this model"):
            check(*overrides)


def test_the_largest_micro_batch_is_one_ranks_rows_or_the_budget_or_one_row(folder):
    model = read_model(str(folder / "model"))

    def tokens(*overrides):
        return largest_micro_batch(load_recipe(folder / "recipe.yaml", overrides), model).tokens

    assert tokens() == 24 * 160
    assert tokens("learner.workers=5") == 5 * 160
    assert tokens("learner.tokens_per_microbatch=1000") == 1000
    assert tokens("learner.tokens_per_microbatch=10") == 160
    assert tokens("data.0.max_prompt_tokens=480", "learner.tokens_per_microbatch=10") == 512


def test_the_optimiser_is_offloaded_from_gpus_only(check):
    offload = ["learner.offload_optimizer=true"]
    with pytest.raises(ConfigError, match=r"learner.offload_optimizer: true .* the learner has no GPU"):
        check(*offload)
    plan = check(*offload, "placement.gpus_per_learner_worker=1", assume_gpus=8)
    assert any(line.label == "  offloaded" for line in plan.lines)
    with pytest.raises(ConfigError, match="needs zero 1, 2 or 3"):
        check(*offload, "learner.zero=0", assume_gpus=8)


def test_an_optimiser_whose_package_is_missing_is_refused_with_the_command_that_installs_it(check, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"adamw_8bit needs the package bitsandbytes.* pip install"):
        check("learner.optimizer=adamw_8bit")


def test_the_checked_recipe_makes_the_prompts_of_the_run(check):
    plan = check()
    stream = plan.prompts()
    assert plan.longest_prompt_tokens == 480
    assert stream.prompt(0).source == "chain_sum"
    assert len({stream.prompt(position).prompt_id for position in range(50)}) == 50
