"""``examples/plugin_package`` installed with pip, without a network, and used by name in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

USE = """
import json
import torch
from learner.divergences import divergence_names, find_divergence
from learner.objectives import ObjectiveBatch, build_objective, objective_names
from reward_service.functions import RewardItem
from reward_service.verifiers import load_reward
from reward_service.functions import FunctionSpec
from system.catalog import catalog

batch = ObjectiveBatch.from_lists(
    logprobs=[[-1.0, -1.0], [-2.0]], reference_logprobs=[[-1.0, -1.0], [-2.0]], rewards=[1.0, 0.2], group_ids=[0, 0],
    dtype=torch.float64,
)
item = RewardItem("c0", "text", "prompt", None, {}, "stop", 64)
print(json.dumps({
    "names": ["signed" in objective_names(), "neyman" in divergence_names()],
    "coefficients": build_objective("signed", strength=3.0)(batch).coefficients.tolist(),
    "slopes": find_divergence("neyman").slopes_at_zero,
    "f_grpo": build_objective("f_grpo", divergence="neyman", kappa=1.0, ddof=0, eps=0.0)(batch).coefficients.tolist(),
    "reward": load_reward(FunctionSpec("short", "brevity", {"longest": 256})).call(item),
    "summary": catalog("objectives", "signed")[0].summary,
}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    source = shutil.copytree(ROOT / "examples" / "plugin_package", folder / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--target", str(folder / "site"), str(source)], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


def python(program, site):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT
    )


def test_an_installed_package_adds_an_objective_a_divergence_and_a_reward(installed):
    done = python(USE, installed)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["names"] == [True, True]
    assert found["coefficients"] == [pytest.approx([-1.0, -1.0]), pytest.approx([1.0, 0.0])]
    assert found["slopes"] == pytest.approx([-1.0, 1.0])
    assert found["f_grpo"] == [pytest.approx([-0.05, -0.05]), pytest.approx([0.05, 0.0])]
    assert found["reward"] == 0.75
    assert found["summary"] == "The ratio times the sign of the advantage."


def test_its_options_are_checked_like_the_built_in_ones(installed):
    program = "from learner.objectives import build_objective; build_objective('signed', strenght=1.0)"
    assert "did you mean 'strength'" in python(program, installed).stderr


def test_without_the_package_its_names_are_unknown():
    done = python("from learner.objectives import objective_names; print('signed' in objective_names())", ROOT)
    assert done.stdout.strip() == "False"
