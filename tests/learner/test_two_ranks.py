"""One rank and two real ones over gloo, ZeRO 0 to 3, uneven work, a cut group, an idle rank: the same weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from learner.rank import LearnerRank
from tests.learner import two_ranks
from tests.learner.conftest import coupled_objective

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Learned = tuple[dict[str, torch.Tensor], list[tuple[float, float, int, int]]]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run_of_two(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two")
    coupled_objective(out)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(2):
            command = [sys.executable, "-m", "tests.learner.two_ranks", str(rank), str(tiny_llama), str(out)]
            log = (out / f"log-{rank}").open("wb")
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=REPOSITORY))
            until_s = time.monotonic() + 120
            while rank == 0 and not (out / "port").exists():
                assert time.monotonic() < until_s, "rank 0 did not open its port"
                assert ranks[0].poll() is None, (out / "log-0").read_text()
                time.sleep(0.1)
        for rank, process in enumerate(ranks):
            assert process.wait(timeout=180) == 0, (out / f"log-{rank}").read_text()[-4000:]
    finally:
        for process in ranks:
            process.kill()
    return out


@pytest.fixture(scope="module")
def alone(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Learned]:
    out = tmp_path_factory.mktemp("one")
    return {run: learn(tiny_llama, run, out) for run in two_ranks.RUNS}


def learn(folder: Path, run: str, out: Path) -> Learned:
    rank = LearnerRank(two_ranks.plan(folder, run, out))
    rank.setup()
    reports = [rank.step(two_ranks.share(step, None), step, step) for step in range(two_ranks.STEPS)]
    weights = two_ranks.weights_of(rank)
    rank.close()
    return weights, [(report.loss, report.grad_norm, report.completion_tokens, report.updates) for report in reports]


@pytest.mark.parametrize("run", two_ranks.RUNS)
def test_two_ranks_report_what_one_reports(run_of_two, alone, run):
    reported, _ = json.loads((run_of_two / f"reports-{run}.json").read_text())
    np.testing.assert_allclose(reported, alone[run][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("runs", [("0", "1", "2", "3"), ("coupled",)])
def test_after_three_steps_parameters_do_not_depend_on_ranks_and_stage(run_of_two, alone, tiny_llama, runs):
    learned = [alone[run][0] for run in runs] + [torch.load(run_of_two / f"weights-{run}.pt") for run in runs]
    start = load_file(tiny_llama / "model.safetensors")
    for name, weight in start.items():
        values = torch.stack([weights[name] for weights in learned])
        assert float((values - weight).abs().max()) > 1e-4, f"{name} did not move"
        spread = float((values.amax(0) - values.amin(0)).max())
        assert spread <= 1e-5, f"{name}: {spread:.1e}"


@pytest.mark.parametrize("run", two_ranks.RUNS)
def test_the_folder_saved_by_two_ranks_holds_the_same_weights(run_of_two, run):
    weights = torch.load(run_of_two / f"weights-{run}.pt")
    on_disk = load_file(run_of_two / f"hf-{run}" / "model.safetensors")
    assert on_disk.keys() == weights.keys()
    assert all(torch.equal(on_disk[name], weights[name]) for name in weights)
