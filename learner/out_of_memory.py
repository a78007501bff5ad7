"""An allocation that failed in a learner rank, told as what to change: where it happened and which settings to lower.

The rank that ran out leaves its step at once; the pool ends the others, which wait for it (``learner/rank_group.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from learner.settings import LearnerSettings
from system.core.deadlines import first_line
from system.core.errors import OutOfMemory

_PHRASES = (
    "can't allocate memory",
    "Cannot allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
"""What allocators say that have no exception class of their own."""


@dataclass(frozen=True)
class Place:
    """What a rank was computing."""

    doing: str
    """``learning`` or ``log-probs``."""
    number: int
    """Of the micro-batch, from 1."""
    count: int
    """Micro-batches of this rank's pass."""
    groups: Sequence[int]
    """Group ids, one for every completion of the micro-batch."""
    tokens: int
    """Positions computed, padding included."""

    def __str__(self) -> str:
        distinct = sorted(set(self.groups))
        shown = ", ".join(str(group) for group in distinct[:8]) + (", ..." if len(distinct) > 8 else "")
        return (
            f"micro-batch {self.number} of {self.count} ({self.doing}, {self.tokens:,} tokens with padding, "
            f"completions: {len(self.groups)}, of groups {shown})"
        )


class Doing:
    """Where a rank is, for whoever has to explain a failure."""

    def __init__(self) -> None:
        self.place: Place | str = "the start"


def is_out_of_memory(failure: BaseException) -> bool:
    """Whether an allocation failed, on a CPU or a GPU."""
    if isinstance(failure, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(failure, RuntimeError) and any(phrase in str(failure) for phrase in _PHRASES)


@contextmanager
def explained(rank: int, doing: Doing, settings: LearnerSettings, on_cpu: bool) -> Iterator[None]:
    """Turns an allocator's error into one that names the place and the mend.

    Raises:
        OutOfMemory: instead of the allocator's error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as failure:
        if not is_out_of_memory(failure):
            raise
        advice = ", or ".join(mends(settings, doing.place, on_cpu))
        raise OutOfMemory(
            f"learner rank {rank}: out of memory at {doing.place}: {first_line(failure)}. What takes less: {advice}"
        ) from failure


def mends(settings: LearnerSettings, place: Place | str, on_cpu: bool) -> list[str]:
    """What takes less memory than ``settings`` do, the cheapest first."""
    found = []
    if isinstance(place, Place):
        if len(place.groups) > 1:
            found.append(f"lower learner.tokens_per_microbatch (now {settings.tokens_per_microbatch})")
        if not settings.activation_checkpointing and place.doing == "learning":
            found.append("set learner.activation_checkpointing: true")
    if settings.zero < 3 and settings.workers > 1:
        found.append(f"raise learner.zero (now {settings.zero})")
    if not on_cpu and settings.zero > 0 and not settings.offload_optimizer and settings.optimizer == "adamw":
        found.append("set learner.offload_optimizer: true")
    if isinstance(place, Place) and len(place.groups) == 1:
        found.append("shorten completions (rollout.max_tokens) or prompts (max_prompt_tokens)")
    if settings.zero > 0:
        found.append(f"raise learner.workers (now {settings.workers})")
    elif not found:
        found.append(f"set learner.zero to 1 or more and raise learner.workers (now {settings.workers})")
    return found
