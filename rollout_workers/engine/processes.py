"""``RolloutEngine``: vLLM in processes of its own, as a rollout worker runs it.

They are started from one thread that stays until they have ended, since the kernel ends them with that thread: so a
worker whose process is killed leaves none behind, whatever they do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollout_workers.contract import GenerationFailed
from rollout_workers.engine.arguments import check_backend, engine_arguments
from rollout_workers.engine.base import CLOSE_S, ENGINE_PROCESS_ENDED, VllmEngine
from rollout_workers.settings import RolloutSettings
from system.core.deadlines import within
from system.core.model import ModelSettings

DEATH_POLL_S = 0.2
DYING_POLLS = 15
"""A process that dies fails the calls under way some moments before vLLM knows the engine for dead."""


class RolloutEngine(VllmEngine):
    """vLLM's ``AsyncLLM``: the scheduler and each GPU's worker in a process of their own."""

    def __init__(self, model: ModelSettings, rollout: RolloutSettings, **options: Any) -> None:
        super().__init__(model, rollout, **options)
        self._parent_thread = ThreadPoolExecutor(1, thread_name_prefix=f"{self.name}-vllm")

    async def _launch(self) -> None:
        def launch() -> None:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            check_backend(self._backend)
            arguments = engine_arguments(self._model, self._rollout, self._backend)
            self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            if self._state == "closed":
                self.shut_down()

        await asyncio.get_running_loop().run_in_executor(self._parent_thread, launch)

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

    async def _call_workers(self, method: str, **arguments: Any) -> list[Any]:
        return await self._guarded(self._llm.collective_rpc(method, kwargs=arguments))

    async def _label(self, version: str) -> None:
        await self._guarded(self._llm.update_weight_version(version))

    async def _guarded(self, call: Any) -> Any:
        """What ``call`` answers. vLLM forgets calls under way when its processes end, so that is watched here."""
        from vllm.v1.engine.exceptions import EngineDeadError

        llm, task = self._llm, asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=DEATH_POLL_S))[0]:
                if llm.errored:
                    raise EngineDeadError
            return task.result()
        except Exception as failure:
            if isinstance(failure, EngineDeadError) or await _is_dying(llm):
                raise self._died(ENGINE_PROCESS_ENDED) from failure
            raise
        finally:
            task.cancel()

    async def check(self) -> None:
        """Raises ``EngineDied`` when the engine's processes are gone."""
        self._check_alive()
        if self._llm.errored:
            raise self._died(ENGINE_PROCESS_ENDED)

    async def close(self) -> None:
        self._enter("closed")
        if self._llm is not None:
            self._fail_requests()
        await within(asyncio.to_thread(self.shut_down), CLOSE_S, f"{self.name}: end of vLLM's processes")

    def _fail_requests(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        self._llm.output_processor.propagate_error(EngineDeadError())

    def shut_down(self) -> None:
        """Ends vLLM's processes; for places without an event loop. Idempotent."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.shutdown()
        self._parent_thread.shutdown(wait=False)


async def _is_dying(llm: Any) -> bool:
    for _ in range(DYING_POLLS):
        if llm.errored:
            return True
        await asyncio.sleep(DEATH_POLL_S)
    return False
