"""``LocalEngine``: vLLM in a thread of this process, for debuggers and small machines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

from rollout_workers.contract import EngineDied
from rollout_workers.engine.arguments import check_backend, engine_arguments
from rollout_workers.engine.base import CLOSE_S, VllmEngine
from rollout_workers.environment import vllm_in_this_process
from rollout_workers.settings import RolloutSettings
from rollout_workers.step_thread import StepThread
from system.core.model import ModelSettings


class LocalEngine(VllmEngine):
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

    async def _call_workers(self, method: str, **arguments: Any) -> list[Any]:
        return await self._do(lambda: self._llm.collective_rpc(method, kwargs=arguments))

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
        if self._death is not None:
            raise self._death
        thread = self._thread
        if thread is None:
            raise EngineDied(f"{self.name}: the engine is not started")
        try:
            return await asyncio.wrap_future(thread.do(command))
        except Exception as failure:
            if thread.has_ended:
                raise self._died(f"{type(failure).__name__}: {failure}") from failure
            raise
