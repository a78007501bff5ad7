"""The stream in one process: waiting, waking, failing."""

import asyncio
import inspect
import threading
import time

import pytest

from system.core.clock import SimulatedClock
from system.core.errors import DataError, WorkerLost
from system.core.records import Group, RecordError
from system.stream import StreamClient, StreamCore
from system.stream.head import GroupHead
from tests.system.stream_parts import answer, make_group, make_limits, make_prompt, make_row, produce


def make_stream(prompts=make_prompt, clock=None, group_size=2, **limits) -> StreamCore:
    return StreamCore(make_limits(**limits), group_size, prompts, clock=clock)


def test_a_step_arrives_in_issue_order_with_its_bytes_and_its_staleness():
    async def scenario():
        stream = make_stream()
        leases = await stream.lease("w0", 4)
        assert [lease.prompt.prompt_id for lease in leases] == ["sum/0", "sum/1", "sum/2", "sum/3"]
        for lease in reversed(leases):
            assert await stream.submit("w0", answer(lease)) == "ready"
        taken = await stream.take(0, 1.0)
        assert taken.group_ids == (0, 1)
        assert [Group.from_bytes(payload).group_id for payload in taken.groups] == [0, 1]
        await stream.commit(1)
        taken = await stream.take(1, 1.0)
        assert (taken.group_ids, taken.staleness) == ((2, 3), (1, 1))

    asyncio.run(scenario())


def test_equal_prompts_form_groups_of_their_own():
    async def scenario():
        stream = make_stream(groups_per_step=11)
        leases = await produce(stream, room=11)
        assert leases[0].prompt.prompt_id == leases[10].prompt.prompt_id
        taken = await stream.take(0, 1.0)
        assert taken.group_ids == tuple(range(11))

    asyncio.run(scenario())


def test_a_waiting_take_is_woken_by_the_group_that_fills_the_step():
    async def scenario():
        stream = make_stream()
        leases = await stream.lease("w0", 2)
        take = asyncio.create_task(stream.take(0, 10.0))
        await asyncio.sleep(0.05)
        assert not take.done()
        started_s = time.monotonic()
        for lease in leases:
            await stream.submit("w0", answer(lease))
        taken = await take
        assert time.monotonic() - started_s < 0.4
        assert taken.wait_s >= 0.04
        assert taken.idle_s == 0.0

    asyncio.run(scenario())


def test_a_waiting_worker_gets_work_as_soon_as_the_step_is_committed():
    async def scenario():
        stream = make_stream(max_staleness=0)
        await produce(stream)
        request = asyncio.create_task(stream.lease("w0", 4))
        await stream.take(0, 1.0)
        await asyncio.sleep(0.05)
        assert not request.done()
        started_s = time.monotonic()
        await stream.commit(1)
        leases = await request
        assert time.monotonic() - started_s < 0.4
        assert [(lease.group_id, lease.version) for lease in leases] == [(2, 1), (3, 1)]

    asyncio.run(scenario())


def test_a_wait_in_one_thread_is_woken_from_another():
    stream = make_stream()
    leases = asyncio.run(stream.lease("w0", 2))
    found = []
    waiter = threading.Thread(target=lambda: found.append(asyncio.run(stream.take(0, 20.0))))
    waiter.start()
    time.sleep(0.05)
    started_s = time.monotonic()
    for lease in leases:
        asyncio.run(stream.submit("w0", answer(lease)))
    waiter.join(timeout=10)
    assert found[0].group_ids == (0, 1)
    assert time.monotonic() - started_s < 0.4


def test_takes_and_leases_end_at_their_deadlines_with_nothing():
    async def scenario():
        clock = SimulatedClock()
        stream = make_stream(clock=clock, max_staleness=0)
        await stream.lease("w0", 9)
        take = asyncio.create_task(stream.take(0, 3.0))
        lease = asyncio.create_task(stream.lease("w1", 9))
        for _ in range(14):
            await asyncio.sleep(0)
            await clock.advance_s(0.25)
        await asyncio.sleep(0)
        assert lease.done()
        assert lease.result() == []
        assert take.done()
        assert take.result() is None

    asyncio.run(scenario())


def test_an_expired_lease_goes_to_the_worker_that_waits_for_work():
    async def scenario():
        clock = SimulatedClock()
        stream = make_stream(clock=clock, max_staleness=0, deadline_s=1.0)
        await stream.lease("silent", 9)
        request = asyncio.create_task(stream.lease("w1", 9))
        for _ in range(8):
            await asyncio.sleep(0)
            await clock.advance_s(0.25)
        leases = await request
        assert [(lease.group_id, lease.attempt) for lease in leases] == [(0, 1), (1, 1)]

    asyncio.run(scenario())


