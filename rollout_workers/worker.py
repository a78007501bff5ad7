"""A rollout worker: leases groups while it has room, generates, has them judged, and hands them in.

Invariants: nothing is leased before the first verified weight sync, and no group is handed in while it holds a token of
a version that is not verified yet. Every lease ends in a submit or a ``give_up`` with its reason, unless the worker
itself fails; then ``run`` raises the first cause. An infrastructure failure never becomes a reward.
All methods belong to one event loop. Knows no Ray and no vLLM; the actor around it only forwards.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from rollout_workers.activity import Activity, ActivityMeter
from rollout_workers.assembly import Completion, assemble, match_scores, newest_version, score_request
from rollout_workers.contract import (
    Engine,
    EngineMetrics,
    GenerationFailed,
    RequestRefused,
)
from rollout_workers.settings import RolloutSettings
from system.core.clock import Clock
from system.core.deadlines import within
from system.core.errors import InfrastructureError, TriptychError
from system.core.protocols import Lease, LeaseSource, Reference, Score, ScoreError, Scorer, TokenRow
from system.core.records import DropReason, Group
from system.core.seeds import request_seed
from system.core.weights.wire import Endpoint, Manifest

log = logging.getLogger("triptych.rollout")

T = TypeVar("T")

STREAM_DEADLINE_S = 60.0
"""For calls to the stream; a lease waits there for work only briefly."""
EMPTY_LEASE_PAUSE_S = 0.05
REFERENCE_RETRY_S = 1.0

WorkerState = Literal["waiting", "serving", "isolated", "draining", "stopped", "failed"]


class PastDeadline(Exception):
    """A lease ran out; says in which phase."""


@dataclass(frozen=True)
class WorkerStatus:
    """What an operator, the fleet and the stall report want to know of one worker."""

    name: str
    state: WorkerState
    engine: EngineMetrics
    verified_version: int | None
    groups: int
    """In flight: generating, being judged, or waiting to be handed in."""
    completions: int
    completion_tokens: int
    submitted: dict[str, int] = field(default_factory=dict)
    """Verdict of the stream -> groups."""
    given_up: dict[str, int] = field(default_factory=dict)
    """Reason -> leases."""
    null_rewards: int = 0
    last_error: str | None = None


class RolloutWorker:
    """Owns its engine's requests; the engine's start and end belong to whoever made it."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        stream: LeaseSource,
        scorer: Scorer | None,
        reference: Reference | None,
        settings: RolloutSettings,
        *,
        run_name: str,
        run_seed: int,
        clock: Clock,
    ) -> None:
        self.name = name
        self._engine = engine
        self._stream = stream
        self._scorer = scorer
        self._reference = reference
        self._settings = settings
        self._run_name = run_name
        self._run_seed = run_seed
        self._clock = clock
        self._meter = ActivityMeter(clock.now_s())
        self._state: WorkerState = "waiting"
        self._verified: int | None = None
        self._changed = asyncio.Event()
        self._groups: set[asyncio.Task[None]] = set()
        self._leasing = False
        self._requests = 0
        self._failure: BaseException | None = None
        self._last_error: str | None = None
        self._completions = 0
        self._completion_tokens = 0
        self._null_rewards = 0
        self._submitted: Counter[str] = Counter()
        self._given_up: Counter[str] = Counter()

    async def run(self) -> None:
        """Serves until ``stop``. Raises the first failure of the engine, the stream or the scorer."""
        try:
            while self._state != "stopped":
                if self._failure is not None:
                    raise self._failure
                if self._state == "serving" and self.room() > 0:
                    await self._lease_once()
                else:
                    await self._change()
        finally:
            if self._state != "stopped":
                self._state = "failed"
            await self._cancel_groups()

    def room(self) -> int:
        """Groups that the engine could still take at once."""
        return (self._settings.max_running_requests - self._requests) // self._settings.group_size

    async def admit(self, version: int) -> None:
        """A verified sync: lease from now on, and hand in what ``version`` and those before it sampled."""
        self._verified = version
        if self._state in ("waiting", "isolated"):
            self._enter("serving")
        self._changed.set()

    async def isolate(self) -> None:
        """Lease nothing more until the next ``admit``; groups under way go on."""
        if self._state in ("waiting", "serving"):
            self._enter("isolated")

    async def drain(self, deadline_s: float) -> None:
        """Lease nothing more, and wait until every group is handed in or given up."""
        if self._state not in ("stopped", "failed"):
            self._enter("draining")
        idle = self._until(lambda: not self._groups and not self._leasing)
        await within(idle, deadline_s, f"{self.name}: drain", InfrastructureError)

    async def stop(self) -> None:
        """Ends ``run``; requests under way are aborted, their leases are left to the ledger."""
        self._enter("stopped")
        await self._cancel_groups()

    async def join_transfer(self, endpoint: Endpoint, rank_offset: int, world_size: int, deadline_s: float) -> None:
        await self._engine.join_transfer(endpoint, rank_offset, world_size, deadline_s)

    async def begin_update(self, deadline_s: float) -> None:
        with self._during("sync"):
            await self._syncing(self._engine.begin_update(deadline_s))

    async def receive(self, manifest: Manifest, deadline_s: float) -> None:
        with self._during("sync"):
            await self._syncing(self._engine.receive(manifest, deadline_s))

    async def finish_update(self, version: int, deadline_s: float) -> None:
        """The engine goes on generating; what it samples is handed in only after ``admit(version)``."""
        with self._during("sync"):
            await self._syncing(self._engine.finish_update(version, deadline_s))

    async def probe(self, tokens: Sequence[int], deadline_s: float) -> list[float]:
        return await self._engine.probe(tokens, deadline_s)

    def activity(self) -> dict[str, float]:
        """Cumulative seconds by kind, each second counted once; see ``ActivityMeter``."""
        return self._meter.seconds(self._clock.now_s())

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            name=self.name,
            state=self._state,
            engine=self._engine.metrics(),
            verified_version=self._verified,
            groups=len(self._groups),
            completions=self._completions,
            completion_tokens=self._completion_tokens,
            submitted=dict(self._submitted),
            given_up=dict(self._given_up),
            null_rewards=self._null_rewards,
            last_error=self._last_error,
        )

    async def _lease_once(self) -> None:
        await self._engine.check()
        self._leasing = True
        try:
            leases = await self._or_end(self._stream.lease(self.name, self.room()), "lease")
            for lease in leases or ():
                task = asyncio.create_task(self._serve(lease), name=f"group {lease.group_id}")
                self._requests += lease.group_size
                self._groups.add(task)
                task.add_done_callback(self._group_ended)
        finally:
            self._leasing = False
            self._changed.set()
        if leases == []:
            await self._or_end(self._clock.sleep_s(EMPTY_LEASE_PAUSE_S), "pause")

    async def _or_end(self, call: Awaitable[T], what: str) -> T | None:
        """What ``call`` answers, or None as soon as this worker failed or stopped."""
        call_task = asyncio.ensure_future(within(call, STREAM_DEADLINE_S, f"{self.name}: {what}", InfrastructureError))
        ending = asyncio.ensure_future(self._until(lambda: self._state == "stopped" or self._failure is not None))
        try:
            await asyncio.wait({call_task, ending}, return_when=asyncio.FIRST_COMPLETED)
            return call_task.result() if call_task.done() else None
        finally:
            for task in (call_task, ending):
                task.cancel()

    async def _serve(self, lease: Lease) -> None:
        """One lease from generation to submit or give-up."""
        end_s = self._clock.now_s() + lease.deadline_s
        try:
            completions = await self._generate(lease, end_s)
            request = score_request(self._run_name, lease, completions)
            scores, reference = await self._by(
                end_s, asyncio.gather(self._score(request), self._refer(lease, completions)), "judging"
            )
            group = assemble(self.name, lease, completions, scores, reference)
            version = newest_version(completions)
            await self._by(end_s, self._until(lambda: self._verified is not None and self._verified >= version), "sync")
        except PastDeadline as cause:
            await self._give_up(lease, "deadline", f"{cause} within {lease.deadline_s:g} s")
        except GenerationFailed as cause:
            await self._give_up(lease, "generation_failed", str(cause))
        except RequestRefused as cause:
            await self._give_up(lease, "poison", str(cause))
        else:
            await self._submit(group)

    async def _generate(self, lease: Lease, end_s: float) -> list[Completion]:
        tasks = [asyncio.create_task(self._complete(lease, index)) for index in range(lease.group_size)]
        for task in tasks:
            task.add_done_callback(self._request_ended)
        try:
            return list(await self._by(end_s, asyncio.gather(*tasks), "generation"))
        except PastDeadline:
            finished = sum(task.done() and not task.cancelled() for task in tasks)
            raise PastDeadline(f"{finished} of {lease.group_size} completions finished") from None
        finally:
            for task in tasks:
                task.cancel()

    async def _complete(self, lease: Lease, trajectory_id: int) -> Completion:
        """One completion, tried again while its engine lives and attempts remain."""
        seed = request_seed(self._run_seed, lease.group_id, trajectory_id)
        retries = 0
        with self._during("generate"):
            while True:
                request_id = f"{lease.group_id}.{lease.incarnation}.{lease.attempt}.{trajectory_id}.{retries}"
                try:
                    output = await self._engine.generate(
                        lease.prompt.tokens, seed, self._settings.max_tokens, request_id
                    )
                except GenerationFailed as failure:
                    self._note(failure)
                    retries += 1
                    if retries == self._settings.attempts:
                        raise
                else:
                    self._completions += 1
                    self._completion_tokens += len(output.tokens)
                    return Completion(trajectory_id, seed, retries, output)

    async def _score(self, request: Any) -> list[Score]:
        if self._scorer is None:
            return [
                Score(item.id, None, error=ScoreError("no_scorer", "this run scores nothing")) for item in request.items
            ]
        with self._during("reward"):
            scores = match_scores(request, await self._scorer.score(request))
        self._null_rewards += sum(score.reward is None for score in scores)
        return scores

    async def _refer(self, lease: Lease, completions: Sequence[Completion]) -> list[np.ndarray] | None:
        """Reference log-probs; while the reference worker is being restarted, the group waits."""
        if self._reference is None:
            return None
        prompt = np.asarray(lease.prompt.tokens, dtype=np.int32)
        rows = [TokenRow(prompt, np.asarray(completion.output.tokens, dtype=np.int32)) for completion in completions]
        with self._during("reference"):
            while True:
                try:
                    return await self._reference.logprobs(rows)
                except InfrastructureError as failure:
                    self._note(failure)
                    await self._clock.sleep_s(REFERENCE_RETRY_S)

    async def _submit(self, group: Group) -> None:
        submitting = self._stream.submit(self.name, group.to_bytes())
        verdict = await within(submitting, STREAM_DEADLINE_S, f"{self.name}: submit", InfrastructureError)
        self._submitted[verdict] += 1

    async def _give_up(self, lease: Lease, reason: DropReason, cause: str) -> None:
        self._given_up[reason] += 1
        self._last_error = f"group {lease.group_id}: {reason}: {cause}"
        log.warning("%s gives up group %d (%s): %s", self.name, lease.group_id, reason, cause)
        giving = self._stream.give_up(self.name, lease.group_id, reason, cause)
        await within(giving, STREAM_DEADLINE_S, f"{self.name}: give up", InfrastructureError)

    async def _by(self, end_s: float, work: Awaitable[T], phase: str) -> T:
        """``work``'s result, or ``PastDeadline`` once the clock reaches ``end_s``; ``work`` is cancelled then."""
        work_task = asyncio.ensure_future(work)
        work_task.add_done_callback(lambda done: done.cancelled() or done.exception())
        alarm = asyncio.ensure_future(self._clock.sleep_s(end_s - self._clock.now_s()))
        try:
            await asyncio.wait({work_task, alarm}, return_when=asyncio.FIRST_COMPLETED)
            if not work_task.done():
                raise PastDeadline(f"{phase} not finished")
            return work_task.result()
        finally:
            work_task.cancel()
            alarm.cancel()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._change()

    async def _change(self) -> None:
        """Waits for anything in this worker to change; every waiter sees every change."""
        self._changed.clear()
        await self._changed.wait()

    @contextmanager
    def _during(self, activity: Activity) -> Iterator[None]:
        self._meter.enter(activity, self._clock.now_s())
        try:
            yield
        finally:
            self._meter.leave(activity, self._clock.now_s())

    async def _syncing(self, call: Awaitable[None]) -> None:
        try:
            await call
        except TriptychError as failure:
            self._note(failure)
            await self.isolate()
            raise

    def _request_ended(self, task: asyncio.Task[Completion]) -> None:
        self._requests -= 1
        self._changed.set()

    def _group_ended(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        if not task.cancelled() and task.exception() is not None and self._failure is None:
            self._failure = task.exception()
            self._note(self._failure)
        self._changed.set()

    def _note(self, failure: BaseException | None) -> None:
        self._last_error = f"{type(failure).__name__}: {failure}"

    def _enter(self, state: WorkerState) -> None:
        if self._state not in ("stopped", "failed"):
            self._state = state
        self._changed.set()

    async def _cancel_groups(self) -> None:
        tasks = list(self._groups)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
