"""The worker's loop: leasing, retries, deadlines, judging, verification, and the end."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from rollout_workers.contract import EngineDied, EngineOutput, GenerationFailed, RequestRefused
from rollout_workers.settings import RolloutSettings
from rollout_workers.worker import RolloutWorker
from system.core.clock import Clock, RealClock, SimulatedClock
from system.core.errors import InfrastructureError, ScoringDown, SyncFailed
from system.core.protocols import Score, ScoreError, ScoreRequest, TokenRow
from system.core.seeds import request_seed
from tests.rollout_workers.canned import CannedEngine, MemoryStream, lease, output

Scoring = Callable[[ScoreRequest], Awaitable[list[Score]]]


class FunctionScorer:
    def __init__(self, function: Scoring) -> None:
        self.function = function
        self.requests: list[ScoreRequest] = []

    async def score(self, request: ScoreRequest) -> list[Score]:
        self.requests.append(request)
        return await self.function(request)

    async def close(self) -> None: ...


async def reward_by_id(request: ScoreRequest) -> list[Score]:
    return [Score(item.id, float(item.id), {"half": 0.5}, '{"judge": "a"}') for item in reversed(request.items)]


class LengthReference:
    """Log-probs that tell which row they belong to."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures

    async def logprobs(self, rows: Sequence[TokenRow]) -> list[np.ndarray]:
        if self.failures:
            self.failures -= 1
            raise InfrastructureError("reference worker: restarting")
        return [-row.completion_tokens.astype(np.float32) for row in rows]


def make_worker(
    stream: MemoryStream,
    engine: CannedEngine,
    scoring: Scoring | None = reward_by_id,
    *,
    reference: LengthReference | None = None,
    clock: Clock | None = None,
    **changes: object,
) -> RolloutWorker:
    settings = RolloutSettings.model_validate({"group_size": 4, "max_running_requests": 8, **changes})
    scorer = FunctionScorer(scoring) if scoring is not None else None
    return RolloutWorker(
        "w0", engine, stream, scorer, reference, settings, run_name="run", run_seed=11, clock=clock or RealClock()
    )


@asynccontextmanager
async def running(worker: RolloutWorker, version: int | None = 0) -> AsyncIterator[asyncio.Task[None]]:
    if version is not None:
        await worker.admit(version)
    task = asyncio.create_task(worker.run())
    try:
        yield task
    finally:
        await worker.stop()
        await asyncio.wait({task}, timeout=5)
        assert task.done()


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(20):
            return await coroutine

    return asyncio.run(bounded())


async def hang(seed: int, request_id: str) -> EngineOutput:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_group_is_handed_in_with_everything_that_belongs_to_it() -> None:
    async def scenario() -> MemoryStream:
        stream = MemoryStream([lease(5, attempt=1)])

        async def answer(seed: int, request_id: str) -> EngineOutput:
            trajectory_id = int(request_id.split(".")[3])
            await asyncio.sleep(0.01 * (4 - trajectory_id))
            return output([trajectory_id + 10, 5], version=2)

        worker = make_worker(stream, CannedEngine(answer), reference=LengthReference())
        async with running(worker, version=2):
            await stream.until_returned(1)
        return stream

    rows = run(scenario()).groups[5].rows
    assert [row.trajectory_id for row in rows] == [0, 1, 2, 3]
    assert [row.reward for row in rows] == [0.0, 1.0, 2.0, 3.0]
    assert [row.seed for row in rows] == [request_seed(11, 5, index) for index in range(4)]
    for index, row in enumerate(rows):
        assert row.prompt_tokens.tolist() == [1, 2, 3]
        assert row.completion_tokens.tolist() == [index + 10, 5]
        assert row.reference_logprobs.tolist() == [-index - 10.0, -5.0]
        assert row.versions.tolist() == [2, 2]
        assert (row.prompt_id, row.source, row.worker, row.attempt, row.incarnation) == ("p5", "sums", "w0", 1, 3)
        assert row.reward_parts == {"half": 0.5}
        assert json.loads(row.metadata) == {"terms": 2, "judge": "a"}


