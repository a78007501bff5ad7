"""The pool: rows spread over ranks, and one rank in this process. Several ranks in Ray: test_pool_actors."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.actor import LearnerActor
from learner.pool import LearnerPool, share_rows
from learner.rank import LearnerPlan
from learner.settings import LearnerSettings
from system.core.errors import ConfigError, LearnerLost
from system.core.model import ModelSettings
from system.core.records import Group
from system.core.weights.inline import InlineGroup
from system.core.weights.wire import new_buffer, unpack, verify
from tests.learner.conftest import make_groups


def plan(folder: Path, **learner: Any) -> LearnerPlan:
    settings = LearnerSettings(**{"learning_rate": 1e-3, "threads": 1, **learner})
    return LearnerPlan(ModelSettings(path=str(folder), dtype="float32"), settings, {"name": "grpo"})


def row_keys(groups: list[Group]) -> list[tuple[int, int]]:
    return sorted((row.group_id, row.trajectory_id) for group in groups for row in group.rows)


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
def test_every_row_goes_to_exactly_one_rank(count, size, ranks, minibatches):
    groups = make_groups(count, size)
    shares = share_rows(groups, ranks, minibatches)
    assert len(shares) == ranks
    assert row_keys([group for share in shares for group in share]) == row_keys(groups)


def test_no_groups_leave_every_rank_without_work():
    assert share_rows([], 3, 2) == [[], [], []]


def test_several_ranks_do_not_fit_one_process(tiny_llama):
    with pytest.raises(ConfigError, match=r"learner\.workers: 2"):
        LearnerPool(plan(tiny_llama, workers=2), local=True)


def test_the_address_is_loopback_as_long_as_the_cluster_is_one_machine(monkeypatch):
    import ray

    def address_among(*machines: tuple[str, bool]) -> str:
        nodes = [{"NodeManagerAddress": address, "Alive": alive} for address, alive in machines]
        monkeypatch.setattr(ray, "nodes", lambda: nodes)
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
        return asyncio.run(LearnerActor(plan(Path("unused")), 0, 1).node_address())

    assert address_among(("10.0.0.1", True)) == "127.0.0.1"
    assert address_among(("10.0.0.1", True), ("10.0.0.1", True), ("10.0.0.2", False)) == "127.0.0.1"
    assert address_among(("10.0.0.1", True), ("10.0.0.2", True)) == "10.0.0.1"


@pytest.mark.engine
def test_a_local_pool_learns_saves_and_goes_on(tiny_llama, tmp_path):
    async def scenario() -> None:
        pool = LearnerPool(plan(tiny_llama), local=True)
        with pytest.raises(LearnerLost, match="not started"):
            await pool.probe([7, 8, 9])
        await pool.start()
        before = await pool.probe([7, 8, 9])
        report = await pool.step(make_groups(), 0, 0)
        assert report.updates == 1
        after = await pool.probe([7, 8, 9])
        assert after != before
        await pool.save(tmp_path)
        await pool.restart(tmp_path)
        assert await pool.probe([7, 8, 9]) == after
        await pool.close()

    asyncio.run(scenario())


@pytest.mark.engine
def test_a_local_pool_sends_its_weights_to_receivers_in_this_process(tied_llama):
    received: dict[str, torch.Tensor] = {}

    async def scenario() -> None:
        pool = LearnerPool(plan(tied_llama), local=True)
        await pool.start()
        await pool.step(make_groups(), 0, 0)
        manifest = await pool.weight_manifest(1, bucket_bytes=50_000)
        endpoint = await pool.open_transfer(10.0, "inline")

        def receive() -> None:
            group = InlineGroup()
            group.join(endpoint, 1, 2, 10.0)
            for bucket in manifest.buckets():
                flat = new_buffer(bucket)
                group.broadcast(flat, 10.0)
                verify(bucket, 1, flat)
                received.update(zip(bucket.names, (part.clone() for part in unpack(bucket, flat)), strict=True))

        receiver = threading.Thread(target=receive)
        receiver.start()
        await pool.connect_transfer(2, 10.0)
        report = await pool.send_weights(manifest, 10.0)
        receiver.join(10.0)
        assert report.bytes == manifest.total_bytes
        rank = pool._ranks.ranks[0]._rank
        for name, tensor in received.items():
            assert torch.equal(tensor, rank.weight_source().gather([name])[0])
        assert set(received) == {info.name for info in manifest.parameters}
        await pool.close_transfer()
        await pool.close()

    asyncio.run(scenario())
