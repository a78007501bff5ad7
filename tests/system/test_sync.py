"""Weight sync over receivers that do as they are told: who is verified, mended, lost. Real engines are under test
elsewhere (tests/e2e/test_cut_transfers.py, tests/system/test_sync_matrix.py)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_workers.fleet import Fleet, TransferPlan
from system.core.errors import LearnerLost, SyncFailed
from system.core.weights.wire import TransferBroken, WeightsRejected
from system.probe import ProbeLimit
from system.sync import SyncReport, WeightSync

PHASES = ("join", "begin", "receive", "finish", "probe", "admit")
HANG = "hang"


class Side:
    """A receiver or the source: logs its calls, and in a phase does what its script says next (nothing: succeeds)."""

    def __init__(self, name: str, wire: Wire, script: dict[str, list[Any]] | None = None, probe: float = -1.0):
        self.name = name
        self.wire = wire
        self.script = script or {}
        self.answer = [probe]
        self.verified: list[int] = []
        self.generating = False

    async def _do(self, phase: str, *details: Any) -> None:
        self.wire.log.append(" ".join([self.name, phase, *map(str, details)]))
        planned = self.script.get(phase)
        if planned:
            happens = planned.pop(0)
            if happens == HANG:
                await asyncio.sleep(3600)
            elif happens is not None:
                self.wire.broken = True
                raise happens

    async def join_transfer(self, endpoint: Any, rank: int, world_size: int, deadline_s: float) -> None:
        await self._do("join", rank, world_size)

    async def begin_update(self, deadline_s: float) -> None:
        self.generating = False
        await self._do("begin")

    async def receive(self, manifest: Any, deadline_s: float) -> None:
        await self._do("receive", manifest)
        await self.wire.passed(deadline_s)

    async def finish_update(self, version: int, deadline_s: float) -> None:
        await self._do("finish", version)
        self.generating = True

    async def probe(self, tokens: Sequence[int], deadline_s: float = 0.0) -> list[float]:
        await self._do("probe")
        return self.answer

    async def admit(self, version: int) -> None:
        await self._do("admit", version)
        self.verified.append(version)

    async def open_transfer(self, deadline_s: float) -> str:
        await self._do("open")
        self.wire.broken = False
        return "endpoint"

    async def connect_transfer(self, world_size: int, deadline_s: float) -> None:
        await self._do("connect", world_size)

    async def manifest(self, version: int, bucket_bytes: int) -> str:
        return f"v{version}"

    async def send_weights(self, manifest: Any, deadline_s: float) -> None:
        await self._do("send", manifest)
        await self.wire.passed(deadline_s)

    async def close_transfer(self) -> None:
        await self._do("close")


class Wire:
    """A broadcast group as gloo is one: when one side leaves, all others get an error; else all hang until theirs."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.broken = False

    async def passed(self, deadline_s: float) -> None:
        await asyncio.sleep(0.001)
        if self.broken:
            raise TransferBroken("a side left")


class Crew:
    """Members over a real ``Fleet``; whoever is lost is noted."""

    def __init__(self, receivers: Sequence[Side], worlds: Sequence[int] | None = None, restarts: int = 1) -> None:
        self.fleet = Fleet(restarts)
        self.sides = {receiver.name: receiver for receiver in receivers}
        for receiver, world in zip(receivers, worlds or [1] * len(receivers), strict=True):
            self.fleet.add(receiver.name, world)
            self.fleet.started(receiver.name)
        self.lost: dict[str, str] = {}

    def receivers(self) -> list[Any]:
        return [self.sides[name] for name in self.fleet.named("ready", "healthy")]

    def late(self) -> list[Any]:
        return [self.sides[name] for name in self.fleet.named("ready")]

    def transfer_plan(self, receivers: Sequence[Any]) -> TransferPlan:
        return self.fleet.transfer_plan([receiver.name for receiver in receivers])

    def admitted(self, receiver: Any) -> None:
        self.fleet.admitted(receiver.name)

    def lose(self, receiver: Any, cause: str) -> bool:
        self.lost[receiver.name] = cause
        return self.fleet.lose(receiver.name, cause)


