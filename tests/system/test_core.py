"""Deadlines, clocks, seeds, records: the ground that all rooms stand on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from system.core.clock import SimulatedClock
from system.core.deadlines import DeadlineExceeded, together, within
from system.core.errors import ConfigError, SyncFailed
from system.core.records import Group, RecordError, Row, rewards_are_equal
from system.core.seeds import request_seed
from system.core.settings import Settings, parse_settings


def test_of_calls_together_the_first_failure_ends_the_others_at_once() -> None:
    cancelled: list[bool] = []

    async def long() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def failing() -> None:
        await asyncio.sleep(0.01)
        raise SyncFailed("the first")

    async def story() -> None:
        with pytest.raises(SyncFailed, match="the first"):
            await together(long(), failing())
        await asyncio.sleep(0)
        assert cancelled == [True]
        assert await together(asyncio.sleep(0, "a"), asyncio.sleep(0, "b")) == ["a", "b"]

    asyncio.run(story())


def test_a_wait_ends_at_its_deadline_with_the_name_of_what_it_waited_for() -> None:
    async def wait() -> None:
        with pytest.raises(SyncFailed, match=r"engine w3: receive: no answer within 0.02 s"):
            await within(asyncio.sleep(60), 0.02, "engine w3: receive", SyncFailed)

    asyncio.run(wait())


def test_a_timeout_of_the_awaited_itself_is_not_taken_for_the_deadline() -> None:
    async def own() -> None:
        raise TimeoutError("its own")

    async def wait() -> None:
        with pytest.raises(TimeoutError, match="its own"):
            await within(own(), 5.0, "something")
        with pytest.raises(DeadlineExceeded):
            await within(asyncio.sleep(60), 0.01, "something")

    asyncio.run(wait())


def test_a_cancelled_wait_cancels_what_it_waited_for() -> None:
    async def wait() -> bool:
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        task = asyncio.create_task(within(work(), 60, "work"))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task}, timeout=1)
        await asyncio.sleep(0.01)
        return ended.is_set()

    assert asyncio.run(wait())


def test_simulated_sleepers_wake_in_order_of_their_time() -> None:
    async def run() -> list[str]:
        clock, woken = SimulatedClock(), []

        async def sleeper(name: str, seconds: float) -> None:
            await clock.sleep_s(seconds)
            woken.append(f"{name} {clock.now_s():g}")

        tasks = [asyncio.create_task(sleeper("late", 2)), asyncio.create_task(sleeper("early", 1))]
        await asyncio.sleep(0)
        await clock.advance_s(3)
        await asyncio.gather(*tasks)
        return woken

    assert asyncio.run(run()) == ["early 1", "late 2"]


@given(st.integers(0, 2**62), st.integers(0, 10**9), st.integers(0, 1000), st.integers(0, 5))
def test_seeds_fit_63_bits_and_tell_neighbours_apart(run: int, group: int, trajectory: int, continuation: int) -> None:
    seed = request_seed(run, group, trajectory, continuation)
    assert 0 <= seed < 2**63
    others = [
        request_seed(run, group, trajectory + 1, continuation),
        request_seed(run, group + 1, trajectory, continuation),
        request_seed(run, group, trajectory, continuation + 1),
    ]
    assert seed not in others
    assert seed == request_seed(run, group, trajectory, continuation)


def row(**changes: object) -> Row:
    values: dict[str, object] = {
        "group_id": 1, "trajectory_id": 0, "prompt_id": "p", "source": "s", "prompt_tokens": [1, 2],
        "completion_tokens": [3, 4, 5], "rollout_logprobs": [-0.5, -1.0, -0.25], "versions": [0, 0, 1],
        "finish_reason": "stop", "seed": 9, "worker": "w", "completion_text": "héé", "reward": None,
        "reward_parts": {"a": 0.5}, "metadata": '{"answer": "1", "x": [1.0]}',
    }  # fmt: skip
    return Row(**{**values, **changes})  # type: ignore[arg-type]


def test_a_group_survives_its_bytes_exactly() -> None:
    group = Group((row(), row(trajectory_id=1, reward=1.0, reference_logprobs=[-1, -2, -3])))
    back = Group.from_bytes(group.to_bytes())
    assert back.to_batch().equals(group.to_batch())
    assert back.trajectory_rewards() == {0: None, 1: 1.0}
    assert back.rows[0].metadata == '{"answer": "1", "x": [1.0]}'
    assert back.oldest_version == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout_logprobs": [-0.5]},
        {"versions": [0]},
        {"loss_mask": [True]},
        {"reference_logprobs": [-1.0, -2.0]},
        {"completion_tokens": [], "rollout_logprobs": [], "versions": []},
        {"reward": float("nan")},
        {"finish_reason": "tired"},
    ],
)
def test_a_row_that_cannot_be_is_refused_when_it_is_made(changes: dict[str, object]) -> None:
    with pytest.raises(RecordError):
        row(**changes)


def test_a_group_holds_one_prompt_and_one_reward_per_trajectory() -> None:
    with pytest.raises(RecordError, match="several groups"):
        Group((row(), row(group_id=2)))
    with pytest.raises(RecordError, match="two rewards"):
        Group((row(reward=1.0), row(reward=0.0, segment_index=1)))


def test_rewards_that_differ_by_rounding_only_are_equal() -> None:
    assert rewards_are_equal([float(np.float32(0.1) + np.float32(0.2)), float(np.float32(0.3))])
    assert not rewards_are_equal([0.3, 0.3001])
    assert rewards_are_equal([])


class Inner(Settings):
    learning_rate: float = 1.0
    steps: int | None = None
    deadline_s: float = 1.0
    probe: bool = True


class Outer(Settings):
    learner: Inner = Inner()


def test_an_unknown_key_is_named_with_its_path_and_the_nearest_valid_one() -> None:
    with pytest.raises(ConfigError, match=r"learner\.lernrate: unknown key; did you mean 'learning_rate'\?"):
        parse_settings(Outer, {"learner": {"lernrate": 1}}, "")
    with pytest.raises(ConfigError, match=r"learner\.learning_rate: .*'fast'"):
        parse_settings(Outer, {"learner": {"learning_rate": "fast"}}, "")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", float("nan")),
        ("learning_rate", float("inf")),
        ("learning_rate", True),
        ("steps", False),
        ("steps", 10**30),
        ("deadline_s", 1e9),
    ],
)
def test_a_number_is_finite_of_a_size_that_makes_sense_and_not_a_truth(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        parse_settings(Outer, {"learner": {key: value}}, "")
    assert parse_settings(Outer, {"learner": {"probe": False, "steps": 3}}, "").learner.steps == 3
