"""One step of one rank: from groups to optimiser updates, by the objective's coefficients.

What a step needs to know of all ranks (advantages, denominators, how many micro-batches) is gathered before the
forward passes; a rank without rows joins every collective with an empty micro-batch. Gradients are sums over rows
weighted by coefficients. Where an objective mixes rows (``Objective.unit``) and some that belong together stand in
different micro-batches or ranks, coefficients come first: a pass without gradient gives the log-probs of all rows,
gathered over the ranks. So gradients are the same however rows are spread or packed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from learner.advantages import Denominators, StepRows, step_denominators, takes_part
from learner.deepspeed_engine import NonFiniteError, TrainingEngine
from learner.kl import reward_kl
from learner.objectives import MetricSums, ObjectiveBatch, StepPlan
from learner.objectives.base import AnyObjective
from learner.out_of_memory import Doing, Place
from learner.packing import Layout, PackItem, pack_rows
from learner.token_batch import ScoredRow, TokenBatch, TokenCounts, token_batch
from learner.world import World
from system.core.errors import ConfigError
from system.core.records import Group, Row

EMPTY_ROW = ScoredRow(np.zeros(1, np.int32), np.zeros(1, np.int32))


@dataclass(eq=False)
class Line:
    """A row on its way through a step."""

    row: Row
    scored: ScoredRow
    advantage: float | None = None
    old_logprobs: np.ndarray | None = None

    @staticmethod
    def of(row: Row) -> Line:
        return Line(row, ScoredRow(row.prompt_tokens, row.completion_tokens, row.loss_mask))

    @property
    def trained_tokens(self) -> int:
        assert self.row.loss_mask is not None
        return int(self.row.loss_mask.sum())


@dataclass(frozen=True)
class StepFacts:
    """What all ranks know of all rows of a step, in rank order."""

    rows: StepRows
    plan: StepPlan
    first: int
    """Where this rank's rows start."""
    active: tuple[bool, ...]
    """Rows that can have coefficients other than zero; the others are not computed."""

    @property
    def sampled_tokens(self) -> int:
        """Generated tokens, those of offline pairs left out."""
        lengths, offline = self.rows.lengths or (), self.rows.offline or ()
        return sum(length for length, paired in zip(lengths, offline, strict=True) if not paired)

    @property
    def moving_groups(self) -> set[int]:
        """Groups with an active row; an update without any is left out."""
        return {group for group, active in zip(self.rows.group_ids, self.active, strict=True) if active}


@dataclass
class StepTotals:
    """What the updates of a step add up to on this rank."""

    sums: MetricSums = field(default_factory=MetricSums)
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    tokens: TokenCounts = field(default_factory=TokenCounts)
    entropy_nats: float = 0.0
    """Summed over ``entropy_tokens``."""
    entropy_tokens: int = 0
    """0 where no entropy is wanted."""