class Scene:
    """Some receivers, a learner, and the sync between them."""

    def __init__(self, scripts: dict[str, dict[str, list[Any]]], *, probes: dict[str, float] | None = None, **options):
        self.wire = Wire()
        learner_script = scripts.pop("learner", None)
        self.sides = [Side(name, self.wire, script, (probes or {}).get(name, -1.0)) for name, script in scripts.items()]
        self.learner = Side("learner", self.wire, learner_script)
        self.crew = Crew(self.sides, options.pop("worlds", None), options.pop("restarts", 1))
        defaults = {"deadline_s": 5.0, "bucket_bytes": 1, "probe_tokens": [1, 2], "limit": ProbeLimit(True)}
        self.sync = WeightSync(self.learner, self.crew, **{**defaults, **options})

    def publish(self, version: int = 1) -> SyncReport:
        return asyncio.run(self.sync.publish(version))


def test_every_engine_gets_its_own_ranks_and_is_admitted_last() -> None:
    scene = Scene({"w0": {}, "w1": {}}, worlds=[2, 1])
    report = scene.publish(7)
    assert {"w0 join 1 4", "w1 join 3 4", "learner connect 4"} <= set(scene.wire.log)
    for name in ("w0", "w1"):
        assert [entry for entry in scene.wire.log if entry.startswith(name)][-1] == f"{name} admit 7"
    assert (report.version, report.workers, report.probe_gap_max, report.rounds) == (7, ("w0", "w1"), 0.0, 1)
    assert scene.crew.fleet.named("healthy") == ["w0", "w1"]


def test_the_transfer_group_is_built_once_for_one_membership() -> None:
    scene = Scene({"w0": {}})

    async def twice() -> None:
        await scene.sync.publish(1)
        await scene.sync.publish(2)

    asyncio.run(twice())
    assert scene.wire.log.count("w0 join 1 2") == 1
    assert scene.wire.log.count("w0 finish 2") == 1


@pytest.mark.parametrize("phase", PHASES)
def test_a_receiver_that_fails_is_lost_with_its_words_and_the_other_gets_the_version(phase: str) -> None:
    scene = Scene({"w0": {}, "w1": {phase: [RuntimeError("out of memory")]}})
    report = scene.publish()
    assert report.workers == ("w0",)
    assert scene.sides[0].verified == [1]
    assert scene.sides[0].generating
    assert scene.sides[1].verified == []
    assert report.lost == scene.crew.lost == {"w1": "RuntimeError: out of memory"}


@pytest.mark.parametrize("phase", PHASES)
def test_a_receiver_that_never_answers_is_lost_at_the_deadline_and_the_other_gets_the_version(phase: str) -> None:
    scene = Scene({"w0": {}, "w1": {phase: [HANG]}}, deadline_s=0.4)
    began_s = time.monotonic()
    report = scene.publish()
    assert time.monotonic() - began_s < 0.4 + 1.0
    assert report.workers == ("w0",)
    assert "no answer within" in report.lost["w1"]


@pytest.mark.parametrize("phase", ["join", "receive"])
def test_a_broken_transfer_is_mended_in_place_and_nobody_is_lost(phase: str) -> None:
    scene = Scene({"w0": {}, "w1": {phase: [TransferBroken("connection reset")]}})
    report = scene.publish()
    assert set(report.workers) == {"w0", "w1"}
    assert report.lost == {}
    assert report.rounds == 2
    assert scene.wire.log.count("learner open") == 2


def test_of_two_that_break_again_and_again_the_guilty_one_is_found_by_trying_each_alone() -> None:
    broken = [TransferBroken("connection reset")] * 9
    scene = Scene({"w0": {}, "w1": {"receive": broken}, "w2": {}})
    report = scene.publish()
    assert set(report.workers) == {"w0", "w2"}
    assert list(report.lost) == ["w1"]


def test_a_single_worker_is_tried_twice() -> None:
    scene = Scene({"w0": {"receive": [TransferBroken("cut"), TransferBroken("cut again")]}})
    report = scene.publish()
    assert (report.workers, report.rounds) == ((), 2)
    assert "cut again" in report.lost["w0"]


def test_a_broken_sender_is_tried_again_with_everybody() -> None:
    scene = Scene({"learner": {"send": [TransferBroken("port closed")]}, "w0": {}, "w1": {}})
    report = scene.publish()
    assert set(report.workers) == {"w0", "w1"}
    assert report.lost == {}