def test_nothing_is_leased_before_the_first_verified_sync() -> None:
    async def scenario() -> None:
        stream = MemoryStream([lease(0)])
        worker = make_worker(stream, CannedEngine())
        async with running(worker, version=None):
            await asyncio.sleep(0.1)
            assert stream.asked == []
            assert worker.status().state == "waiting"
            await worker.admit(0)
            await stream.until_returned(1)

    run(scenario())


def test_as_many_groups_run_as_the_engine_has_room_for_and_the_next_starts_when_one_ends() -> None:
    async def scenario() -> None:
        stream = MemoryStream([lease(index) for index in range(6)])
        gates = {index: asyncio.Event() for index in range(6)}

        async def answer(seed: int, request_id: str) -> EngineOutput:
            await gates[int(request_id.split(".")[0])].wait()
            return output()

        engine = CannedEngine(answer)
        async with running(make_worker(stream, engine)):
            await asyncio.sleep(0.1)
            assert {request.split(".")[0] for request in engine.requests} == {"0", "1"}
            gates[1].set()
            await stream.until_returned(1)
            await asyncio.sleep(0.1)
            assert {request.split(".")[0] for request in engine.running} == {"0", "2"}
            for gate in gates.values():
                gate.set()
            await stream.until_returned(6)
        assert engine.most_running == 8

    run(scenario())


def test_a_slow_judgement_does_not_hold_up_generation() -> None:
    async def scenario() -> None:
        stream = MemoryStream([lease(index) for index in range(5)])
        judged = asyncio.Event()

        async def score(request: ScoreRequest) -> list[Score]:
            await judged.wait()
            return await reward_by_id(request)

        engine = CannedEngine()
        async with running(make_worker(stream, engine, score)):
            await asyncio.sleep(0.2)
            assert len(engine.requests) == 20
            judged.set()
            await stream.until_returned(5)

    run(scenario())


def test_a_group_past_its_deadline_is_aborted_and_given_up_with_what_was_finished() -> None:
    async def scenario() -> tuple[MemoryStream, CannedEngine]:
        clock = SimulatedClock()
        stream = MemoryStream([lease(0, deadline_s=30.0)])

        async def answer(seed: int, request_id: str) -> EngineOutput:
            return await hang(seed, request_id) if request_id.split(".")[3] == "2" else output()

        engine = CannedEngine(answer)
        async with running(make_worker(stream, engine, clock=clock)):
            for _ in range(40):
                await clock.advance_s(1.0)
                await asyncio.sleep(0.001)
            await stream.until_returned(1)
        return stream, engine

    stream, engine = run(scenario())
    assert stream.given_up == {0: ("deadline", "3 of 4 completions finished within 30 s")}
    assert [request.split(".")[3] for request in engine.aborted] == ["2"]


def test_judging_that_outlasts_the_lease_is_given_up_too() -> None:
    async def scenario() -> MemoryStream:
        clock = SimulatedClock()
        stream = MemoryStream([lease(0, deadline_s=30.0)])

        async def score(request: ScoreRequest) -> list[Score]:
            await asyncio.Event().wait()
            return []

        async with running(make_worker(stream, CannedEngine(), score, clock=clock)):
            for _ in range(40):
                await clock.advance_s(1.0)
                await asyncio.sleep(0.001)
            await stream.until_returned(1)
        return stream

    assert run(scenario()).given_up == {0: ("deadline", "judging not finished within 30 s")}


@pytest.mark.parametrize(("failures", "handed_in"), [(2, True), (3, False)])
def test_one_completion_is_tried_again_within_its_attempts(failures: int, handed_in: bool) -> None:
    async def scenario() -> MemoryStream:
        stream = MemoryStream([lease(0)])
        left = failures

        async def answer(seed: int, request_id: str) -> EngineOutput:
            nonlocal left
            if request_id.split(".")[3] == "1" and left:
                left -= 1
                raise GenerationFailed("w0: out of blocks")
            return output()

        async with running(make_worker(stream, CannedEngine(answer), attempts=3)):
            await stream.until_returned(1)
        return stream

    stream = run(scenario())
    if handed_in:
        assert [row.attempt for row in stream.groups[0].rows] == [0, 2, 0, 0]
    else:
        assert stream.given_up == {0: ("generation_failed", "w0: out of blocks")}


