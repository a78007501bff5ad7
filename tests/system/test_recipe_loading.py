"""Recipes from YAML: precedence, overrides, and errors that name the key, the line and the nearest valid one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from system.core.errors import ConfigError
from system.recipe import Recipe, differing_keys, load_recipe, read_resolved, resolved_yaml

SMALLEST = """
run: {steps: 3}
model: {path: models/tiny}
data: [{source: reasoning_gym, task: chain_sum}]
rewards: [{name: answer, use: exact_last_integer}]
"""
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def recipe_file(tmp_path):
    def write(text=SMALLEST, name="my_run.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_what_a_recipe_leaves_out_is_filled_in(recipe_file):
    recipe = load_recipe(recipe_file())
    assert (recipe.run.name, recipe.run.folder) == ("my_run", "runs/my_run")
    assert recipe.data[0].name == "chain_sum"
    assert recipe.stream.max_staleness == 4
    assert recipe.objective.name == "grpo"
    assert recipe.objective.correction == "token_tis"


def test_synchronous_training_needs_no_correction(recipe_file):
    recipe = load_recipe(recipe_file(), ["stream.max_staleness=0"])
    assert recipe.objective.options == {"correction": "none"}
    assert load_recipe(recipe_file(), ["objective.correction=none"]).objective.correction == "none"


def test_later_sources_of_a_value_win(recipe_file):
    recipe_file(SMALLEST + "learner: {learning_rate: 1.0e-4, warmup_steps: 7, zero: 2}\n", "base.yaml")
    path = recipe_file("extends: base.yaml\nlearner: {warmup_steps: 8, zero: 0}\nrun: {name: child}\n")
    recipe = load_recipe(path, ["learner.zero=1", "learner.zero=2"])
    learner = recipe.learner
    assert (learner.learning_rate, learner.warmup_steps, learner.zero, learner.workers) == (1e-4, 8, 2, 1)
    assert (recipe.run.name, recipe.run.folder, recipe.run.steps) == ("child", "runs/child", 3)


def test_options_of_one_objective_are_not_inherited_by_another(recipe_file):
    recipe_file(SMALLEST + "objective: {name: grpo, aggregation: token_mean, clip_high: 0.3}\n", "base.yaml")

    def options(objective):
        path = recipe_file(f"extends: base.yaml\nobjective: {objective}\n")
        return load_recipe(path, ["stream.max_staleness=0"]).objective.options

    assert options("{name: gift, beta: 0.5}") == {"correction": "none", "beta": 0.5}
    assert options("{name: grpo, clip_high: 0.4}") == {
        "correction": "none", "aggregation": "token_mean", "clip_high": 0.4,
    }  # fmt: skip
    assert options("{clip_low: 0.1}")["clip_high"] == 0.3


def test_lists_are_replaced_by_a_recipe_that_extends(recipe_file):
    recipe_file(name="base.yaml")
    path = recipe_file("extends: base.yaml\ndata: [{source: a.jsonl}, {source: b.jsonl}]\n")
    assert [source.source for source in load_recipe(path).data] == ["a.jsonl", "b.jsonl"]


def test_overrides_reach_into_lists_and_open_objects(recipe_file):
    recipe = load_recipe(
        recipe_file(),
        [
            "data.0.weight=2", "data.0.options.max_terms=2", "objective.kl_coefficient=4e-2", "rewards.0.name=sum",
            "rollout.engine.enforce_eager=true", "model.lora=null", 'data.0.suffix=" Only the number."',
            "placement.threads.engine=0-1", "data.0.chat_template={think: false}",
        ],
    )  # fmt: skip
    assert recipe.data[0].weight == 2.0
    assert recipe.data[0].options == {"max_terms": 2}
    assert recipe.data[0].suffix == " Only the number."
    assert recipe.data[0].chat_template == {"think": False}
    assert recipe.objective.options["kl_coefficient"] == 0.04
    assert recipe.rewards[0].name == "sum"
    assert recipe.rollout.engine == {"enforce_eager": True}
    assert recipe.placement.threads.engine == "0-1"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lernrate=1", "learner.lernrate: unknown key; did you mean 'learning_rate'"),
        ("lerner.zero=1", "lerner: unknown key; did you mean 'learner'"),
        ("run.steps=many", "run.steps: .*valid integer"),
        ("run.steps=2.5", "run.steps: .*integer"),
        ("run.steps=0", "run.steps: .*greater than or equal to 1"),
        ("run.steps=", "run.steps: .*integer"),
        ("run.name=a/b", "run.name: "),
        ("rollout.max_tokens=-1", "rollout.max_tokens: "),
        ("rollout.temperature=0", "rollout.temperature: must be at least"),
        ("rollout.top_p=0.9", "rollout.top_p: must be 1.0"),
        ("rewards.0.use=exact_last_intger", "did you mean 'exact_last_integer'"),
        ("rewards=[]", "rewards: "),
        ("evaluation.every_steps=5", "evaluation.every_steps: evaluation during a run is not yet available"),
        ("data.1.weight=2", "data.1: a list of 1 is indexed with 0..0"),
        ("data.x.weight=2", "data.x: a list of 1 is indexed with 0..0, not 'x'"),
        ("run.steps.more=2", "run.steps is a plain value"),
        ("run.steps", "'run.steps' is not an override; write key=value"),
        ("=3", "is not an override"),
        ("rollout.engine={a: [", "rollout.engine: the value .* is not valid YAML"),
        ("placement.threads.engine=all", "cores are written as 0-3 or 0,2"),
        ("data=[{source: a.jsonl, name: x}, {source: b.jsonl, name: x}]", "data: two sources are named 'x'"),
        ("sync.backend=mpi", "sync.backend: "),
    ],
)
def test_a_wrong_override_is_named(recipe_file, override, message):
    with pytest.raises(ConfigError, match=message) as failure:
        load_recipe(recipe_file(), [override])
    assert failure.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: {steps: 3\nmodel: x\n", r"my_run.yaml:2: not valid YAML"),
        ("run: {steps: 3}\nrun: {steps: 4}\n", "not valid YAML: found duplicate key run"),
        ("", "an empty recipe"),
        ("- run\n", "a recipe is a mapping"),
        ("run: 7\n", "run: "),
        (SMALLEST + "lerner: {}\n", "lerner: unknown key; did you mean 'learner'"),
        (SMALLEST.replace("run: {steps: 3}", "run: {}"), "run.steps: required, but missing"),
        (SMALLEST.replace("task: chain_sum", "taks: chain_sum"), "data.0.taks: unknown key; did you mean 'task'"),
        (SMALLEST + "stream: {groups_per_step: '4 groups'}\n", "stream.groups_per_step: .*got '4 groups'"),
        (SMALLEST + "extends: [a, b]\n", "extends names one other recipe"),
        (SMALLEST + "extends: nowhere.yaml\n", "extends nowhere.yaml, but there is no file"),
        (SMALLEST + "log: {wandb: {project: '${oc.env:HOME}'}}\n", "recipes do not read the environment"),
    ],
)
def test_a_wrong_recipe_is_named_with_its_place(recipe_file, text, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe_file(text))


def test_every_wrong_key_is_named_at_once(recipe_file):
    with pytest.raises(ConfigError) as failure:
        load_recipe(recipe_file(), ["learner.lernrate=1", "rollout.groupsize=3"])
    assert "learner.lernrate" in str(failure.value)
    assert "rollout.groupsize" in str(failure.value)


def test_a_missing_recipe_is_named_with_its_nearest_neighbour(recipe_file):
    path = recipe_file(name="quickstart.yaml")
    with pytest.raises(ConfigError, match=r"no recipe at .*quikstart.yaml; did you mean 'quickstart.yaml'"):
        load_recipe(path.with_name("quikstart.yaml"))


def test_only_one_level_is_extended(recipe_file):
    recipe_file(name="a.yaml")
    recipe_file("extends: a.yaml\n", "b.yaml")
    with pytest.raises(ConfigError, match="only one level is allowed"):
        load_recipe(recipe_file("extends: b.yaml\n"))


def test_a_resolved_recipe_reads_back_equal(recipe_file, tmp_path):
    recipe = load_recipe(recipe_file(), ["learner.learning_rate=3e-7", "objective.dual_clip=3"])
    written = tmp_path / "recipe.yaml"
    written.write_text(resolved_yaml(recipe), encoding="utf-8")
    assert read_resolved(written) == recipe
    assert differing_keys(read_resolved(written), recipe) == []
    assert set(yaml.safe_load(written.read_text())) == set(Recipe.model_fields)


@settings(max_examples=20, deadline=None)
@example(rate=1e-6, suffix="\x85 ${x} \\d", seed=0)
@given(rate=st.floats(1e-9, 1.0), suffix=st.text(max_size=20), seed=st.integers(0, 2**63 - 1))
def test_any_value_survives_being_written_and_read(tmp_path_factory, rate, suffix, seed):
    values = yaml.safe_load(SMALLEST)
    values["learner"] = {"learning_rate": rate}
    values["data"][0]["suffix"] = suffix
    values["run"]["seed"] = seed
    recipe = Recipe.model_validate(values)
    path = tmp_path_factory.mktemp("resolved") / "recipe.yaml"
    path.write_text(resolved_yaml(recipe), encoding="utf-8")
    assert read_resolved(path) == recipe


def test_a_run_may_go_on_with_smaller_micro_batches(recipe_file):
    overrides = ["learner.tokens_per_microbatch=512", "learner.activation_checkpointing=true"]
    assert differing_keys(load_recipe(recipe_file()), load_recipe(recipe_file(), overrides)) == []


def test_differing_keys_are_named_with_both_values(recipe_file):
    there = load_recipe(recipe_file())
    here = load_recipe(recipe_file(), ["learner.zero=2", "objective.kl_coefficient=0.04", "data.0.weight=2"])
    assert differing_keys(there, here) == [
        "data.0.weight: 1.0 -> 2.0",
        "learner.zero: 1 -> 2",
        "objective.kl_coefficient: absent -> 0.04",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "rollout.engine.hf_token=abcdefgh12345",
        "rewards.0.options.api_key=abcdefgh12345",
        "log.wandb.api_key=abcdefgh12345",
        "log.mlflow.tracking_uri=https://me:abcdefgh12345@example.org",
        "model.path=hf_abcdefgh12345ABCDEFGH",
    ],
)
def test_secrets_are_refused_without_being_repeated(recipe_file, override):
    with pytest.raises(ConfigError, match="looks like a secret") as failure:
        load_recipe(recipe_file(), [override])
    assert override.split("=")[0] in str(failure.value)
    assert "abcdefgh12345" not in str(failure.value)


def test_words_that_only_sound_like_secrets_are_fine(recipe_file):
    recipe = load_recipe(recipe_file(), ["rollout.max_tokens=7", "data.0.chat_template.bos_token=<s>"])
    assert recipe.data[0].chat_template == {"bos_token": "<s>"}


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_recipes_load(path):
    recipe = load_recipe(path)
    assert recipe.run.name == path.stem


def test_the_quick_start_is_short():
    assert len((RECIPES / "quickstart.yaml").read_text().splitlines()) <= 30
