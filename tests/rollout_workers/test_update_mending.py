"""An update of a real engine is cut anywhere, mended by sending everything again, and then exact; nothing runs between.

Engines of one process, of vLLM's own processes, and of two model-parallel ones; a tied Llama and a mixture of experts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout_workers.contract import EngineDied
from rollout_workers.engine import LocalEngine, RolloutEngine
from system.core.errors import SyncFailed
from system.core.model import ModelSettings
from system.core.weights.sender import Sender, manifest_of
from system.core.weights.wire import ChecksumMismatch, Endpoint, Manifest, TransferBroken, WeightsRejected
from tests.rollout_workers.torch_side import (
    WAIT_S,
    TorchSource,
    connect,
    probe_gaps,
    rollout_settings,
    send_some,
    sync,
)
from tests.tiny_models import save_tiny_llama, save_tiny_qwen3_moe

pytestmark = [pytest.mark.engine, pytest.mark.slow]

START_S = 500.0
BUCKET_BYTES = 20_000
PROBE = list(range(6, 70))
FAMILIES: dict[str, Callable[[Path, int], Path]] = {
    "tied llama": lambda folder, seed: save_tiny_llama(folder, tied=True, seed=seed),
    "qwen3 moe": lambda folder, seed: save_tiny_qwen3_moe(folder, tied=False, seed=seed),
}
ENGINES: dict[str, Callable[[ModelSettings], LocalEngine | RolloutEngine]] = {
    "local": lambda model: LocalEngine(model, rollout_settings(), name="w0", backend="gloo"),
    "processes": lambda model: RolloutEngine(model, rollout_settings(), name="w0"),
    "two processes": lambda model: RolloutEngine(model, rollout_settings(tensor_parallel=2), name="w0", threads="0|1"),
}


@dataclass
class Scene:
    """An engine that serves, and a sender; ``serve`` brings it to the next version."""

    engine: LocalEngine | RolloutEngine
    folders: list[Path]
    world: int
    sender: Sender
    version: int = 0

    @property
    def next_folder(self) -> Path:
        return self.folders[(self.version + 1) % 2]

    def manifest(self, source: TorchSource) -> Manifest:
        return manifest_of(source, self.version + 1, BUCKET_BYTES)

    async def connect(self) -> None:
        await connect(self.sender, self.engine, self.world)

    async def mend(self) -> None:
        """Everything again, in a new group; the engine then agrees with transformers, and answers what waited."""
        waiting = asyncio.ensure_future(self.engine.generate(PROBE[:4], 1, 8, f"waiting{self.version}"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await self.connect()
        await sync(self.sender, self.engine, self.next_folder, self.version + 1, BUCKET_BYTES)
        self.version += 1
        assert set((await waiting).versions) == {self.version}
        gaps = await probe_gaps(self.engine, self.folders[self.version % 2], PROBE)
        assert gaps.max() < 1e-4
        assert gaps.mean() < 1e-5


@pytest.fixture(
    scope="module",
    params=[
        ("tied llama", "local"),
        ("qwen3 moe", "local"),
        ("qwen3 moe", "processes"),
        ("tied llama", "two processes"),
    ],
    ids=lambda made: " in ".join(made),
)
def scene(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, loop: asyncio.Runner
) -> Iterator[Scene]:
    family, kind = request.param
    folder = tmp_path_factory.mktemp("mending")
    folders = [FAMILIES[family](folder / name, seed) for seed, name in enumerate(("first", "second"))]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # so that a test can break the receiver
        engine = ENGINES[kind](ModelSettings(path=str(folders[0]), dtype="float32"))
        loop.run(engine.start(START_S))
        made = Scene(engine, folders, 2 if kind == "two processes" else 1, Sender("gloo"))
        yield made
        made.sender.close()
        loop.run(engine.close())


def fail_at(bucket_index: int, worker: Any) -> None:
    """In vLLM's worker process: the receiver's load of one bucket fails, once."""
    receiver = worker.weight_transfer_engine
    load = receiver._load

    def failing(bucket: Any, flat: Any) -> None:
        if bucket.index == bucket_index:
            del receiver._load
            raise MemoryError("no room for the test's bucket")
        load(bucket, flat)

    receiver._load = failing


CUTS = ["first", "second", "middle", "last"]


def position(cut: str, manifest: Manifest) -> int:
    count = len(manifest.buckets())
    assert count > 8
    return {"first": 0, "second": 1, "middle": count // 2, "last": count - 1}[cut]


async def receive_and_fail(scene: Scene, manifest: Manifest, send: Callable[[], Any]) -> SyncFailed:
    await scene.connect()
    await scene.engine.begin_update(WAIT_S)
    sending = asyncio.ensure_future(asyncio.to_thread(send))
    with pytest.raises(SyncFailed) as raised:
        await scene.engine.receive(manifest, WAIT_S)
    await asyncio.wait({sending}, timeout=WAIT_S)
    sending.exception()
    assert scene.engine.state == "broken"
    return raised.value


@pytest.mark.parametrize("cut", CUTS)
def test_a_sender_that_leaves(scene: Scene, loop: asyncio.Runner, cut: str) -> None:
    async def cut_and_mend() -> None:
        source = TorchSource(scene.next_folder)
        manifest = scene.manifest(source)
        count = position(cut, manifest)
        failure = await receive_and_fail(scene, manifest, lambda: send_some(scene.sender, manifest, source, count))
        assert type(failure) is TransferBroken
        await scene.mend()

    loop.run(cut_and_mend())


@pytest.mark.parametrize("cut", CUTS)
def test_a_byte_that_changed_on_the_way(scene: Scene, loop: asyncio.Runner, cut: str) -> None:
    async def cut_and_mend() -> None:
        source = TorchSource(scene.next_folder)
        manifest = scene.manifest(source)
        at = position(cut, manifest)
        failure = await receive_and_fail(
            scene, manifest, lambda: send_some(scene.sender, manifest, source, at + 1, flipped=at)
        )
        assert type(failure) is ChecksumMismatch
        assert f"bucket {at} of version {manifest.version}" in str(failure)
        await scene.mend()

    loop.run(cut_and_mend())


@pytest.mark.parametrize("cut", CUTS)
def test_a_receiver_that_fails_by_itself(scene: Scene, loop: asyncio.Runner, cut: str) -> None:
    async def cut_and_mend() -> None:
        source = TorchSource(scene.next_folder)
        manifest = scene.manifest(source)
        at = position(cut, manifest)
        await scene.engine._call_workers(lambda worker: fail_at(at, worker))
        failure = await receive_and_fail(scene, manifest, lambda: scene.sender.send(manifest, source, WAIT_S))
        assert type(failure) is SyncFailed
        assert "MemoryError: no room for the test's bucket" in str(failure)
        await scene.mend()

    loop.run(cut_and_mend())


def test_a_weight_that_is_left_out(scene: Scene, loop: asyncio.Runner) -> None:
    async def cut_and_mend() -> None:
        source = TorchSource(scene.next_folder)
        del source.tensors["model.norm.weight"]
        manifest = scene.manifest(source)
        await scene.connect()
        await scene.engine.begin_update(WAIT_S)
        sending = asyncio.to_thread(scene.sender.send, manifest, source, WAIT_S)
        await asyncio.gather(scene.engine.receive(manifest, WAIT_S), sending)
        with pytest.raises(WeightsRejected, match=r"left out 1 parameters: model\.norm\.weight"):
            await scene.engine.finish_update(manifest.version, WAIT_S)
        assert scene.engine.state == "broken"
        await scene.mend()

    loop.run(cut_and_mend())


@pytest.mark.parametrize("step", ["begin", "receive"])
def test_a_caller_that_gives_up(scene: Scene, loop: asyncio.Runner, step: str) -> None:
    async def cut_and_mend() -> None:
        source = TorchSource(scene.next_folder)
        manifest = scene.manifest(source)
        await scene.connect()
        call = asyncio.ensure_future(scene.engine.begin_update(WAIT_S))
        if step == "receive":
            await call
            call = asyncio.ensure_future(scene.engine.receive(manifest, WAIT_S))
            await asyncio.to_thread(send_some, scene.sender, manifest, source, 3)
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises((asyncio.CancelledError, SyncFailed)):
            await call
        assert scene.engine.state == "broken"
        await scene.mend()

    loop.run(cut_and_mend())


def test_a_name_that_the_model_does_not_have(scene: Scene, loop: asyncio.Runner) -> None:
    async def cut_and_mend() -> None:
        source = TorchSource(scene.next_folder)
        source.tensors["model.layers.7.self_attn.o_proj.weight"] = source.tensors[
            "model.layers.0.self_attn.o_proj.weight"
        ]
        manifest = scene.manifest(source)
        failure = await receive_and_fail(scene, manifest, lambda: scene.sender.send(manifest, source, WAIT_S))
        assert type(failure) is WeightsRejected
        assert "model.layers.7.self_attn.o_proj.weight" in str(failure)
        await scene.mend()

    loop.run(cut_and_mend())


def test_at_last_a_process_that_is_killed_while_it_receives_is_a_dead_engine_at_once(
    scene: Scene, loop: asyncio.Runner
) -> None:
    if isinstance(scene.engine, LocalEngine):
        pytest.skip("it has no process of its own")
    workers = [child for child in psutil.Process().children(recursive=True) if "VLLM::Worker" in child.name()]
    assert len(workers) == scene.world

    async def kill() -> None:
        manifest = scene.manifest(TorchSource(scene.next_folder))
        await scene.connect()
        await scene.engine.begin_update(WAIT_S)
        receiving = asyncio.ensure_future(scene.engine.receive(manifest, WAIT_S))
        await asyncio.sleep(0.5)
        started_s = time.monotonic()
        workers[-1].kill()
        with pytest.raises(EngineDied, match="w0: the engine died"):
            await receiving
        assert time.monotonic() - started_s < 10
        joining = scene.engine.join_transfer(Endpoint("127.0.0.1", 1), 1, 2, WAIT_S)
        for call in (joining, scene.engine.begin_update(WAIT_S), scene.engine.check()):
            with pytest.raises(EngineDied, match="w0"):
                await call

    loop.run(kill())
