"""The vLLM engine, in processes of its own (``RolloutEngine``) or in a thread of this one (``LocalEngine``).

With the weight receiver, the only module that knows vLLM's Python API; vLLM is imported when an engine starts.
Token ids in, token ids out. Every request carries a seed, so samples do not depend on the batch they run in, and a
cache salt of the current version, so that the prefix cache never crosses a version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from rollout_workers.contract import (
    EngineDied,
    EngineMetrics,
    EngineOutput,
    GenerationFailed,
    RequestRefused,
    WeightBackend,
)
from rollout_workers.environment import prepare_environment, vllm_in_this_process
from rollout_workers.settings import RolloutSettings
from rollout_workers.step_thread import StepThread
from rollout_workers.update_cycle import UpdateCycle
from system.core.deadlines import within
from system.core.errors import ConfigError, InfrastructureError, nearest
from system.core.model import ModelSettings
from system.core.weights.register import PLUGIN_NAME, register

CPU_KV_CACHE_BYTES = 1024**3
CLOSE_S = 20.0
ENGINE_PROCESS_ENDED = (
    "a process of vLLM ended (killed, out of memory, or a crash); what it said last stands in the output of this "
    "worker's process, under Ray in the session's logs folder"
)


def check_backend(backend: WeightBackend) -> None:
    """Raises ``ConfigError`` unless every vLLM process will know the weight-transfer ``backend``."""
    from importlib.metadata import entry_points

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if PLUGIN_NAME not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        raise ConfigError(
            f"the entry point '{PLUGIN_NAME}' is not installed, so vLLM's processes would not know how to receive "
            "weights; install Triptych into this environment (pip install, not only PYTHONPATH)"
        )
    register()
    if backend not in WeightTransferEngineFactory._registry:
        known = sorted(WeightTransferEngineFactory._registry)
        raise ConfigError(f"vLLM knows no weight-transfer backend '{backend}'{nearest(backend, known)}")


def engine_arguments(model: ModelSettings, rollout: RolloutSettings, backend: WeightBackend) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``EngineArgs``.

    On CPU a prompt is never prefilled in pieces: vLLM draws a token after each piece and winds the request's seeded
    generator back, which a CPU generator cannot do; the engine would die.

    Raises:
        ConfigError: ``rollout.engine`` names an argument that vLLM does not have.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    known = EngineArgs.__dataclass_fields__
    for name in rollout.engine:
        if name not in known:
            raise ConfigError(f"rollout.engine.{name}: vLLM has no such argument{nearest(name, known)}")
    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "tensor_parallel_size": rollout.tensor_parallel,
        "max_num_seqs": rollout.max_running_requests,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": backend},
        "enforce_eager": on_cpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **({"enable_chunked_prefill": False} if on_cpu else {}),
        **rollout.engine,
    }
    kv_cache_bytes = rollout.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None)
    if kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes
    return arguments


def _sampling(temperature: float, seed: int, max_tokens: int) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _scoring() -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=False,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _as_output(name: str, request_id: str, answer: Any, tokenizer: Any) -> EngineOutput:
    """Checks and converts what vLLM answered; every token must carry a log-prob and a version."""
    sample = answer.outputs[0]
    tokens = list(sample.token_ids)
    if sample.finish_reason not in ("stop", "length") or not tokens:
        raise GenerationFailed(f"{name}: request {request_id} ended with '{sample.finish_reason}', not with an answer")
    versions = [int(span.version) for span in sample.weight_versions or () for _ in range(span.start, span.end)]
    logprobs = list(sample.logprobs.logprobs)
    if len(versions) != len(tokens) or len(logprobs) != len(tokens):
        raise GenerationFailed(
            f"{name}: request {request_id}: {len(tokens)} tokens, {len(logprobs)} log-probs, {len(versions)} versions"
        )
    known = [token for token in tokens if token < len(tokenizer)]
    text = tokenizer.decode(known, skip_special_tokens=True).encode("utf-8", "replace").decode("utf-8")
    return EngineOutput(tokens, logprobs, versions, sample.finish_reason, text)


def _as_probe(tokens: Sequence[int], answer: Any) -> list[float]:
    return [answer.prompt_logprobs[index][token].logprob for index, token in enumerate(tokens) if index > 0]


class _VllmEngine(UpdateCycle):
    """What both engines share: arguments, requests, counting. Subclasses carry requests to vLLM and back."""

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

    async def start(self, deadline_s: float) -> None:
        prepare_environment(self._threads)
        try:
            await within(self._launch(), deadline_s, f"{self.name}: start of vLLM", InfrastructureError)
        except (ConfigError, InfrastructureError):
            await self.close()
            raise
        except Exception as failure:
            await self.close()
            raise InfrastructureError(f"{self.name}: vLLM did not start: {failure}") from failure
        self._tokenizer = self._llm.get_tokenizer()
        await within(self._label("0"), deadline_s, f"{self.name}: label the first weights")
        self._enter("serving")

    def _prompt(self, tokens: Sequence[int]) -> Any:
        from vllm.inputs import TokensPrompt

        return TokensPrompt(prompt_token_ids=[int(token) for token in tokens], cache_salt=f"version-{self._version}")

    async def generate(self, prompt_tokens: Sequence[int], seed: int, max_tokens: int, request_id: str) -> EngineOutput:
        self._outstanding += 1
        try:
            await self._pass_gate()
            sampling = _sampling(self._rollout.temperature, seed, max_tokens)
            answer = await self._request(prompt_tokens, sampling, request_id)
        finally:
            self._outstanding -= 1
        return _as_output(self.name, request_id, answer, self._tokenizer)

    async def probe(self, tokens: Sequence[int], deadline_s: float) -> list[float]:
        async def ask() -> Any:
            await self._pass_gate()
            self._probes += 1
            return await self._request(tokens, _scoring(), f"probe-{self._probes}")

        return _as_probe(tokens, await within(ask(), deadline_s, f"{self.name}: probe", InfrastructureError))

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


class RolloutEngine(_VllmEngine):
    """vLLM's ``AsyncLLM``: the scheduler and each GPU's worker in a process of their own."""

    async def _launch(self) -> None:
        def launch() -> None:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            check_backend(self._backend)
            arguments = engine_arguments(self._model, self._rollout, self._backend)
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            if self._state == "closed":
                self.shut_down()

        await asyncio.get_running_loop().run_in_executor(None, launch)

    async def _request(self, prompt_tokens: Sequence[int], sampling: Any, request_id: str) -> Any:
        try:
            answers = [answer async for answer in self._llm.generate(self._prompt(prompt_tokens), sampling, request_id)]
        except Exception as failure:
            raise self._translated(request_id, failure) from failure
        if not answers:
            raise GenerationFailed(f"{self.name}: request {request_id} ended without an answer")
        return answers[-1]

    async def _pause(self) -> None:
        clear_cache = self._rollout.kv_cache == "exact"
        await self._guarded(self._llm.pause_generation(mode="keep", clear_cache=clear_cache))

    async def _resume(self) -> None:
        await self._guarded(self._llm.resume_generation())

    async def _call_workers(self, method: str, **arguments: Any) -> None:
        await self._guarded(self._llm.collective_rpc(method, kwargs=arguments))

    async def _label(self, version: str) -> None:
        await self._guarded(self._llm.update_weight_version(version))

    async def _guarded(self, call: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await call
        except EngineDeadError as failure:
            raise self._died(ENGINE_PROCESS_ENDED) from failure

    async def check(self) -> None:
        """Raises ``EngineDied`` when the engine's processes are gone."""
        self._check_alive()
        if self._llm.errored:
            raise self._died(ENGINE_PROCESS_ENDED)

    async def close(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._enter("closed")
        if self._llm is None:
            return
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        self._llm.output_processor.propagate_error(EngineDeadError())
        await within(asyncio.to_thread(self.shut_down), CLOSE_S, f"{self.name}: end of vLLM's processes")

    def shut_down(self) -> None:
        """Ends vLLM's processes; for places without an event loop. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()


class LocalEngine(_VllmEngine):
    """vLLM inside this process, stepped by one thread, for debuggers and small machines. Starts in seconds."""

    def __init__(self, model: ModelSettings, rollout: RolloutSettings, **options: Any) -> None:
        super().__init__(model, rollout, **{"backend": "inline", **options})
        self._answers: dict[str, Future[Any]] = {}
        self._paused = False
        self._thread: StepThread | None = None

    async def _launch(self) -> None:
        loop = asyncio.get_running_loop()

        def failed(cause: Exception) -> None:
            loop.call_soon_threadsafe(self._fail_all, f"{type(cause).__name__}: {cause}")

        def launch() -> None:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            check_backend(self._backend)
            arguments = engine_arguments(self._model, self._rollout, self._backend)
            with vllm_in_this_process():
                self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments))

        self._thread = StepThread(f"{self.name}-vllm", self._step, failed)
        await self._do(launch)

    def _step(self) -> bool:
        if self._llm is None or self._paused or not self._llm.has_unfinished_requests():
            return False
        for answer in self._llm.step():
            waiting = self._answers.pop(answer.request_id, None) if answer.finished else None
            if waiting is not None:
                with suppress(InvalidStateError):
                    waiting.set_result(answer)
        return True

    async def _request(self, prompt_tokens: Sequence[int], sampling: Any, request_id: str) -> Any:
        answer: Future[Any] = Future()
        prompt = self._prompt(prompt_tokens)

        def add() -> None:
            self._llm.add_request(request_id, prompt, sampling)
            self._answers[request_id] = answer

        def abort() -> None:
            if self._answers.pop(request_id, None) is not None:
                self._llm.abort_request([request_id])

        try:
            await self._do(add)
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            if self._thread is not None:
                self._thread.do(abort)
            raise
        except EngineDied:
            raise
        except Exception as failure:
            raise self._translated(request_id, failure) from failure

    async def _pause(self) -> None:
        def pause() -> None:
            self._paused = True
            core = self._llm.engine_core.engine_core
            core.pause_scheduler(mode="keep", clear_cache=self._rollout.kv_cache == "exact")

        await self._do(pause)

    async def _resume(self) -> None:
        def resume() -> None:
            self._llm.engine_core.engine_core.resume_scheduler()
            self._paused = False

        await self._do(resume)

    async def _call_workers(self, method: str, **arguments: Any) -> None:
        await self._do(lambda: self._llm.collective_rpc(method, kwargs=arguments))

    async def _label(self, version: str) -> None:
        await self._do(lambda: self._llm.set_weight_version(version))

    async def check(self) -> None:
        """Raises ``EngineDied`` when the engine's thread has ended."""
        self._check_alive()

    async def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return

        def end() -> None:
            llm, self._llm = self._llm, None
            if llm is not None:
                llm.engine_core.shutdown()

        thread.do(end)
        self._fail_all("it was closed")
        self._enter("closed")
        await asyncio.to_thread(thread.end, CLOSE_S)

    def _fail_all(self, cause: str) -> None:
        death = self._died(cause)
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            with suppress(InvalidStateError):
                answer.set_exception(death)

    async def _do(self, command: Callable[[], Any]) -> Any:
        """Runs ``command`` on the engine's thread, between two of its steps."""
        self._check_thread()
        assert self._thread is not None
        return await asyncio.wrap_future(self._thread.do(command))

    def _check_thread(self) -> None:
        if self._death is not None:
            raise self._death
        if self._thread is None:
            raise EngineDied(f"{self.name}: the engine is not started")