def test_a_prompt_that_the_engine_refuses_is_poison_and_not_tried_again() -> None:
    async def scenario() -> tuple[MemoryStream, CannedEngine]:
        stream = MemoryStream([lease(0)])

        async def answer(seed: int, request_id: str) -> EngineOutput:
            raise RequestRefused("w0: longer than the context")

        engine = CannedEngine(answer)
        async with running(make_worker(stream, engine)):
            await stream.until_returned(1)
        return stream, engine

    stream, engine = run(scenario())
    assert stream.given_up[0][0] == "poison"
    assert len(engine.requests) == 4


def test_what_cannot_be_judged_has_no_reward_and_says_why() -> None:
    async def score(request: ScoreRequest) -> list[Score]:
        return [
            Score("3", 1.0),
            Score("1", math.nan),
            Score("2", 7.0, error=ScoreError("timeout", "no answer in 10 s", True)),
            Score("9", 1.0),
        ]

    async def scenario() -> tuple[MemoryStream, int]:
        stream = MemoryStream([lease(0)])
        worker = make_worker(stream, CannedEngine(), score)
        async with running(worker):
            await stream.until_returned(1)
        return stream, worker.status().null_rewards

    stream, null_rewards = run(scenario())
    rows = stream.groups[0].rows
    assert [row.reward for row in rows] == [None, None, None, 1.0]
    codes = [json.loads(row.metadata).get("score_error", {}).get("code") for row in rows]
    assert codes == ["unmatched", "not_a_number", "timeout", None]
    assert null_rewards == 3


def test_a_group_that_is_issued_again_is_another_request_to_the_scorer() -> None:
    async def scenario() -> list[str]:
        stream = MemoryStream([lease(0), lease(0, attempt=1)])
        scorer = FunctionScorer(reward_by_id)
        worker = RolloutWorker(
            "w0",
            CannedEngine(),
            stream,
            scorer,
            None,
            RolloutSettings(group_size=4),
            run_name="run",
            run_seed=1,
            clock=RealClock(),
        )
        async with running(worker):
            await stream.until_returned(2)
        return [request.request_id for request in scorer.requests]

    assert run(scenario()) == ["run/0/3.0", "run/0/3.1"]


@pytest.mark.parametrize("failure", [ScoringDown("rewards: http://judge down for 60 s"), RuntimeError("a defect")])
def test_a_scorer_that_is_down_ends_the_worker_with_its_cause_and_never_becomes_a_reward(failure: Exception) -> None:
    async def scenario() -> MemoryStream:
        stream = MemoryStream([lease(0)])

        async def score(request: ScoreRequest) -> list[Score]:
            raise failure

        worker = make_worker(stream, CannedEngine(), score)
        async with running(worker) as task:
            with pytest.raises(type(failure), match=str(failure)):
                await task
            assert worker.status().state == "failed"
            assert str(failure) in str(worker.status().last_error)
        return stream

    assert run(scenario()).groups == {}


def test_an_engine_that_dies_ends_the_worker_with_the_first_cause() -> None:
    async def scenario() -> None:
        stream = MemoryStream([lease(0), lease(1)])

        async def answer(seed: int, request_id: str) -> EngineOutput:
            if request_id.startswith("1."):
                raise EngineDied("w0: the engine died: killed")
            return await hang(seed, request_id)

        engine = CannedEngine(answer)
        async with running(make_worker(stream, engine)) as task:
            with pytest.raises(EngineDied, match="killed"):
                await task
        assert len(engine.aborted) == 4

    run(scenario())


