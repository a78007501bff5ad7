"""Two learner ranks in Ray under ZeRO 3: broken transfers, calls at the same time, a killed rank, a hung one."""

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
import psutil
import pytest
import torch
from safetensors.torch import load_file

from learner.pool import LearnerPool
from learner.rank import LearnerPlan
from learner.reference_actor import ReferenceClient, start_reference_actors
from learner.settings import LearnerSettings, ReferenceSettings
from system.core.errors import ConfigError, LearnerLost
from system.core.model import ModelSettings
from system.core.processes import is_gone
from system.core.protocols import TokenRow
from system.core.weights.gloo import GlooGroup
from system.core.weights.wire import Endpoint, Manifest, TransferBroken, new_buffer, unpack, verify
from tests.learner.conftest import make_groups

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WAIT_S = 60.0
PROBE = list(range(10, 20))
OPTIONS: list[dict[str, Any]] = [{"num_cpus": 0}] * 2


def plan(folder: Path, **learner: Any) -> LearnerPlan:
    """Adam's epsilon is large enough that it does not blow up the rounding of gradients near zero."""
    settings = LearnerSettings(
        **{"learning_rate": 1e-3, "epsilon": 1e-2, "threads": 1, "schedule": "cosine", "warmup_steps": 2, **learner}
    )
    return LearnerPlan(ModelSettings(path=str(folder), dtype="float32"), settings, {"name": "grpo"}, total_updates=20)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    import ray

    repository = str(Path(__file__).parents[2])
    environment = {"env_vars": {"PYTHONPATH": repository, "OMP_NUM_THREADS": "1"}}
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=environment)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def pool(ray_here: None, tiny_llama: Path, runner: asyncio.Runner) -> Iterator[LearnerPool]:
    made = LearnerPool(plan(tiny_llama, workers=2, zero=3), actor_options=OPTIONS)
    runner.run(made.start())
    yield made
    runner.run(made.close())


class Listener(threading.Thread):
    """A receiver that takes the first ``buckets`` buckets (default: all) and leaves."""

    def __init__(self, endpoint: Endpoint, manifest: Manifest, buckets: int | None = None) -> None:
        super().__init__()
        self.weights: dict[str, torch.Tensor] = {}
        self._arguments = endpoint, manifest, buckets
        self.start()

    def run(self) -> None:
        endpoint, manifest, buckets = self._arguments
        group = GlooGroup()
        group.join(endpoint, 1, 2, WAIT_S)
        for bucket in manifest.buckets()[:buckets]:
            flat = new_buffer(bucket)
            group.broadcast(flat, WAIT_S)
            verify(bucket, manifest.version, flat)
            self.weights.update(zip(bucket.names, unpack(bucket, flat), strict=True))
        group.close()


async def connected(pool: LearnerPool, manifest: Manifest, buckets: int | None = None) -> Listener:
    listener = Listener(await pool.open_transfer(WAIT_S), manifest, buckets)
    await pool.connect_transfer(2, WAIT_S)
    return listener


async def pids_of(pool: LearnerPool) -> list[int]:
    return [(await rank._actor.status.remote())["pid"] for rank in pool._ranks.ranks]


