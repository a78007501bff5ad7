"""A worker is discarded whatever its processes do, on the driver's node and on another."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from rollout_workers.actor import RolloutActor, RolloutClient, WorkerPlan, create_rollout_actor
from rollout_workers.contract import EngineDied
from system.core.model import ModelSettings
from system.core.processes import is_gone
from tests.rollout_workers.canned import MemoryStream
from tests.rollout_workers.torch_side import rollout_settings

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DEADLINE_S = 400.0
GONE_S = 10.0


@pytest.fixture(scope="module")
def other_node() -> Iterator[str]:
    """A cluster of two nodes on this machine; the id of the one where the driver is not."""
    head = {"num_cpus": 1, "include_dashboard": False, "resources": {"driver": 1}}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(num_cpus=1, resources={"other": 1})
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield other.node_id
    ray.shutdown()
    cluster.shutdown()


def plan(folder: Path) -> WorkerPlan:
    return WorkerPlan(
        name="w0",
        model=ModelSettings(path=str(folder), dtype="float32"),
        rollout=rollout_settings(),
        run_name="run",
        run_seed=5,
        stream=MemoryStream,
    )


def family_of(worker: RolloutClient) -> list[psutil.Process]:
    assert worker.place is not None
    process = psutil.Process(worker.place.pid)
    return [process, *process.children(recursive=True)]


def test_a_worker_whose_processes_are_all_stopped_is_gone_at_once(
    other_node: str, tiny_folders: dict[str, Path], loop: asyncio.Runner
) -> None:
    worker = create_rollout_actor(plan(tiny_folders["first"]), num_cpus=0, resources={"driver": 0.1})
    loop.run(worker.start(DEADLINE_S))
    assert worker.place is not None
    assert worker.place.node_id != other_node
    family = family_of(worker)
    assert len(family) >= 3
    for process in reversed(family):
        os.kill(process.pid, signal.SIGSTOP)
    for _ in range(2):
        loop.run(worker.discard(GONE_S))
        assert all(is_gone(process) for process in family)
    with pytest.raises(EngineDied, match="w0"):
        loop.run(worker.status())


class IdleActor(RolloutActor):
    """A worker whose engine never starts."""

    async def start(self) -> None: ...


def test_a_stopped_worker_on_another_node_is_gone_too(
    other_node: str, tiny_folders: dict[str, Path], loop: asyncio.Runner
) -> None:
    actor = ray.remote(IdleActor).options(num_cpus=0, resources={"other": 0.1}).remote(plan(tiny_folders["first"]))
    worker = RolloutClient("w1", actor)
    loop.run(worker.start(DEADLINE_S))
    assert worker.place is not None
    assert worker.place.node_id == other_node
    process = psutil.Process(worker.place.pid)
    os.kill(process.pid, signal.SIGSTOP)
    loop.run(worker.discard(GONE_S))
    assert is_gone(process)
    with pytest.raises(EngineDied, match="w1"):
        loop.run(worker.status())


def test_a_worker_that_never_started_is_discarded_too(
    other_node: str, tiny_folders: dict[str, Path], loop: asyncio.Runner
) -> None:
    worker = create_rollout_actor(plan(tiny_folders["first"]), num_cpus=0, resources={"driver": 0.1})
    loop.run(worker.discard(GONE_S))
    with pytest.raises(EngineDied, match="w0"):
        loop.run(worker.status())
