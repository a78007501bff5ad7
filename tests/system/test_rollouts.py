"""The rollout workers' keeper: who is lost is discarded, has its groups issued again, and is built anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from system.core.errors import ConfigError, InfrastructureError, WorkerLost
from system.rollouts import RolloutWorkers


class Worker:
    """A client whose process is a future that the test ends."""

    def __init__(self, name: str, start_failure: Exception | None = None) -> None:
        self.name = name
        self.start_failure = start_failure
        self.seconds = {"generate": 0.0}
        self.closed = self.discarded = False
        self.ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, deadline_s: float) -> None:
        await asyncio.sleep(0)
        if self.start_failure is not None:
            raise self.start_failure

    async def run(self) -> None:
        await self.ending

    async def activity(self) -> dict[str, float]:
        return dict(self.seconds)

    async def close(self) -> None:
        self.closed = True

    async def discard(self) -> None:
        self.discarded = True


class Stream:
    def __init__(self) -> None:
        self.failures: list[tuple[str, str, int, bool]] = []
        self.recoveries: list[int] = []

    async def report_failure(self, worker: str, cause: str, workers_left: int, suspect: bool) -> None:
        self.failures.append((worker, cause, workers_left, suspect))

    async def report_recovery(self, workers_left: int) -> None:
        self.recoveries.append(workers_left)


class Scene:
    def __init__(self, names: tuple[str, ...] = ("w0", "w1"), restarts: int = 1, **start_failures: list[Any]) -> None:
        self.built: list[Worker] = []
        self.stream = Stream()
        self.start_failures = start_failures
        self.workers = RolloutWorkers(names, self.build, self.stream, restarts=restarts)

    def build(self, name: str) -> Worker:
        planned = self.start_failures.get(name)
        worker = Worker(name, planned.pop(0) if planned else None)
        self.built.append(worker)
        return worker

    async def begin(self) -> None:
        await self.workers.start()
        for receiver in self.workers.receivers():
            self.workers.admitted(receiver)

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0.001)


def played(story: Callable[[Scene], Awaitable[None]], **options: Any) -> Scene:
    scene: list[Scene] = []

    async def play() -> None:
        scene.append(Scene(**options))
        await scene[0].begin()
        await story(scene[0])
        await scene[0].workers.close()

    asyncio.run(play())
    return scene[0]


def test_a_worker_whose_engine_died_is_discarded_and_rebuilt_and_only_a_sync_admits_it() -> None:
    async def story(scene: Scene) -> None:
        first = scene.built[0]
        first.ending.set_exception(InfrastructureError("rollout-0: the engine died"))
        await scene.settle()
        assert first.discarded
        assert scene.stream.failures == [("w0", "rollout-0: the engine died", 2, True)]
        assert scene.stream.recoveries == [2]
        assert [receiver.name for receiver in scene.workers.late()] == ["w0"]
        (late,) = scene.workers.late()
        assert late is not first
        scene.workers.admitted(late)
        assert scene.workers.late() == []
        assert {receiver.name for receiver in scene.workers.receivers()} == {"w0", "w1"}

    played(story)


def test_a_sync_that_gives_a_worker_up_does_not_make_its_groups_suspects() -> None:
    async def story(scene: Scene) -> None:
        assert scene.workers.lose(scene.built[1], "no answer")
        await scene.settle()
        assert scene.stream.failures == [("w1", "no answer", 2, False)]

    played(story)


def test_what_is_said_about_a_worker_that_was_replaced_does_not_touch_the_new_one() -> None:
    async def story(scene: Scene) -> None:
        old = scene.built[0]
        scene.workers.lose(old, "killed")
        await scene.settle()
        assert scene.workers.lose(old, "killed, says somebody else")
        scene.workers.admitted(old)
        await scene.settle()
        assert len(scene.built) == 3
        assert [receiver.name for receiver in scene.workers.late()] == ["w0"]

    played(story)


def test_a_worker_that_keeps_dying_is_given_up_and_the_run_goes_on_until_nobody_is_left() -> None:
    async def story(scene: Scene) -> None:
        assert scene.workers.lose(scene.built[0], "first")
        await scene.settle()
        assert not scene.workers.lose(scene.built[-1], "second")
        await scene.settle()
        await scene.workers.check()
        assert scene.stream.failures[-1] == ("w0", "second", 1, False)
        assert scene.workers.lose(scene.built[1], "third")
        await scene.settle()
        await scene.workers.check()
        assert not scene.workers.lose(scene.built[-1], "fourth")
        await scene.settle()
        with pytest.raises(WorkerLost, match=r"the first cause was w0: first"):
            await scene.workers.check()

    played(story)


def test_a_rebuild_that_fails_uses_up_the_budget_too() -> None:
    async def story(scene: Scene) -> None:
        scene.workers.lose(scene.built[0], "killed")
        await scene.settle()
        assert [cause for _, cause, _, _ in scene.stream.failures] == ["killed", "no GPU left"]
        assert scene.workers.fleet.producers() == ["w1"]

    played(story, w0=[None, InfrastructureError("no GPU left")])


def test_what_rebuilding_would_not_mend_ends_the_run_as_it_was_raised() -> None:
    async def story(scene: Scene) -> None:
        scene.built[0].ending.set_exception(ConfigError("rewards.answer: no such file"))
        await scene.settle()
        with pytest.raises(ConfigError, match=r"rewards\.answer: no such file"):
            await scene.workers.check()
        assert len(scene.built) == 2

    played(story)


def test_the_first_failure_at_the_start_is_raised() -> None:
    with pytest.raises(ConfigError, match="no such model"):
        played(lambda scene: scene.settle(), w1=[ConfigError("no such model")])


def test_seconds_only_grow_also_when_a_worker_is_lost() -> None:
    async def story(scene: Scene) -> None:
        for worker in scene.built:
            worker.seconds["generate"] = 10.0
        assert await scene.workers.activity() == {"generate": 10.0}
        scene.workers.lose(scene.built[0], "killed")
        scene.built[1].seconds["generate"] = 12.0
        assert await scene.workers.activity() == {"generate": 12.0}
        await scene.settle()
        scene.workers.admitted(scene.built[2])
        scene.built[2].seconds["generate"] = 4.0
        assert await scene.workers.activity() == {"generate": 14.0}

    played(story)


def test_closing_ends_everyone() -> None:
    scene = played(lambda scene: scene.settle())
    assert all(worker.closed for worker in scene.built)