class StepRunner:
    """Carries out the parts of a step on one rank."""

    def __init__(
        self,
        engine: TrainingEngine,
        objective: AnyObjective,
        world: World,
        tokens_per_microbatch: int,
        layout: Layout = "padded",
    ) -> None:
        self.engine = engine
        self.objective = objective
        self.world = world
        self.budget_tokens = tokens_per_microbatch
        self.layout: Layout = layout
        self.unit = objective.unit
        self.doing = Doing()
        self._zero_is_silent = is_silent_at_zero_advantage(objective)

    def lines_of(self, groups: Sequence[Group]) -> list[Line]:
        """The rows of ``groups``.

        Raises:
            ConfigError: the objective needs reference log-probs that a row does not have.
        """
        lines = [Line.of(row) for group in groups for row in group.rows]
        if "reference" in self.objective.needs:
            for line in lines:
                if line.row.reference_logprobs is None:
                    by_kl_alone = "reference" not in self.objective.policy_needs
                    raise ConfigError(
                        f"group {line.row.group_id}: no reference log-probs, which objective {self.objective.name} "
                        "needs with these options; sample with a reference worker"
                        + (", or set objective.kl_coefficient to 0" if by_kl_alone else "")
                    )
        return lines

    def gather_facts(self, lines: Sequence[Line]) -> StepFacts:
        """Advantages and counts of the whole step; fills in each line's advantage. Collective.

        ``old_logprobs`` of the lines must be there when the objective takes the KL off the reward.
        """
        kl = None
        if self.objective.settings.has_kl_in_reward:
            kl = [self._reward_kl(line) for line in lines]
        local = StepRows.from_rows([line.row for line in lines], kl)
        parts = self.world.gather(local)
        rows = StepRows.joined(parts)
        first = sum(len(part) for part in parts[: self.world.rank])
        plan = self.objective.prepare(rows)
        for line, advantage in zip(lines, plan.advantages[first : first + len(lines)], strict=True):
            line.advantage = advantage
        return StepFacts(rows, plan, first, self._active(rows, plan.advantages))

    def _active(self, rows: StepRows, advantages: Sequence[float | None]) -> tuple[bool, ...]:
        """A row without signal is left out where that cannot be seen: by itself, or with its whole group."""
        taking_part = [
            takes_part(advantage) and tokens > 0
            for advantage, tokens in zip(advantages, rows.token_counts, strict=True)
        ]
        if not self._zero_is_silent:
            return tuple(taking_part)
        with_signal = {self._key(group, row) for row, group in enumerate(rows.group_ids) if advantages[row]}
        return tuple(
            part and self._key(group, row) in with_signal
            for row, (part, group) in enumerate(zip(taking_part, rows.group_ids, strict=True))
        )

    def _key(self, group_id: int, row: int) -> tuple[int, int]:
        return (group_id, -1) if self.unit == "group" else (group_id, row)

    def denominators(self, facts: StepFacts, groups: set[int], lines: Sequence[Line]) -> Denominators:
        """Counts over all ranks of what takes part in ``groups``. Collective where a correction masks tokens."""
        settings = self.objective.settings
        if settings.denominator == "survivors" and self.objective.needs_logprobs_first:
            mine = [
                (_without_prompt(line), _known(line.old_logprobs))
                for line in lines
                if takes_part(line.advantage) and line.row.group_id in groups
            ]
            return self._surviving([entry for part in self.world.gather(mine) for entry in part])
        chosen = [index for index, group_id in enumerate(facts.rows.group_ids) if group_id in groups]
        subset = facts.rows.select(chosen)
        return step_denominators(subset, [facts.plan.advantages[index] for index in chosen])

    def _surviving(self, entries: Sequence[tuple[Line, np.ndarray]]) -> Denominators:
        if not entries:
            return Denominators(0, 0, 0, 0)
        lines, old = [line for line, _ in entries], [values for _, values in entries]
        return self.objective.surviving(self._objective_batch(lines, old, None))

    def recompute_old_logprobs(self, lines: Sequence[Line]) -> None:
        """Log-probs under the current weights, without gradient, as each line's ``old_logprobs``."""
        for line, logprobs in zip(lines, self._logprobs(lines), strict=True):
            line.old_logprobs = logprobs

    def accumulate(
        self, lines: Sequence[Line], denominators: Denominators, facts: StepFacts, totals: StepTotals
    ) -> None:
        """Forward and backward passes of one optimiser update over this rank's ``lines``. Collective.

        Raises:
            NonFiniteError: loss or coefficients are not finite on some rank; raised on all of them.
        """
        packed = pack_rows(self._items(lines), self.budget_tokens, self.unit == "group", self.layout)
        coefficients: list[Tensor] | None = None
        loss = 0.0
        if not self._units_are_whole(packed, lines, facts):
            loss, coefficients = self._coefficients_first(lines, denominators, totals)
        problem: str | None = None
        rounds = self._rounds(len(packed))
        for number in range(rounds):
            members = packed[number] if number < len(packed) else []
            chosen = [lines[index] for index in members]
            batch = self._token_batch(chosen)
            if members:
                totals.tokens += batch.counts
            self._now("learning", number, len(packed), chosen, batch)
            logprobs = self.engine.forward(batch)
            entropies = self.engine.module.entropies
            if members and entropies is not None:
                totals.entropy_nats += float(entropies.sum(dtype=torch.float64))
                totals.entropy_tokens += len(entropies)
            weights = torch.zeros_like(logprobs)
            if members and coefficients is not None:
                weights = torch.cat([coefficients[index] for index in members]).to(logprobs.device)
            elif members:
                padded = batch.padded(logprobs.detach())
                result = self.objective(self._objective_batch(chosen, padded, denominators))
                loss += result.loss
                totals.sums += result.sums
                weights = batch.selected(result.coefficients).to(logprobs.dtype)
            if not (math.isfinite(loss) and bool(torch.isfinite(weights).all())):
                problem = problem or _describe_non_finite(chosen, logprobs, loss)
                weights = torch.zeros_like(logprobs)
            self.engine.backward((logprobs * weights).sum(), last=number == rounds - 1)
        for rank, found in enumerate(self.world.gather(problem)):
            if found is not None:
                raise NonFiniteError(f"learner rank {rank}: {found}; no weight was changed")
        totals.losses.append(loss)

    def _coefficients_first(
        self, lines: Sequence[Line], denominators: Denominators, totals: StepTotals
    ) -> tuple[float, list[Tensor]]:
        """The two-pass form: log-probs of all ranks, then coefficients, of this rank's lines.

        Every rank computes the same whole; rank 0 reports loss and metrics.
        """
        mine = self._logprobs(lines)
        parts = self.world.gather([(_without_prompt(line), values) for line, values in zip(lines, mine, strict=True)])
        everything = [entry for part in parts for entry in part]
        if not everything:
            return 0.0, []
        result = self.objective(
            self._objective_batch([line for line, _ in everything], [values for _, values in everything], denominators)
        )
        first = sum(len(part) for part in parts[: self.world.rank])
        coefficients = [
            result.coefficients[first + index, : line.row.length][torch.tensor(_known(line.row.loss_mask))]
            for index, line in enumerate(lines)
        ]
        if self.world.rank == 0:
            totals.sums += result.sums
            return result.loss, coefficients
        return 0.0, coefficients

    def _units_are_whole(self, packed: list[list[int]], lines: Sequence[Line], facts: StepFacts) -> bool:
        """Whether what the objective mixes stands in one micro-batch, everywhere. Collective where it mixes rows."""
        if self.unit == "row":
            return True

        def unit(group_id: int, trajectory_id: int) -> tuple[int, int]:
            return (group_id, -1) if self.unit == "group" else (group_id, trajectory_id)

        keys = zip(facts.rows.group_ids, facts.rows.trajectory_ids, strict=True)
        total = Counter(unit(*key) for key, active in zip(keys, facts.active, strict=True) if active)
        whole = True
        for members in packed:
            here = Counter(unit(lines[index].row.group_id, lines[index].row.trajectory_id) for index in members)
            whole = whole and all(count == total[key] for key, count in here.items())
        return all(self.world.gather(whole))

    def _logprobs(self, lines: Sequence[Line]) -> list[np.ndarray]:
        """Log-probs without gradient, float32 of completion length each; collective under ZeRO 3."""
        answers: list[np.ndarray] = [np.zeros(0, np.float32)] * len(lines)
        packed = pack_rows(self._items(lines), self.budget_tokens, layout=self.layout)
        rounds = max(self.world.gather(len(packed))) if self.engine.zero == 3 else len(packed)
        for number in range(rounds):
            members = packed[number] if number < len(packed) else []
            batch = self._token_batch([lines[index] for index in members])
            self._now("log-probs", number, len(packed), [lines[index] for index in members], batch)
            with torch.no_grad():
                padded = batch.padded(self.engine.module(batch)).cpu().numpy()
            for place, index in enumerate(members):
                answers[index] = padded[place, : lines[index].row.length].copy()
        return answers

    def _now(self, doing: str, number: int, count: int, lines: Sequence[Line], batch: TokenBatch) -> None:
        """Says which micro-batch is computed next, for whoever has to explain a failure."""
        groups = [line.row.group_id for line in lines]
        self.doing.place = (
            Place(doing, number + 1, count, groups, batch.tokens.numel())
            if groups
            else "an empty micro-batch, made because other ranks have more"
        )

    def _token_batch(self, lines: Sequence[Line]) -> TokenBatch:
        return token_batch([line.scored for line in lines] or [EMPTY_ROW], self.world.device, self.layout)

    def _items(self, lines: Sequence[Line]) -> list[PackItem]:
        return [line.scored.pack_item(line.row.group_id, line.row.trajectory_id) for line in lines]

    def _rounds(self, microbatches: int) -> int:
        """Passes of one update: under ZeRO 2 and 3 each is collective, below only the last."""
        if self.engine.zero >= 2:
            return max(1, *self.world.gather(microbatches))
        return max(1, microbatches)

    def _objective_batch(
        self, lines: Sequence[Line], logprobs: Tensor | Sequence[np.ndarray], denominators: Denominators | None
    ) -> ObjectiveBatch:
        width = max(line.row.length for line in lines)
        device = logprobs.device if isinstance(logprobs, Tensor) else torch.device("cpu")

        def padded(values: Sequence[np.ndarray | None]) -> Tensor | None:
            known = [value for value in values if value is not None]
            return _padded(known, width).to(device) if len(known) == len(values) else None

        current = logprobs if isinstance(logprobs, Tensor) else padded(logprobs)
        mask = padded([line.row.loss_mask for line in lines])
        offline = [line.row.offline for line in lines]
        assert current is not None
        assert mask is not None
        return ObjectiveBatch(
            logprobs=current,
            mask=mask,
            group_ids=torch.tensor([line.row.group_id for line in lines], device=device),
            trajectory_ids=torch.tensor([line.row.trajectory_id for line in lines], device=device),
            old_logprobs=padded([line.old_logprobs for line in lines]),
            reference_logprobs=padded([line.row.reference_logprobs for line in lines]),
            rollout_logprobs=padded([line.row.rollout_logprobs for line in lines]),
            rewards=_with_gaps([line.row.reward for line in lines], device),
            advantages=_with_gaps([line.advantage for line in lines], device),
            denominators=denominators,
            offline=torch.tensor(offline, device=device) if any(offline) else None,
        )

    def _reward_kl(self, line: Line) -> float:
        def one(values: np.ndarray | None) -> Tensor:
            return torch.from_numpy(_known(values).copy())[None]

        logprobs = one(line.old_logprobs), one(line.row.reference_logprobs)
        return float(reward_kl(*logprobs, one(line.row.loss_mask), self.objective.settings.kl_estimator)[0])


