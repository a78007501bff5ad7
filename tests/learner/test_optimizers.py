"""The optimiser: offloaded or not the same updates, 8-bit moments close to them, refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from learner.optimizers import build_optimizer, check_optimizer
from learner.rank import LearnerRank
from learner.settings import LearnerSettings
from system.core.errors import ConfigError
from system.core.settings import parse_settings
from tests.learner.conftest import make_groups
from tests.learner.test_rank import Weights, assert_same, make_rank, weights_of

STAGES = [(dtype, zero) for dtype in ("float32", "bfloat16") for zero in (1, 2, 3)]
SEVERAL = {"tokens_per_microbatch": 40, "gradient_clip": 0.1, "minibatches_per_step": 2, "weight_decay": 0.1}
"""Several micro-batches an update, several updates a step, every gradient clipped."""


def learn(rank: LearnerRank, steps: range) -> None:
    for step in steps:
        rank.step(make_groups(seed=step), step, step)


def trained(folder: Path, dtype: str, steps: int = 3, **learner: Any) -> Weights:
    rank = make_rank(folder, dtype=dtype, **learner)
    learn(rank, range(steps))
    weights = weights_of(rank)
    rank.close()
    return weights


@pytest.mark.engine
@pytest.mark.parametrize(("dtype", "zero"), STAGES)
def test_an_offloaded_optimiser_makes_the_same_updates(tiny_llama, dtype, zero):
    plain = trained(tiny_llama, dtype, zero=zero, **SEVERAL)
    offloaded = trained(tiny_llama, dtype, zero=zero, offload_optimizer=True, **SEVERAL)
    assert_same(plain, offloaded, atol=1e-6 if dtype == "float32" else 5e-4)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("dtype", "options"),
    [("bfloat16", {"zero": zero, "offload_optimizer": True}) for zero in (1, 2, 3)]
    + [("bfloat16", {"zero": zero, "optimizer": "adamw_8bit"}) for zero in (0, 1, 2, 3)],
    ids=str,
)
def test_a_rank_with_another_optimiser_resumes_bit_by_bit(tiny_llama, tmp_path, dtype, options):
    if options.get("optimizer") == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    rank = make_rank(tiny_llama, dtype=dtype, **options)
    learn(rank, range(2))
    rank.save(tmp_path)
    learn(rank, range(2, 4))
    expected = weights_of(rank)
    rank.close()
    rank = make_rank(tiny_llama, dtype=dtype, **options)
    rank.load(tmp_path)
    learn(rank, range(2, 4))
    assert_same(weights_of(rank), expected)
    rank.close()


@pytest.mark.engine
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_eight_bit_moments_stay_close_to_float32_ones(tiny_llama, zero):
    pytest.importorskip("bitsandbytes")
    start = trained(tiny_llama, "float32", steps=0, zero=zero)
    plain = trained(tiny_llama, "float32", zero=zero)
    small = trained(tiny_llama, "float32", zero=zero, optimizer="adamw_8bit")
    moved = sum(float((plain[name] - start[name]).abs().sum()) for name in plain)
    apart = sum(float((plain[name] - small[name]).abs().sum()) for name in plain)
    assert 0.0 < apart < 0.1 * moved


def test_moments_are_kept_in_eight_bits():
    pytest.importorskip("bitsandbytes")
    module = torch.nn.Linear(128, 128, bias=False)
    optimizer = build_optimizer(module, LearnerSettings(optimizer="adamw_8bit"))
    module(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    assert [optimizer.state[module.weight][name].dtype for name in ("state1", "state2")] == [torch.uint8] * 2


@pytest.mark.gpu
@pytest.mark.engine
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_on_a_gpu_the_offloaded_state_takes_no_gpu_memory(tiny_llama, zero):
    used = {}
    for offload in (False, True):
        rank = make_rank(tiny_llama, dtype="bfloat16", zero=zero, offload_optimizer=offload)
        learn(rank, range(2))
        used[offload] = torch.cuda.memory_allocated()
        states = [entry for state in rank.engine._optimizer.optimizer.state.values() for entry in state.values()]
        devices = {entry.device.type for entry in states if isinstance(entry, torch.Tensor) and entry.ndim > 0}
        assert devices == {"cpu" if offload else "cuda"}
        rank.close()
    assert used[True] < used[False]


def test_without_a_gpu_there_is_nothing_to_offload():
    with pytest.raises(ConfigError, match="learner has no GPU: everything is there already; set it to false"):
        check_optimizer(LearnerSettings(offload_optimizer=True), on_cpu=True)
    check_optimizer(LearnerSettings(offload_optimizer=True), on_cpu=False)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"offload_optimizer": True, "zero": 0}, "needs zero 1, 2 or 3"),
        ({"offload_optimizer": True, "optimizer": "adamw_8bit"}, "exclude each other"),
        ({"optimizer": "sgd"}, "learner.optimizer"),
    ],
)
def test_optimisers_that_cannot_be_are_refused(wrong, named):
    with pytest.raises(ConfigError, match=named):
        parse_settings(LearnerSettings, wrong, "learner")
