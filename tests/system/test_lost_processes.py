"""What is said of an actor that is gone: killed from outside, or by Ray for want of memory. Real clusters, small."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCRIPT = """
import asyncio, os, signal, sys
import ray
from system.core.deadlines import answer
from system.core.errors import LearnerLost

class Holder:
    async def pid(self):
        return os.getpid()

    async def hold(self):
        held = bytearray(200_000_000)
        await asyncio.sleep(60)
        return len(held)

async def main():
    holder = ray.remote(Holder).options(num_cpus=0).remote()
    if sys.argv[1] == "kill":
        os.kill(await answer(holder.pid.remote(), 60, "pid"), signal.SIGKILL)
    try:
        await answer(holder.hold.remote(), 60, "learner rank 3", LearnerLost)
    except LearnerLost as failure:
        print("SAID", failure)

ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
asyncio.run(main())
"""


def said_of(how: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=180,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert len(lines) == 1, done.stderr[-2000:]
    return lines[0]


def test_an_actor_killed_from_outside_is_lost_and_the_message_says_where_to_look() -> None:
    said = said_of("kill")
    assert said.startswith("SAID learner rank 3: its process is gone: ")
    assert "whether the kernel did it because memory ran out, dmesg on machine" in said


def test_an_actor_that_ray_ended_for_memory_is_said_to_be() -> None:
    """Ray ends actors once a machine's memory is used to a share that any machine exceeds."""
    said = said_of("hold", RAY_memory_usage_threshold="0.01", RAY_memory_monitor_refresh_ms="50")
    assert said.startswith(
        "SAID learner rank 3: its process is gone: Ray ended it because its machine ran out of memory"
    )
    assert "GB used" in said
