"""A program for one of several learner ranks over gloo: the whole gradient of one update, for each of many settings.

``python -m tests.learner.gradient_ranks RANK SIZE MODEL_FOLDER OUT``; rank 0 writes ``gradient-SETTING.pt``. The
objective multiplies each log-prob by a coefficient of its own (given as its rollout log-prob).
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from learner.packing import Layout
from learner.pool import share_rows
from learner.rank import LearnerPlan, LearnerRank
from learner.settings import LearnerSettings
from learner.world import Meeting
from system.core.model import ModelSettings
from system.core.records import Group
from tests.learner.conftest import make_row

OBJECTIVE = """
from learner.objectives.base import TokenObjective
from learner.objectives.settings import TokenSettings


class GivenCoefficients(TokenObjective):
    '''Each log-prob times a number of its own.'''

    name = "given_coefficients"
    Options = TokenSettings
    policy_needs = frozenset({"rollout"})

    def token_loss(self, inputs):
        return inputs.rollout * inputs.logprobs
"""


@dataclass(frozen=True)
class Setting:
    """One way to come to the same gradient."""

    zero: int
    layout: Layout
    budget_tokens: int = 10_000
    checkpointing: bool = False
    cut: bool = False
    """Whether every group stands on several ranks, instead of being spread as a pool does."""

    @property
    def name(self) -> str:
        return f"{self.zero}-{self.layout}-{self.budget_tokens}-{self.checkpointing}-{self.cut}"


def settings(size: int) -> list[Setting]:
    """For one rank everything; for several each stage and layout, once with whole groups and once with cut ones."""
    layouts: tuple[Layout, ...] = ("shared_prefix", "padded")
    found = [
        Setting(zero, layout, budget_tokens)
        for zero, layout, budget_tokens in itertools.product(range(4), layouts, (10_000, 45))
    ]
    if size == 1:
        return [*found, *(Setting(1, layout, 45, checkpointing=True) for layout in layouts)]
    return [*found, *(Setting(zero, "shared_prefix", 45, cut=True) for zero in range(4))]


def groups() -> list[Group]:
    """Uneven groups; masked tokens, a row that is all masked but for one, completions of one token, two prompts."""
    generator = np.random.default_rng(2)
    made = []
    for group_id, lengths in enumerate(((1, 9, 5, 3), (12, 2), (1, 1, 7), (4,) * 6)):
        rows = []
        for trajectory, length in enumerate(lengths):
            mask = generator.random(length) < 0.7
            mask[generator.integers(length)] = True
            row = make_row(
                generator, group_id, trajectory, float(trajectory % 2), length=length, loss_mask=mask,
                prompt_length=8 if trajectory < 4 else 11,
            )  # fmt: skip
            rows.append(row)
        made.append(Group(tuple(rows)))
    return made


def share(setting: Setting, rank: int, size: int) -> list[Group]:
    """The rank's rows."""
    everything = groups()
    if not setting.cut:
        return share_rows(everything, size, 1, layout=setting.layout)[rank]
    cut = [tuple(row for row in group.rows if row.trajectory_id % size == rank) for group in everything]
    return [Group(rows) for rows in cut if rows]


def gradient(setting: Setting, folder: Path, objective: Path, rank: int, size: int, meeting: Meeting | None) -> dict:
    """Of one update, complete on every rank, by parameter name."""
    from deepspeed.utils import safe_get_full_grad

    learner = LearnerRank(
        LearnerPlan(
            ModelSettings(path=str(folder), dtype="float32"),
            LearnerSettings(
                threads=1, zero=setting.zero, workers=size, tokens_per_microbatch=setting.budget_tokens,
                layout=setting.layout, activation_checkpointing=setting.checkpointing, gradient_clip=0.0,
                collective_timeout_s=120.0, checkpoint_deadline_s=120.0,
            ),
            {"name": "given_coefficients", "file": str(objective)},
        ),
        rank, size,
    )  # fmt: skip
    learner.setup(meeting)
    found: dict[str, torch.Tensor] = {}

    def keep(learning_rate: float) -> float:
        for name, weight in learner.model.causal_lm.named_parameters():
            whole = safe_get_full_grad(weight) if setting.zero else weight.grad
            assert whole is not None, name
            found[name] = whole.detach().float().clone()
        return 0.0

    learner.engine.update = keep  # type: ignore[method-assign]
    report = learner.step(share(setting, rank, size), 0, 0)
    assert report.updates == 1
    assert setting.cut or (report.shared_prompt_share > 0) == (setting.layout == "shared_prefix")
    learner.engine.close()
    return found


def main(rank: int, size: int, folder: Path, out: Path) -> None:
    objective = out / "own.py"
    if rank == 0:
        objective.write_text(OBJECTIVE)
    point, meeting = None, None
    if size > 1 and rank == 0:
        point = LearnerRank(LearnerPlan(ModelSettings(path=str(folder)), LearnerSettings(), {}), 0, size)
        meeting = point.meeting()
        (out / "port.tmp").write_text(str(meeting.port))
        (out / "port.tmp").rename(out / "port")
    elif size > 1:
        meeting = Meeting("127.0.0.1", int((out / "port").read_text()))
    if meeting is not None:
        from learner.world import World

        World.open(rank, size, torch.device("cpu"), 120.0, meeting, point._meeting_point if point else None)
    for setting in settings(size):
        found = gradient(setting, folder, objective, rank, size, meeting)
        if rank == 0:
            torch.save(found, out / f"gradient-{setting.name}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
