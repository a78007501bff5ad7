"""Allocations that really fail in a rank: who, where, how much, what to lower; the other ranks are not left waiting."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from learner.out_of_memory import Place, is_out_of_memory, mends
from learner.pool import LearnerPool
from learner.rank import LearnerPlan, LearnerRank
from learner.settings import LearnerSettings
from system.core.errors import LearnerLost, OutOfMemory
from system.core.model import ModelSettings
from system.core.records import Group
from tests.learner.conftest import make_groups, make_row
from tests.learner.test_pool_actors import OPTIONS, pids_of, ray_here, runner  # noqa: F401 (fixtures)

ABSURD_ELEMENTS = 1 << 44
"""64 TiB in float32: more than any address space that a process is given."""


def plan(folder: Path, **learner: Any) -> LearnerPlan:
    settings = LearnerSettings(threads=1, **learner)
    return LearnerPlan(ModelSettings(path=str(folder), dtype="float32"), settings, {"name": "grpo"})


def started(folder: Path, **learner: Any) -> LearnerRank:
    rank = LearnerRank(plan(folder, **learner))
    rank.setup()
    return rank


def allocate_too_much(*_: Any) -> None:
    torch.empty(ABSURD_ELEMENTS)


def in_forward(rank: LearnerRank) -> None:
    rank.model.causal_lm.lm_head.register_forward_hook(allocate_too_much)


def in_backward(rank: LearnerRank) -> None:
    rank.model.causal_lm.lm_head.register_full_backward_hook(allocate_too_much)


def in_the_third_pass(rank: LearnerRank) -> None:
    passes = []

    def hook(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 3:
            allocate_too_much()

    rank.model.causal_lm.base_model.register_forward_hook(hook)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("where", "said"),
    [
        (in_forward, r"micro-batch 1 of \d+ \(learning, "),
        (in_backward, r"micro-batch 1 of \d+ \(learning, "),
        (in_the_third_pass, r"micro-batch 3 of \d+ \(learning, "),
    ],
)
def test_a_micro_batch_that_does_not_fit_is_named_with_the_setting_to_lower(
    tiny_llama: Path, where: Callable[[LearnerRank], None], said: str
) -> None:
    rank = started(tiny_llama, tokens_per_microbatch=30)
    where(rank)
    with pytest.raises(OutOfMemory, match=said) as failure:
        rank.step(make_groups(), 0, 0)
    text = str(failure.value)
    assert "learner rank 0" in text
    assert "tokens with padding, completions: " in text
    assert f"you tried to allocate {4 * ABSURD_ELEMENTS} bytes" in text
    assert "lower learner.tokens_per_microbatch (now 30), or set learner.activation_checkpointing: true" in text
    assert failure.value.exit_code == 4
    assert "\n" not in text
    rank.close()


@pytest.mark.engine
def test_log_probs_without_gradient_are_told_from_learning(tiny_llama: Path) -> None:
    rank = started(tiny_llama, epochs_per_step=2)
    in_forward(rank)
    with pytest.raises(OutOfMemory, match=r"micro-batch 1 of 1 \(log-probs, ") as failure:
        rank.step(make_groups(), 0, 0)
    assert "activation_checkpointing" not in str(failure.value)
    rank.close()


@pytest.mark.engine
def test_an_update_that_does_not_fit_is_told_from_a_micro_batch(tiny_llama: Path) -> None:
    rank = started(tiny_llama, zero=1)
    rank.engine._optimizer.optimizer.register_step_pre_hook(allocate_too_much)
    with pytest.raises(
        OutOfMemory, match=r"out of memory at the optimiser's update: .*raise learner.workers \(now 1\)"
    ):
        rank.step(make_groups(), 0, 0)
    rank.close()


@pytest.mark.engine
@pytest.mark.slow
def test_a_rank_without_memory_is_named_and_the_others_do_not_hang(
    ray_here: None,  # noqa: F811
    tiny_llama: Path,
    runner: asyncio.Runner,  # noqa: F811
) -> None:
    """Rank 1 may have 300 MB more of address space; what it is given to learn needs several times as much."""
    generator = np.random.default_rng(0)
    groups = [
        Group(tuple(make_row(generator, number, member, float(member % 2), length=400) for member in range(8)))
        for number in range(32)
    ]

    async def scenario() -> None:
        pool = LearnerPool(plan(tiny_llama, workers=2, zero=3, tokens_per_microbatch=10**6), actor_options=OPTIONS)
        await pool.start()
        pids = await pids_of(pool)
        limit = psutil.Process(pids[1]).memory_info().vms + 300_000_000
        resource.prlimit(pids[1], resource.RLIMIT_AS, (limit, limit))
        started_s = time.monotonic()
        with pytest.raises(OutOfMemory, match=r"learner rank 1: out of memory at micro-batch 1 of 1 \(learning, "):
            await pool.step(groups, 0, 0)
        assert time.monotonic() - started_s < 60.0
        with pytest.raises(LearnerLost, match="failed before: OutOfMemory: learner rank 1"):
            await pool.probe([7, 8, 9])
        await pool.close()
        closed_s = time.monotonic()
        while any(psutil.pid_exists(pid) for pid in pids):
            assert time.monotonic() - closed_s < 10.0
            await asyncio.sleep(0.05)

    runner.run(scenario())


@pytest.mark.parametrize(
    ("failure", "memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("can't allocate memory"), False),
    ],
)
def test_only_failed_allocations_count(failure: Exception, memory: bool) -> None:
    assert is_out_of_memory(failure) == memory


PLACE = Place("learning", 1, 3, (4, 4, 5), 4096)


@pytest.mark.parametrize(
    ("settings", "place", "on_cpu", "first"),
    [
        ({}, PLACE, True, "lower learner.tokens_per_microbatch (now 4096)"),
        ({}, Place("learning", 1, 1, (4,), 9000), True, "set learner.activation_checkpointing: true"),
        ({"activation_checkpointing": True}, Place("learning", 1, 1, (4,), 9000), True, "shorten completions"),
        ({"zero": 1, "workers": 4}, "the optimiser's update", True, "raise learner.zero (now 1)"),
        ({"zero": 3, "workers": 4}, "the optimiser's update", False, "set learner.offload_optimizer: true"),
        ({"zero": 3, "workers": 4}, "the optimiser's update", True, "raise learner.workers (now 4)"),
        ({"zero": 0}, "the start", True, "set learner.zero to 1 or more"),
    ],
)
def test_the_first_advice_is_one_that_helps(settings: dict[str, Any], place: Any, on_cpu: bool, first: str) -> None:
    advice = mends(LearnerSettings(**settings), place, on_cpu)
    assert advice[0].startswith(first)
    assert not any("offload" in entry for entry in advice if on_cpu)
