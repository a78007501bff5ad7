"""A small real run for end-to-end tests: a tiny random model, a JSONL data file, a recipe on disk, the real command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tiny_models import save_tiny_llama

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "system.cli"]

REWARD = '''
"""Rewards short answers that are mostly letters; graded, so that most groups carry signal."""


def letters(completion: str, **_) -> float:
    return sum(character.isalpha() for character in completion) / 16
'''


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", tied=False, seed=0)


def questions(count: int) -> list[dict[str, Any]]:
    return [{"question": f"{a}+{a + 1}=", "answer": str(2 * a + 1), "id": f"q{a}"} for a in range(count)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tiny_recipe(folder: Path, model: Path) -> dict[str, Any]:
    """A complete recipe of the smallest shape; tests change what they are about."""
    write_jsonl(folder / "questions.jsonl", questions(12))
    (folder / "rewards.py").write_text(REWARD, encoding="utf-8")
    return {
        "run": {"name": "tiny", "folder": str(folder / "run"), "seed": 0, "steps": 3, "checkpoint_every_steps": 1},
        "model": {"path": str(model), "dtype": "float32"},
        "data": [
            {
                "source": str(folder / "questions.jsonl"), "prompt_column": "question", "label_column": "answer",
                "id_column": "id",
            }
        ],
        "rollout": {"group_size": 4, "max_tokens": 8, "temperature": 1.0, "deadline_s": 60},
        "rewards": [{"name": "letters", "use": f"{folder / 'rewards.py'}:letters"}],
        "stream": {"groups_per_step": 2, "max_staleness": 0},
        "objective": {"name": "grpo"},
        "learner": {"learning_rate": 1e-3, "tokens_per_microbatch": 512},
        "log": {"tensorboard": False},
    }  # fmt: skip


def write_recipe(folder: Path, recipe: dict[str, Any] | str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(recipe if isinstance(recipe, str) else yaml.safe_dump(recipe), encoding="utf-8")
    return path


@pytest.fixture
def triptych() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the command to its end and returns what it said."""

    def run(*arguments: str | Path, timeout_s: float = 300.0, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            cwd=cwd,
            env=environment,
        )

    return run
