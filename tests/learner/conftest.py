"""Tiny models, and groups of rollouts made by sampling from them exactly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from system.core.records import Group, Row
from tests.tiny_models import save_tiny_llama


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def tied_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("models") / "tied", tied=True)


def make_row(
    generator: np.random.Generator,
    group_id: int,
    trajectory_id: int,
    reward: float | None,
    *,
    prompt_length: int = 6,
    length: int | None = None,
    **fields: object,
) -> Row:
    """A row of random tokens and plausible log-probs."""
    length = int(generator.integers(2, 12)) if length is None else length
    return Row(
        group_id=group_id,
        trajectory_id=trajectory_id,
        prompt_id=f"p{group_id}",
        source="test",
        prompt_tokens=np.random.default_rng(abs(group_id)).integers(6, 262, prompt_length),
        completion_tokens=generator.integers(6, 262, length),
        rollout_logprobs=-5.0 - generator.random(length),
        versions=[0] * length,
        finish_reason="stop",
        seed=0,
        worker="w0",
        completion_text="",
        reward=reward,
        **fields,
    )


def make_groups(count: int = 4, size: int = 4, seed: int = 0) -> list[Group]:
    """Groups of rows of uneven length, with mixed rewards and reference log-probs."""
    generator = np.random.default_rng(seed)
    groups = []
    for group_id in range(count):
        rows = []
        for trajectory in range(size):
            length = int(generator.integers(2, 12))
            reward = float(trajectory % 2) + 0.25 * group_id * (trajectory == 0)
            reference = -5.0 - generator.random(length)
            rows.append(make_row(generator, group_id, trajectory, reward, length=length, reference_logprobs=reference))
        groups.append(Group(tuple(rows)))
    return groups


SEQUENCE_VARIANCE = """
import torch
from learner.objectives import Objective


class SequenceVariance(Objective):
    '''A toy that mixes the trajectories of a group in its gradient: (log-prob minus the group's mean - advantage)^2.'''

    name = "sequence_variance"
    coupling = "group"

    def loss(self, inputs):
        trajectories = inputs.trajectories
        sums = inputs.trajectory_sum(inputs.logprobs)
        centred = sums - trajectories.group_mean(sums)[trajectories.groups]
        return (centred - trajectories.advantages).square().sum() / inputs.denominators.groups
"""


def coupled_objective(folder: Path) -> dict[str, str]:
    """A user's own objective, in a file, that couples the trajectories of a group."""
    if not (folder / "own.py").exists():
        (folder / "own.py").write_text(SEQUENCE_VARIANCE)
    return {"name": "sequence_variance", "file": str(folder / "own.py")}
