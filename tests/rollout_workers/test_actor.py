"""A rollout worker in a real Ray actor with a real engine, whose model ties its head to its embedding."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray

from rollout_workers.actor import RolloutClient, WorkerPlan, create_rollout_actor
from rollout_workers.contract import EngineDied
from system.core.model import ModelSettings
from system.core.processes import is_gone
from system.core.protocols import Lease, Score, ScoreRequest
from system.core.records import DropReason, Group
from system.core.seeds import request_seed
from system.core.weights.sender import Sender
from tests.rollout_workers.canned import MemoryStream, lease
from tests.rollout_workers.torch_side import connect, logprobs, probe_gap, rollout_settings, sync

pytestmark = pytest.mark.engine

GROUPS = 240
"""Enough that a fast machine is still generating when the weights change."""
START_S = 400.0
"""Two processes load vLLM one after the other; a busy machine takes minutes."""
DEADLINE_S = 120.0
PROBE = list(range(6, 70))
TEMPERATURE = 1.0


class RayStream:
    """The worker's end of a stream that is an actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    async def lease(self, worker: str, room: int) -> list[Lease]:
        return await self.actor.lease.remote(worker, room)

    async def submit(self, worker: str, payload: bytes) -> str:
        return await self.actor.submit.remote(worker, payload)

    async def give_up(self, worker: str, group_id: int, reason: DropReason, cause: str) -> None:
        await self.actor.give_up.remote(worker, group_id, reason, cause)


class StreamActor(MemoryStream):
    async def put(self, leases: list[Lease]) -> None:
        self.waiting.extend(leases)

    async def taken(self) -> dict[int, bytes]:
        return {group_id: group.to_bytes() for group_id, group in self.groups.items()}


class CountingScorer:
    """Reward: the number of tokens."""

    async def score(self, request: ScoreRequest) -> list[Score]:
        return [Score(item.id, float(item.completion_tokens)) for item in request.items]

    async def close(self) -> None: ...


@pytest.fixture(scope="module")
def stream() -> Iterator[Any]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray.remote(StreamActor).options(num_cpus=0).remote()
    ray.shutdown()


@pytest.fixture(scope="module")
def worker(stream: Any, tiny_folders: dict[str, Path], loop: asyncio.Runner) -> RolloutClient:
    plan = WorkerPlan(
        name="w0",
        model=ModelSettings(path=str(tiny_folders["tied_first"]), dtype="float32"),
        rollout=rollout_settings(temperature=TEMPERATURE, max_running_requests=16),
        run_name="run",
        run_seed=5,
        stream=partial(RayStream, stream),
        scorer=CountingScorer,
    )
    client = create_rollout_actor(plan, num_cpus=0)
    loop.run(client.start(START_S))
    return client


@pytest.fixture(scope="module")
def sender(worker: RolloutClient, loop: asyncio.Runner) -> Sender:
    made = Sender("gloo")
    loop.run(connect(made, worker))
    return made


async def groups_of(stream: Any, ids: set[int]) -> dict[int, Group]:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            taken = await stream.taken.remote()
            if ids <= taken.keys():
                return {group_id: Group.from_bytes(taken[group_id]) for group_id in ids}
            await asyncio.sleep(0.1)


def test_three_syncs_with_a_tied_head_arrive_exactly(
    worker: RolloutClient, sender: Sender, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    for version, name in ((1, "tied_second"), (2, "tied_first"), (3, "tied_second")):
        loop.run(sync(sender, worker, tiny_folders[name], version))
        assert loop.run(probe_gap(worker, tiny_folders[name], PROBE)) < 1e-4


def test_admitted_it_serves_through_a_sync_while_control_calls_stay_quick(
    worker: RolloutClient, stream: Any, sender: Sender, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    names = {3: "tied_second", 4: "tied_first"}

    async def serve() -> dict[int, Group]:
        running = asyncio.ensure_future(worker.run())
        await worker.admit(3)
        await stream.put.remote([lease(index, deadline_s=DEADLINE_S) for index in range(GROUPS)])
        await groups_of(stream, {0})
        assert (await worker.status()).groups > 0
        started_s = time.monotonic()
        await sync(sender, worker, tiny_folders[names[4]], 4)
        await worker.admit(4)
        assert time.monotonic() - started_s < 10
        assert not running.done()
        return await groups_of(stream, set(range(GROUPS)))

    groups = loop.run(serve())
    crossed = 0
    for group in groups.values():
        for row in group.rows:
            assert row.seed == request_seed(5, group.group_id, row.trajectory_id)
            assert row.reward == row.length
            versions = set(row.versions.tolist())
            assert versions <= {3, 4}
            crossed += len(versions) == 2
            if len(versions) == 1 and group.group_id % 8:
                continue
            for version in versions:
                under = row.versions == version
                tokens = [*row.prompt_tokens.tolist(), *row.completion_tokens.tolist()]
                expected = logprobs(tiny_folders[names[version]], tokens, TEMPERATURE)[len(row.prompt_tokens) - 1 :]
                assert np.abs(expected - row.rollout_logprobs)[under].max() < 1e-4
    assert crossed > 0
    status = loop.run(worker.status())
    assert status.submitted == {"ready": GROUPS}
    assert status.completion_tokens == sum(row.length for group in groups.values() for row in group.rows)
    seconds = loop.run(worker.activity())
    assert seconds["generate"] > 0
    assert seconds["sync"] > 0


def test_a_killed_worker_is_named_and_its_processes_are_gone_within_ten_seconds_although_they_are_stopped(
    worker: RolloutClient, loop: asyncio.Runner
) -> None:
    assert worker.place is not None
    pid = worker.place.pid
    children = psutil.Process(pid).children(recursive=True)
    family = [psutil.Process(pid), *children]
    assert len(family) >= 3
    for child in children:
        os.kill(child.pid, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="w0"):
        loop.run(worker.status())
    end_s = time.monotonic() + 10
    while not all(is_gone(process) for process in family):
        assert time.monotonic() < end_s
        time.sleep(0.05)