def is_silent_at_zero_advantage(objective: AnyObjective) -> bool:
    """Whether rows of advantage 0 have coefficients of exactly 0, so that their passes can be left out.

    The objective itself is asked, with log-probs that differ everywhere.
    """
    generator = torch.Generator().manual_seed(0)
    logprobs, old, reference, rollout = (-3.0 * torch.rand(4, 8, 16, generator=generator)).unbind()
    batch = ObjectiveBatch(
        logprobs=logprobs,
        mask=torch.ones(8, 16, dtype=torch.bool),
        group_ids=torch.arange(8) // 4,
        trajectory_ids=torch.arange(8) % 4,
        old_logprobs=old,
        reference_logprobs=reference,
        rollout_logprobs=rollout,
        rewards=torch.ones(8, dtype=torch.float64),
        advantages=torch.zeros(8, dtype=torch.float64),
        denominators=Denominators(tokens=128, completions=8, trajectories=8, groups=2),
    )
    return not bool(objective(batch).coefficients.any())


def _padded(values: Sequence[np.ndarray], width: int) -> Tensor:
    filled = np.zeros((len(values), width), values[0].dtype)
    for index, value in enumerate(values):
        filled[index, : len(value)] = value
    return torch.from_numpy(filled)


def _with_gaps(values: Sequence[float | None], device: torch.device) -> Tensor:
    numbers = [math.nan if value is None else value for value in values]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def _without_prompt(line: Line) -> Line:
    """The line for other ranks, whose objective reads no prompt and no completion."""
    row = replace(line.row, prompt_tokens=EMPTY_ROW.prompt_tokens, completion_text="", metadata="{}")
    return Line(row, EMPTY_ROW, line.advantage, line.old_logprobs)


def _known(values: np.ndarray | None) -> np.ndarray:
    if values is None:
        raise ValueError("log-probs that this step needs are missing")
    return values


def _describe_non_finite(lines: Sequence[Line], logprobs: Tensor, loss: float) -> str:
    groups = sorted({line.row.group_id for line in lines})
    wrong = int((~torch.isfinite(logprobs)).sum())
    return (
        f"loss {loss} in a micro-batch of groups {groups}; {wrong} of {logprobs.numel()} log-probs of the policy are "
        "not finite"
    )
