"""The engine in processes of its own: exact log-probs, seeds, stop tokens, weight syncs, and what breaks them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from rollout_workers.contract import EngineDied, EngineOutput, RequestRefused
from rollout_workers.engine import RolloutEngine
from system.core.errors import SyncFailed
from system.core.model import ModelSettings
from system.core.weights.sender import Sender, manifest_of
from system.core.weights.wire import ChecksumMismatch, TransferBroken
from tests.rollout_workers.torch_side import (
    WAIT_S,
    TorchSource,
    connect,
    logprobs,
    probe_gap,
    rollout_settings,
    send_some,
    sync,
)

pytestmark = pytest.mark.engine

TEMPERATURE = 0.6
PROMPT = [10, 20, 30, 40]


@pytest.fixture(scope="module")
def engine(tiny_folders: dict[str, Path], loop: asyncio.Runner) -> Iterator[RolloutEngine]:
    model = ModelSettings(path=str(tiny_folders["first"]), dtype="float32")
    started = RolloutEngine(model, rollout_settings(temperature=TEMPERATURE), name="w0")
    loop.run(started.start(180))
    yield started
    loop.run(started.close())


@pytest.fixture(scope="module")
def sender(engine: RolloutEngine, loop: asyncio.Runner) -> Iterator[Sender]:
    made = Sender("gloo")
    loop.run(connect(made, engine))
    yield made
    made.close()


async def sample(engine: RolloutEngine, seeds: list[int], max_tokens: int = 48, tag: str = "r") -> list[EngineOutput]:
    return list(await asyncio.gather(*(engine.generate(PROMPT, seed, max_tokens, f"{tag}{seed}") for seed in seeds)))


def gaps(folder: Path, output: EngineOutput) -> np.ndarray:
    expected = logprobs(folder, PROMPT + output.tokens, TEMPERATURE)[len(PROMPT) - 1 :]
    return np.abs(expected - np.asarray(output.logprobs))


def test_sampled_logprobs_are_those_of_transformers(
    engine: RolloutEngine, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    outputs = loop.run(sample(engine, list(range(8))))
    differences = np.concatenate([gaps(tiny_folders["first"], output) for output in outputs])
    assert differences.mean() < 1e-5
    assert all(set(output.versions) == {0} for output in outputs)


def test_a_seed_draws_the_same_answer_in_any_batch(engine: RolloutEngine, loop: asyncio.Runner) -> None:
    together = loop.run(sample(engine, [1, 2, 3, 4, 5]))
    alone = [loop.run(sample(engine, [seed], tag="again"))[0] for seed in (4, 2)]
    assert [alone[0].tokens, alone[1].tokens] == [together[3].tokens, together[1].tokens]
    assert together[0].tokens != together[1].tokens


def test_every_stop_id_of_the_generation_config_ends_a_completion_and_stays_in_it(
    engine: RolloutEngine, loop: asyncio.Runner
) -> None:
    outputs = loop.run(sample(engine, list(range(100, 180)), max_tokens=64))
    stops = {5, 2}
    for output in outputs:
        assert stops.isdisjoint(output.tokens[:-1])
        assert (output.tokens[-1] in stops) == (output.finish_reason == "stop")
        assert output.finish_reason == "stop" or len(output.tokens) == 64
        assert "<|end|>" not in output.text
        assert output.text.encode("utf-8")
    assert {output.tokens[-1] for output in outputs if output.finish_reason == "stop"} == stops


def test_ids_that_the_tokenizer_lacks_are_kept_and_left_out_of_the_text(
    engine: RolloutEngine, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    outputs = loop.run(sample(engine, list(range(8))))
    assert any(token >= 262 for output in outputs for token in output.tokens)
    assert all(gaps(tiny_folders["first"], output).max() < 1e-4 for output in outputs)


def test_a_prompt_that_does_not_fit_is_refused_by_name(engine: RolloutEngine, loop: asyncio.Runner) -> None:
    with pytest.raises(RequestRefused, match="w0: request long"):
        loop.run(engine.generate([7] * 600, 1, 8, "long"))


def test_a_cancelled_request_leaves_the_engine(engine: RolloutEngine, loop: asyncio.Runner) -> None:
    async def cancel() -> None:
        asking = asyncio.ensure_future(engine.generate(PROMPT, 1, 400, "cancelled"))
        await asyncio.sleep(0.05)
        assert engine.metrics().running == 1
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    loop.run(cancel())
    assert engine.metrics().running == 0
    assert loop.run(sample(engine, [1]))[0].tokens


def test_three_weight_syncs_arrive_exactly(
    engine: RolloutEngine, sender: Sender, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    tokens = PROMPT + loop.run(sample(engine, [3]))[0].tokens
    assert loop.run(probe_gap(engine, tiny_folders["first"], tokens)) < 1e-4
    for version, name in ((1, "second"), (2, "first"), (3, "second")):
        loop.run(sync(sender, engine, tiny_folders[name], version))
        assert loop.run(probe_gap(engine, tiny_folders[name], tokens)) < 1e-4
        output = loop.run(sample(engine, [version], tag=f"after{version}-"))[0]
        assert set(output.versions) == {version}
        assert gaps(tiny_folders[name], output).max() < 1e-4


def test_requests_run_through_a_sync_and_every_token_is_exact_under_its_version(
    engine: RolloutEngine, sender: Sender, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    names = {4: "first", 5: "second"}

    async def through() -> list[EngineOutput]:
        await sync(sender, engine, tiny_folders[names[4]], 4)
        seeds = list(range(200, 224))
        running = [asyncio.ensure_future(engine.generate(PROMPT, seed, 300, f"through{seed}")) for seed in seeds]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await sync(sender, engine, tiny_folders[names[5]], 5)
        return list(await asyncio.gather(*running))

    outputs = loop.run(through())
    crossing = [output for output in outputs if set(output.versions) == {4, 5}]
    assert crossing
    for output in crossing:
        assert output.versions == sorted(output.versions)
        for version, name in names.items():
            under = np.asarray(output.versions) == version
            assert gaps(tiny_folders[name], output)[under].max() < 1e-4


def test_a_broken_transfer_generates_nothing_and_is_mended_by_sending_again(
    engine: RolloutEngine, sender: Sender, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    source = TorchSource(tiny_folders["first"])
    manifest = manifest_of(source, 6, 20_000)

    async def break_and_mend() -> list[EngineOutput]:
        running = [asyncio.ensure_future(engine.generate(PROMPT, seed, 300, f"kept{seed}")) for seed in range(300, 316)]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await engine.begin_update(WAIT_S)
        kept = [task for task in running if not task.done()]
        started_s = time.monotonic()
        with pytest.raises(TransferBroken):
            await asyncio.gather(
                engine.receive(manifest, WAIT_S), asyncio.to_thread(send_some, sender, manifest, source, 5)
            )
        assert time.monotonic() - started_s < 10
        assert engine.state == "broken"
        late = asyncio.ensure_future(engine.generate(PROMPT, 10, 8, "late"))
        await asyncio.sleep(0.5)
        assert kept
        assert not any(task.done() for task in [*kept, late])
        await connect(sender, engine)
        await sync(sender, engine, tiny_folders["first"], 6)
        return list(await asyncio.gather(late, *kept))

    late, *kept = loop.run(break_and_mend())
    assert set(late.versions) == {6}
    for output in kept:
        assert output.versions[-1] == 6
        assert gaps(tiny_folders["first"], output)[np.asarray(output.versions) == 6].max() < 1e-4


def test_changed_bytes_reach_the_caller_as_a_checksum_mismatch_with_the_parameters_name(
    engine: RolloutEngine, sender: Sender, loop: asyncio.Runner, tiny_folders: dict[str, Path]
) -> None:
    source = TorchSource(tiny_folders["second"])
    manifest = manifest_of(source, 7)

    async def receive() -> None:
        await engine.begin_update(WAIT_S)
        sending = asyncio.to_thread(send_some, sender, manifest, source, 1, 0)
        await asyncio.gather(engine.receive(manifest, WAIT_S), sending)

    with pytest.raises(ChecksumMismatch, match=r"model\.embed_tokens\.weight"):
        loop.run(receive())
    assert engine.state == "broken"
    loop.run(connect(sender, engine))
    loop.run(sync(sender, engine, tiny_folders["second"], 7))
    assert engine.state == "serving"


def test_a_sender_that_never_comes_is_an_error_within_the_deadline(engine: RolloutEngine, loop: asyncio.Runner) -> None:
    absent = Sender("gloo")
    endpoint = absent.open()
    absent.close()
    started_s = time.monotonic()
    with pytest.raises(SyncFailed, match=r"no sender|no answer within"):
        loop.run(engine.join_transfer(endpoint, 1, 2, 2.0))
    assert time.monotonic() - started_s < 7
    assert engine.state == "serving"


def test_a_killed_engine_fails_its_requests_with_its_name(engine: RolloutEngine, loop: asyncio.Runner) -> None:
    children = psutil.Process().children(recursive=True)
    core = next(
        child for child in children if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline())
    )

    async def kill() -> None:
        running = [asyncio.ensure_future(engine.generate(PROMPT, seed, 400, f"last{seed}")) for seed in range(400, 416)]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        os.kill(core.pid, signal.SIGKILL)
        done, pending = await asyncio.wait(running, timeout=20)
        assert not pending
        deaths = [task.exception() for task in done if task.exception() is not None]
        assert deaths
        assert all(isinstance(death, EngineDied) and "w0" in str(death) for death in deaths)

    loop.run(kill())
    assert engine.state == "dead"
    with pytest.raises(EngineDied):
        loop.run(engine.check())
    with pytest.raises(EngineDied):
        loop.run(engine.begin_update(5))
