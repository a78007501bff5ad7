"""The stream as a real Ray actor, with producers in other processes."""

import asyncio
import os
import time

import pytest

from system.core.errors import DataError, InfrastructureError, WorkerLost
from system.core.records import RecordError
from tests.system.stream_parts import answer, make_limits, make_prompts, produce

pytestmark = pytest.mark.engine


def missing_prompts():
    raise DataError("data[0]: no such file 'sums.jsonl'")


@pytest.fixture(scope="module")
def ray_cluster():
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def start(**limits):
    from system.stream.actor import start_stream

    return start_stream(make_limits(**limits), 2, make_prompts, open_deadline_s=60.0)


async def produce_steps(stream, worker, deadline_s=30.0):
    """Leases and submits until the ledger has nothing more to issue."""
    until_s = time.monotonic() + deadline_s
    while time.monotonic() < until_s:
        leases = await produce(stream, worker, room=2)
        if not leases:
            return


def test_producers_in_other_processes_feed_every_step_to_the_driver(ray_cluster):
    @ray_cluster.remote(num_cpus=0)
    def producer(stream, worker):
        asyncio.run(produce_steps(stream, worker))

    async def scenario():
        stream = await start(steps=5, max_staleness=2)
        producers = [producer.remote(stream, f"w{index}") for index in range(2)]
        trained = []
        for version in range(5):
            taken = await stream.take(version, 30.0)
            trained += taken.group_ids
            assert max(taken.staleness) <= 2
            await stream.commit(version + 1)
        assert sorted(trained) == list(range(10))
        await asyncio.wait_for(asyncio.gather(*producers), 30.0)
        counts = await stream.counts()
        assert (counts["issued"], counts["trained"], counts["leased"]) == (10, 10, 0)

    asyncio.run(scenario())


def test_submits_and_waiting_requests_do_not_hold_up_a_take_or_control(ray_cluster):
    async def scenario():
        stream = await start(max_staleness=0)
        leases = await stream.lease("w0", 2)
        waiting = [asyncio.create_task(stream.lease(f"w{index}", 1)) for index in range(1, 100)]
        twins = [asyncio.create_task(stream.submit("w0", answer(leases[0]))) for _ in range(400)]
        await stream.submit("w0", answer(leases[1]))
        started_s = time.monotonic()
        assert "needs 2 groups" in await stream.why_waiting()
        taken = await stream.take(0, 10.0)
        assert taken.group_ids == (0, 1)
        assert time.monotonic() - started_s < 5.0
        verdicts = await asyncio.gather(*twins)
        assert sorted(set(verdicts)) == ["late_twin", "ready"]
        assert (await stream.counts())["late_twins"] == 399
        assert await asyncio.gather(*waiting) == [[] for _ in waiting]

    asyncio.run(scenario())


def test_errors_cross_the_actor_as_themselves(ray_cluster):
    from system.stream.actor import start_stream

    async def scenario():
        with pytest.raises(DataError, match=r"no such file 'sums.jsonl'") as missing:
            await start_stream(make_limits(), 2, missing_prompts)
        assert missing.value.exit_code == 3
        stream = await start()
        with pytest.raises(RecordError, match="not an Arrow stream"):
            await stream.submit("w0", b"nonsense")
        take = asyncio.create_task(stream.take(0, 60.0))
        started_s = time.monotonic()
        await stream.report_failure("w0", "engine died", workers_left=0)
        with pytest.raises(WorkerLost, match="w0: engine died"):
            await take
        assert time.monotonic() - started_s < 10.0

    asyncio.run(scenario())


def test_a_dead_stream_actor_is_an_infrastructure_error_that_names_it(ray_cluster):
    async def scenario():
        stream = await start()
        take = asyncio.create_task(stream.take(0, 60.0))
        await asyncio.sleep(0.2)
        ray_cluster.kill(stream.handle)
        with pytest.raises(InfrastructureError, match="stream actor: take: its process is gone"):
            await take

    asyncio.run(scenario())
