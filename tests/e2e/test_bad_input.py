"""What a person gets wrong: exit code 2 or 3, one message that names the thing and the mend, no traceback."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from system.core.errors import TriptychError
from tests.e2e.conftest import questions, tiny_recipe, write_jsonl, write_recipe

Change = Callable[[dict[str, Any], Path], object]


def put(dotted: str, value: Any) -> Change:
    def change(recipe: dict[str, Any], _: Path) -> None:
        *parents, last = dotted.split(".")
        for parent in parents:
            recipe = recipe[int(parent)] if isinstance(recipe, list) else recipe.setdefault(parent, {})
        recipe[last] = value

    return change


def without_tokenizer(recipe: dict[str, Any], folder: Path) -> None:
    import shutil

    model = folder / "model"
    shutil.copytree(recipe["model"]["path"], model)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        (model / name).unlink(missing_ok=True)
    recipe["model"]["path"] = str(model)


def empty_data(recipe: dict[str, Any], folder: Path) -> None:
    (folder / "questions.jsonl").write_text("")


def broken_line_7(recipe: dict[str, Any], folder: Path) -> None:
    path = folder / "questions.jsonl"
    lines = path.read_text().splitlines()
    lines[6] = '{"question": "1+1=", '
    path.write_text("\n".join(lines) + "\n")


def only_long_prompts(recipe: dict[str, Any], folder: Path) -> None:
    write_jsonl(folder / "questions.jsonl", [{"question": "9" * 2000, "answer": "1", "id": "long"}])


def stale_without_correction(recipe: dict[str, Any], folder: Path) -> None:
    put("stream.max_staleness", 2)(recipe, folder)
    put("objective.correction", "none")(recipe, folder)


CASES: dict[str, tuple[Change, int, list[str]]] = {
    "unknown key": (put("learner.lernrate", 1e-5), 2, ["learner.lernrate", "learning_rate"]),
    "unknown section": (put("lerner", {}), 2, ["lerner", "learner"]),
    "wrong type": (put("run.steps", "many"), 2, ["run.steps", "many"]),
    "missing model folder": (put("model.path", "models/nowhere"), 2, ["models/nowhere"]),
    "no tokenizer": (without_tokenizer, 2, ["tokenizer"]),
    "empty data file": (empty_data, 3, ["questions.jsonl", "empty"]),
    "missing column": (put("data.0.prompt_column", "qestion"), 3, ["qestion", "question"]),
    "broken JSON": (broken_line_7, 3, ["questions.jsonl:7"]),
    "missing data file": (put("data.0.source", "nowhere.jsonl"), 3, ["nowhere.jsonl"]),
    "only over-long prompts": (only_long_prompts, 3, ["questions", "504"]),
    "group size 1": (put("rollout.group_size", 1), 2, ["group_size"]),
    "top_p": (put("rollout.top_p", 0.9), 2, ["top_p"]),
    "temperature 0": (put("rollout.temperature", 0), 2, ["temperature"]),
    "negative length": (put("rollout.max_tokens", -4), 2, ["max_tokens", "-4"]),
    "more GPUs than there are": (put("placement.gpus_per_rollout_worker", 1), 2, ["1 GPUs are asked for", "0"]),
    "more GPUs for a rank than it uses": (put("placement.gpus_per_learner_worker", 64), 2, ["64", "learner.workers"]),
    "unknown objective": (put("objective.name", "grop"), 2, ["grop", "grpo"]),
    "unknown option of the objective": (put("objective.clip_hihg", 0.3), 2, ["clip_hihg", "clip_high"]),
    "unknown reward": (put("rewards.0.use", "exact_last_integr"), 2, ["exact_last_integer"]),
    "missing reward function": (
        lambda recipe, folder: put("rewards.0.use", f"{folder / 'rewards.py'}:leters")(recipe, folder),
        2,
        ["leters", "rewards.py"],
    ),
    "no steps": (put("run.steps", 0), 2, ["run.steps"]),
    "stale without correction": (stale_without_correction, 2, ["token_tis"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_names_the_thing_and_the_mend(case: str, tmp_path: Path, tiny_model: Path) -> None:
    change, code, words = CASES[case]
    recipe = copy.deepcopy(tiny_recipe(tmp_path, tiny_model))
    change(recipe, tmp_path)
    failure = dry_run(write_recipe(tmp_path, recipe))
    assert failure is not None
    assert failure.exit_code == code, failure
    for word in words:
        assert word in str(failure), failure
    assert not (tmp_path / "run").exists()


def dry_run(path: Path, *overrides: str) -> TriptychError | None:
    """The command in this process: its expected error, or None when the recipe is accepted."""
    from system.cli import app

    result = CliRunner().invoke(app, ["train", str(path), *overrides, "--dry-run"])
    if result.exception is None:
        return None
    assert isinstance(result.exception, TriptychError), result.exception
    return result.exception


def test_a_good_recipe_is_accepted_and_starts_nothing(tmp_path: Path, tiny_model: Path) -> None:
    assert dry_run(write_recipe(tmp_path, tiny_recipe(tmp_path, tiny_model))) is None
    assert not (tmp_path / "run").exists()


def test_over_long_prompts_are_skipped_counted_and_named(
    tmp_path: Path, tiny_model: Path, triptych: Callable[..., Any]
) -> None:
    recipe = tiny_recipe(tmp_path, tiny_model)
    write_jsonl(
        tmp_path / "questions.jsonl", [*questions(4), {"question": "9" * 2000, "answer": "1", "id": "the-long-one"}]
    )
    done = triptych("train", write_recipe(tmp_path, recipe), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "the-long-one" in done.stdout
    assert "1" in done.stdout


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    failure = dry_run(write_recipe(tmp_path, "run:\n  steps: 3\n model: [\n"))
    assert failure is not None
    assert failure.exit_code == 2
    assert "recipe.yaml:3" in str(failure)


def test_the_command_itself_exits_with_the_code_and_without_a_traceback(
    tmp_path: Path, tiny_model: Path, triptych: Callable[..., Any]
) -> None:
    missing = triptych("train", tmp_path / "nowhere.yaml")
    assert missing.returncode == 2
    assert "nowhere.yaml" in missing.stderr
    recipe = tiny_recipe(tmp_path, tiny_model)
    empty_data(recipe, tmp_path)
    done = triptych("train", write_recipe(tmp_path, recipe))
    assert done.returncode == 3
    assert "Traceback" not in missing.stderr + done.stderr
    debugged = triptych("train", tmp_path / "nowhere.yaml", "--debug")
    assert "Traceback" in debugged.stderr


def test_overrides_are_checked_like_the_recipe(tmp_path: Path, tiny_model: Path) -> None:
    path = write_recipe(tmp_path, tiny_recipe(tmp_path, tiny_model))
    assert dry_run(path, "learner.learning_rate=0.5", "data.0.weight=2") is None
    failure = dry_run(path, "learner.lerning_rate=0.5")
    assert failure is not None
    assert "learning_rate" in str(failure)


def test_a_run_folder_of_a_different_recipe_is_refused_with_the_keys_that_differ(
    tmp_path: Path, tiny_model: Path
) -> None:
    from system.recipe import load_recipe, resolved_yaml
    from system.run_folder import RunFolder

    path = write_recipe(tmp_path, tiny_recipe(tmp_path, tiny_model))
    recipe = load_recipe(path, [])
    folder = RunFolder(recipe.run.folder)
    folder.begin(recipe.run.steps)
    folder.recipe.write_text(resolved_yaml(recipe))
    assert dry_run(path) is None
    failure = dry_run(path, "learner.learning_rate=0.5", "run.seed=3")
    assert failure is not None
    assert failure.exit_code == 2
    assert "learner.learning_rate" in str(failure)
    assert "run.seed" in str(failure)
