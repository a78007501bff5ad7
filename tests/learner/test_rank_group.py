"""Calls to all ranks: one at a time, in the same order everywhere; the cause is raised; no call after a loss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from learner import rank_group
from learner.deepspeed_engine import NonFiniteError
from learner.rank_group import RankGroup
from learner.world import RanksDisconnected
from system.core.errors import ConfigError, LearnerLost, OutOfMemory
from system.core.weights.wire import TransferBroken


class ScriptedRank:
    """Does what it is told, and writes down when calls begin and end; while ``held``, a call does not end."""

    def __init__(self, number: int, answer: Callable[[str], Any] = lambda method: method, takes_s: float = 0.001):
        self.name = f"learner rank {number}"
        self.log: list[str] = []
        self.closed = False
        self.may_end = asyncio.Event()
        self.may_end.set()
        self._answer, self._takes_s = answer, takes_s

    async def call(self, method: str, *arguments: Any) -> Any:
        self.log.append(f"begin {method}")
        await asyncio.sleep(self._takes_s)
        await self.may_end.wait()
        answer = self._answer(method)
        self.log.append(f"end {method}")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def node_address(self) -> str:
        return "127.0.0.1"

    async def close(self) -> None:
        self.closed = True


def holding(number: int) -> ScriptedRank:
    rank = ScriptedRank(number)
    rank.may_end.clear()
    return rank


async def begun(call: asyncio.Future[Any], rank: ScriptedRank, method: str) -> None:
    while f"begin {method}" not in rank.log:
        assert not call.done()
        await asyncio.sleep(0.001)


def fails_with(failure: Exception, takes_s: float = 0.001) -> ScriptedRank:
    return ScriptedRank(0, lambda _: failure, takes_s)


def calls_of(rank: ScriptedRank) -> list[str]:
    return [entry.removeprefix("begin ") for entry in rank.log if entry.startswith("begin")]


def test_calls_made_at_once_reach_every_rank_one_after_the_other_in_one_order() -> None:
    ranks = [ScriptedRank(0, takes_s=0.001), ScriptedRank(1, takes_s=0.02), ScriptedRank(2, takes_s=0.005)]

    async def scenario() -> None:
        group = RankGroup(ranks)
        methods = [f"call {number}" for number in range(6)]
        answers = await asyncio.gather(*(group.all(method, 5.0) for method in methods))
        assert answers == [[method] * 3 for method in methods]

    asyncio.run(scenario())
    assert calls_of(ranks[0]) == calls_of(ranks[1]) == calls_of(ranks[2])
    assert ranks[0].log[1::2] == [entry.replace("begin", "end") for entry in ranks[0].log[::2]]


def test_each_rank_gets_its_own_arguments_and_a_call_of_the_first_only_that_one() -> None:
    async def scenario() -> None:
        ranks = [ScriptedRank(0), ScriptedRank(1)]
        group = RankGroup(ranks)
        await group.each("step", 5.0, [("a",), ("b",)])
        assert await group.first("manifest", 5.0) == "manifest"
        assert calls_of(ranks[1]) == ["step"]

    asyncio.run(scenario())


def test_a_call_that_its_caller_gave_up_ends_before_the_next_begins() -> None:
    async def scenario() -> None:
        ranks = [ScriptedRank(0), holding(1)]
        group = RankGroup(ranks)
        sending = asyncio.ensure_future(group.all("send", 5.0))
        await begun(sending, ranks[1], "send")
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        probing = asyncio.ensure_future(group.all("probe", 5.0))
        await asyncio.sleep(0.05)
        ranks[1].may_end.set()
        await probing
        assert ranks[0].log == ["begin send", "end send", "begin probe", "end probe"]

    asyncio.run(scenario())


def test_a_call_given_up_before_its_turn_is_never_made() -> None:
    async def scenario() -> None:
        rank = holding(0)
        group = RankGroup([rank])
        first = asyncio.ensure_future(group.all("step", 5.0))
        second = asyncio.ensure_future(group.all("probe", 5.0))
        await begun(first, rank, "step")
        second.cancel()
        rank.may_end.set()
        await first
        await group.all("save", 5.0)
        assert calls_of(rank) == ["step", "save"]

    asyncio.run(scenario())


def test_the_wait_for_the_turn_counts_against_the_deadline_and_costs_only_that_call() -> None:
    async def scenario() -> None:
        rank = holding(0)
        group = RankGroup([rank])
        step = asyncio.ensure_future(group.all("step", 5.0))
        await begun(step, rank, "step")
        with pytest.raises(LearnerLost, match=r"probe: not begun within 0\.05 s, the ranks are busy with step"):
            await group.all("probe", 0.05)
        rank.may_end.set()
        assert await step == ["step"]
        assert await group.all("probe", 5.0) == ["probe"]

    asyncio.run(scenario())


def test_a_rank_that_does_not_answer_in_time_is_named_and_the_group_is_spent() -> None:
    async def scenario() -> None:
        group = RankGroup([ScriptedRank(0), holding(1)])
        with pytest.raises(LearnerLost, match=r"learner rank 1: step: no answer within 0\.1 s"):
            await group.all("step", 0.1)
        with pytest.raises(LearnerLost, match="failed before: LearnerLost: learner rank 1: step"):
            await group.all("probe", 5.0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("cause", "consequence"),
    [
        (ConfigError("no reference log-probs"), LearnerLost("learner rank 1: its process is gone")),
        (LearnerLost("learner rank 0: its process is gone"), RanksDisconnected("learner rank 1: lost the others")),
        (RanksDisconnected("learner rank 0: lost the others"), ValueError("a defect that follows")),
    ],
)
@pytest.mark.parametrize("cause_comes_first", [True, False])
def test_the_cause_is_raised_and_not_what_follows_from_it(
    cause: Exception, consequence: Exception, cause_comes_first: bool
) -> None:
    async def scenario() -> None:
        early, late = 0.01, 0.1
        times = (early, late) if cause_comes_first else (late, early)
        group = RankGroup([fails_with(cause, times[0]), fails_with(consequence, times[1])])
        with pytest.raises(type(cause), match=str(cause)):
            await group.all("step", 5.0)

    asyncio.run(scenario())


def test_an_error_while_others_hang_comes_at_once_and_refuses_all_later_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "OTHERS_DEADLINE_S", 0.1)

    async def scenario() -> None:
        hanging = holding(1)
        group = RankGroup([fails_with(ConfigError("too long")), hanging])
        started_s = time.monotonic()
        with pytest.raises(ConfigError, match="too long"):
            await group.all("step", 30.0)
        assert time.monotonic() - started_s < 5.0
        with pytest.raises(LearnerLost, match="ConfigError: too long; start it again"):
            await group.first("manifest", 5.0)
        await group.close()
        assert hanging.closed

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("failure", "usable"),
    [
        (ConfigError("beta"), True),
        (TransferBroken("a receiver left"), True),
        (NonFiniteError("loss"), False),
        (LearnerLost("gone"), False),
        (OutOfMemory("micro-batch 1 of 2"), False),
        (ValueError("a defect"), False),
    ],
)
def test_only_errors_that_leave_the_ranks_in_step_leave_them_usable(failure: Exception, usable: bool) -> None:
    async def scenario() -> None:
        answers = iter([failure, "fine"])
        group = RankGroup([ScriptedRank(0, lambda _: next(answers)), ScriptedRank(1)])
        with pytest.raises(type(failure)):
            await group.all("send_weights", 5.0)
        if usable:
            assert await group.all("probe", 5.0) == ["fine", "probe"]
        else:
            with pytest.raises(LearnerLost, match="failed before"):
                await group.all("probe", 5.0)

    asyncio.run(scenario())


def test_a_closed_group_takes_no_call_also_none_that_waits() -> None:
    async def scenario() -> None:
        rank = holding(0)
        group = RankGroup([rank])
        step, probe = (asyncio.ensure_future(group.all(method, 5.0)) for method in ("step", "probe"))
        await begun(step, rank, "step")
        await group.close()
        rank.may_end.set()
        assert await step == ["step"]
        with pytest.raises(LearnerLost, match="it was closed"):
            await probe

    asyncio.run(scenario())
