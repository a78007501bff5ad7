"""Real processes, stopped and killed: none is left behind, and none is mistaken for another."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import psutil
import pytest

from system.core.errors import InfrastructureError
from system.core.processes import ProcessPlace, end_process, end_with_parent, place_of_this_process

SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 30.0


def _child(report: Connection, generations: int) -> None:
    """Ties itself to its parent, starts the next generation, and says who it is."""
    end_with_parent()
    _start_next(report, generations)


def _parent(report: Connection, generations: int) -> None:
    _start_next(report, generations)


def _start_next(report: Connection, generations: int) -> None:
    if generations:
        SPAWN.Process(target=_child, args=(report, generations - 1)).start()
    report.send(place_of_this_process("here"))
    time.sleep(300)


@pytest.fixture
def family() -> Iterator[list[ProcessPlace]]:
    """A process, its child and its grandchild; the latter two end with their parents."""
    receiving, sending = SPAWN.Pipe(duplex=False)
    parent = SPAWN.Process(target=_parent, args=(sending, 2))
    parent.start()
    places = []
    try:
        for _ in range(3):
            assert receiving.poll(WAIT_S)
            places.append(receiving.recv())
        yield sorted(places, key=lambda place: place.started_s)
    finally:
        for place in places:
            end_process(place, WAIT_S)
        parent.kill()


def has_ended(place: ProcessPlace) -> bool:
    try:
        return psutil.Process(place.pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_gone(places: list[ProcessPlace], deadline_s: float = 5.0) -> bool:
    end_s = time.monotonic() + deadline_s
    while time.monotonic() < end_s:
        if all(has_ended(place) for place in places):
            return True
        time.sleep(0.02)
    return False


def test_stopped_children_end_with_a_killed_parent(family: list[ProcessPlace]) -> None:
    parent, *children = family
    for child in children:
        os.kill(child.pid, signal.SIGSTOP)
    os.kill(parent.pid, signal.SIGKILL)
    assert until_gone(family)


def test_a_stopped_process_is_ended_with_all_its_descendants(family: list[ProcessPlace]) -> None:
    for place in reversed(family):
        os.kill(place.pid, signal.SIGSTOP)
    end_process(family[0], WAIT_S)
    assert all(has_ended(place) for place in family)


def test_ending_a_process_that_has_ended_does_nothing(family: list[ProcessPlace]) -> None:
    for _ in range(2):
        end_process(family[0], WAIT_S)


def test_a_later_process_with_the_same_id_is_left_alone(family: list[ProcessPlace]) -> None:
    end_process(replace(family[0], started_s=family[0].started_s - 60), WAIT_S)
    time.sleep(0.2)
    assert not any(has_ended(place) for place in family)


def test_what_the_kernel_does_not_let_go_of_is_named(
    family: list[ProcessPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as immortal:
        immortal.setattr(psutil.Process, "kill", lambda process: None)
        with pytest.raises(InfrastructureError, match=rf"processes {family[0].pid}, .* still there 0.2 s after"):
            end_process(family[0], 0.2)


def test_a_process_that_multiprocessing_did_not_start_goes_on_as_it_was() -> None:
    end_with_parent()