def test_an_engine_that_dies_idle_is_noticed_too() -> None:
    async def scenario() -> None:
        engine = CannedEngine()
        async with running(make_worker(MemoryStream(), engine)) as task:
            await asyncio.sleep(0.1)
            engine.failure = EngineDied("w0: the engine died")
            with pytest.raises(EngineDied):
                await task

    run(scenario())


def test_a_group_waits_while_the_reference_worker_is_restarted() -> None:
    async def scenario() -> MemoryStream:
        clock = SimulatedClock()
        stream = MemoryStream([lease(0)])
        worker = make_worker(stream, CannedEngine(), reference=LengthReference(failures=2), clock=clock)
        async with running(worker):
            for _ in range(10):
                await clock.advance_s(0.5)
                await asyncio.sleep(0.001)
            await stream.until_returned(1)
        return stream

    assert run(scenario()).groups[0].rows[0].reference_logprobs is not None


def test_a_group_with_tokens_of_an_unverified_version_is_handed_in_only_after_its_admission() -> None:
    async def scenario() -> None:
        stream = MemoryStream([lease(0)])
        gate = asyncio.Event()
        engine = CannedEngine()

        async def answer(seed: int, request_id: str) -> EngineOutput:
            await gate.wait()
            return output(version=engine.version)

        engine.answer = answer
        worker = make_worker(stream, engine)
        async with running(worker):
            await asyncio.sleep(0.05)
            await worker.begin_update(5)
            await worker.finish_update(1, 5)
            gate.set()
            await asyncio.sleep(0.2)
            assert stream.groups == {}
            await worker.admit(1)
            await stream.until_returned(1)

    run(scenario())


def test_a_failed_sync_isolates_the_worker_until_the_next_verified_one() -> None:
    async def scenario() -> None:
        stream = MemoryStream()
        engine = CannedEngine()
        worker = make_worker(stream, engine)
        async with running(worker):
            await asyncio.sleep(0.05)
            engine.update_failure = SyncFailed("transfer broken: peer left")
            with pytest.raises(SyncFailed):
                await worker.begin_update(5)
            assert worker.status().state == "isolated"
            await asyncio.sleep(0.1)
            stream.waiting = [lease(0)]
            await asyncio.sleep(0.2)
            assert engine.requests == []
            await worker.admit(1)
            await stream.until_returned(1)

    run(scenario())


def test_draining_hands_in_what_is_under_way_and_leases_nothing_more() -> None:
    async def scenario() -> None:
        stream = MemoryStream([lease(0)])

        async def answer(seed: int, request_id: str) -> EngineOutput:
            await asyncio.sleep(0.2)
            return output()

        worker = make_worker(stream, CannedEngine(answer))
        async with running(worker):
            await asyncio.sleep(0.05)
            stream.waiting = [lease(1)]
            await worker.drain(5)
            assert list(stream.groups) == [0]
            await asyncio.sleep(0.1)
            assert [left.group_id for left in stream.waiting] == [1]
            assert (worker.status().state, worker.status().groups) == ("draining", 0)

    run(scenario())


def test_seconds_go_to_generation_before_judging() -> None:
    async def scenario() -> dict[str, float]:
        clock = SimulatedClock()
        stream = MemoryStream([lease(0), lease(1)])

        async def answer(seed: int, request_id: str) -> EngineOutput:
            await clock.sleep_s(4.0 if request_id.startswith("0.") else 10.0)
            return output()

        async def score(request: ScoreRequest) -> list[Score]:
            await clock.sleep_s(9.0)
            return await reward_by_id(request)

        worker = make_worker(stream, CannedEngine(answer), score, clock=clock)
        async with running(worker):
            while clock.now_s() < 30.0:
                await clock.advance_s(0.25)
                await asyncio.sleep(0.001)
            assert sorted(stream.groups) == [0, 1]
            return worker.activity()

    seconds = run(scenario())
    assert seconds["generate"] == pytest.approx(10.0, abs=1.0)
    assert seconds["reward"] == pytest.approx(9.0, abs=1.0)
    assert sum(seconds.values()) == pytest.approx(30.0, abs=0.5)
