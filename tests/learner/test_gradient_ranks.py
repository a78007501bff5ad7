"""One update's loss and gradient on 1, 2 and 4 real ranks are those of each row alone, however the work is cut.

ZeRO stages, layouts, micro-batches, activation checkpointing, sizes of the head's pieces, groups cut or whole; random
coefficients, float32, relative to the gradient of transformers' plain forward passes. The whole product is a ``long``
test; a part in which any two values of any two axes come together runs with the others. Run with ``-s`` they print the
largest gaps.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.token_batch import ScoredRow
from tests.learner import gradient_ranks
from tests.learner.gradient_ranks import AXES, Setting
from tests.learner.test_layouts import Gradient, assert_equal, gap_between, gradient_of
from tests.learner.test_logprobs import plain_logprobs

pytestmark = [pytest.mark.engine, pytest.mark.slow]
REPOSITORY = Path(__file__).parents[2]
SIZES = (1, 2, 4)


@pytest.fixture(scope="module")
def expected(tied_llama: Path) -> tuple[float, Gradient]:
    """Of the mean over all trained tokens of coefficient times log-prob, row by row, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(tied_llama, dtype=torch.float32, attn_implementation="eager")
    rows = [row for group in gradient_ranks.groups() for row in group.rows]
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    whole = 0.0
    for row in rows:
        logprobs = plain_logprobs(model, ScoredRow(row.prompt_tokens, row.completion_tokens), 1.0)
        mask = torch.tensor(row.loss_mask)
        loss = ((logprobs * (torch.tensor(row.rollout_logprobs) + 6.0))[mask].sum() / trained).float()
        loss.backward()
        whole += float(loss.detach())
    return whole, gradient_of(model)


def learn_together(folder: Path, out: Path, size: int, which: str, deadline_s: float) -> None:
    """``size`` processes of ``gradient_ranks``."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            command = [sys.executable, "-m", "tests.learner.gradient_ranks", str(rank), str(size), str(folder)]
            log = (out / f"log-{rank}").open("wb")
            ranks.append(
                subprocess.Popen([*command, str(out), which], env=environment, stdout=log, stderr=log, cwd=REPOSITORY)
            )
            until_s = time.monotonic() + 120
            while size > 1 and rank == 0 and not (out / "port").exists():
                assert time.monotonic() < until_s, "rank 0 did not open its port"
                assert ranks[0].poll() is None, (out / "log-0").read_text()
                time.sleep(0.1)
        for rank, process in enumerate(ranks):
            assert process.wait(timeout=deadline_s) == 0, (out / f"log-{rank}").read_text()[-4000:]
    finally:
        for process in ranks:
            process.kill()


def largest_gaps(gaps: dict[Setting, float], size: int) -> str:
    """By value of every axis."""
    lines = [f"ranks {size}: {len(gaps)} settings, largest gap {max(gaps.values()):.1e}"]
    for axis, values in AXES.items():
        found = {value: [gap for setting, gap in gaps.items() if getattr(setting, axis) == value] for value in values}
        lines.append(f"  {axis}: " + ", ".join(f"{value} {max(some):.1e}" for value, some in found.items() if some))
    return "\n".join(lines)


def check(settings: Sequence[Setting], out: Path, size: int, expected: tuple[float, Gradient]) -> None:
    loss, gradient = expected
    gaps = {}
    for setting in settings:
        found = torch.load(out / f"{setting.name}.pt")
        gaps[setting] = gap_between(found["gradient"], gradient)
        assert_equal(found["gradient"], gradient)
        assert found["loss"] == pytest.approx(loss, rel=1e-5), setting
    print(f"\n{largest_gaps(gaps, size)}")


@pytest.mark.parametrize("size", SIZES)
def test_loss_and_gradient_are_those_of_each_row_alone(tied_llama, expected, tmp_path, size):
    learn_together(tied_llama, tmp_path, size, "some", 400)
    check(gradient_ranks.settings(size), tmp_path, size, expected)


def test_the_part_has_all_pairs_of_values():
    part = gradient_ranks.settings(2)
    for (one, values), (other, others) in itertools.combinations(AXES.items(), 2):
        found = {(getattr(setting, one), getattr(setting, other)) for setting in part}
        assert found == set(itertools.product(values, others))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", SIZES)
def test_loss_and_gradient_are_those_of_each_row_alone_in_every_setting(tied_llama, expected, tmp_path, size):
    learn_together(tied_llama, tmp_path, size, "all", 3500)
    check(gradient_ranks.settings(size, "all"), tmp_path, size, expected)
