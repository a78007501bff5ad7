"""The phases of a weight sync over receivers that do as they are told; real engines are under test elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from system.core.errors import SyncFailed
from system.sync import ProbeLimit, WeightSync


class Side:
    """A receiver and a source in one: logs its calls, and fails or hangs where told to."""

    def __init__(self, name: str, log: list[str], fail: str = "", hang: str = "", probe: Sequence[float] = (-1.0,)):
        self.name = name
        self._log = log
        self._fail, self._hang = fail, hang
        self._probe = list(probe)

    async def _do(self, what: str, *details: Any) -> None:
        self._log.append(" ".join([self.name, what, *map(str, details)]))
        if what == self._fail:
            raise RuntimeError(f"{what} broke")
        if what == self._hang:
            await asyncio.sleep(3600)

    async def join_transfer(self, endpoint: Any, rank: int, world_size: int, deadline_s: float) -> None:
        await self._do("join", rank, world_size)

    async def begin_update(self, deadline_s: float) -> None:
        await self._do("begin")

    async def receive(self, manifest: Any, deadline_s: float) -> None:
        await self._do("receive", manifest)

    async def finish_update(self, version: int, deadline_s: float) -> None:
        await self._do("finish", version)

    async def probe(self, tokens: Sequence[int], deadline_s: float = 0.0) -> list[float]:
        await self._do("probe")
        return self._probe

    async def admit(self, version: int) -> None:
        await self._do("admit", version)

    async def open_transfer(self, deadline_s: float) -> str:
        await self._do("open")
        return "endpoint"

    async def connect_transfer(self, world_size: int, deadline_s: float) -> None:
        await self._do("connect", world_size)

    async def manifest(self, version: int, bucket_bytes: int) -> str:
        return f"v{version}"

    async def send_weights(self, manifest: Any, deadline_s: float) -> None:
        await self._do("send", manifest)

    async def close_transfer(self) -> None:
        await self._do("close")


def made(receivers: list[Side], source: Side, **changes: Any) -> WeightSync:
    options: dict[str, Any] = {"deadline_s": 5.0, "bucket_bytes": 1, "probe_tokens": [1, 2], "limit": ProbeLimit(True)}
    return WeightSync(source, receivers, **{**options, **changes})


def test_every_engine_gets_its_own_ranks_and_is_admitted_last() -> None:
    log: list[str] = []
    sync = made([Side("w0", log), Side("w1", log)], Side("learner", log), worlds=[2, 1])
    report = asyncio.run(sync.publish(7))
    assert {"w0 join 1 4", "w1 join 3 4", "learner connect 4"} <= set(log)
    assert log[-2:] == ["w0 admit 7", "w1 admit 7"]
    assert (report.version, report.workers, report.probe_gap_max) == (7, ("w0", "w1"), 0.0)


def test_the_transfer_group_is_built_once_for_one_membership() -> None:
    log: list[str] = []
    sync = made([Side("w0", log)], Side("learner", log))

    async def twice() -> None:
        await sync.publish(1)
        await sync.publish(2)

    asyncio.run(twice())
    assert log.count("w0 join 1 2") == 1
    assert log.count("w0 finish 2") == 1


@pytest.mark.parametrize("phase", ["join", "begin", "receive", "finish", "probe"])
def test_a_receiver_that_raises_is_named_with_its_words_and_nobody_is_admitted(phase: str) -> None:
    log: list[str] = []
    sync = made([Side("w0", log), Side("w1", log, fail=phase)], Side("learner", log))
    with pytest.raises(SyncFailed, match=f"w1: RuntimeError: {phase} broke"):
        asyncio.run(sync.publish(1))
    assert not any("admit" in entry for entry in log)
    assert log[-1] == "learner close"


def test_after_a_failure_the_next_sync_builds_the_group_anew() -> None:
    log: list[str] = []
    receiver = Side("w0", log, fail="receive")
    sync = made([receiver], Side("learner", log))

    async def again() -> None:
        with pytest.raises(SyncFailed):
            await sync.publish(1)
        receiver._fail = ""
        await sync.publish(2)

    asyncio.run(again())
    assert log.count("w0 join 1 2") == 2
    assert log[-1] == "w0 admit 2"


def test_a_receiver_that_never_answers_ends_the_sync_at_its_deadline() -> None:
    log: list[str] = []
    sync = made([Side("w0", log, hang="receive")], Side("learner", log), deadline_s=-4.8)
    with pytest.raises(SyncFailed, match="w0: receive weights: no answer within"):
        asyncio.run(sync.publish(1))


def test_in_float32_a_gap_above_1e_4_is_refused() -> None:
    log: list[str] = []
    sync = made([Side("w0", log, probe=[-1.0, -2.0002])], Side("learner", log, probe=[-1.0, -2.0]))
    with pytest.raises(SyncFailed, match=r"w0: the weights that arrived are not the learner's"):
        asyncio.run(sync.publish(1))
    assert not any("admit" in entry for entry in log)


def test_in_bfloat16_three_times_the_first_gap_is_the_limit() -> None:
    limit = ProbeLimit(float32=False, yardstick=0.05)
    assert limit.verdict(np.full(4, 0.149)) is None
    assert "limit 0.150" in (limit.verdict(np.full(4, 0.151)) or "")
    assert ProbeLimit(False, yardstick=0.001).verdict(np.full(4, 0.05)) is None


def test_the_first_gap_becomes_the_yardstick() -> None:
    log: list[str] = []
    sync = made([Side("w0", log, probe=[-1.1])], Side("learner", log, probe=[-1.0]), limit=ProbeLimit(False))
    asyncio.run(sync.publish(0))
    assert sync.limit.yardstick == pytest.approx(0.1)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_probe_that_is_not_a_number_is_never_fine(bad: float) -> None:
    for limit in (ProbeLimit(True), ProbeLimit(False), ProbeLimit(False, 0.1)):
        assert limit.verdict(np.array([0.0, abs(bad)])) is not None