def test_a_lost_learner_ends_the_sync_and_nobody_is_blamed_for_it() -> None:
    for phase in ("open", "connect", "send", "probe"):
        scene = Scene({"learner": {phase: [LearnerLost("learner rank 1 is gone")]}, "w0": {}})
        with pytest.raises(LearnerLost, match="learner rank 1 is gone"):
            scene.publish()
        assert scene.crew.lost == {}
        assert scene.sides[0].verified == []


def test_the_run_goes_on_while_the_only_worker_is_being_rebuilt_and_ends_when_it_may_not_be() -> None:
    scene = Scene({"w0": {"receive": [RuntimeError("killed")]}})
    assert scene.publish().lost == {"w0": "RuntimeError: killed"}
    scene = Scene({"w0": {"receive": [RuntimeError("killed")]}}, restarts=0)
    with pytest.raises(SyncFailed, match="no worker could be verified; w0: RuntimeError: killed"):
        scene.publish()


@pytest.mark.parametrize("how", ["probe", "rejected"])
def test_one_engine_with_wrong_weights_is_lost_but_when_all_have_them_the_run_stops(how: str) -> None:
    def scripts(*bad: str) -> dict[str, dict[str, list[Any]]]:
        def script(name: str) -> dict[str, list[Any]]:
            refuses = how == "rejected" and name in bad
            return {"finish": [WeightsRejected("no such parameter")]} if refuses else {}

        return {name: script(name) for name in ("w0", "w1")}

    def probes(*bad: str) -> dict[str, float]:
        return {name: -2.0 for name in bad} if how == "probe" else {}

    one = Scene(scripts("w1"), probes=probes("w1"))
    report = one.publish()
    assert report.workers == ("w0",)
    assert list(report.lost) == ["w1"]
    everyone = Scene(scripts("w0", "w1"), probes=probes("w0", "w1"))
    with pytest.raises(SyncFailed, match="no worker could be verified"):
        everyone.publish()
    assert not any(side.verified for side in (*everyone.sides, one.sides[1]))


def test_a_rebuilt_worker_catches_up_alone_under_the_same_version() -> None:
    scene = Scene({"w0": {}, "w1": {"begin": [RuntimeError("killed")]}})

    async def story() -> SyncReport | None:
        await scene.sync.publish(3)
        assert await scene.sync.catch_up(3) is None
        scene.crew.fleet.rebuild("w1")
        assert await scene.sync.catch_up(3) is None
        scene.crew.fleet.started("w1")
        scene.wire.log.clear()
        return await scene.sync.catch_up(3)

    report = asyncio.run(story())
    assert report is not None
    assert report.workers == ("w1",)
    assert not any(entry.startswith("w0") for entry in scene.wire.log)
    assert scene.crew.fleet.named("healthy") == ["w0", "w1"]


def test_the_first_gap_becomes_the_yardstick() -> None:
    scene = Scene({"w0": {}, "w1": {}}, probes={"w0": -1.1, "w1": -1.05}, limit=ProbeLimit(False))
    scene.publish(0)
    assert scene.sync.limit.yardstick == pytest.approx(0.1)


def events() -> st.SearchStrategy[list[Any]]:
    happens = st.sampled_from([None, HANG, TransferBroken("cut"), RuntimeError("died"), WeightsRejected("shape")])
    return st.lists(happens, max_size=3)


scripts = st.dictionaries(st.sampled_from(PHASES), events(), max_size=4)


@settings(max_examples=80, deadline=None)
@given(st.lists(scripts, min_size=1, max_size=4))
def test_whatever_happens_every_worker_ends_verified_or_lost_and_only_the_verified_are_admitted(
    happenings: list[dict[str, list[Any]]],
) -> None:
    scene = Scene({f"w{index}": script for index, script in enumerate(happenings)}, deadline_s=0.05)
    try:
        report = scene.publish(4)
    except SyncFailed:
        assert scene.crew.fleet.named("healthy") == []
        assert set(scene.crew.lost) == set(scene.crew.sides)
        return
    assert set(report.workers) | set(report.lost) == set(scene.crew.sides)
    assert not set(report.workers) & set(report.lost)
    for side in scene.sides:
        assert (side.verified == [4]) == (side.name in report.workers)
        assert side.name not in report.workers or side.generating
    assert scene.crew.fleet.named("healthy") == [name for name in scene.crew.sides if name in report.workers]
