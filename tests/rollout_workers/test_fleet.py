"""Membership as a state machine: who serves, who may be rebuilt, and which ranks an engine takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_workers.fleet import Fleet


def healthy_fleet(*names: str, restarts: int = 0) -> Fleet:
    fleet = Fleet(restarts)
    for name in names:
        fleet.add(name)
        fleet.started(name)
        fleet.admitted(name)
    return fleet


def test_the_offset_of_a_worker_is_one_plus_the_processes_before_it() -> None:
    fleet = Fleet()
    for name, world in {"w0": 2, "w1": 1, "w2": 4}.items():
        fleet.add(name, world)
    assert fleet.transfer_plan(["w0", "w1", "w2"]).offsets == {"w0": 1, "w1": 3, "w2": 4}
    assert fleet.transfer_plan(["w0", "w2"]).offsets == {"w0": 1, "w2": 3}
    assert fleet.transfer_plan(["w2"]).world_size == 5


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8))
def test_ranks_are_dense_and_never_shared(worlds: list[int]) -> None:
    fleet = Fleet()
    for index, world in enumerate(worlds):
        fleet.add(f"w{index}", world)
    plan = fleet.transfer_plan([f"w{index}" for index in range(len(worlds))])
    ranks = [plan.offsets[f"w{index}"] + process for index, world in enumerate(worlds) for process in range(world)]
    assert ranks == list(range(1, plan.world_size))


def test_only_a_sync_makes_a_worker_healthy() -> None:
    fleet = Fleet()
    fleet.add("w0")
    with pytest.raises(ValueError, match="w0 is starting"):
        fleet.admitted("w0")
    fleet.started("w0")
    assert fleet.named("ready") == ["w0"]
    assert fleet.named("healthy") == []
    fleet.admitted("w0")
    assert fleet.named("healthy") == ["w0"]


def test_a_lost_worker_is_rebuilt_as_often_as_allowed_and_waits_longer_each_time() -> None:
    fleet = healthy_fleet("w0", "w1", restarts=3)
    pauses = []
    for _ in range(3):
        assert fleet.lose("w0", "killed")
        pauses.append(fleet.pause_before_rebuild_s("w0"))
        fleet.rebuild("w0")
    assert pauses == [0.0, 5.0, 10.0]
    assert not fleet.lose("w0", "killed again")
    assert fleet.producers() == ["w1"]
    with pytest.raises(ValueError, match="rebuilt 3 of 3 times"):
        fleet.rebuild("w0")


def test_the_first_cause_of_all_stays() -> None:
    fleet = healthy_fleet("w0", "w1", restarts=1)
    fleet.lose("w1", "killed")
    fleet.lose("w1", "a later cause")
    fleet.lose("w0", "out of memory")
    fleet.rebuild("w1")
    assert fleet.first_cause == "w1: killed"


def test_a_name_is_taken_once_and_an_engine_has_processes() -> None:
    fleet = healthy_fleet("w0")
    with pytest.raises(ValueError, match="w0 is in the fleet already"):
        fleet.add("w0")
    with pytest.raises(ValueError, match="an engine of 0 processes"):
        fleet.add("w1", world=0)


class FleetMachine(RuleBasedStateMachine):
    """Any order of events leaves every worker in one state, within its budget, and served only after a sync."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(restarts=2)
        self.names = ["w0", "w1", "w2"]
        self.losses = dict.fromkeys(self.names, 0)
        self.synced_since_start = dict.fromkeys(self.names, False)
        for name in self.names:
            self.fleet.add(name)

    @rule(name=st.sampled_from(["w0", "w1", "w2"]), event=st.sampled_from(["start", "admit", "lose", "rebuild"]))
    def happens(self, name: str, event: str) -> None:
        try:
            if event == "start":
                self.fleet.started(name)
            elif event == "admit":
                self.fleet.admitted(name)
                self.synced_since_start[name] = True
            elif event == "lose":
                was_lost = name in self.fleet.named("lost")
                self.fleet.lose(name, "killed")
                self.losses[name] += not was_lost
                self.synced_since_start[name] = False
            else:
                self.fleet.rebuild(name)
        except ValueError:
            pass

    @precondition(lambda self: True)
    @invariant()
    def adds_up(self) -> None:
        states = self.fleet.named("starting", "ready", "healthy", "lost")
        assert states == self.names
        for member in self.fleet.members():
            assert member.rebuilt <= 2
            assert member.rebuilt <= self.losses[member.name]
            assert (member.health == "healthy") == self.synced_since_start[member.name]
            given_up = member.health == "lost" and member.rebuilt == 2
            assert (member.name in self.fleet.producers()) != given_up


FleetMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestFleetMachine = FleetMachine.TestCase
