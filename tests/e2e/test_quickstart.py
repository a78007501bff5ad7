"""The quick start as a person runs it: it learns with every seed, in time, also when it is killed in the middle."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from system.metrics import read_metrics
from system.models import import_model
from system.rollout_files import read_rollouts
from tests.e2e.conftest import ROOT
from tests.e2e.test_endings import wait_until

pytestmark = pytest.mark.long

DEADLINE_S = 600
"""From the command to its end, on two cores."""


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return import_model("smollm2", ROOT / "models" / "smollm2")


def command(recipe: str, folder: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "system.cli", "train", f"recipes/{recipe}.yaml", f"run.folder={folder}", *overrides]


def check_learned(folder: Path) -> None:
    lines = read_metrics(folder / "metrics.jsonl")
    rewards = [line["reward"] for line in lines]
    print([round(reward, 2) for reward in rewards])
    assert sum(rewards[:2]) / 2 < 0.35
    assert sum(rewards[-10:]) / 10 >= 0.60
    rows = read_rollouts(folder / "rollouts")
    for line in lines:
        of_step = [row.reward for row in rows if row.step == line["step"] and row.reward is not None]
        assert line["reward"] == pytest.approx(sum(of_step) / len(of_step), abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quick_start_learns_with_every_seed_in_ten_minutes(seed: int, smollm2: Path, tmp_path: Path) -> None:
    began_s = time.monotonic()
    done = subprocess.run(command("quickstart", tmp_path / "run", f"run.seed={seed}"), cwd=ROOT, timeout=2 * DEADLINE_S)
    assert done.returncode == 0
    assert time.monotonic() - began_s < DEADLINE_S
    check_learned(tmp_path / "run")


def test_killed_in_the_middle_and_started_again_it_ends_the_same_way(smollm2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(command("quickstart", folder), cwd=ROOT)
    wait_until(lambda: len(read_metrics(folder / "metrics.jsonl")) >= 17, DEADLINE_S, "17 steps")
    process.kill()
    process.wait(timeout=30)
    assert subprocess.run(command("quickstart", folder), cwd=ROOT, timeout=2 * DEADLINE_S).returncode == 0
    check_learned(folder)


def test_pairs_learn_the_same_task(smollm2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert subprocess.run(command("two_grpo", folder), cwd=ROOT, timeout=3 * DEADLINE_S).returncode == 0
    rewards = [line["reward"] for line in read_metrics(folder / "metrics.jsonl")]
    print([round(reward, 2) for reward in rewards])
    assert sum(rewards[-10:]) / 10 > 2 * sum(rewards[:5]) / 5
