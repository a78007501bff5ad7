"""One update's gradient: the same in one pass and in two, however rows are packed, on one rank, two and four.

The ranks are threads around a table of bigrams; packing, gathering and coefficients are the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from learner.advantages import StepRows
from learner.objectives import MetricSums, build_objective, objective_names
from learner.packing import Layout, split_in_order
from learner.step import StepFacts, StepRunner, StepTotals
from learner.token_batch import TokenBatch
from system.core.records import Group
from tests.learner.conftest import make_row

VOCABULARY = 300
REQUIRED: dict[str, dict[str, Any]] = {"dr_grpo": {"max_tokens": 12}}
CASES = [(name, REQUIRED.get(name, {})) for name in objective_names()] + [
    ("gift", {"correction": "k3_mask", "correction_high": 0.5}),
    ("gift", {"anchor": "reference", "statistics": "graph"}),
    ("gvpo", {"anchor": "reference", "kl_coefficient": 0.1, "kl_estimator": "k2"}),
    ("online_dpo", {"correction": "sequence_tis"}),
    ("ipo", {"zero_variance": "drop"}),
    ("f_grpo", {"weights": "snis", "divergence": "hellinger"}),
    ("f_grpo", {"level": "token", "correction": "token_tis"}),
    ("f_hal", {"correction": "sequence_mask", "denominator": "survivors", "correction_low": 0.1}),
    ("opd", {"level": "sequence", "reward_weight": 0.5}),
    ("grpo", {"correction": "geometric_mask", "lone_responses": "drop", "correction_low": 0.5, "correction_high": 2.0}),
    ("grpo", {"correction": "sequence_tis", "denominator": "survivors"}),
    ("gspo", {"kl_coefficient": 0.1}),
]


class Bigrams(nn.Module):
    """Log-prob of a token given the one before it."""

    entropies = None

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.table = nn.Parameter(table)

    def forward(self, batch: TokenBatch) -> Tensor:
        logits = self.table[batch.tokens.flatten()[batch.source]]
        return torch.log_softmax(logits, dim=-1).gather(1, batch.target[:, None])[:, 0]


class Engine:
    """What a step asks of an engine; gradients of this rank's rows are summed."""

    zero = 1

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.forward = module
        self.passes = 0

    @property
    def gradient(self) -> Tensor:
        """Of all parameters, one behind the other; zero where there is none."""
        return torch.cat(
            [
                (torch.zeros_like(weight) if weight.grad is None else weight.grad).flatten()
                for weight in self.module.parameters()
            ]
        )

    def backward(self, loss: Tensor, last: bool) -> None:
        self.passes += 1
        loss.backward()


class Threads:
    """Ranks that meet in one process."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        everything = list(self._values)
        self._barrier.wait()
        return everything


class Rank:
    """``learner.world.World`` over threads."""

    device = torch.device("cpu")

    def __init__(self, rank: int, meeting: Threads, size: int) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def gather(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, value)


def step_groups(with_pairs: bool) -> list[Group]:
    """Three groups of different size, one of equal rewards, a null, a masked token; and two offline pairs."""
    generator = np.random.default_rng(3)
    rewards: dict[int, list[float | None]] = {0: [1.0, 0.0, 0.5, None], 1: [0.5, 0.5], 2: [0.0, 1.0, 1.0]}
    groups = []
    for group_id, values in [*rewards.items(), *(((-1, [1.0, 0.0]), (-2, [0.0, 1.0])) if with_pairs else ())]:
        rows = []
        for trajectory, reward in enumerate(values):
            length = int(generator.integers(2, 12))
            mask = np.arange(length) != (1 if trajectory == 0 else -1)
            reference = -5.0 - generator.random(length)
            rows.append(
                make_row(
                    generator, group_id, trajectory, reward, length=length, prompt_length=3, loss_mask=mask,
                    reference_logprobs=reference,
                )
            )  # fmt: skip
        groups.append(Group(tuple(rows)))
    return groups


def learn(
    name: str,
    options: dict[str, Any],
    budget_tokens: int,
    ranks: int,
    *,
    layout: Layout = "padded",
    module: Callable[[], nn.Module] = Bigrams,
    old_logprobs: bool = False,
) -> tuple[Tensor, float, MetricSums, int]:
    """Gradient, loss, metrics and passes of one update, summed over ranks.

    Groups are cut over the ranks; of four the last has nothing to do, and with three groups there are fewer than ranks.

    Args:
        module: makes the model of each rank.
        old_logprobs: whether the policy at the start of the pass is another one, so that ratios are not 1.
    """
    groups = step_groups(name == "f_hal")
    meeting = Threads(ranks)
    engines = [Engine(module()) for _ in range(ranks)]
    totals = [StepTotals() for _ in range(ranks)]
    plans: list[StepFacts] = []
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            objective = build_objective(name, **options)
            world: Any = Rank(rank, meeting, ranks)
            runner = StepRunner(engines[rank], objective, world, budget_tokens, layout)  # type: ignore[arg-type]
            lines = [
                line
                for number, line in enumerate(runner.lines_of(groups))
                if rank == (0, min(number % 3, 1), 0, number % 3)[ranks - 1]
            ]
            if old_logprobs:
                for line in lines:
                    line.old_logprobs = line.row.rollout_logprobs[::-1].copy()
            elif objective.needs_logprobs_first:
                runner.recompute_old_logprobs(lines)
            facts = runner.gather_facts(lines)
            plans.append(facts)
            flags = facts.active[facts.first : facts.first + len(lines)]
            active = [line for line, moves in zip(lines, flags, strict=True) if moves]
            denominators = runner.denominators(facts, set(facts.rows.group_ids), lines)
            runner.accumulate(active, denominators, facts, totals[rank])
        except BaseException as failure:
            failures.append(failure)
            raise

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failures, failures
    gradient = torch.stack([engine.gradient for engine in engines]).sum(0)
    sums = sum((part.sums for part in totals), plans[0].plan.sums)
    return gradient, sum(sum(part.losses) for part in totals), sums, sum(engine.passes for engine in engines)


@pytest.mark.parametrize(("name", "options"), CASES, ids=lambda value: str(value))
def test_the_gradient_depends_neither_on_micro_batches_nor_on_ranks(name, options):
    whole, loss, sums, passes = learn(name, options, 100_000, 1)
    assert passes == 1
    assert whole.abs().max() > 1e-6
    for budget_tokens, ranks in ((60, 1), (8, 1), (60, 2), (8, 2), (60, 4), (8, 4)):
        gradient, other_loss, other_sums, _ = learn(name, options, budget_tokens, ranks)
        torch.testing.assert_close(gradient, whole, rtol=1e-5, atol=1e-7)
        assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert other_sums.means() == pytest.approx(sums.means(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", ["gift", "online_dpo"])
def test_groups_without_signal_are_not_computed_though_groups_are_coupled(name):
    assert learn(name, {}, 8, 1)[3] == 6
    assert learn(name, {"kl_coefficient": 0.1}, 8, 1)[3] == 8


def test_offline_pairs_are_shared_among_the_updates_of_a_step():
    assert split_in_order([3, 0, -2, 1, 2, -1, 3], 2) == [[0, 1, -1], [2, 3, -2]]
    assert split_in_order([0, 1, -1], 2) == [[0], [1, -1]]
    assert split_in_order([-1, -2], 3) == [[-1], [-2]]


def test_rows_of_offline_pairs_are_known_by_their_ids():
    rows = [row for group in step_groups(True) for row in group.rows]
    assert StepRows.from_rows(rows).offline == [False] * 9 + [True] * 4
