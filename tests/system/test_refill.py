"""Dynamic sampling: groups without signal give way to the next prompts, in prompt order, up to a cap."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from system.core.errors import DataError
from system.ledger import GroupLedger
from system.parts import ledger_limits
from system.recipe import load_recipe
from system.stream.core import StreamCore
from system.stream.head import GroupHead
from tests.system.stream_parts import make_group, make_limits, make_prompt, produce

RECIPE = """
run: {steps: 3}
model: {path: models/m}
data: [{source: reasoning_gym, task: chain_sum}]
rewards: [{name: answer, use: exact_last_integer}]
"""


@given(seed=st.integers(0, 10_000), groups_per_step=st.integers(1, 4), share=st.sampled_from([0.3, 0.6, 1.0]))
@settings(max_examples=60, deadline=None)
def test_a_step_holds_the_first_prompts_with_signal_whatever_order_they_finish_in(seed, groups_per_step, share):
    source = random.Random(seed)
    signal = [source.random() < share for _ in range(400)]
    limits = make_limits(
        groups_per_step=groups_per_step, max_staleness=0, refill_zero_signal=True, refill_limit=1_000, steps=3
    )
    ledger, leased, trained = GroupLedger(limits), [], []
    for version in range(3):
        while (taken := ledger.take(version)) is None:
            leased += [ticket.group_id for ticket in ledger.lease("w0", source.randint(1, 3), 0.0)]
            group_id = leased.pop(source.randrange(len(leased)))
            verdict = ledger.submit("w0", group_id, version, 2, not signal[group_id], 0, 0.0)
            assert verdict == ("ready" if signal[group_id] else "zero_signal")
        trained += taken
        ledger.commit(version + 1)
        ledger.check_conservation()
    assert trained == [group_id for group_id in range(400) if signal[group_id]][: 3 * groups_per_step]


def test_what_cannot_be_filled_says_what_the_rewards_were_and_how_many_groups_it_cost():
    async def scenario():
        stream = StreamCore(make_limits(refill_zero_signal=True, refill_limit=3), 2, make_prompt)
        rewards = iter([(1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 1.0), None])
        while (pair := next(rewards)) is not None:
            await produce(stream, room=1, rewards=pair)
        with pytest.raises(DataError) as failure:
            await stream.take(0, 1.0)
        return str(failure.value), await stream.counts()

    message, counts = asyncio.run(scenario())
    assert "6 groups were dropped while it needed 2 and 1 were ready" in message
    assert "zero_signal 6 (all rewards 1 in 4, all rewards 0 in 2, last: group 6" in message
    assert "stream.refill_limit x groups_per_step = 3 x 2" in message
    assert "objective.zero_variance: keep" in message
    assert (counts["issued"], counts["dropped"], counts["ready"]) == (7, {"zero_signal": 6}, 1)


def test_a_margin_makes_small_differences_no_signal():
    group = make_group(3, rewards=(0.5, 0.6)).to_bytes()
    assert not GroupHead.from_bytes(group).zero_signal
    head = GroupHead.from_bytes(group, margin=0.2)
    assert (head.zero_signal, head.silent_cause) == (True, "rewards differ by less than 0.2")

    async def scenario():
        stream = StreamCore(make_limits(refill_zero_signal=True, refill_margin=0.2), 2, make_prompt)
        await produce(stream, room=1, rewards=(0.5, 0.6))
        await produce(stream, room=1, rewards=(0.3, 0.5))
        return await stream.counts()

    counts = asyncio.run(scenario())
    assert (counts["ready"], counts["dropped"]) == (1, {"zero_signal": 1})


@pytest.mark.parametrize(
    ("objective", "refills", "margin"),
    [
        ("{name: grpo}", False, 0.0),
        ("{name: dapo}", True, 0.0),
        ("{name: dapo, zero_variance: keep}", False, 0.0),
        ("{name: grpo, zero_variance: refill, margin: 0.3}", True, 0.3),
        ("{name: grpo, zero_variance: refill, margin_confidence: 0.2, reward_temperature: 2.0}", True, 0.8109302162),
    ],
)
def test_the_stream_refills_as_the_objective_says_also_by_default(tmp_path, objective, refills, margin):
    path = tmp_path / "r.yaml"
    path.write_text(f"{RECIPE}objective: {objective}\n")
    limits = ledger_limits(load_recipe(path))
    assert (limits.refill_zero_signal, limits.refill_margin) == (refills, pytest.approx(margin))


@pytest.mark.parametrize(
    ("objective", "group_size", "staleness", "filled"),
    [
        ("{name: grpo}", 8, 4, {"correction": "token_tis"}),
        ("{name: gspo}", 8, 4, {"correction": "sequence_tis"}),
        ("{name: gspo}", 8, 0, {"correction": "none"}),
        ("{name: two_grpo, correction: k3_mask}", 2, 4, {"correction": "k3_mask", "lone_responses": "drop"}),
        ("{name: grpo, correction: k3_mask}", 4, 4, {"correction": "k3_mask"}),
        ("{name: unknown}", 8, 4, {"correction": "token_tis"}),
    ],
)
def test_a_recipe_is_filled_in_with_what_its_objective_bears(tmp_path, objective, group_size, staleness, filled):
    path = tmp_path / "r.yaml"
    path.write_text(f"{RECIPE}objective: {objective}\nrollout: {{group_size: {group_size}}}\n")
    recipe = load_recipe(path, [f"stream.max_staleness={staleness}"])
    assert recipe.objective.options == filled
