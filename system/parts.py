"""What ``system/cluster.py`` and ``system/local.py`` share in putting a run together.

The rooms know nothing of each other; here the learner pool gets the shape that the loop and the weight sync ask for,
and factories carry one room's behaviour into another's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from learner.pool import LearnerPool
from learner.rank import LearnerPlan, StepReport
from system.core.protocols import Prompt, Reference, TokenRow
from system.core.records import Group
from system.core.weights.sender import SenderBackend
from system.core.weights.wire import Endpoint, Manifest
from system.ledger_facts import LedgerLimits
from system.probe import ProbeLimit
from system.prompts.pairs import OfflinePairs
from system.recipe import Plan, Recipe, build_objective_of
from system.run_folder import RunRecord

PROBE_TOKENS = 48
LEARNER_FOLDER, MODEL_FOLDER = "learner", "hf"


class LearnerPart:
    """The learner pool as the loop (``step``, ``save``, ``load``) and the weight sync see it."""

    def __init__(self, pool: LearnerPool, backend: SenderBackend, pairs: PairSupply | None = None) -> None:
        self.pool = pool
        self._backend: SenderBackend = backend
        self._pairs = pairs

    async def step(self, groups: Sequence[bytes], step: int, version: int) -> StepReport:
        sampled = [Group.from_bytes(payload) for payload in groups]
        paired = [] if self._pairs is None else await self._pairs.groups(step)
        return await self.pool.step(sampled + paired, step, version)

    async def save(self, folder: Path) -> None:
        """All that a resume needs, and the policy as a plain Hugging Face folder."""
        await self.pool.save(folder / LEARNER_FOLDER)
        await self.pool.save_hf(folder / MODEL_FOLDER)

    async def load(self, folder: Path) -> None:
        await self.pool.load(folder / LEARNER_FOLDER)

    async def restart(self, folder: Path | None) -> None:
        """New ranks, from the checkpoint in ``folder``, or from the starting model."""
        await self.pool.restart(folder / LEARNER_FOLDER if folder is not None else None)

    async def open_transfer(self, deadline_s: float) -> Endpoint:
        return await self.pool.open_transfer(deadline_s, self._backend)

    async def connect_transfer(self, world_size: int, deadline_s: float) -> None:
        await self.pool.connect_transfer(world_size, deadline_s)

    async def manifest(self, version: int, bucket_bytes: int) -> Manifest:
        return await self.pool.weight_manifest(version, bucket_bytes)

    async def send_weights(self, manifest: Manifest, deadline_s: float) -> None:
        await self.pool.send_weights(manifest, deadline_s)

    async def close_transfer(self) -> None:
        await self.pool.close_transfer()

    async def probe(self, tokens: Sequence[int]) -> list[float]:
        return await self.pool.probe(tokens)


class PairSupply:
    """The offline pairs of each step, with their reference log-probs where there is a reference."""

    def __init__(self, pairs: OfflinePairs, pairs_per_step: int, reference: Reference | None) -> None:
        self._pairs = pairs
        self._pairs_per_step = pairs_per_step
        self._reference = reference

    @staticmethod
    async def open(plan: Plan, reference: Reference | None) -> PairSupply | None:
        """None where the objective takes no pairs."""
        if plan.pairs is None:
            return None
        return PairSupply(await asyncio.to_thread(plan.pairs), plan.pairs.pairs_per_step, reference)

    async def groups(self, step: int) -> list[Group]:
        """The same for the same step, also after a return to a checkpoint."""
        first = step * self._pairs_per_step
        positions = range(first, first + self._pairs_per_step)
        groups = await asyncio.to_thread(lambda: [self._pairs.group(position) for position in positions])
        if self._reference is None:
            return groups
        asked = [TokenRow(row.prompt_tokens, row.completion_tokens) for group in groups for row in group.rows]
        logprobs = iter(await self._reference.logprobs(asked))
        return [Group(tuple(replace(row, reference_logprobs=next(logprobs)) for row in group.rows)) for group in groups]


def learner_plan(recipe: Recipe, plan: Plan) -> LearnerPlan:
    """What every learner rank is made of."""
    updates = recipe.run.steps * recipe.learner.epochs_per_step * recipe.learner.minibatches_per_step
    objective = recipe.objective
    return LearnerPlan(
        model=recipe.model,
        learner=recipe.learner.model_copy(update={"threads": plan.placement.learner_threads}),
        objective={"name": objective.name, "file": objective.file, **objective.options},
        temperature=recipe.rollout.temperature,
        total_updates=updates,
    )


def ledger_limits(recipe: Recipe) -> LedgerLimits:
    """The stream's rules for this recipe."""
    options = build_objective_of(recipe).settings
    return LedgerLimits(
        groups_per_step=recipe.stream.groups_per_step,
        max_staleness=recipe.stream.max_staleness,
        deadline_s=recipe.rollout.deadline_s,
        attempts=recipe.rollout.attempts,
        refill_limit=recipe.stream.refill_limit,
        refill_zero_signal=options.zero_variance == "refill",
        refill_margin=options.reward_margin,
        steps=recipe.run.steps,
    )


def probe_tokens(recipe: Recipe, prompts: Callable[[int], Prompt]) -> list[int] | None:
    """The run's first prompts, up to ``PROBE_TOKENS`` tokens; None when the recipe wants no probe."""
    if not recipe.sync.probe:
        return None
    tokens: list[int] = []
    position = 0
    while len(tokens) < PROBE_TOKENS and position < PROBE_TOKENS:
        tokens.extend(prompts(position).tokens)
        position += 1
    return tokens[:PROBE_TOKENS]


def probe_limit(recipe: Recipe, record: RunRecord) -> ProbeLimit:
    return ProbeLimit(float32=recipe.model.dtype == "float32", yardstick=record.probe_yardstick)
