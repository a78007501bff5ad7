"""Who runs where, and what it needs: GPUs, threads and memory per role. Pure arithmetic on a recipe and a machine.

Without GPUs the roles share the machine's cores and ask Ray for no CPUs. Memory figures are estimates from measured
runs: an engine holds 1.5 GB beside weights and keys and values; what a learner holds is worked out in
``learner/memory.py``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from learner.memory import ELEMENT_BYTES, MicroBatch, RankMemory, rank_memory
from learner.optimizers import check_optimizer
from system.core.errors import ConfigError
from system.recipe.model_facts import ModelFacts
from system.recipe.settings import Recipe

LEARNER = "learner"
"""Role of the learner ranks in the plan."""
_ENGINE_BYTES = 1_500_000_000
_PROCESS_BYTES = 800_000_000
"""A process with torch and transformers loaded."""
_CPU_KEY_VALUE_BYTES = 2**30
_USUAL_PROMPT_TOKENS = 512
"""Where a source sets no limit of its own."""


@dataclass(frozen=True)
class Machine:
    """What there is to place roles on."""

    gpus: int
    cores: tuple[int, ...]
    memory_bytes: int
    assumed: bool = False
    """GPUs are those of a cluster one is not on; nothing is known of its memory."""


@dataclass(frozen=True)
class RolePlacement:
    """All processes of one role."""

    role: str
    processes: int
    gpus_each: int
    threads: str
    """For people: ``cores 0-1``, ``2 threads``, ``automatic``."""
    memory_bytes: int | None
    """Estimate for one process; None: the model does not say how large it is."""


@dataclass(frozen=True)
class Placement:
    """Where every role runs."""

    rollout_gpus_each: int
    learner_gpus_each: int
    reference_gpus_each: int
    engine_cores: str | None
    """Cores to bind an engine to; None leaves it to vLLM."""
    learner_threads: int | None
    reference_threads: int | None
    sync_backend: str
    learner_memory: RankMemory | None
    """By cause, for one rank; None: the model does not say how large it is."""
    roles: tuple[RolePlacement, ...]

    @property
    def gpus(self) -> int:
        """GPUs that all roles ask for together."""
        return sum(role.processes * role.gpus_each for role in self.roles)


def this_machine(assume_gpus: int | None = None) -> Machine:
    """The machine this runs on, or the same with ``assume_gpus`` GPUs."""
    cores = (
        tuple(sorted(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else tuple(range(os.cpu_count() or 1))
    )
    gpus = assume_gpus
    if gpus is None:
        import torch

        gpus = torch.cuda.device_count()
    return Machine(gpus=gpus, cores=cores, memory_bytes=memory_bytes(), assumed=assume_gpus is not None)


def memory_bytes() -> int:
    """Memory of this machine, or of the control group this process is confined to."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def place(
    recipe: Recipe, model: ModelFacts, machine: Machine, *, needs_reference: bool, reference: ModelFacts | None = None
) -> Placement:
    """Resolves what ``placement:`` leaves open.

    Args:
        reference: the model that reference workers hold; None: the policy's own.
    Raises:
        ConfigError: more GPUs are asked for than there are, more memory than the machine has, or the keys contradict
            each other.
    """
    wanted, threads = recipe.placement, recipe.placement.threads
    own = 1 if machine.gpus else 0
    tensor_parallel = recipe.rollout.tensor_parallel
    rollout_gpus = own * tensor_parallel if wanted.gpus_per_rollout_worker is None else wanted.gpus_per_rollout_worker
    learner_gpus = own if wanted.gpus_per_learner_worker is None else wanted.gpus_per_learner_worker
    reference_gpus = own if wanted.gpus_per_reference_worker is None else wanted.gpus_per_reference_worker
    if rollout_gpus not in (0, tensor_parallel):
        raise ConfigError(
            f"placement.gpus_per_rollout_worker: {rollout_gpus}, but rollout.tensor_parallel is {tensor_parallel}; "
            "an engine uses exactly that many GPUs"
        )
    if learner_gpus > 1:
        raise ConfigError(
            f"placement.gpus_per_learner_worker: {learner_gpus}; a learner rank uses one GPU, raise learner.workers"
        )
    if tensor_parallel > 1 and rollout_gpus == 0:
        raise ConfigError(f"rollout.tensor_parallel: {tensor_parallel} needs GPUs; without them it is 1")
    check_optimizer(recipe.learner, on_cpu=learner_gpus == 0)
    learner_threads = _agreed("learner", recipe.learner.threads, threads.learner)
    reference_threads = _agreed("reference", recipe.reference.threads, threads.reference)
    engine_cores = threads.engine
    if rollout_gpus == 0 and engine_cores is None:
        engine_cores = _ranges(machine.cores)
    elif engine_cores is not None and not machine.assumed:
        _check_cores(engine_cores, machine.cores)
    if learner_gpus == 0 and learner_threads is None:
        learner_threads = max(1, len(machine.cores) // recipe.learner.workers)
    if reference_gpus == 0 and reference_threads is None:
        reference_threads = max(1, len(machine.cores) // 2)
    memory = learner_memory(recipe, model, on_cpu=learner_gpus == 0)
    references = recipe.reference.workers if needs_reference else 0
    roles = (
        RolePlacement(
            "rollout worker", recipe.rollout.workers, rollout_gpus, _shown_cores(engine_cores),
            engine_memory_bytes(recipe, model),
        ),
        RolePlacement(
            LEARNER, recipe.learner.workers, learner_gpus, _shown_threads(learner_threads),
            None if memory is None else memory.total_bytes - memory.offloaded_bytes,
        ),
        RolePlacement(
            "reference worker", references, reference_gpus, _shown_threads(reference_threads),
            reference_memory_bytes(recipe, reference or model),
        ),
    )  # fmt: skip
    placement = Placement(
        rollout_gpus, learner_gpus, reference_gpus, engine_cores, learner_threads, reference_threads,
        _backend(recipe, rollout_gpus, learner_gpus), memory, roles,
    )  # fmt: skip
    _check_fits(placement, machine)
    return placement


def engine_memory_bytes(recipe: Recipe, model: ModelFacts) -> int | None:
    """1.5 GB, the weights, and the keys and values (1 GiB where the recipe leaves it to a CPU engine)."""
    if model.parameters is None:
        return None
    weights = model.parameters * ELEMENT_BYTES[recipe.model.dtype]
    key_values = recipe.rollout.kv_cache_bytes or _CPU_KEY_VALUE_BYTES
    return _ENGINE_BYTES + weights // recipe.rollout.tensor_parallel + key_values


def largest_micro_batch(recipe: Recipe, model: ModelFacts) -> MicroBatch:
    """The largest micro-batch that a learner rank can meet: of rows as long as the recipe allows."""
    rollout, workers = recipe.rollout, recipe.learner.workers
    rows = -(-recipe.stream.groups_per_step * rollout.group_size // workers)
    prompt = max(source.max_prompt_tokens or _USUAL_PROMPT_TOKENS for source in recipe.data)
    row = prompt + rollout.max_tokens
    if model.context_tokens is not None:
        row = min(row, model.context_tokens)
    tokens = max(min(recipe.learner.tokens_per_microbatch, rows * row), row)
    return MicroBatch(tokens=tokens, row_tokens=row, wanted_tokens=min(tokens, rows * rollout.max_tokens))


def learner_memory(recipe: Recipe, model: ModelFacts, on_cpu: bool) -> RankMemory | None:
    """What one rank holds, by cause; None where the model does not say how large it is."""
    if model.parameters is None:
        return None
    batch = largest_micro_batch(recipe, model)
    return rank_memory(model.shape, recipe.model.dtype, recipe.learner, batch, on_cpu)


def reference_memory_bytes(recipe: Recipe, model: ModelFacts) -> int | None:
    """The weights, and a process around them."""
    if model.parameters is None:
        return None
    return _PROCESS_BYTES + model.parameters * ELEMENT_BYTES[recipe.model.dtype]


def _check_fits(placement: Placement, machine: Machine) -> None:
    asked = [role for role in placement.roles if role.processes and role.gpus_each]
    if placement.gpus > machine.gpus:
        listed = ", ".join(f"{role.processes} x {role.gpus_each} for {role.role}s" for role in asked)
        there = "assumed" if machine.assumed else "on this machine"
        raise ConfigError(
            f"placement: {placement.gpus} GPUs are asked for ({listed}), GPUs {there}: {machine.gpus}. "
            "Lower the numbers of workers, or set placement.gpus_per_..._worker to 0 for roles without a GPU"
        )
    on_cpu = [role for role in placement.roles if role.processes and not role.gpus_each]
    needed = sum(role.processes * (role.memory_bytes or 0) for role in on_cpu)
    if not machine.assumed and needed > machine.memory_bytes:
        listed = ", ".join(
            f"{role.processes} x {(role.memory_bytes or 0) / 1e9:.1f} GB for {role.role}s" for role in on_cpu
        )
        raise ConfigError(
            f"placement: about {needed / 1e9:.1f} GB of memory are needed ({listed}), this machine has "
            f"{machine.memory_bytes / 1e9:.1f} GB. Lower the numbers of workers, rollout.kv_cache_bytes or "
            "learner.tokens_per_microbatch"
        )


def _backend(recipe: Recipe, rollout_gpus: int, learner_gpus: int) -> str:
    """From GPU to GPU where both sides have them, else over TCP."""
    backend, on_gpus = recipe.sync.backend, bool(rollout_gpus and learner_gpus)
    if backend == "nccl":
        raise ConfigError(
            "sync.backend: nccl, which is vLLM's own, carries no checksums and cannot be interrupted, so that no sync "
            "could be verified; use nccl_checked"
        )
    if backend == "nccl_checked" and not on_gpus:
        without = [role for role, gpus in (("learners", learner_gpus), ("rollout workers", rollout_gpus)) if not gpus]
        raise ConfigError(
            f"sync.backend: nccl_checked sends weights from GPU to GPU, but {' and '.join(without)} have none; "
            "use auto or gloo"
        )
    if backend == "auto":
        return "nccl_checked" if on_gpus else "gloo"
    return backend


def _agreed(role: str, own: int | None, placed: int | None) -> int | None:
    if own is not None and placed is not None and own != placed:
        raise ConfigError(f"placement.threads.{role} is {placed} and {role}.threads is {own}; set one of them")
    return placed if placed is not None else own


def _check_cores(written: str, there: tuple[int, ...]) -> None:
    for span in written.split(","):
        first, last = int(span.split("-")[0]), int(span.split("-")[-1])
        if first > last or first not in there or last not in there:
            raise ConfigError(
                f"placement.threads.engine: {written}: {span} is not a range of this machine's cores ({_ranges(there)})"
            )


def _ranges(cores: tuple[int, ...]) -> str:
    """``(0, 1, 2, 5)`` as ``0-2,5``."""
    spans: list[list[int]] = []
    for core in cores:
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)


def _shown_cores(cores: str | None) -> str:
    return "threads automatic" if cores is None else f"cores {cores}"


def _shown_threads(threads: int | None) -> str:
    if threads is None:
        return "threads automatic"
    return f"{threads} thread{'s' if threads > 1 else ''}"
