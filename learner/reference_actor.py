"""Serves the reference model to many callers: requests that arrive together share forward passes.

``ReferenceWorker`` is the service in any process (``--local``); as a Ray actor it is the same class. A request either
has its answer by its deadline or an error that names it; one whose caller gave up is not computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from learner.reference import ReferenceModel
from learner.settings import ReferenceSettings
from system.core.deadlines import answer, within
from system.core.errors import InfrastructureError, TriptychError, WorkerLost
from system.core.model import ModelSettings
from system.core.protocols import TokenRow


@dataclass(eq=False)
class _Request:
    rows: Sequence[TokenRow]
    answer: asyncio.Future[list[np.ndarray]]

    @property
    def tokens(self) -> int:
        return sum(len(row.prompt_tokens) + len(row.completion_tokens) for row in self.rows)


class ReferenceWorker:
    """An asyncio service; implements ``system.core.protocols.Reference``."""

    def __init__(self, model: ModelSettings, settings: ReferenceSettings, temperature: float) -> None:
        self._arguments = (model, settings, temperature)
        self._settings = settings
        self._model: ReferenceModel | None = None
        self._waiting: list[_Request] = []
        self._arrived = asyncio.Event()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="reference")
        self._serving: asyncio.Task[None] | None = None
        self.served_rows = 0
        self.batches = 0

    async def start(self) -> None:
        """Loads the model and serves.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        self._model = await loop.run_in_executor(self._worker, lambda: ReferenceModel(*self._arguments))
        self._serving = asyncio.create_task(self._serve())

    async def logprobs(self, rows: Sequence[TokenRow]) -> list[np.ndarray]:
        """One float32 array of completion length per row, in order.

        Raises:
            InfrastructureError: not within ``reference.deadline_s``, or the service is closed.
            DataError: a row that has no log-probs.
        """
        if self._serving is None or self._serving.done():
            raise InfrastructureError("reference worker: not serving; start it first")
        request = _Request(rows, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self._arrived.set()
        return await within(
            request.answer, self._settings.deadline_s, f"reference worker: {len(rows)} rows", InfrastructureError
        )

    async def close(self) -> None:
        """Stops serving; waiting requests get an error."""
        if self._serving is not None:
            self._serving.cancel()
        for request in self._waiting:
            if not request.answer.done():
                request.answer.set_exception(InfrastructureError("reference worker: closed"))
        self._waiting.clear()
        self._model = None
        self._worker.shutdown(wait=False, cancel_futures=True)

    async def _serve(self) -> None:
        while True:
            await self._arrived.wait()
            await asyncio.sleep(self._settings.collect_s)
            self._arrived.clear()
            while batch := self._next_batch():
                await self._answer(batch)

    def _next_batch(self) -> list[_Request]:
        """The oldest requests that fit a forward pass together; those given up by their callers are left out."""
        batch: list[_Request] = []
        tokens = 0
        while self._waiting:
            request = self._waiting[0]
            if not request.answer.done():
                tokens += request.tokens
                if batch and tokens > self._settings.batch_tokens:
                    break
                batch.append(request)
            self._waiting.pop(0)
        return batch

    async def _answer(self, batch: list[_Request]) -> None:
        assert self._model is not None
        rows = [row for request in batch for row in request.rows]
        try:
            values = await asyncio.get_running_loop().run_in_executor(self._worker, self._model.logprobs, rows)
        except TriptychError as failure:
            if len(batch) == 1:
                _fail(batch, failure)
                return
            for request in batch:
                await self._answer([request])
            return
        except RuntimeError as failure:
            _fail(batch, InfrastructureError(f"reference worker: {failure}"))
            return
        self.batches += 1
        self.served_rows += len(rows)
        remaining = iter(values)
        for request in batch:
            answer = [next(remaining) for _ in request.rows]
            if not request.answer.done():
                request.answer.set_result(answer)


def _fail(batch: Sequence[_Request], failure: Exception) -> None:
    for request in batch:
        if not request.answer.done():
            request.answer.set_exception(failure)


class ReferenceActor(ReferenceWorker):
    """The service as a Ray actor."""

    async def ping(self) -> int:
        """Rows served so far."""
        return self.served_rows


class ReferenceClient:
    """``Reference`` over one or more actors, for callers in other processes; picklable. Calls take turns over them."""

    def __init__(self, actors: Sequence[Any], deadline_s: float) -> None:
        self._actors = list(actors)
        self._deadline_s = deadline_s
        self._turn = 0

    async def logprobs(self, rows: Sequence[TokenRow]) -> list[np.ndarray]:
        self._turn = (self._turn + 1) % len(self._actors)
        call = self._actors[self._turn].logprobs.remote(list(rows))
        return await answer(call, self._deadline_s, f"reference worker {self._turn}: {len(rows)} rows", WorkerLost)


async def start_reference_actors(
    model: ModelSettings,
    settings: ReferenceSettings,
    temperature: float,
    actor_options: Sequence[Mapping[str, Any]] | None = None,
) -> list[Any]:
    """Creates ``settings.workers`` actors and waits until all have the model.

    Args:
        actor_options: per actor, Ray's options of it; default: none.
    Raises:
        WorkerLost: not within ``reference.start_deadline_s``.
        ConfigError: the model cannot be loaded.
    """
    import ray

    options = list(actor_options) if actor_options is not None else [{}] * settings.workers
    made = ray.remote(ReferenceActor)
    actors = [made.options(**chosen).remote(model, settings, temperature) for chosen in options]
    loading = [
        answer(actor.start.remote(), settings.start_deadline_s, f"reference worker {index}: load the model", WorkerLost)
        for index, actor in enumerate(actors)
    ]
    await asyncio.gather(*loading)
    return actors
