"""Every objective trains: three real steps of a tiny model through the whole loop; some start a reference worker."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from learner.objectives import objective_names
from system.rollout_files import read_rollouts
from tests.e2e.conftest import tiny_recipe, write_jsonl, write_recipe
from tests.tiny_models import save_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NEED_A_REFERENCE = {"f_grpo", "f_hal", "online_dpo", "ipo", "opd"}
PAIRS = [{"prompt": f"{number}+1=", "chosen": f"{number + 1}", "rejected": "?!"} for number in range(6)]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "teacher", seed=1)


def recipe_of(name: str, folder: Path, model: Path, teacher: Path) -> dict[str, Any]:
    recipe = tiny_recipe(folder, model)
    recipe["objective"] = {"name": name}
    if name == "two_grpo":
        recipe["rollout"]["group_size"] = 2
    elif name == "dr_grpo":
        recipe["objective"]["max_tokens"] = recipe["rollout"]["max_tokens"]
    elif name == "f_hal":
        recipe["objective"]["offline_file"] = str(write_jsonl(folder / "pairs.jsonl", PAIRS))
    elif name == "opd":
        recipe["reference"] = {"path": str(teacher)}
    return recipe


UNLIKE_THE_OTHERS = {("f_hal", 0), ("opd", 0), ("gift", 2)}
"""What couples groups, takes pairs, has a teacher, or has no correction while its groups are stale."""
CASES = [(name, 0) for name in objective_names()] + [(name, 2) for name in ("gift", "gvpo", "online_dpo", "gspo")]


@pytest.mark.parametrize(
    ("name", "staleness"),
    [pytest.param(*case, marks=() if case in UNLIKE_THE_OTHERS else pytest.mark.long) for case in CASES],
)
def test_three_steps_are_finite_and_move_the_parameters(name, staleness, triptych, tiny_model, teacher, tmp_path):
    recipe = recipe_of(name, tmp_path, tiny_model, teacher)
    recipe["stream"]["max_staleness"] = staleness
    done = triptych("train", write_recipe(tmp_path, recipe), "--local")
    assert done.returncode == 0, done.stderr[-4000:]
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert math.isfinite(line["loss"])
        assert line["grad_norm"] is None or math.isfinite(line["grad_norm"])
    (saved,) = sorted(run.glob("checkpoints/*3/hf/model.safetensors"))
    before, after = load_file(tiny_model / "model.safetensors"), load_file(saved)
    assert all(tensor.isfinite().all() for tensor in after.values())
    still = [key for key in before if torch.equal(before[key], after[key])]
    assert not still
    rows = read_rollouts(run / "rollouts")
    assert {row.reference_logprobs is not None for row in rows} == {name in NEED_A_REFERENCE}
