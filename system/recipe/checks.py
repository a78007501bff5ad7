"""What only the whole recipe shows, checked before anything is started; and the plan: every derived number.

``check_recipe`` finds what would fail later (a missing model, over-long prompts, a group size the objective refuses,
more GPUs than there are) and starts nothing: no engine, no GPU, no reward process stays. Errors name the key.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.markup import escape

from reward_service.catalog import check_rewards
from rollout_workers.environment import prepare_environment
from system.core.errors import ConfigError
from system.prompts.pairs import OfflinePairsFactory
from system.prompts.stream import PromptStreamFactory
from system.recipe.model_facts import ModelFacts, read_model
from system.recipe.partners import check_reference, offline_pairs, reference_settings
from system.recipe.placement import LEARNER, Placement, place, this_machine
from system.recipe.plan import PlanLine, plan_lines
from system.recipe.settings import Recipe

PROMPTS_TRIED = 1000
"""Prompts of the first step that the check makes, so that a broken row shows before anything starts."""
PROMPTS_MEASURED = 64
"""Of the first steps, where a step has fewer: the plan says what learning from them computes."""


@dataclass(frozen=True)
class Plan:
    """A checked recipe: what will run, where, on what."""

    lines: tuple[PlanLine, ...]
    placement: Placement
    needs_reference: bool
    longest_prompt_tokens: int | None
    """What the model's context leaves for a prompt."""
    prompts: PromptStreamFactory
    pairs: OfflinePairsFactory | None = None
    """The objective's offline pairs, where it takes them."""

    @property
    def learner_lines(self) -> tuple[PlanLine, ...]:
        """What a learner rank trains and holds, by cause: its line and the indented ones below it."""
        first = next(index for index, line in enumerate(self.lines) if line.label == LEARNER)
        below = takewhile(lambda line: line.label.startswith(" "), self.lines[first + 1 :])
        return (self.lines[first], *below)


def check_recipe(recipe: Recipe, *, assume_gpus: int | None = None, local: bool = False) -> Plan:
    """Checks a recipe as a whole. Call it from synchronous code: reward functions are loaded in processes of their own.

    Args:
        assume_gpus: check against this many GPUs instead of this machine's.
        local: one process without Ray.

    Raises:
        ConfigError: keys contradict each other, the model, the objective or the machine.
        DataError: a data source cannot give prompts.
    """
    prepare_environment(None)
    model = read_model(recipe.model.path)
    _check_features(recipe, local)
    if recipe.rollout.engine:
        from rollout_workers.engine import engine_arguments

        engine_arguments(recipe.model, recipe.rollout, "gloo")
    objective = build_objective_of(recipe)
    needs_reference = "reference" in objective.needs
    longest = _longest_prompt_tokens(recipe, model)
    _check_folder(Path(recipe.run.folder))
    reference = check_reference(recipe, objective, model)
    machine = this_machine(assume_gpus)
    placement = place(recipe, model, machine, needs_reference=needs_reference, reference=reference)
    check_rewards(recipe.rewards, [str(source.name) for source in recipe.data])
    prompts = PromptStreamFactory(recipe.data, recipe.model.path, recipe.run.seed, longest)
    stream = prompts()
    groups = recipe.stream.groups_per_step
    tried = min(max(groups, min(PROMPTS_MEASURED, recipe.run.steps * groups)), PROMPTS_TRIED)
    lengths = [len(stream.prompt(position).tokens) for position in range(tried)]
    pairs = offline_pairs(recipe, objective, model)
    padded = _why_padded(recipe, needs_reference)
    lines = plan_lines(recipe, model, objective, placement, stream.summary(), longest, lengths, padded)
    if pairs is not None:
        lines.append(PlanLine("offline pairs per step", f"{pairs.pairs_per_step} of {pairs.file}"))
    return Plan(
        lines=tuple(lines),
        placement=placement,
        needs_reference=needs_reference,
        longest_prompt_tokens=longest,
        prompts=prompts,
        pairs=pairs,
    )


