"""The engine inside this process: the same exactness, syncs without a wire, and what an engine refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollout_workers.contract import EngineDied, RequestRefused
from rollout_workers.engine import LocalEngine, check_backend, engine_arguments
from rollout_workers.environment import prepare_environment
from system.core.errors import ConfigError
from system.core.model import ModelSettings
from system.core.weights.sender import Sender, manifest_of
from system.core.weights.wire import Manifest, WeightsRejected
from tests.rollout_workers.torch_side import (
    WAIT_S,
    TorchSource,
    connect,
    logprobs,
    probe_gap,
    rollout_settings,
    sync,
)

pytestmark = pytest.mark.engine

PROMPT = [10, 20, 30, 40]


@pytest.fixture(scope="module")
def engine(tiny_folders: dict[str, Path], loop: asyncio.Runner) -> Iterator[LocalEngine]:
    model = ModelSettings(path=str(tiny_folders["tied_first"]), dtype="float32")
    started = LocalEngine(model, rollout_settings(kv_cache="stale"), name="local")
    loop.run(started.start(120))
    yield started
    loop.run(started.close())


@pytest.fixture(scope="module")
def sender(engine: LocalEngine, loop: asyncio.Runner) -> Sender:
    made = Sender("inline")
    loop.run(connect(made, engine))
    return made


def test_sampled_logprobs_are_those_of_transformers_at_temperature_one(
    engine: LocalEngine, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    async def sample() -> list[float]:
        outputs = await asyncio.gather(*(engine.generate(PROMPT, seed, 48, f"r{seed}") for seed in range(8)))
        differences = []
        for output in outputs:
            expected = logprobs(tiny_folders["tied_first"], PROMPT + output.tokens)[len(PROMPT) - 1 :]
            differences.extend(np.abs(expected - np.asarray(output.logprobs)))
        return differences

    assert np.mean(loop.run(sample())) < 1e-5


def test_three_syncs_with_a_tied_head_arrive_exactly_and_no_prefix_outlives_its_version(
    engine: LocalEngine, sender: Sender, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    prompt = list(range(6, 262)) * 1
    loop.run(engine.generate(prompt, 1, 4, "warm"))
    for version, name in ((1, "tied_second"), (2, "tied_first"), (3, "tied_second")):
        loop.run(sync(sender, engine, tiny_folders[name], version))
        assert loop.run(probe_gap(engine, tiny_folders[name], prompt[:64])) < 1e-4
        output = loop.run(engine.generate(prompt, version, 16, f"repeat{version}"))
        expected = logprobs(tiny_folders[name], prompt + output.tokens)[len(prompt) - 1 :]
        assert np.abs(expected - np.asarray(output.logprobs)).max() < 1e-4
        assert set(output.versions) == {version}


def test_requests_that_come_during_an_update_wait_for_it(
    engine: LocalEngine, sender: Sender, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    async def during() -> set[int]:
        await engine.begin_update(WAIT_S)
        waiting = asyncio.ensure_future(engine.generate(PROMPT, 1, 8, "waiting"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        assert engine.metrics().state == "updating"
        source = TorchSource(tiny_folders["tied_first"])
        manifest = manifest_of(source, 4)
        await asyncio.gather(engine.receive(manifest, WAIT_S), asyncio.to_thread(sender.send, manifest, source, WAIT_S))
        await engine.finish_update(4, WAIT_S)
        return set((await waiting).versions)

    assert loop.run(during()) == {4}


def test_an_update_that_was_cut_off_before_it_was_received_can_begin_again(
    engine: LocalEngine, sender: Sender, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    loop.run(engine.begin_update(WAIT_S))
    with pytest.raises(WeightsRejected, match="left out"):
        loop.run(engine.finish_update(5, WAIT_S))
    assert engine.state == "broken"
    loop.run(sync(sender, engine, tiny_folders["tied_second"], 5))
    assert loop.run(probe_gap(engine, tiny_folders["tied_second"], PROMPT)) < 1e-4


def test_an_id_outside_the_vocabulary_is_refused(engine: LocalEngine, loop: asyncio.Runner) -> None:
    with pytest.raises(RequestRefused, match="local: request odd"):
        loop.run(engine.generate([5000], 1, 8, "odd"))


def test_a_name_that_the_model_does_not_have_is_rejected_by_name(
    engine: LocalEngine, sender: Sender, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    source = TorchSource(tiny_folders["tied_first"])
    source.tensors["model.layers.7.mlp.up_proj.weight"] = source.tensors["model.layers.0.mlp.up_proj.weight"]
    manifest = Manifest(6, tuple(source.parameters()))

    async def receive() -> None:
        await engine.begin_update(WAIT_S)
        await asyncio.gather(engine.receive(manifest, WAIT_S), asyncio.to_thread(sender.send, manifest, source, WAIT_S))

    with pytest.raises(WeightsRejected, match=r"layers\.7"):
        loop.run(receive())
    assert engine.state == "broken"


def test_a_closed_engine_fails_what_is_in_it(engine: LocalEngine, loop: asyncio.Runner) -> None:
    async def close() -> None:
        waiting = asyncio.ensure_future(engine.generate(PROMPT, 1, 8, "too late"))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineDied):
            await waiting

    loop.run(close())
    assert engine.state == "closed"


def test_more_prompt_tokens_than_a_pass_holds_wait_whole_for_the_next(
    tiny_folders: dict[str, Path], loop: asyncio.Runner
) -> None:
    """vLLM's engine dies on CPU when it prefills a seeded request in pieces, so it must not."""
    model = ModelSettings(path=str(tiny_folders["tied_first"]), dtype="float32")
    limits = {"max_model_len": 64, "max_num_batched_tokens": 64}
    small = LocalEngine(model, rollout_settings(engine=limits), name="small")
    loop.run(small.start(120))

    async def crowd() -> list[int]:
        asked = (small.generate([10 + seed] * 40, seed, 4, f"c{seed}") for seed in range(6))
        return [len(output.tokens) for output in await asyncio.gather(*asked)]

    try:
        assert all(1 <= length <= 4 for length in loop.run(crowd()))
    finally:
        loop.run(small.close())


def test_an_engine_argument_that_vllm_lacks_names_the_nearest(tiny_folders: dict[str, Path]) -> None:
    model = ModelSettings(path=str(tiny_folders["first"]), dtype="float32")
    with pytest.raises(ConfigError, match=r"rollout\.engine\.max_model_length: .* 'max_model_len'"):
        engine_arguments(model, rollout_settings(engine={"max_model_length": 100}), "gloo")


def test_every_vllm_process_will_know_our_backends() -> None:
    check_backend("gloo")
    check_backend("inline")


def test_a_plugin_list_that_hides_the_weight_transfer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "something_else")
    with pytest.raises(ConfigError, match="triptych_weight_transfer"):
        prepare_environment(None)
    monkeypatch.setenv("VLLM_PLUGINS", "something_else,triptych_weight_transfer")
    prepare_environment(None)
