"""The plan of a checked recipe: every derived number with its unit, for ``--dry-run``. Pure text; checks nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from learner.memory import ELEMENT_BYTES, MicroBatch, RankMemory, activation_bytes
from learner.packing import Layout
from learner.step_work import UpdateWork, mean_work, prompt_share, update_work
from system.prompts.stream import SourceSummary
from system.recipe.model_facts import ModelFacts
from system.recipe.placement import LEARNER, Placement, RolePlacement, largest_micro_batch
from system.recipe.settings import Recipe

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
MOST_UPDATES = 8
"""Updates over which the expected work is averaged."""


@dataclass(frozen=True)
class PlanLine:
    """One fact of the plan."""

    label: str
    value: str


@dataclass(frozen=True)
class _Data:
    """What a learner will meet."""

    prompt_tokens: Sequence[int]
    why_padded: str | None


def plan_lines(
    recipe: Recipe,
    model: ModelFacts,
    objective: Any,
    placement: Placement,
    sources: list[SourceSummary],
    longest_prompt_tokens: int | None,
    prompt_tokens: Sequence[int],
    why_padded: str | None,
) -> list[PlanLine]:
    """The plan, in the order in which data flows.

    Args:
        objective: as ``learner.objectives.build_objective`` made it.
        longest_prompt_tokens: what the model's context leaves for a prompt.
        prompt_tokens: lengths of the run's first prompts, a step's or more.
        why_padded: why rows will be padded, where that is known (``learner.layout_choice.why_padded``).
    """
    data = _Data(prompt_tokens, why_padded)
    pairs = [
        *_run_lines(recipe, model, sources),
        ("objective", objective.name),
        *((f"  {key}", _written(value)) for key, value in objective.settings.model_dump().items()),
        *_step_lines(recipe, sources, longest_prompt_tokens, why_padded),
        ("groups without signal", _WITHOUT_SIGNAL[objective.settings.zero_variance]),
        ("weight sync", _sync_line(recipe, model, placement)),
        *(line for role in placement.roles for line in _role_lines(recipe, model, placement, role, data)),
        *_total_lines(placement),
    ]
    return [PlanLine(label, value) for label, value in pairs]


_WITHOUT_SIGNAL = {
    "keep": "trained with advantage 0, counted in the denominators",
    "drop": "left out of the step",
    "refill": "replaced by the next prompts, in prompt order",
    "as_is": "trained as they are",
}


_LAYOUTS = {
    "auto": "a prompt is computed once for all its completions where that leaves the log-probs as they are",
    "shared_prefix": "a prompt is computed once for all its completions",
    "padded": "every completion is computed with a prompt of its own",
}


def _written(value: Any) -> str:
    """A value as a recipe writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _run_lines(recipe: Recipe, model: ModelFacts, sources: list[SourceSummary]) -> list[tuple[str, str]]:
    run = recipe.run
    size = "size unknown" if model.parameters is None else f"{model.parameters / 1e6:,.1f} M parameters"
    context = "context unknown" if model.context_tokens is None else f"context {model.context_tokens:,} tokens"
    return [
        ("run", f"{run.name}: {run.steps} steps, seed {run.seed}, in {run.folder}"),
        ("checkpoints", f"every {run.checkpoint_every_steps} steps and at the end; the newest {run.keep} are kept"),
        ("model", f"{model.path}: {model.architecture}, {size}, {recipe.model.dtype}, {context}"),
        *((f"data {source.name}", str(source)) for source in sources),
        *(
            (f"reward {reward.name}", f"{reward.use}, weight {reward.weight:g}, within {reward.deadline_s:g} s")
            for reward in recipe.rewards
        ),
    ]


def _step_lines(
    recipe: Recipe, sources: list[SourceSummary], longest: int | None, why_padded: str | None
) -> list[tuple[str, str]]:
    stream, rollout, learner = recipe.stream, recipe.rollout, recipe.learner
    groups, size = stream.groups_per_step, rollout.group_size
    completions = groups * size
    limits = [source.longest_allowed_tokens for source in sources]
    prompt = None if None in limits else max(limit for limit in limits if limit is not None)
    if prompt is None:
        learned = longest_prompt = "no limit: the model does not say its context"
    else:
        learned = f"at most {completions * (rollout.max_tokens + prompt):,} tokens, prompts included"
        longest_prompt = f"{prompt:,} tokens"
        if longest is not None:
            longest_prompt += f" (the context leaves {longest:,} beside a completion)"
    passes = f"{learner.epochs_per_step} epochs of {learner.minibatches_per_step} minibatches"
    steps = recipe.run.steps
    return [
        ("prompts per step", f"{groups} prompts"),
        ("completions per step", f"{completions} completions ({groups} groups of {size})"),
        ("generated per step", f"at most {completions * rollout.max_tokens:,} tokens ({rollout.max_tokens} each)"),
        ("learned per step", learned),
        ("optimiser updates per step", f"{learner.epochs_per_step * learner.minibatches_per_step} ({passes})"),
        (
            "row layout",
            f"padded: {why_padded}"
            if learner.layout == "auto" and why_padded
            else f"{learner.layout}: {_LAYOUTS[learner.layout]}",
        ),
        ("prompts in the run", f"{steps * groups:,} prompts, {steps * completions:,} completions"),
        ("longest prompt", longest_prompt),
        (
            "staleness",
            f"at most {stream.max_staleness} versions" if stream.max_staleness else "0 versions: synchronous",
        ),
        (
            "groups outstanding",
            f"at most {stream.outstanding_groups} groups ((max_staleness {stream.max_staleness} + 1) x {groups})",
        ),
        ("refill", f"a step gives up after {stream.refill_limit * groups} filtered groups in a row"),
    ]


