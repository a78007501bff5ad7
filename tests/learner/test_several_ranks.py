"""One rank, two and four real ones over gloo, ZeRO 0 to 3, several updates a step: the same weights.

Work is uneven, a group is cut, there are more ranks than groups, and ranks have nothing to do.
"""

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
from tests.learner import several_ranks
from tests.learner.conftest import coupled_objective

pytestmark = [pytest.mark.engine, pytest.mark.slow]

Together = tuple[int, Path]
"""Number of ranks, and the folder that they wrote into."""
Learned = tuple[dict[str, torch.Tensor], list[tuple[float, ...]]]
REPOSITORY = Path(__file__).parents[2]


def run_together(size: int, tiny_llama: Path, out: Path) -> Path:
    """Trains in ``size`` processes; returns the folder that they wrote into."""
    coupled_objective(out)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            command = [
                sys.executable, "-m", "tests.learner.several_ranks", str(rank), str(size), str(tiny_llama), str(out)
            ]  # fmt: skip
            log = (out / f"log-{rank}").open("wb")
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=REPOSITORY))
            until_s = time.monotonic() + 300
            while rank == 0 and not (out / "port").exists():
                assert time.monotonic() < until_s, "rank 0 did not open its port"
                assert ranks[0].poll() is None, (out / "log-0").read_text()
                time.sleep(0.1)
        for rank, process in enumerate(ranks):
            assert process.wait(timeout=300) == 0, (out / f"log-{rank}").read_text()[-4000:]
    finally:
        for process in ranks:
            process.kill()
    return out


@pytest.fixture(scope="module", params=[2, 4])
def together(request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Together:
    return request.param, run_together(request.param, tiny_llama, tmp_path_factory.mktemp(f"ranks{request.param}"))


@pytest.fixture(scope="module")
def alone(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Learned]:
    out = tmp_path_factory.mktemp("one")
    return {run: learn(tiny_llama, run, out) for run in several_ranks.RUNS[1]}


def learn(folder: Path, run: str, out: Path) -> Learned:
    rank = LearnerRank(several_ranks.plan(folder, run, out, 1))
    rank.setup()
    reports = [rank.step(several_ranks.groups_of(step), step, step) for step in range(several_ranks.STEPS)]
    weights = several_ranks.weights_of(rank)
    rank.close()
    return weights, [several_ranks.facts_of(report) for report in reports]


def test_several_ranks_report_what_one_reports(together, alone):
    size, out = together
    for run in several_ranks.RUNS[size]:
        reported, _ = json.loads((out / f"reports-{run}.json").read_text())
        np.testing.assert_allclose(reported, alone[run][1], rtol=1e-4, atol=1e-6)
        assert [updates for *_, updates in reported] == [4, 4, 4]


@pytest.mark.parametrize("coupled", [False, True])
def test_after_twelve_updates_parameters_do_not_depend_on_ranks_and_stage(together, alone, tiny_llama, coupled):
    size, out = together
    runs = [run for run in several_ranks.RUNS[size] if (run == "coupled") == coupled]
    learned = [weights for run, (weights, _) in alone.items() if (run == "coupled") == coupled]
    learned += [torch.load(out / f"weights-{run}.pt") for run in runs]
    start = load_file(tiny_llama / "model.safetensors")
    for name, weight in start.items():
        values = torch.stack([weights[name] for weights in learned])
        assert float((values - weight).abs().max()) > 1e-4, f"{name} did not move"
        spread = float((values.amax(0) - values.amin(0)).max())
        assert spread <= 1e-5, f"{name}: {spread:.1e}"


def test_the_folder_saved_by_several_ranks_holds_the_same_weights(together):
    size, out = together
    for run in several_ranks.RUNS[size]:
        weights = torch.load(out / f"weights-{run}.pt")
        on_disk = load_file(out / f"hf-{run}" / "model.safetensors")
        assert on_disk.keys() == weights.keys()
        assert all(torch.equal(on_disk[name], weights[name]) for name in weights)
