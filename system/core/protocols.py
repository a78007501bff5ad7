"""The seams between rooms: what passes over them, and the behaviour one room needs from another.

A room never imports another; ``system`` makes the object from a picklable factory inside the actor's process and hands
it in. Every method may raise ``InfrastructureError``; none of them waits longer than the deadline it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from system.core.records import DropReason

ChatMessages = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """One question, already tokenised, with whatever the reward needs."""

    prompt_id: str
    source: str
    tokens: tuple[int, ...]
    text: str | ChatMessages
    """What a scorer is shown: the plain text, or the chat messages before the template."""
    label: Any = None
    """Exactly as the data source wrote it."""
    metadata: str = "{}"
    """JSON object, exactly as the data source wrote it."""


@dataclass(frozen=True)
class Lease:
    """The right to produce one group until ``deadline_s`` seconds after it was given."""

    group_id: int
    prompt: Prompt
    group_size: int
    version: int
    """Policy version current when the lease was given."""
    attempt: int
    incarnation: int
    deadline_s: float


class LeaseSource(Protocol):
    """The stream as a rollout worker sees it."""

    async def lease(self, worker: str, room: int) -> list[Lease]:
        """At most ``room`` leases; waits briefly for work, then returns an empty list."""
        ...

    async def submit(self, worker: str, payload: bytes) -> str:
        """Hands in ``Group.to_bytes()``. Returns ``"ready"``, ``"late_twin"``, ``"revoked"`` or a drop reason."""
        ...

    async def give_up(self, worker: str, group_id: int, reason: DropReason, cause: str) -> None:
        """Returns a lease unfulfilled; the ledger issues it again or drops it with the reason."""
        ...


@dataclass(frozen=True)
class ScoreItem:
    """One completion to judge. ``id`` is unique within the request; results are matched by it, never by position."""

    id: str
    prompt: str | ChatMessages
    completion: str
    finish_reason: str
    label: Any = None
    metadata: str = "{}"
    completion_tokens: int = 0


@dataclass(frozen=True)
class ScoreRequest:
    """All completions of one group, judged in one call."""

    request_id: str
    """``run/group/attempt``; the same id has the same answer."""
    source: str
    """The data source's name; it selects which rewards apply."""
    policy_version: int
    items: tuple[ScoreItem, ...]


@dataclass(frozen=True)
class ScoreError:
    """Why a completion could not be judged. Never a number."""

    code: str
    message: str
    retryable: bool = False


@dataclass(frozen=True)
class Score:
    """The judgement of one item: a finite reward, or an error."""

    id: str
    reward: float | None
    parts: dict[str, float] = field(default_factory=dict)
    info: str = "{}"
    """JSON object for logs; becomes part of the row's metadata."""
    error: ScoreError | None = None


class Scorer(Protocol):
    """Judges completions. Owns its deadlines and retries; a completion it cannot judge has an error, not a number."""

    async def score(self, request: ScoreRequest) -> list[Score]: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, eq=False)
class TokenRow:
    """A prompt and the completion whose log-probs are asked for."""

    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray


class Reference(Protocol):
    """Log-probs of a frozen model at the run's sampling temperature: the learner's code, dtype and head."""

    async def logprobs(self, rows: Sequence[TokenRow]) -> list[np.ndarray]:
        """One float32 array of completion length per row, in order."""
        ...