def test_two_actors_learn_as_one_rank(pool: LearnerPool, tiny_llama: Path, runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        alone = LearnerPool(plan(tiny_llama), local=True)
        await alone.start()
        for step in range(2):
            groups = make_groups(3, seed=step)
            one, two = await alone.step(groups, step, step), await pool.step(groups, step, step)
            assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
            assert two.advantages == one.advantages
        np.testing.assert_allclose(await pool.probe(PROBE), await alone.probe(PROBE), atol=1e-5)
        await alone.close()

    runner.run(scenario())


@pytest.mark.parametrize("taken", [0, 1, 5, 10])
def test_a_receiver_that_leaves_at_any_bucket_leaves_the_ranks_in_step(
    pool: LearnerPool, runner: asyncio.Runner, tmp_path: Path, taken: int
) -> None:
    async def scenario() -> None:
        manifest = await pool.weight_manifest(7, bucket_bytes=20_000)
        assert len(manifest.buckets()) > taken + 3
        await connected(pool, manifest, taken)
        started_s = time.monotonic()
        with pytest.raises(TransferBroken):
            await pool.send_weights(manifest, WAIT_S)
        assert time.monotonic() - started_s < 10.0
        listener = await connected(pool, manifest)
        report = await pool.send_weights(manifest, WAIT_S)
        listener.join(WAIT_S)
        assert report.bytes == manifest.total_bytes
        await pool.save_hf(tmp_path)
        on_disk = load_file(tmp_path / "model.safetensors")
        assert listener.weights.keys() == on_disk.keys()
        assert all(torch.equal(listener.weights[name], on_disk[name]) for name in on_disk)

    runner.run(scenario())


def test_a_transfer_that_nobody_joins_costs_its_deadline_and_not_the_pool(
    pool: LearnerPool, runner: asyncio.Runner
) -> None:
    async def scenario() -> None:
        assert (await pool.open_transfer(WAIT_S)).address == "127.0.0.1"
        with pytest.raises(TransferBroken, match=r"not all joined within 1 s"):
            await pool.connect_transfer(2, 1.0)
        with pytest.raises(TransferBroken):
            await pool.send_weights(await pool.weight_manifest(1), WAIT_S)
        await pool.probe(PROBE)

    runner.run(scenario())


def test_calls_made_at_the_same_time_do_not_cross(pool: LearnerPool, runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        manifest = await pool.weight_manifest(8, bucket_bytes=20_000)
        listener = await connected(pool, manifest)
        calls = [pool.probe(PROBE), pool.send_weights(manifest, WAIT_S), pool.probe(PROBE)]
        calls += [pool.step(make_groups(3), 2, 2), pool.probe(PROBE), pool.close_transfer()]
        before, _, between, report, after, _ = await asyncio.wait_for(asyncio.gather(*calls), WAIT_S)
        listener.join(WAIT_S)
        assert before == between != after
        assert report.updates == 1

    runner.run(scenario())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in a checkpoint's files, weights and moments, by file and place."""
    found: dict[str, torch.Tensor] = {}

    def walk(place: str, entry: Any) -> None:
        if isinstance(entry, torch.Tensor):
            found[place] = entry
        elif isinstance(entry, dict):
            for key, value in entry.items():
                walk(f"{place}/{key}", value)
        elif isinstance(entry, list | tuple):
            for index, value in enumerate(entry):
                walk(f"{place}/{index}", value)

    for file in sorted((folder / "engine").iterdir()):
        walk(file.name, torch.load(file, weights_only=False, map_location="cpu"))
    return found


def test_a_rank_killed_in_a_step_is_named_and_a_new_pool_goes_on_bit_by_bit(
    pool: LearnerPool, runner: asyncio.Runner, tmp_path: Path
) -> None:
    async def scenario() -> None:
        await pool.save(tmp_path / "before")
        expected = await pool.step(make_groups(3, seed=3), 3, 3)
        await pool.save(tmp_path / "expected")
        stepping = asyncio.create_task(pool.step(make_groups(60, 8), 4, 4))
        pids = await pids_of(pool)
        os.kill(pids[1], signal.SIGKILL)
        killed_s = time.monotonic()
        with pytest.raises(
            LearnerLost, match=r"learner rank 1: its process is gone: .* because memory ran out, dmesg on"
        ):
            await stepping
        assert time.monotonic() - killed_s < 15.0
        with pytest.raises(LearnerLost, match=r"failed before: .*learner rank 1.*; start it again"):
            await pool.probe(PROBE)
        await pool.restart(tmp_path / "before")
        resumed = await pool.step(make_groups(3, seed=3), 3, 3)
        await pool.save(tmp_path / "resumed")
        for fact in ("loss", "grad_norm", "learning_rate", "updates"):
            assert getattr(resumed, fact) == getattr(expected, fact)

    runner.run(scenario())
    wanted, got = tensors_of(tmp_path / "expected"), tensors_of(tmp_path / "resumed")
    assert wanted.keys() == got.keys()
    assert any("exp_avg" in place for place in wanted)
    assert all(torch.equal(wanted[place], got[place]) for place in wanted)


def test_ranks_that_hang_in_a_collective_are_named_and_ended_at_once(pool: LearnerPool, runner: asyncio.Runner) -> None:
    async def scenario() -> None:
        pids = await pids_of(pool)
        processes = [psutil.Process(pid) for pid in pids]
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(LearnerLost, match="learner rank 0, learner rank 1: probe: no answer within 2 s"):
            await pool._ranks.all("probe", 2.0, PROBE)
        closing_s = time.monotonic()
        await pool.close()
        while not all(is_gone(process) for process in processes):
            assert time.monotonic() - closing_s < 10.0
            await asyncio.sleep(0.05)

    runner.run(scenario())


def test_a_config_error_in_an_actor_arrives_as_one_and_reference_actors_answer(
    ray_here: None, tiny_llama: Path, tmp_path: Path, runner: asyncio.Runner
) -> None:
    async def scenario() -> None:
        pool = LearnerPool(plan(tmp_path / "nowhere"), actor_options=OPTIONS[:1])
        with pytest.raises(ConfigError, match=r"model\.path"):
            await pool.start()
        await pool.close()
        model = ModelSettings(path=str(tiny_llama), dtype="float32")
        (actor,) = await start_reference_actors(model, ReferenceSettings(threads=1), 1.0, OPTIONS[:1])
        row = TokenRow(np.array([7, 8]), np.array([9, 10, 11]))
        (answer,) = await ReferenceClient([actor], 30.0).logprobs([row])
        assert answer.shape == (3,)

    runner.run(scenario())
