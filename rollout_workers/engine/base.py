"""What both engines share: arguments, requests, counting. Subclasses carry requests to vLLM and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout_workers.contract import (
    EngineMetrics,
    EngineOutput,
    GenerationFailed,
    RequestRefused,
    WeightBackend,
)
from rollout_workers.engine.requests import as_output, as_probe, sampling_parameters, scoring_parameters
from rollout_workers.environment import prepare_environment
from rollout_workers.settings import RolloutSettings
from rollout_workers.update_cycle import UpdateCycle
from system.core.deadlines import within
from system.core.errors import ConfigError, InfrastructureError
from system.core.model import ModelSettings
from system.core.weights.wire import Report

CLOSE_S = 20.0
WARM_UP_TOKENS = (0,) * 8
ENGINE_PROCESS_ENDED = (
    "a process of vLLM ended (killed, out of memory, or a crash); what it said last stands in the output of this "
    "worker's process, under Ray in the session's logs folder"
)


class VllmEngine(UpdateCycle):
    """A subclass says how vLLM is launched, asked and ended."""

    def __init__(
        self,
        model: ModelSettings,
        rollout: RolloutSettings,
        *,
        name: str = "engine",
        threads: str | None = None,
        backend: WeightBackend = "gloo",
    ) -> None:
        super().__init__(name)
        self._model = model
        self._rollout = rollout
        self._threads = threads
        self._backend: WeightBackend = backend
        self._outstanding = 0
        self._llm: Any = None
        self._tokenizer: Any = None
        self._probes = 0

    async def _launch(self) -> None:
        """Starts vLLM; sets ``_llm``."""
        raise NotImplementedError

    async def _request(self, prompt_tokens: Sequence[int], sampling: Any, request_id: str) -> Any:
        """vLLM's final ``RequestOutput``; cancelling aborts the request."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def _reports(self) -> list[Report]:
        return [Report(*answer) for answer in await self._call_workers("weight_transfer_engine")]

    async def start(self, deadline_s: float) -> None:
        prepare_environment(self._threads)
        try:
            await within(self._make_ready(), deadline_s, f"{self.name}: start of vLLM", InfrastructureError)
        except (ConfigError, InfrastructureError):
            await self.close()
            raise
        except Exception as failure:
            await self.close()
            raise InfrastructureError(f"{self.name}: vLLM did not start: {failure}") from failure
        self._enter("serving")

    async def _make_ready(self) -> None:
        """Launches vLLM and asks it once: its first request takes long, and no later deadline allows for that."""
        await self._launch()
        self._tokenizer = self._llm.get_tokenizer()
        await self._label("0")
        await self._request(WARM_UP_TOKENS, sampling_parameters(self._rollout.temperature, 0, 2), "warm-up-sampling")
        await self._request(WARM_UP_TOKENS, scoring_parameters(), "warm-up-scoring")

    def _prompt(self, tokens: Sequence[int]) -> Any:
        from vllm.inputs import TokensPrompt

        return TokensPrompt(prompt_token_ids=[int(token) for token in tokens], cache_salt=f"version-{self._version}")

    async def generate(self, prompt_tokens: Sequence[int], seed: int, max_tokens: int, request_id: str) -> EngineOutput:
        self._outstanding += 1
        try:
            await self._pass_gate()
            sampling = sampling_parameters(self._rollout.temperature, seed, max_tokens)
            answer = await self._request(prompt_tokens, sampling, request_id)
        finally:
            self._outstanding -= 1
        return as_output(self.name, request_id, answer, self._tokenizer)

    async def probe(self, tokens: Sequence[int], deadline_s: float) -> list[float]:
        async def ask() -> Any:
            await self._pass_gate()
            self._probes += 1
            return await self._request(tokens, scoring_parameters(), f"probe-{self._probes}")

        return as_probe(tokens, await within(ask(), deadline_s, f"{self.name}: probe", InfrastructureError))

    def metrics(self) -> EngineMetrics:
        running = min(self._outstanding, self._rollout.max_running_requests)
        return EngineMetrics(running, self._outstanding - running, self._state, self._version)

    def _translated(self, request_id: str, failure: Exception) -> Exception:
        """What a failure inside vLLM means to the caller."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError

        if isinstance(failure, EngineDeadError) or isinstance(failure.__cause__, EngineDeadError):
            return self._died(ENGINE_PROCESS_ENDED)
        if isinstance(failure, VLLMClientError | ValueError):
            return RequestRefused(f"{self.name}: request {request_id}: {failure}")
        cause = failure.__cause__ or failure
        return GenerationFailed(f"{self.name}: request {request_id}: {type(cause).__name__}: {cause}")