def build_objective_of(recipe: Recipe) -> Any:
    """The recipe's objective, checked against its group size and staleness.

    Raises:
        ConfigError: there is no such objective, or it refuses an option or the rest of the recipe.
    """
    from learner.objectives import build_objective

    chosen = recipe.objective
    objective = build_objective(chosen.name, file=chosen.file, **chosen.options)
    objective.check(recipe.rollout.group_size)
    objective.check_passes(recipe.learner.epochs_per_step, recipe.learner.minibatches_per_step)
    overlong = objective.settings.overlong
    if overlong is not None and overlong.penalty(recipe.rollout.max_tokens) == 0.0:
        raise ConfigError(
            f"objective.overlong_max_tokens: {overlong.max_tokens} with overlong_cache_tokens {overlong.cache_tokens} "
            f"has no effect: completions end at rollout.max_tokens {recipe.rollout.max_tokens}"
        )
    staleness, anchor = recipe.stream.max_staleness, objective.settings.stale_correction
    if staleness > 0 and objective.settings.correction == "none" and anchor != "none":
        raise ConfigError(
            f"objective.correction: none with stream.max_staleness: {staleness}: groups up to {staleness} versions old "
            f"would be trained without any off-policy anchor; use correction: {anchor}, or max_staleness: 0"
        )
    return objective


def _check_features(recipe: Recipe, local: bool) -> None:
    if recipe.model.lora is not None:
        raise ConfigError("model.lora: LoRA is not yet available; leave it null")
    if recipe.rollout.workers == 0:
        raise ConfigError("rollout.workers: 0: nothing would generate; a run begins with at least 1")
    if local and (recipe.rollout.workers, recipe.learner.workers) != (1, 1):
        raise ConfigError(
            f"--local is one process: rollout.workers ({recipe.rollout.workers}) and learner.workers "
            f"({recipe.learner.workers}) must be 1"
        )
    groups, parts = recipe.stream.groups_per_step, recipe.learner.minibatches_per_step
    if groups % parts:
        fitting = [str(number) for number in range(1, groups + 1) if groups % number == 0]
        raise ConfigError(
            f"learner.minibatches_per_step: {parts} does not divide stream.groups_per_step {groups}; "
            f"possible: {', '.join(fitting)}"
        )


def _longest_prompt_tokens(recipe: Recipe, model: ModelFacts) -> int | None:
    contexts = [("the model's context", model.context_tokens)]
    contexts.append(("rollout.engine.max_model_len", recipe.rollout.engine.get("max_model_len")))
    longest: int | None = None
    for what, context in contexts:
        if not isinstance(context, int):
            continue
        left = context - recipe.rollout.max_tokens
        if left < 1:
            raise ConfigError(
                f"rollout.max_tokens: {recipe.rollout.max_tokens} leaves no room for a prompt: "
                f"{what} is {context} tokens"
            )
        for index, source in enumerate(recipe.data):
            if source.max_prompt_tokens is not None and source.max_prompt_tokens > left:
                raise ConfigError(
                    f"data.{index}.max_prompt_tokens: {source.max_prompt_tokens} + rollout.max_tokens "
                    f"{recipe.rollout.max_tokens} exceed {what} of {context} tokens; {left} are left for a prompt"
                )
        longest = left if longest is None else min(longest, left)
    return longest


def _why_padded(recipe: Recipe, needs_reference: bool) -> str | None:
    """Why the learner's rows will be padded, where that is known; both layouts are checked."""
    from learner.layout_choice import why_padded

    if needs_reference:
        why_padded(reference_settings(recipe).path, recipe.reference.layout, "reference.layout")
    return why_padded(recipe.model.path, recipe.learner.layout)


def _check_folder(folder: Path) -> None:
    """The nearest existing parent must be a folder one can write to."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"run.folder: {existing} is a file; {folder} cannot be made below it")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise ConfigError(f"run.folder: cannot write to {existing} ({reason}); choose another folder") from None


def print_plan(plan: Plan, console: Any) -> None:
    """Prints the plan as a table on a rich console."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for line in plan.lines:
        table.add_row(escape(line.label), escape(line.value))
    console.print(table, highlight=False)
