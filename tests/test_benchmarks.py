"""The learner's benchmark runs to its end and says what it promises; on a tiny model its figures mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import save_tiny_llama

ROOT = Path(__file__).parent.parent


@pytest.mark.engine
@pytest.mark.long
def test_the_benchmark_of_the_learners_step_ends_with_its_figures(tmp_path):
    model = save_tiny_llama(tmp_path / "model", max_positions=1024)
    command = [sys.executable, "benchmarks/learner.py", "--rounds", "1", "--threads", "1", "--model", str(model)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {"short", "long"}
    for found in figures.values():
        for key in ("speedup_vs_padded", "overhead_vs_bare", "memory_vs_padded", "step_memory_vs_padded"):
            assert isinstance(found[key], float), key
        assert set(found["overhead_by_zero"]) == {"0", "1", "2", "3"}
        assert found["overhead_by_zero"]["0"] == found["overhead_vs_bare"]
