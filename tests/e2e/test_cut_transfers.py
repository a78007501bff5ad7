"""A weight sync is cut at every phase and at many buckets: the survivor has the version, the other comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.transfer_scene import GROUPS_PER_STEP, SYNC_DEADLINE_S, Kind, TransferScene

pytestmark = [pytest.mark.engine, pytest.mark.slow]

POINTS: list[str | float] = ["join", "begin", 0.0, 0.1, 0.3, 0.5, 0.7, 1.0, "finish", "probe"]
"""A phase, or which part of the buckets is through."""
KILLS: list[Kind] = ["kill_engine", "kill_actor"]
STOPS: list[Kind] = ["stop_engine", "stop_actor"]
ALL: list[tuple[Kind, str | float]] = [
    *((KILLS[index % 2], point) for index, point in enumerate(POINTS)),
    *((STOPS[index % 2], point) for index, point in enumerate(POINTS)),
    *(("raise", point) for point in POINTS if point != "probe"),
]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def scene(
    runner: asyncio.Runner, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TransferScene]:
    scene = TransferScene(tiny_model, tmp_path_factory.mktemp("weights"))
    runner.run(scene.open())
    yield scene
    runner.run(scene.close())


async def cut_once(scene: TransferScene, kind: Kind, point: str | float) -> None:
    await scene.until_whole()
    before = scene.victim
    await scene.arm(kind, point if isinstance(point, str) else round(point * (scene.buckets() - 1)))
    if point == "join":
        scene.sync.disconnect()
    learned = scene.version
    began_s = time.monotonic()
    report = await scene.step()
    seconds = time.monotonic() - began_s
    print(f"\n{kind} at {point}: sync {report.sync_s:.1f} s, {report.rounds} rounds, lost {report.lost}", end="")
    assert scene.version == learned + 1
    assert report.workers == ("rollout-0",)
    assert list(report.lost) == ["rollout-1"]
    assert report.probe_gap_max <= 1e-4
    assert report.sync_s < SYNC_DEADLINE_S + 5.0
    if not kind.startswith("stop"):
        assert report.sync_s < SYNC_DEADLINE_S
    assert seconds < SYNC_DEADLINE_S + 30.0
    back_s = await scene.until_whole()
    print(f", back after {back_s:.1f} s", end="")
    assert scene.victim is not before
    after = await scene.step()
    assert after.workers == ("rollout-0", "rollout-1")
    counts = await scene.stream.counts()
    outstanding = counts["leased"] + counts["ready"] + counts["taken"]
    assert counts["issued"] == outstanding + counts["trained"]
    assert counts["dropped"] == {}
    assert len(set(scene.taken)) == len(scene.taken)
    assert counts["trained"] == len(scene.taken)
    assert len(scene.taken) % GROUPS_PER_STEP == 0


def test_a_cut_transfer_leaves_the_survivor_verified_and_the_other_comes_back(
    scene: TransferScene, runner: asyncio.Runner
) -> None:
    runner.run(cut_once(scene, "kill_engine", 0.5))


@pytest.mark.long
@pytest.mark.parametrize(("kind", "point"), ALL)
def test_the_same_at_ten_points_for_every_way_of_being_lost(
    kind: Kind, point: str | float, scene: TransferScene, runner: asyncio.Runner
) -> None:
    runner.run(cut_once(scene, kind, point))
