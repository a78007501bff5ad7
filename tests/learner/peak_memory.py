"""One rank in a process of its own: prints the most memory that it held, and its largest micro-batch.

Usage: python -m tests.learner.peak_memory MODEL DTYPE LEARNER_SETTINGS_AS_JSON. Run by test_memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from learner.rank import LearnerPlan, LearnerRank
from learner.settings import LearnerSettings
from system.core.model import ModelSettings
from system.core.records import Group
from tests.learner.conftest import make_row

ROWS, PROMPT_TOKENS, COMPLETION_TOKENS = 8, 33, 224


def peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main(model: str, dtype: str, learner: dict[str, object]) -> None:
    generator = np.random.default_rng(0)
    rows = [
        make_row(generator, 0, number, float(number % 2), prompt_length=PROMPT_TOKENS, length=COMPLETION_TOKENS)
        for number in range(ROWS)
    ]
    row_tokens = PROMPT_TOKENS + COMPLETION_TOKENS - 1
    tokens = ROWS * row_tokens
    settings = LearnerSettings(threads=1, tokens_per_microbatch=tokens // 2, **learner)
    rank = LearnerRank(LearnerPlan(ModelSettings(path=model, dtype=dtype), settings, {"name": "grpo"}))
    rank.setup()
    for step in range(2):
        rank.step([Group(tuple(rows))], step, step)
    batch = {"tokens": tokens // 2, "row_tokens": row_tokens, "wanted_tokens": ROWS * COMPLETION_TOKENS // 2}
    print(json.dumps([peak_bytes(), batch]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
