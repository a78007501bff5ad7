"""What a rollout worker needs from an engine, and the errors one can raise. Imports no vLLM.

Two engines keep this contract: ``RolloutEngine`` (vLLM in processes of its own) and ``LocalEngine`` (vLLM in this
process). An engine generates only under verified weights: from ``begin_update`` until ``finish_update`` succeeded,
nothing runs, and requests that arrive wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from system.core.errors import DataError, InfrastructureError
from system.core.records import FinishReason
from system.core.weights.wire import Endpoint, Manifest

EngineState = Literal["starting", "serving", "updating", "broken", "dead", "closed"]
"""``broken``: a weight update failed; paused until ``begin_update`` and all after it succeed, or the engine goes."""

WeightBackend = Literal["gloo", "nccl_checked", "inline"]


class EngineDied(InfrastructureError):
    """The engine's processes are gone; every request in it is lost."""


class GenerationFailed(InfrastructureError):
    """One request failed while its engine lives; it may be tried again."""


class RequestRefused(DataError):
    """The engine will never take this request (a prompt longer than its context, an id out of range)."""


@dataclass(frozen=True)
class EngineOutput:
    """One completion as sampled. ``tokens``, ``logprobs`` and ``versions`` have one entry per sampled token.

    Tokens include the stop token. Ids that the model has and its tokenizer lacks (padding of the vocabulary) are kept
    as sampled, since learner and sampler share the softmax over them; ``text`` leaves them and special tokens out.
    """

    tokens: list[int]
    logprobs: list[float]
    """After temperature, natural logarithm."""
    versions: list[int]
    finish_reason: FinishReason
    text: str


@dataclass(frozen=True)
class EngineMetrics:
    """Requests in the engine: those that fit ``max_running_requests``, and those beyond."""

    running: int
    waiting: int
    state: EngineState
    version: int


class Engine(Protocol):
    """One engine. All calls come from one event loop; those that wait take their deadline in seconds."""

    @property
    def state(self) -> EngineState: ...

    @property
    def version(self) -> int:
        """The policy version that the next token will carry."""
        ...

    async def start(self, deadline_s: float) -> None:
        """Loads the model, labelled version 0. Raises ``ConfigError`` or ``InfrastructureError``."""
        ...

    async def generate(self, prompt_tokens: Sequence[int], seed: int, max_tokens: int, request_id: str) -> EngineOutput:
        """Samples one completion; waits while an update is on. Cancel the call to abort the request.

        Raises:
            EngineDied, GenerationFailed, RequestRefused
        """
        ...

    async def join_transfer(self, endpoint: Endpoint, rank_offset: int, world_size: int, deadline_s: float) -> None:
        """Joins a transfer group; its worker processes take the ranks from ``rank_offset`` on."""
        ...

    async def begin_update(self, deadline_s: float) -> None:
        """Freezes running requests and opens the model for new weights. Also mends an update that broke."""
        ...

    async def receive(self, manifest: Manifest, deadline_s: float) -> None:
        """Receives, verifies and loads all of ``manifest``. Raises ``SyncFailed``; see ``wire`` for its kinds."""
        ...

    async def finish_update(self, version: int, deadline_s: float) -> None:
        """Closes the model, labels what is sampled from now on ``version``, and goes on generating."""
        ...

    async def probe(self, tokens: Sequence[int], deadline_s: float) -> list[float]:
        """Log-probs of ``tokens[1:]``, each given all before it, under the current weights at temperature 1.

        Temperature 1 whatever the run samples at: vLLM's prompt log-probs know no other, so the learner's side of the
        comparison is taken at 1 too.
        """
        ...

    def metrics(self) -> EngineMetrics: ...

    async def check(self) -> None:
        """Raises ``EngineDied``, with the first cause, when the engine cannot generate any more."""
        ...

    async def close(self) -> None:
        """Ends all processes of the engine; requests in it fail. Idempotent."""
        ...
