"""The life of an engine around its updates, over worker processes that keep vLLM's rules and fail where told to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollout_workers.contract import EngineDied
from rollout_workers.update_cycle import UpdateCycle
from system.core.errors import SyncFailed
from system.core.weights.wire import ChecksumMismatch, Endpoint, Manifest, Report, TransferBroken, WeightsRejected

WAIT_S = 5.0
METHODS = {
    "join": "init_weight_transfer_engine",
    "begin": "start_weight_update",
    "receive": "update_weights",
    "finish": "finish_weight_update",
}


class Process:
    """One worker process: vLLM's rules about the order of calls, and our receiver's report."""

    def __init__(self) -> None:
        self.updating = False
        self.failure: Exception | None = None

    def call(self, method: str, failure: Exception | None) -> None:
        if method == "start_weight_update":
            assert not self.updating, "a weight update is already active"
            self.updating = True
        elif method == "update_weights":
            assert self.updating, "start_weight_update must be called before"
        elif method == "finish_weight_update":
            assert self.updating, "finish without start"
            self.updating = False
        self.failure = failure


class FakeEngine(UpdateCycle):
    """An engine of two processes. ``fail`` says what the next call of a method meets, in each process."""

    def __init__(self) -> None:
        super().__init__("w0")
        self.processes = [Process(), Process()]
        self.fail: dict[str, tuple[Exception | None, Exception | None]] = {}
        self.raise_in: dict[str, Exception] = {}
        self.hang_in = ""
        self.log: list[str] = []
        self._enter("serving")

    async def _step(self, what: str) -> None:
        self.log.append(what)
        if what == self.hang_in:
            self.hang_in = ""
            await asyncio.sleep(3600)
        if what in self.raise_in:
            raise self.raise_in.pop(what)

    async def _pause(self) -> None:
        await self._step("pause")

    async def _resume(self) -> None:
        await self._step("resume")

    async def _label(self, version: str) -> None:
        await self._step(f"label {version}")

    async def _call_workers(self, method: str, **arguments: Any) -> list[Any]:
        failures = self.fail.pop(method, (None, None))
        for process, failure in zip(self.processes, failures, strict=True):
            process.call(method, failure)
        await self._step(method)
        return [None, None]

    async def _reports(self) -> list[Report]:
        return [Report.of(process.updating, process.failure) for process in self.processes]

    async def step(self, step: str, deadline_s: float = WAIT_S) -> None:
        if step == "join":
            await self.join_transfer(Endpoint("127.0.0.1", 1), 1, 3, deadline_s)
        elif step == "begin":
            await self.begin_update(deadline_s)
        elif step == "receive":
            await self.receive(Manifest(1, ()), deadline_s)
        else:
            await self.finish_update(1, deadline_s)

    async def up_to(self, step: str) -> None:
        for earlier in ("begin", "receive", "finish"):
            if step in (earlier, "join"):
                return
            await self.step(earlier)

    async def update(self, deadline_s: float = WAIT_S) -> None:
        for step in ("begin", "receive", "finish"):
            await self.step(step, deadline_s)


STEPS = sorted(METHODS)
KINDS = [TransferBroken, ChecksumMismatch, WeightsRejected, SyncFailed]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_process_reports_is_raised_as_it_was(step: str, kind: type[SyncFailed]) -> None:
    async def fail() -> None:
        engine = FakeEngine()
        await engine.up_to(step)
        engine.fail[METHODS[step]] = (None, kind("bucket 3"))
        with pytest.raises(SyncFailed, match="bucket 3") as raised:
            await engine.step(step)
        assert type(raised.value) is kind
        assert engine.state == ("serving" if step == "join" else "broken")

    asyncio.run(fail())


@pytest.mark.parametrize("step", STEPS)
def test_anything_else_is_a_failed_sync_that_carries_its_words_and_is_no_broken_transfer(step: str) -> None:
    async def fail() -> None:
        engine = FakeEngine()
        await engine.up_to(step)
        engine.raise_in[METHODS[step]] = KeyError("no such method")
        with pytest.raises(SyncFailed, match="w0: KeyError: 'no such method'") as raised:
            await engine.step(step)
        assert type(raised.value) is SyncFailed

    asyncio.run(fail())


@pytest.mark.parametrize("step", STEPS)
def test_a_dead_engine_is_dead_whatever_was_called(step: str) -> None:
    async def fail() -> None:
        engine = FakeEngine()
        await engine.up_to(step)
        engine.raise_in[METHODS[step]] = engine._died("killed")
        with pytest.raises(EngineDied, match="w0: the engine died: killed"):
            await engine.step(step)
        with pytest.raises(EngineDied, match="killed"):
            await engine.step("begin")
        assert engine.state == "dead"

    asyncio.run(fail())


@pytest.mark.parametrize("broken", [TransferBroken("late"), ChecksumMismatch("flipped")])
def test_of_several_processes_the_one_that_cannot_be_mended_is_told(broken: Exception) -> None:
    async def fail() -> None:
        engine = FakeEngine()
        await engine.up_to("receive")
        engine.fail["update_weights"] = (broken, WeightsRejected("no such name"))
        with pytest.raises(WeightsRejected, match="no such name"):
            await engine.step("receive")

    asyncio.run(fail())


@pytest.mark.parametrize("step", ["begin", "receive", "finish"])
@pytest.mark.parametrize("how", ["reported", "raised", "cancelled", "timed out"])
def test_an_update_that_was_cut_anywhere_begins_again_and_again(step: str, how: str) -> None:
    async def cut(engine: FakeEngine) -> None:
        await engine.up_to(step)
        if how == "cancelled":
            engine.hang_in = METHODS[step]
            call = asyncio.ensure_future(engine.step(step))
            await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            return
        if how == "reported":
            engine.fail[METHODS[step]] = (TransferBroken("cut"), None)
        elif how == "raised":
            engine.raise_in[METHODS[step]] = RuntimeError("cut")
        else:
            engine.hang_in = METHODS[step]
        with pytest.raises(SyncFailed):
            await engine.step(step, 0.02 if step != "receive" else -2.98)

    async def again() -> None:
        engine = FakeEngine()
        for _ in range(3):
            await cut(engine)
            assert engine.state == "broken"
            assert engine.version == 0
            assert "resume" not in engine.log
        await engine.update()
        assert (engine.state, engine.version) == ("serving", 1)
        assert engine.log[-2:] == ["label 1", "resume"]

    asyncio.run(again())


@pytest.mark.parametrize("hang_in", ["pause", "label 1", "resume"])
def test_a_call_of_vllm_that_hangs_ends_at_the_deadline_and_the_update_begins_again(hang_in: str) -> None:
    async def again() -> None:
        engine = FakeEngine()
        engine.hang_in = hang_in
        with pytest.raises(SyncFailed, match=r"w0: (begin a|finish the) weight update: no answer within 0.05 s"):
            await engine.update(0.05)
        assert engine.state == "broken"
        await engine.update()
        assert (engine.state, engine.version) == ("serving", 1)

    asyncio.run(again())


@pytest.mark.parametrize("step", ["receive", "finish"])
def test_what_has_not_begun_is_refused_and_changes_nothing(step: str) -> None:
    async def refuse() -> None:
        engine = FakeEngine()
        with pytest.raises(SyncFailed, match=rf"w0: {step} without an update that has begun \(the engine is serving\)"):
            await engine.step(step)
        assert engine.state == "serving"
        assert not engine.log

    asyncio.run(refuse())


def test_a_request_waits_from_the_beginning_through_every_failure_until_the_update_is_whole() -> None:
    async def wait() -> None:
        engine = FakeEngine()
        await engine.step("begin")
        waiting = asyncio.ensure_future(engine._pass_gate())
        for _ in range(2):
            engine.fail["update_weights"] = (TransferBroken("cut"), None)
            with pytest.raises(TransferBroken):
                await engine.step("receive")
            await asyncio.sleep(0.01)
            assert not waiting.done()
            await engine.step("begin")
        await engine.step("receive")
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await engine.step("finish")
        await asyncio.wait_for(waiting, WAIT_S)

    asyncio.run(wait())
