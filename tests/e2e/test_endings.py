"""Every way of ending a run, one after another on one run folder, and what the run says afterwards.

The same command is started four times: it is killed with -9 in the middle, then asked to end by SIGTERM, then by
``triptych run stop``, and at last runs to its end. The result must be that of a run nobody disturbed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from system.metrics import read_metrics
from system.rollout_files import read_rollouts
from system.run_folder import RunFolder
from tests.e2e.conftest import ROOT, tiny_recipe, write_recipe

STEPS = 24
SLOW_REWARD = """
import time


def letters(completion: str, **_) -> float:
    time.sleep(0.3)
    return sum(character.isalpha() for character in completion) / 16
"""


def recipe_of(folder: Path, model: Path) -> dict[str, Any]:
    recipe = tiny_recipe(folder, model)
    (folder / "rewards.py").write_text(SLOW_REWARD)
    recipe["run"].update(steps=STEPS, checkpoint_every_steps=2)
    recipe["learner"].update(learning_rate=1e-2, epsilon=1e-2)
    return recipe


@dataclass
class Ended:
    """One process of the run: how it ended, how long that took, and what was left."""

    code: int
    seconds: float
    stderr: str
    left_soon: set[str]
    """Names of processes that were there 15 s after the end."""
    steps: int
    incarnation: int


def processes_of(folder: Path) -> dict[int, str]:
    """Processes whose environment names the run folder: the cluster it started, actors, engines, reward processes."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if str(folder).encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:80]
        except OSError:
            continue
    return found


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    until_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < until_s, f"{what}: not within {deadline_s} s"
        time.sleep(0.2)


class Scenario:
    """Starts and ends the same command again and again."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.run = RunFolder(folder / "run")
        self._command = [sys.executable, "-m", "system.cli", "train", str(path)]
        self._log = folder / "stderr.txt"
        self._left: dict[int, str] = {}
        """Processes that were there 15 s after an end."""

    def steps(self) -> int:
        return len(read_metrics(self.run.metrics))

    def start(self, until_steps: int | None) -> subprocess.Popen[str]:
        with open(self._log, "w") as log:
            process = subprocess.Popen(
                self._command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log, text=True, start_new_session=True
            )
        if until_steps is not None:
            wait_until(lambda: process.poll() is not None or self.steps() >= until_steps, 240, f"{until_steps} steps")
            assert process.poll() is None, self._log.read_text()
        return process

    def end(self, process: subprocess.Popen[str], end: Callable[[], object]) -> Ended:
        began_s = time.monotonic()
        end()
        code = process.wait(timeout=240)
        seconds = time.monotonic() - began_s
        until_s = time.monotonic() + 15
        while (left := self._processes()) and time.monotonic() < until_s:
            time.sleep(0.3)
        self._left.update(left)
        record = self.run.read()
        return Ended(code, seconds, self._log.read_text(), set(left.values()), self.steps(), record.incarnation)

    def left_late(self) -> set[str]:
        """Names of the processes that some end left and that still are there."""
        there = processes_of(self.run.path)
        return {name for pid, name in self._left.items() if there.get(pid) == name}

    def _processes(self) -> dict[int, str]:
        """Those of the latest start."""
        return {pid: name for pid, name in processes_of(self.run.path).items() if pid not in self._left}


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("disturbed")
    scenario = Scenario(folder, write_recipe(folder, recipe_of(folder, tiny_model)))
    endings: dict[str, Any] = {"run": scenario.run}

    process = scenario.start(until_steps=3)
    endings["killed"] = scenario.end(process, process.kill)
    process = scenario.start(until_steps=5)
    endings["terminated"] = scenario.end(process, process.terminate)

    process = scenario.start(until_steps=endings["terminated"].steps + 1)
    triptych = [sys.executable, "-m", "system.cli"]
    asked: list[subprocess.CompletedProcess[str]] = []

    def ask(*words: str) -> None:
        command = [*triptych, "run", *words, str(scenario.run.path)]
        asked.append(subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT))

    ask("status")
    endings["stopped"] = scenario.end(process, lambda: ask("stop"))
    endings["status"], endings["stop"] = asked

    endings["finished"] = scenario.end(scenario.start(None), lambda: None)
    endings["again"] = scenario.end(scenario.start(None), lambda: None)
    endings["left_late"] = scenario.left_late()
    return endings


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> RunFolder:
    folder = tmp_path_factory.mktemp("undisturbed")
    path = write_recipe(folder, recipe_of(folder, tiny_model))
    command = [sys.executable, "-m", "system.cli", "train", str(path), "--local"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return RunFolder(folder / "run")


pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_killed_run_leaves_only_rays_own_agents_and_those_not_for_long(disturbed: dict[str, Any]) -> None:
    killed = disturbed["killed"]
    assert killed.code == -signal.SIGKILL
    assert all("agent" in name.lower() or "dashboard" in name for name in killed.left_soon), killed.left_soon
    assert not disturbed["left_late"]


def test_sigterm_ends_with_a_checkpoint_within_30_s(disturbed: dict[str, Any]) -> None:
    terminated = disturbed["terminated"]
    assert terminated.code == 143, terminated.stderr
    assert terminated.seconds < 30
    assert "run the same command again" in terminated.stderr
    assert not terminated.left_soon


def test_run_status_tells_the_step_and_run_stop_ends_the_run(disturbed: dict[str, Any]) -> None:
    assert disturbed["status"].returncode == 0, disturbed["status"].stderr
    assert "running" in disturbed["status"].stdout
    assert "reward" in disturbed["status"].stdout
    assert disturbed["stop"].returncode == 0, disturbed["stop"].stderr
    assert "interrupted" in disturbed["stop"].stdout
    assert disturbed["stopped"].code == 130
    assert not disturbed["stopped"].left_soon


def test_nothing_between_two_checkpointed_stops_is_learned_again(disturbed: dict[str, Any]) -> None:
    """SIGTERM and ``run stop`` write a checkpoint where they end; only the kill may cost steps."""
    lines = [json.loads(line) for line in disturbed["run"].metrics.read_text().splitlines()]
    repeated = [line["step"] for line in lines if line["incarnation"] > 1]
    assert len(repeated) == len(set(repeated))


def test_incarnations_rise_and_versions_are_used_once(disturbed: dict[str, Any]) -> None:
    assert [disturbed[name].incarnation for name in ("killed", "terminated", "stopped", "finished")] == [0, 1, 2, 3]
    lines = [json.loads(line) for line in disturbed["run"].metrics.read_text().splitlines()]
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions))


def test_a_finished_run_started_again_says_so_and_does_nothing(disturbed: dict[str, Any]) -> None:
    assert disturbed["finished"].code == 0, disturbed["finished"].stderr
    assert disturbed["again"].code == 0
    assert disturbed["again"].seconds < 30
    assert disturbed["again"].steps == STEPS


def test_the_disturbed_run_is_the_undisturbed_one(disturbed: dict[str, Any], undisturbed: RunFolder) -> None:
    got, wanted = (read_rollouts(run.rollouts) for run in (disturbed["run"], undisturbed))
    assert [row.prompt_id for row in got] == [row.prompt_id for row in wanted]
    assert [row.group_id for row in got] == [row.group_id for row in wanted]
    assert [row.completion_tokens.tolist() for row in got] == [row.completion_tokens.tolist() for row in wanted]
    assert [row.reward for row in got] == [row.reward for row in wanted]
    one, other = (
        load_file(run.checkpoints / f"step_{STEPS:06d}" / "hf" / "model.safetensors")
        for run in (disturbed["run"], undisturbed)
    )
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-6