def test_idle_time_is_the_part_of_the_wait_in_which_nobody_held_a_lease():
    async def scenario():
        clock = SimulatedClock()
        stream = make_stream(clock=clock)

        async def pass_time(seconds):
            for _ in range(int(seconds / 0.5)):
                await asyncio.sleep(0)
                await clock.advance_s(0.5)
            await asyncio.sleep(0)

        take = asyncio.create_task(stream.take(0, 60.0))
        await pass_time(2.0)
        leases = await stream.lease("w0", 2)
        await pass_time(3.0)
        for lease in leases:
            await stream.submit("w0", answer(lease))
        taken = await take
        assert taken.wait_s == pytest.approx(5.0)
        assert taken.idle_s == pytest.approx(2.0, abs=0.6)

    asyncio.run(scenario())


def test_with_no_worker_left_the_take_fails_at_once_with_the_first_cause():
    async def scenario():
        stream = make_stream()
        await stream.lease("w0", 1)
        await stream.lease("w1", 1)
        take = asyncio.create_task(stream.take(0, 60.0))
        await asyncio.sleep(0.02)
        await stream.report_failure("w0", "engine died: out of memory", workers_left=1)
        await asyncio.sleep(0.02)
        assert not take.done()
        started_s = time.monotonic()
        await stream.report_failure("w1", "killed", workers_left=0)
        with pytest.raises(WorkerLost, match=r"no rollout worker is left.*w0: engine died: out of memory"):
            await take
        assert time.monotonic() - started_s < 1.0

    asyncio.run(scenario())


def test_a_full_step_is_still_taken_when_no_worker_is_left():
    async def scenario():
        stream = make_stream()
        await produce(stream, room=2)
        await stream.report_failure("w0", "killed", workers_left=0)
        assert (await stream.take(0, 1.0)).group_ids == (0, 1)

    asyncio.run(scenario())


def test_a_worker_that_comes_back_ends_the_outage():
    async def scenario():
        stream = make_stream()
        await stream.report_failure("w0", "killed", workers_left=0)
        await stream.report_recovery(workers_left=1)
        assert await stream.take(0, 0.01) is None
        await produce(stream, room=2)
        assert (await stream.take(0, 1.0)).group_ids == (0, 1)

    asyncio.run(scenario())


def test_a_request_of_a_worker_that_died_meanwhile_gets_no_lease():
    async def scenario():
        stream = make_stream(max_staleness=0)
        await stream.lease("w0", 1)
        await stream.lease("w1", 1)
        request = asyncio.create_task(stream.lease("w0", 4))
        await asyncio.sleep(0.02)
        await stream.revoke("w0", "process gone")
        assert await request == []
        assert [lease.group_id for lease in await stream.lease("w1", 4)] == [0]

    asyncio.run(scenario())


def test_an_error_of_the_prompts_reaches_the_learner_as_it_is():
    def broken(position):
        if position >= 1:
            raise DataError("source 'sums': file vanished")
        return make_prompt(position)

    async def scenario():
        stream = make_stream(prompts=broken)
        assert await stream.lease("w0", 2) == []
        with pytest.raises(DataError, match="file vanished"):
            await stream.take(0, 10.0)
        counts = await stream.counts()
        assert (counts["issued"], counts["leased"]) == (2, 2)

    asyncio.run(scenario())


def test_a_step_that_is_always_filtered_out_ends_in_an_error():
    async def scenario():
        stream = make_stream(refill_zero_signal=True, refill_limit=2)
        take = asyncio.create_task(stream.take(0, 30.0))
        for _ in range(4):
            await produce(stream, room=1, rewards=(1.0, 1.0))
        with pytest.raises(DataError, match="zero_signal 4"):
            await take

    asyncio.run(scenario())


def test_given_up_groups_are_handed_out_again():
    async def scenario():
        stream = make_stream()
        await stream.lease("w0", 1)
        await stream.give_up("w0", 0, "generation_failed", "engine restarted")
        (again,) = await stream.lease("w1", 1)
        assert (again.group_id, again.attempt, again.prompt.prompt_id) == (0, 1, "sum/0")

    asyncio.run(scenario())


def test_going_back_discards_what_was_ready_and_issues_it_again_under_the_new_version():
    async def scenario():
        stream = make_stream()
        await produce(stream, room=2)
        await stream.take(0, 1.0)
        await stream.commit(1)
        saved = await stream.snapshot()
        await produce(stream, room=2)
        await stream.restore(saved, version=5, incarnation=1)
        await stream.release()
        assert await stream.take(5, 0.01) is None
        leases = await produce(stream, room=2)
        assert [(lease.group_id, lease.version, lease.incarnation) for lease in leases] == [(2, 5, 1), (3, 5, 1)]
        assert (await stream.take(5, 1.0)).group_ids == (2, 3)

    asyncio.run(scenario())


