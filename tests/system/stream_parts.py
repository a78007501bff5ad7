"""Prompts, groups and an honest worker for tests of the stream and of what is written about its groups."""

import numpy as np

from system.core.protocols import Lease, LeaseSource, Prompt
from system.core.records import Group, Row
from system.ledger_facts import LedgerLimits


def make_prompt(position: int) -> Prompt:
    """Ten different prompts, over and over: equal prompts must form groups of their own."""
    return Prompt(prompt_id=f"sum/{position % 10}", source="sums", tokens=(1, 2, position % 10), text=f"{position}+1?")


def make_prompts():
    return make_prompt


def make_limits(**changes) -> LedgerLimits:
    return LedgerLimits(**{"groups_per_step": 2, "max_staleness": 1, "deadline_s": 60.0, "grace_s": 0.0, **changes})


def make_row(group_id=0, trajectory_id=0, reward=1.0, length=3, version=0, **changes) -> Row:
    settings = {
        "group_id": group_id,
        "trajectory_id": trajectory_id,
        "prompt_id": f"sum/{group_id % 10}",
        "source": "sums",
        "prompt_tokens": [1, 2, 3],
        "completion_tokens": np.arange(10, 10 + length),
        "rollout_logprobs": np.full(length, -0.5),
        "versions": np.full(length, version),
        "finish_reason": "stop",
        "seed": 7 + trajectory_id,
        "worker": "w0",
        "completion_text": f"answer {trajectory_id} é",
        "reward": reward,
        "reward_parts": {} if reward is None else {"answer": reward},
        **changes,
    }
    return Row(**settings)


def make_group(group_id=0, rewards=(1.0, 0.0), version=0, **changes) -> Group:
    return Group(
        tuple(make_row(group_id, index, reward, version=version, **changes) for index, reward in enumerate(rewards))
    )


def answer(lease: Lease, rewards=(1.0, 0.0), version=None) -> bytes:
    """The bytes of a group for ``lease``, sampled at its version unless told otherwise."""
    group = make_group(
        lease.group_id,
        rewards,
        version=lease.version if version is None else version,
        incarnation=lease.incarnation,
        prompt_id=lease.prompt.prompt_id,
    )
    return group.to_bytes()


async def produce(stream: LeaseSource, worker: str = "w0", room: int = 4, rewards=(1.0, 0.0)) -> list[Lease]:
    """Leases once and hands everything in."""
    leases = await stream.lease(worker, room)
    for lease in leases:
        await stream.submit(worker, answer(lease, rewards))
    return leases
