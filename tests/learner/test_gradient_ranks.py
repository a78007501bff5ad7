"""One update's gradient on 1, 2 and 4 real ranks: layouts, ZeRO stages, micro-batches and cut groups change nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.token_batch import ScoredRow
from tests.learner import gradient_ranks
from tests.learner.test_layouts import Gradient, assert_equal, gradient_of
from tests.learner.test_logprobs import plain_logprobs

pytestmark = [pytest.mark.engine, pytest.mark.slow]
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def expected(tied_llama: Path) -> Gradient:
    """Of the mean over all trained tokens of coefficient times log-prob, row by row, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(tied_llama, dtype=torch.float32, attn_implementation="eager")
    rows = [row for group in gradient_ranks.groups() for row in group.rows]
    trained = sum(int(row.loss_mask.sum()) for row in rows)
    for row in rows:
        logprobs = plain_logprobs(model, ScoredRow(row.prompt_tokens, row.completion_tokens), 1.0)
        mask = torch.tensor(row.loss_mask)
        ((logprobs * torch.tensor(row.rollout_logprobs))[mask].sum() / trained).backward()
    return gradient_of(model)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_is_that_of_each_row_alone(tied_llama, expected, tmp_path, size):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(size):
            command = [sys.executable, "-m", "tests.learner.gradient_ranks", str(rank), str(size)]
            log = (tmp_path / f"log-{rank}").open("wb")
            ranks.append(
                subprocess.Popen(
                    [*command, str(tied_llama), str(tmp_path)], env=environment, stdout=log, stderr=log, cwd=REPOSITORY
                )
            )
            until_s = time.monotonic() + 120
            while size > 1 and rank == 0 and not (tmp_path / "port").exists():
                assert time.monotonic() < until_s, "rank 0 did not open its port"
                assert ranks[0].poll() is None, (tmp_path / "log-0").read_text()
                time.sleep(0.1)
        for rank, process in enumerate(ranks):
            assert process.wait(timeout=400) == 0, (tmp_path / f"log-{rank}").read_text()[-4000:]
    finally:
        for process in ranks:
            process.kill()
    for setting in gradient_ranks.settings(size):
        found = torch.load(tmp_path / f"gradient-{setting.name}.pt")
        assert_equal(found, expected)
