"""Two real ranks over gloo, ZeRO 0 to 3, uneven work, a cut group and an idle rank: the weights of one rank alone."""

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
def alone(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Learned]:
    out = tmp_path_factory.mktemp("one")
    return {coupled: learn(tiny_llama, "coupled" if coupled else "1", out) for coupled in (False, True)}


def learn(folder: Path, run: str, out: Path) -> Learned:
    rank = LearnerRank(two_ranks.plan(folder, run, out))
    rank.setup()
    reports = [rank.step(two_ranks.share(step, None), step, step) for step in range(two_ranks.STEPS)]
    weights = two_ranks.weights_of(rank)
    rank.close()
    return weights, [(report.loss, report.grad_norm, report.completion_tokens, report.updates) for report in reports]


@pytest.mark.parametrize("run", two_ranks.RUNS)
def test_two_ranks_learn_what_one_learns(run_of_two, alone, run):
    weights, facts = alone[run == "coupled"]
    found = torch.load(run_of_two / f"weights-{run}.pt")
    for name, weight in weights.items():
        torch.testing.assert_close(found[name], weight, atol=1e-5, rtol=0.0)
    reported, _ = json.loads((run_of_two / f"reports-{run}.json").read_text())
    np.testing.assert_allclose(reported, facts, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("run", two_ranks.RUNS)
def test_the_folder_saved_by_two_ranks_holds_the_same_weights(run_of_two, run):
    weights = torch.load(run_of_two / f"weights-{run}.pt")
    on_disk = load_file(run_of_two / f"hf-{run}" / "model.safetensors")
    assert on_disk.keys() == weights.keys()
    assert all(torch.equal(on_disk[name], weights[name]) for name in weights)
