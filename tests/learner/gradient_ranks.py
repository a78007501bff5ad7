"""A program for one of several learner ranks over gloo: loss and gradient of one update, for each of many settings.

``python -m tests.learner.gradient_ranks RANK SIZE MODEL_FOLDER OUT some|all``; rank 0 writes ``SETTING.pt``. The
objective multiplies each log-prob by a random coefficient of its own (its rollout log-prob plus 6).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from learner import logprobs
from learner.packing import Layout
from learner.pool import share_rows
from learner.rank import LearnerPlan, LearnerRank
from learner.settings import LearnerSettings
from learner.token_batch import ScoredRow
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
        return (inputs.rollout + 6.0) * inputs.logprobs
"""


@dataclass(frozen=True)
class Setting:
    """One way to come to the same gradient."""

    zero: int
    layout: Literal["shared_prefix", "packed", "padded"]
    """``packed``: without padding, every row with a prompt of its own."""
    budget_tokens: int
    checkpointing: bool
    logits_rows: int | None
    """Positions whose logits exist at a time, in pieces of two; None: all."""
    cut: bool
    """Whether every group stands on several ranks, instead of being spread as a pool does."""

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in astuple(self))

    @property
    def learner_layout(self) -> Layout:
        return "padded" if self.layout == "padded" else "shared_prefix"


AXES: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "layout": ("shared_prefix", "packed", "padded"),
    "budget_tokens": (10_000, 45),
    "checkpointing": (False, True),
    "logits_rows": (None, 3),
    "cut": (False, True),
}

PAIRWISE = ["0001", "0100", "1010", "1110", "1001", "0111", "0110", "1101", "1000", "0101", "0010", "1011"]
"""For each stage and layout the places of the other axes' values."""


def settings(size: int, which: str = "some") -> list[Setting]:
    """``all`` of the product, or ``some``: any two values of any two axes come together once at least."""
    if which == "all":
        axes = {**AXES, "cut": AXES["cut"] if size > 1 else (False,)}
        return [Setting(*values) for values in itertools.product(*axes.values())]
    others = list(AXES.values())[2:]
    part = [
        Setting(*pair, *(values[int(place)] for values, place in zip(others, places, strict=True)))
        for pair, places in zip(itertools.product(AXES["zero"], AXES["layout"]), PAIRWISE, strict=True)
    ]
    return part if size > 1 else [replace(setting, cut=False) for setting in part]


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
            coefficients = np.minimum(generator.normal(-6.0, 1.0, length), 0.0)
            rows.append(replace(row, rollout_logprobs=coefficients))
        made.append(Group(tuple(rows)))
    return made


def share(setting: Setting, rank: int, size: int) -> list[Group]:
    """The rank's rows."""
    everything = groups()
    if not setting.cut:
        return share_rows(everything, size, 1, layout=setting.learner_layout)[rank]
    cut = [tuple(row for row in group.rows if row.trajectory_id % size == rank) for group in everything]
    return [Group(rows) for rows in cut if rows]


@contextmanager
def applied(setting: Setting, vocabulary: int = 320) -> Iterator[None]:
    """Inside, what is no setting of a learner is as ``setting`` says."""
    prefix, sizes = ScoredRow.__dict__["prefix"], (logprobs.LOGITS_BYTES, logprobs.SOFTMAX_CHUNK_BYTES)
    if setting.layout == "packed":
        ScoredRow.prefix = property(id)  # type: ignore[assignment, method-assign]
    if setting.logits_rows is not None:
        logprobs.LOGITS_BYTES = {"cpu": 4 * vocabulary * setting.logits_rows}
        logprobs.SOFTMAX_CHUNK_BYTES = {"cpu": 4 * vocabulary * 2}
    try:
        yield
    finally:
        ScoredRow.prefix = prefix  # type: ignore[method-assign]
        logprobs.LOGITS_BYTES, logprobs.SOFTMAX_CHUNK_BYTES = sizes


def learned(setting: Setting, folder: Path, objective: Path, rank: int, size: int, meeting: Meeting | None) -> dict:
    """``loss`` and ``gradient`` (complete on every rank, by parameter name) of one update."""
    from deepspeed.utils import safe_get_full_grad

    learner = LearnerRank(
        LearnerPlan(
            ModelSettings(path=str(folder), dtype="float32"),
            LearnerSettings(
                threads=1, zero=setting.zero, workers=size, tokens_per_microbatch=setting.budget_tokens,
                layout=setting.learner_layout, activation_checkpointing=setting.checkpointing, gradient_clip=0.0,
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
    assert (report.padding_share > 0) == (setting.layout == "padded")
    learner.engine.close()
    return {"loss": report.loss, "gradient": found}


def main(rank: int, size: int, folder: Path, out: Path, which: str) -> None:
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
    for setting in settings(size, which):
        with applied(setting):
            found = learned(setting, folder, objective, rank, size, meeting)
        if rank == 0:
            torch.save(found, out / f"{setting.name}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
