"""The pool: rows spread over ranks, one rank in this process, real Ray ranks that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.handles import with_patient_threads
from learner.pool import LearnerPool, share_rows
from learner.rank import LearnerPlan
from learner.reference_actor import ReferenceClient, start_reference_actors
from learner.settings import LearnerSettings, ReferenceSettings
from system.core.errors import ConfigError, LearnerLost
from system.core.model import ModelSettings
from system.core.protocols import TokenRow
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


def test_actors_wait_patiently_unless_their_options_say_otherwise():
    given = {"num_cpus": 0, "runtime_env": {"env_vars": {"OMP_WAIT_POLICY": "ACTIVE", "A": "1"}, "pip": []}}
    assert with_patient_threads(given) == given
    assert with_patient_threads({})["runtime_env"]["env_vars"] == {"OMP_WAIT_POLICY": "PASSIVE"}


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
        rank = pool._ranks[0]._rank
        for name, tensor in received.items():
            assert torch.equal(tensor, rank.weight_source().gather([name])[0])
        assert set(received) == {info.name for info in manifest.parameters}
        await pool.close_transfer()
        await pool.close()

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    import ray

    repository = str(Path(__file__).parents[2])
    environment = {"env_vars": {"PYTHONPATH": repository, "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.mark.engine
@pytest.mark.slow
def test_two_actors_learn_as_one_rank_and_a_killed_one_is_named_at_once(ray_here, tiny_llama):
    async def scenario() -> None:
        alone = LearnerPool(plan(tiny_llama, epsilon=1e-4), local=True)
        await alone.start()
        pool = LearnerPool(plan(tiny_llama, workers=2, epsilon=1e-4), actor_options=[{"num_cpus": 0}] * 2)
        await pool.start()
        for step in range(2):
            one, two = await alone.step(make_groups(), step, step), await pool.step(make_groups(), step, step)
            assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-3)
            assert two.advantages == one.advantages
        probe = list(range(10, 20))
        np.testing.assert_allclose(await pool.probe(probe), await alone.probe(probe), atol=1e-4)
        await alone.close()

        stepping = asyncio.create_task(pool.step(make_groups(60, 8), 2, 2))
        status = await pool._ranks[1]._actor.status.remote()
        os.kill(status["pid"], signal.SIGKILL)
        killed_s = time.monotonic()
        with pytest.raises(LearnerLost, match="learner rank 1"):
            await stepping
        assert time.monotonic() - killed_s < 30
        with pytest.raises(LearnerLost, match="start it again"):
            await pool.probe(probe)
        await pool.restart(None)
        assert (await pool.step(make_groups(), 0, 0)).updates == 1
        await pool.close()

    asyncio.run(scenario())


@pytest.mark.engine
@pytest.mark.slow
def test_a_config_error_in_an_actor_arrives_as_one_and_reference_actors_answer(ray_here, tiny_llama, tmp_path):
    async def scenario() -> None:
        pool = LearnerPool(plan(tmp_path / "nowhere"), actor_options=[{"num_cpus": 0}])
        with pytest.raises(ConfigError, match=r"model\.path"):
            await pool.start()
        await pool.close()
        model = ModelSettings(path=str(tiny_llama), dtype="float32")
        (actor,) = await start_reference_actors(model, ReferenceSettings(threads=1), 1.0, [{"num_cpus": 0}])
        row = TokenRow(np.array([7, 8]), np.array([9, 10, 11]))
        (answer,) = await ReferenceClient([actor], 30.0).logprobs([row])
        assert answer.shape == (3,)

    asyncio.run(scenario())
