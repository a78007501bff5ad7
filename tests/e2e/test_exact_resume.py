"""Whatever is killed on the way, a run's samples and parameters are those of a run that nobody disturbed.

float32 and ``max_staleness: 0``: prompts, samples, rewards equal; parameters to 1e-6. The number of rollout workers
must not show in them either.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from system.core.records import Row
from system.metrics import read_metrics
from system.rollout_files import read_rollouts
from system.run_folder import RunFolder
from tests.e2e.conftest import ROOT, tiny_recipe, write_recipe
from tests.e2e.test_endings import SLOW_REWARD, processes_of, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS = 8
DEADLINE_S = 500
TWO_RANKS = ["learner.workers=2", "learner.zero=3"]
TWO_WORKERS = ["rollout.workers=2"]


class Run:
    """One run folder and the command that goes on in it."""

    def __init__(self, folder: Path, model: Path, overrides: list[str]) -> None:
        recipe = tiny_recipe(folder, model)
        (folder / "rewards.py").write_text(SLOW_REWARD)
        recipe["run"].update(steps=STEPS, checkpoint_every_steps=2)
        recipe["learner"].update(learning_rate=1e-2, epsilon=1e-2)
        self.folder = RunFolder(folder / "run")
        self.log = folder / "stderr.txt"
        self._command = [sys.executable, "-m", "system.cli", "train", str(write_recipe(folder, recipe)), *overrides]

    def start(self) -> subprocess.Popen[Any]:
        with open(self.log, "a") as log:
            return subprocess.Popen(self._command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log)

    def finish(self, process: subprocess.Popen[Any] | None = None) -> Run:
        assert (process or self.start()).wait(timeout=DEADLINE_S) == 0, self.log.read_text()
        return self

    def steps(self) -> int:
        return len(read_metrics(self.folder.metrics))

    def after_steps(self, steps: int, process: subprocess.Popen[Any]) -> None:
        wait_until(lambda: process.poll() is not None or self.steps() >= steps, DEADLINE_S, f"{steps} steps")
        assert process.poll() is None, self.log.read_text()

    def rows(self) -> tuple[Row, ...]:
        return read_rollouts(self.folder.rollouts)

    def parameters(self) -> dict[str, Any]:
        return load_file(self.folder.checkpoints / f"step_{STEPS:06d}" / "hf" / "model.safetensors")


Make = Callable[..., Run]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Make:
    return lambda *overrides: Run(tmp_path_factory.mktemp("run"), tiny_model, list(overrides))


@pytest.fixture(scope="module")
def undisturbed(make: Make) -> Run:
    return make().finish()


@pytest.fixture(scope="module")
def undisturbed_two_ranks(make: Make) -> Run:
    return make(*TWO_RANKS).finish()


def check_same(run: Run, wanted: Run, atol: float = 1e-6) -> None:
    got_rows, wanted_rows = run.rows(), wanted.rows()
    for column in ("group_id", "trajectory_id", "prompt_id", "reward", "seed", "step"):
        assert [getattr(row, column) for row in got_rows] == [getattr(row, column) for row in wanted_rows], column
    for got, expected in zip(got_rows, wanted_rows, strict=True):
        assert got.prompt_tokens.tolist() == expected.prompt_tokens.tolist()
        assert got.completion_tokens.tolist() == expected.completion_tokens.tolist()
    mine, theirs = run.parameters(), wanted.parameters()
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) <= atol
    lines = [line for line in read_metrics(run.folder.metrics) if line["step"] >= 0]
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert lines[-1]["trained"] == 2 * STEPS
    assert lines[-1]["dropped"] == {}


def processes(run: Run, name: str) -> list[psutil.Process]:
    """The run's processes of that name without those they started themselves, in the order of their start."""
    found = {
        pid: psutil.Process(pid) for pid, command in processes_of(run.folder.path).items() if command.startswith(name)
    }
    first = [process for process in found.values() if process.ppid() not in found]
    return sorted(first, key=lambda process: process.create_time())


def kill_engine(run: Run) -> None:
    """Kills the vLLM process that holds the model of one rollout worker."""
    processes(run, "VLLM::Worker")[-1].kill()


def kill_actor(run: Run) -> None:
    processes(run, "ray::RolloutActor")[0].kill()


def kill_rank(run: Run) -> None:
    processes(run, "ray::LearnerActor")[-1].kill()


def disturbed(make: Make, overrides: list[str], *disturbances: Callable[[Run], None]) -> Run:
    """A run in which something is killed after every second step."""
    run = make(*overrides)
    process = run.start()
    for index, disturb in enumerate(disturbances):
        run.after_steps(2 * index + 1, process)
        disturb(run)
    return run.finish(process)


def test_two_rollout_workers_one_killed_on_the_way_give_the_samples_of_one(make: Make, undisturbed: Run) -> None:
    run = disturbed(make, TWO_WORKERS, kill_engine)
    check_same(run, undisturbed)
    assert "rebuilding rollout-" in (run.folder.logs / "driver.log").read_text()
    assert run.folder.read().incarnation == 0


def test_a_killed_learner_rank_takes_the_run_back_to_its_checkpoint_and_nothing_shows(
    make: Make, undisturbed_two_ranks: Run
) -> None:
    run = disturbed(make, TWO_RANKS, kill_rank)
    check_same(run, undisturbed_two_ranks)
    assert run.folder.read().incarnation == 1


def test_every_worker_killed_and_the_only_worker_killed(make: Make, undisturbed: Run) -> None:
    check_same(disturbed(make, TWO_WORKERS, kill_engine, kill_actor), undisturbed)
    check_same(disturbed(make, [], kill_actor, kill_engine), undisturbed)


@pytest.mark.parametrize("attempt", [1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_killed_at_a_random_moment_and_started_again_is_the_undisturbed_one(
    ranks: int, attempt: int, make: Make, request: pytest.FixtureRequest
) -> None:
    wanted: Run = request.getfixturevalue("undisturbed" if ranks == 1 else "undisturbed_two_ranks")
    run = make(*(TWO_RANKS if ranks == 2 else []))
    process = run.start()
    wait_until(lambda: run.folder.exists() and run.folder.read().state == "running", DEADLINE_S, "start")
    moment_s = random.SystemRandom().uniform(0.0, 12.0)
    time.sleep(moment_s)
    was_running = process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    print(f"\nkilled {moment_s:.2f} s after its first sync, at step {run.steps()} (running: {was_running})", end="")
    assert was_running
    wait_until(partial(_gone, run), 100, "end of the killed run's actors")
    check_same(run.finish(), wanted)
    assert run.folder.read().incarnation == 1


def _gone(run: Run) -> bool:
    return not any(name.startswith("ray::") and "Agent" not in name for name in processes_of(run.folder.path).values())