def _sync_line(recipe: Recipe, model: ModelFacts, placement: Placement) -> str:
    checked = "checksums and a probe" if recipe.sync.probe else "checksums, no probe"
    line = f"{placement.sync_backend}, {checked}, within {recipe.sync.deadline_s:g} s"
    if model.parameters is None:
        return line
    weights = model.parameters * ELEMENT_BYTES[recipe.model.dtype]
    buckets = -(-weights // recipe.sync.bucket_bytes)
    return f"{line}; {weights / 1e6:,.1f} MB in about {buckets} buckets"


def _learner_lines(recipe: Recipe, model: ModelFacts, placement: Placement, data: _Data) -> list[tuple[str, str]]:
    """What a learner rank trains, computes and holds, by cause."""
    batch, memory = largest_micro_batch(recipe, model), placement.learner_memory
    lines = _work_lines(recipe, batch, data)
    if memory is None:
        return lines
    count = model.shape.parameters
    other = activation_bytes(model.shape, recipe.model.dtype, batch, not recipe.learner.activation_checkpointing)
    switched = "without" if recipe.learner.activation_checkpointing else "with"
    return [
        ("  parameters", f"{count / 1e6:,.1f} M, {count / 1e6:,.1f} M of them trained"),
        *lines,
        *((f"  {label}", value) for label, value in _causes(memory)),
        (
            "  activations",
            f"{_gigabytes(memory.activations_bytes)} of the largest micro-batch "
            f"({_gigabytes(other)} {switched} activation_checkpointing)",
        ),
        ("  logits", f"{_gigabytes(memory.logits_bytes)} at a time; their gradient takes their place"),
    ]


def _work_lines(recipe: Recipe, batch: MicroBatch, data: _Data) -> list[tuple[str, str]]:
    """How an update over the data's own prompts is cut, and what it saves to compute each prompt once."""
    prompts, longest = data.prompt_tokens, recipe.rollout.max_tokens
    work = {layout: expected_work(recipe, prompts, layout) for layout in LAYOUTS}
    chosen = work["padded" if data.why_padded else "shared_prefix"]
    saved = 1.0 - work["shared_prefix"].tokens / work["padded"].tokens
    unused = f" (not used: {data.why_padded})" if data.why_padded else ""
    return [
        (
            "  micro-batch",
            f"at most {batch.tokens:,} tokens, padding included, rows of at most {batch.row_tokens:,}; with this data "
            f"about {chosen.microbatches:.3g} for a rank's update, of {chosen.microbatch_tokens:,.0f} tokens",
        ),
        (
            "  shared prefixes",
            f"an update computes {work['padded'].tokens:,.0f} tokens padded, {work['shared_prefix'].tokens:,.0f} with "
            f"each prompt once: {saved:.0%} fewer{unused}. Of the first {len(prompts)} prompts, with completions "
            f"of {longest:,} tokens, the longest allowed; prompts are {prompt_share(prompts, longest):.0%} of "
            "the rows then, and more with shorter completions",
        ),
    ]


def expected_work(recipe: Recipe, prompt_tokens: Sequence[int], layout: Layout) -> UpdateWork:
    """Mean over the optimiser updates that these prompts fill, with completions as long as allowed."""
    learner, rollout = recipe.learner, recipe.rollout
    groups = recipe.stream.groups_per_step // learner.minibatches_per_step
    starts = range(0, max(1, min(len(prompt_tokens) - groups + 1, MOST_UPDATES * groups)), groups)
    limits = rollout.group_size, rollout.max_tokens, learner.workers, learner.tokens_per_microbatch
    works = [update_work(prompt_tokens[start : start + groups], *limits, layout) for start in starts]
    scale = groups / len(prompt_tokens) if len(prompt_tokens) < groups else 1.0
    mean = mean_work(works)
    return UpdateWork(mean.tokens * scale, mean.microbatches * scale, mean.microbatch_tokens)


def _causes(memory: RankMemory) -> list[tuple[str, str]]:
    lines = [
        ("weights", _gigabytes(memory.weights_bytes)),
        ("gradients", _gigabytes(memory.gradients_bytes)),
        ("float32 masters", _gigabytes(memory.masters_bytes)),
        ("optimiser state", _gigabytes(memory.optimiser_bytes)),
        (
            "DeepSpeed's buffers",
            f"{_gigabytes(memory.buffers_bytes)}, {_gigabytes(memory.exchange_bytes)} more in a pass, "
            f"{_gigabytes(memory.update_bytes)} more in an update",
        ),
    ]
    if memory.offloaded_bytes:
        lines.append(("offloaded", f"{_gigabytes(memory.offloaded_bytes)} of these are in the machine's memory"))
    return lines


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB"


def _role_lines(
    recipe: Recipe, model: ModelFacts, placement: Placement, role: RolePlacement, data: _Data
) -> list[tuple[str, str]]:
    lines = [(role.role, _role_line(role))]
    return lines + _learner_lines(recipe, model, placement, data) if role.role == LEARNER else lines


def _role_line(role: RolePlacement) -> str:
    if role.processes == 0:
        return "not started: the objective needs no reference log-probs"
    memory = "memory unknown" if role.memory_bytes is None else f"about {role.memory_bytes / 1e9:.1f} GB"
    return f"{role.processes}, each with {role.gpus_each} GPUs, {role.threads}, {memory}"


def _total_lines(placement: Placement) -> list[tuple[str, str]]:
    on_cpu = sum(role.processes * (role.memory_bytes or 0) for role in placement.roles if not role.gpus_each)
    lines = [("GPUs in all", f"{placement.gpus} GPUs")]
    if on_cpu:
        lines.append(("memory in all", f"about {on_cpu / 1e9:.1f} GB outside GPUs"))
    return lines
