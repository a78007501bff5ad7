"""One of several gloo ranks: trains the same groups under ZeRO stages, writes weights. Run by test_several_ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import torch

from learner.pool import share_rows
from learner.rank import LearnerPlan, LearnerRank, StepReport
from learner.settings import LearnerSettings
from learner.world import Meeting
from system.core.model import ModelSettings
from system.core.records import Group
from tests.learner.conftest import coupled_objective, make_groups

RUNS = {1: ("0", "1", "2", "3", "coupled"), 2: ("0", "1", "2", "3", "coupled"), 4: ("1", "3", "coupled")}
"""By number of ranks: ZeRO stages with GRPO, and a group-coupled objective under ZeRO 1."""
STEPS = 3


def plan(folder: Path, run: str, out: Path, size: int) -> LearnerPlan:
    objective = coupled_objective(out) if run == "coupled" else {"name": "grpo", "kl_coefficient": 0.1}
    zero = 1 if run == "coupled" else int(run)
    settings = LearnerSettings(
        learning_rate=1e-2, epsilon=1e-2, threads=1, zero=zero, workers=size, tokens_per_microbatch=40,
        epochs_per_step=2, minibatches_per_step=2, collective_timeout_s=300.0, checkpoint_deadline_s=300.0,
        entropy=True,
    )  # fmt: skip
    return LearnerPlan(ModelSettings(path=str(folder), dtype="float32"), settings, objective)


def groups_of(step: int) -> list[Group]:
    """Three groups, of 2, 3 and 4 rows."""
    return [Group(group.rows[:size]) for group, size in zip(make_groups(3, seed=step), (2, 3, 4), strict=True)]


def share(step: int, rank: int, size: int) -> list[Group]:
    """Rank's rows of a step.

    In the first step as a pool spreads them, in the second a group is cut, in the last only rank 0 has rows at all.
    """
    groups = groups_of(step)
    if step % STEPS == 0:
        return share_rows(groups, size, minibatches=2)[rank]
    if step % STEPS == 1:
        first, *others = groups
        shares = [[Group(first.rows[:1]), *others[:1]], [Group(first.rows[1:]), *others[1:]]]
        return shares[rank] if rank < 2 else []
    return groups if rank == 0 else []


def facts_of(report: StepReport) -> tuple[float, ...]:
    assert report.entropy is not None
    return report.loss, report.grad_norm, report.entropy, report.completion_tokens, report.updates


def weights_of(rank: LearnerRank) -> dict[str, torch.Tensor]:
    source = rank.weight_source()
    names = [info.name for info in source.parameters()]
    weights = {name: tensor.clone() for name, tensor in zip(names, source.gather(names), strict=True)}
    source.release()
    return weights


def main(rank_number: int, size: int, folder: Path, out: Path) -> None:
    meeting = None
    for run in RUNS[size]:
        rank = LearnerRank(plan(folder, run, out, size), rank_number, size)
        if meeting is None and rank_number == 0:
            meeting = rank.meeting()
            (out / "port.tmp").write_text(str(meeting.port))
            (out / "port.tmp").rename(out / "port")
        elif meeting is None:
            meeting = Meeting("127.0.0.1", int((out / "port").read_text()))
        rank.setup(meeting)
        listening = [entry.laddr.ip for entry in psutil.Process().net_connections("inet") if entry.status == "LISTEN"]
        assert all(address.startswith("127.") for address in listening), listening
        reports = [rank.step(share(step, rank_number, size), step, step) for step in range(STEPS)]
        weights = weights_of(rank)
        rank.save(out / f"checkpoint-{run}")
        rank.step(share(0, rank_number, size), STEPS, STEPS)
        rank.load(out / f"checkpoint-{run}")
        again = weights_of(rank)
        assert all(torch.equal(again[name], weights[name]) for name in weights)
        rank.save_hf(out / f"hf-{run}")
        if rank_number == 0:
            torch.save(weights, out / f"weights-{run}.pt")
            facts = [facts_of(report) for report in reports]
            (out / f"reports-{run}.json").write_text(json.dumps([facts, sorted(reports[0].metrics.items())]))
        rank.engine.close()
    rank.world.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