def test_an_empty_snapshot_is_the_start_of_the_run():
    async def scenario():
        stream = StreamCore(make_limits(), 2, make_prompt, incarnation=1)
        await stream.restore({}, version=3, incarnation=1)
        await stream.release()
        leases = await stream.lease("w0", 1)
        assert [(lease.group_id, lease.version, lease.incarnation) for lease in leases] == [(0, 3, 1)]

    asyncio.run(scenario())


def test_after_going_back_nothing_is_leased_until_the_restored_weights_are_out():
    async def scenario():
        stream = make_stream()
        waiting = asyncio.create_task(stream.lease("w1", 1))
        await produce(stream, room=4)
        snapshot = await stream.snapshot()
        await stream.restore(snapshot, version=1, incarnation=1)
        assert await stream.lease("w0", 1) == []
        assert await waiting == []
        asking = asyncio.create_task(stream.lease("w0", 1))
        await asyncio.sleep(0.05)
        await stream.release()
        assert [lease.version for lease in await asking] == [1]

    asyncio.run(scenario())


def test_workers_that_ask_share_the_work_and_a_busy_one_is_not_waited_for():
    async def scenario():
        stream = make_stream(groups_per_step=4, max_staleness=1)
        first, second = asyncio.create_task(stream.lease("w0", 1)), asyncio.create_task(stream.lease("w1", 1))
        assert len(await first) == len(await second) == 1
        assert len(await stream.lease("w0", 99)) == 3
        assert len(await stream.lease("w1", 99)) == 3
        await asyncio.sleep(1.1)
        for group_id in range(4):
            worker = "w0" if group_id in (0, 2, 3) else "w1"
            await stream.give_up(worker, group_id, "cancelled", "to have something to hand out")
        assert len(await stream.lease("w0", 99)) == 4

    asyncio.run(scenario())


def test_finished_groups_leave_nothing_behind():
    async def scenario():
        stream = make_stream(max_staleness=2)
        for version in range(200):
            await produce(stream, room=6)
            await stream.take(version, 1.0)
            await stream.commit(version + 1)
            assert len(stream._payloads) <= 4
        assert len(stream._ledger._entries) <= 6
        assert len(stream._changes._watches) == 0

    asyncio.run(scenario())


def test_what_is_not_one_group_is_refused():
    two = make_group(0).to_bytes()

    async def scenario():
        stream = make_stream()
        await stream.lease("w0", 1)
        with pytest.raises(RecordError, match="not an Arrow stream"):
            await stream.submit("w0", b"nonsense")
        with pytest.raises(RecordError, match="3 trajectories, group_size is 2"):
            await stream.submit("w0", make_group(0, rewards=(1.0, 0.0, 0.5)).to_bytes())
        assert await stream.submit("w0", two) == "ready"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("rewards", "scored", "zero_signal"),
    [((1.0, 0.0), 2, False), ((0.3, 0.3), 2, True), ((1.0, None), 1, True), ((None, None), 0, True)],
)
def test_the_head_of_a_group_agrees_with_its_rows(rewards, scored, zero_signal):
    rows = [
        make_row(5, index, reward, versions=[4 + index, 3, 6], incarnation=2) for index, reward in enumerate(rewards)
    ]
    group = Group(tuple(rows))
    head = GroupHead.from_bytes(group.to_bytes())
    assert (head.group_id, head.incarnation, head.trajectories) == (5, 2, 2)
    assert (
        (head.scored, head.zero_signal)
        == (scored, zero_signal)
        == (len(group.scored_rewards()), group.has_zero_signal())
    )
    assert head.oldest_version == group.oldest_version == 3


def test_the_client_has_every_method_of_the_core_with_the_same_arguments():
    def public(kind):
        return {
            name: list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(kind, inspect.iscoroutinefunction)
            if not name.startswith("_") and name != "open"
        }

    assert public(StreamClient) == public(StreamCore)


def test_a_step_that_no_reward_could_judge_says_what_the_reward_said():
    """The message names the reward, its error and the mend, not the difficulty of the prompts."""
    said = '{"reward_error": {"style": {"code": "raised", "message": "RuntimeError: bang"}}}'

    async def scenario():
        stream = make_stream(groups_per_step=1, max_staleness=0, refill_limit=2)
        for _ in range(2):
            (lease,) = await stream.lease("w0", 1)
            group = make_group(lease.group_id, rewards=(None, None), metadata=said)
            assert await stream.submit("w0", group.to_bytes()) == "too_few_scored"
        with pytest.raises(DataError, match=r"reward 'style' raised: RuntimeError: bang.*mend the reward"):
            await stream.take(0, 1.0)

    asyncio.run(scenario())
