"""What a rank is expected to hold, against the tensors that DeepSpeed and autograd really keep."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from learner import attention
from learner.memory import MicroBatch, ModelShape, RankMemory, activation_bytes, rank_memory
from learner.rank import LearnerPlan, LearnerRank
from learner.settings import LearnerSettings
from system.core.model import ModelSettings
from tests.learner.conftest import make_groups
from tests.tiny_models import byte_tokenizer

REPOSITORY = Path(__file__).parents[2]
SMALL = MicroBatch(tokens=64, row_tokens=32, wanted_tokens=32)
LLAMA = ModelShape(10**9, 24, 2048, 5632, 32000, 32, 2048, 512)


def estimate(
    shape: ModelShape, dtype: str, batch: MicroBatch = SMALL, on_cpu: bool = True, **learner: Any
) -> RankMemory:
    return rank_memory(shape, dtype, LearnerSettings(**learner), batch, on_cpu)


def save_llama(folder: Path, hidden: int, layers: int, vocabulary: int = 320) -> Path:
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, head_dim=64, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def shape_of(folder: Path) -> ModelShape:
    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    return ModelShape.of_config(config, sum(parameter.numel() for parameter in model.parameters()))


def tensors_here() -> list[torch.Tensor]:
    """All tensors of this process, gradients included."""
    gc.collect()
    found = [entry for entry in gc.get_objects() if issubclass(type(entry), torch.Tensor)]
    return found + [entry.grad for entry in found if entry.is_leaf and entry.grad is not None]


def memory_behind(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Bytes by address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def held_after_backward(folder: Path, dtype: str, **learner: Any) -> int:
    """Bytes that a rank's second step holds when its last backward pass is done and its update is not."""
    settings = LearnerSettings(threads=1, tokens_per_microbatch=40, **learner)
    others = tensors_here()  # kept, so that their memory is not given to the rank
    rank = LearnerRank(LearnerPlan(ModelSettings(path=str(folder), dtype=dtype), settings, {"name": "grpo"}))
    rank.setup()
    held: list[int] = []
    backward = rank.engine.backward

    def observed(loss: torch.Tensor, last: bool) -> None:
        backward(loss, last)
        if last:
            memory = memory_behind(tensors_here())
            held.append(sum(memory[address] for address in memory.keys() - memory_behind(others).keys()))

    rank.step(make_groups(), 0, 0)  # creates the optimiser's state
    rank.engine.backward = observed  # type: ignore[method-assign]
    rank.step(make_groups(), 1, 1)
    rank.engine.backward = backward  # type: ignore[method-assign]
    rank.close()
    return held[-1]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("memory") / "llama", hidden=256, layers=3)


STAGES = [(dtype, {"zero": zero}) for dtype in ("bfloat16", "float32") for zero in range(4)]
OFFLOADED = [
    (dtype, {"zero": zero, "offload_optimizer": True}) for dtype in ("bfloat16", "float32") for zero in (1, 2, 3)
]


@pytest.mark.engine
@pytest.mark.parametrize(("dtype", "learner"), STAGES + OFFLOADED, ids=str)
def test_weights_gradients_masters_and_optimiser_are_what_deepspeed_holds(llama, dtype, learner):
    expected = estimate(shape_of(llama), dtype, **learner).state_bytes
    held = held_after_backward(llama, dtype, **learner)
    assert held == pytest.approx(expected, rel=0.03)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "learner"),
    [
        ("float32", {"zero": 2}),
        *(
            pytest.param(dtype, learner, marks=pytest.mark.long)
            for dtype, learner in (
                ("bfloat16", {"zero": 1}),
                ("bfloat16", {"zero": 1, "activation_checkpointing": True}),
                ("bfloat16", {"zero": 1, "offload_optimizer": True}),
                ("float32", {"zero": 0}),
                ("float32", {"zero": 3}),
                ("bfloat16", {"zero": 2}),
                ("bfloat16", {"zero": 3, "offload_optimizer": True}),
                ("float32", {"zero": 2, "offload_optimizer": True}),
            )
        ),
    ],
    ids=str,
)
def test_the_total_is_the_most_that_a_ranks_process_ever_holds(tmp_path_factory, dtype, learner):
    """A process of its own, with an allocator that gives freed memory back at once; the kernel counts."""
    folder = tmp_path_factory.getbasetemp() / "peak-llama"
    if not folder.exists():
        save_llama(folder, hidden=1024, layers=4, vocabulary=16000)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-m", "tests.learner.peak_memory", str(folder), dtype, json.dumps(learner)]
    done = subprocess.run(command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    peak, batch = json.loads(done.stdout.splitlines()[-1])
    assert estimate(shape_of(folder), dtype, MicroBatch(**batch), **learner).total_bytes == pytest.approx(
        peak, rel=0.15
    )


def saved_bytes(model: Any, rows: int, length: int) -> int:
    """What autograd keeps of the body's forward pass, weights left out."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(input_ids=torch.ones(rows, length, dtype=torch.long), use_cache=False)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


EXPERTS = {"moe_intermediate_size": 192, "num_experts": 8, "num_experts_per_tok": 2}
FAMILIES: list[tuple[Any, Any, dict[str, Any]]] = [
    (LlamaConfig, LlamaForCausalLM, {}),
    (Qwen3Config, Qwen3ForCausalLM, {}),
    (Gemma3TextConfig, Gemma3ForCausalLM, {}),
    (Qwen3MoeConfig, Qwen3MoeForCausalLM, EXPERTS),
    (MixtralConfig, MixtralForCausalLM, {"num_local_experts": 4, "num_experts_per_tok": 2}),
]


@pytest.mark.parametrize("length", [64, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("config", "model", "options"), FAMILIES, ids=lambda value: getattr(value, "__name__", ""))
def test_activations_are_what_autograd_keeps(config, model, options, dtype, length):
    sizes = {
        "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, **options,
    }  # fmt: skip
    made = model(config(**sizes, attn_implementation=attention.register())).to(getattr(torch, dtype)).train()
    shape = ModelShape.of_config(made.config.to_dict(), 0)
    batch = MicroBatch(tokens=4 * length, row_tokens=length, wanted_tokens=0)
    assert activation_bytes(shape, dtype, batch, False) == pytest.approx(saved_bytes(made, 4, length), rel=0.03)
    made.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = saved_bytes(made, 4, length)
    one_layer = activation_bytes(replace(shape, layers=1), dtype, batch, False)
    assert activation_bytes(shape, dtype, batch, True) == pytest.approx(inputs + one_layer, rel=0.15)


def test_a_learner_in_bfloat16_takes_22_bytes_a_parameter_and_zero_spreads_them():
    def per_parameter(**learner: Any) -> float:
        memory = estimate(replace(LLAMA, layers=0, vocabulary=0, hidden=0), "bfloat16", **learner)
        return (memory.total_bytes - memory.process_bytes) / LLAMA.parameters

    assert per_parameter(zero=1) == pytest.approx(22)
    assert per_parameter(zero=1, workers=4) == pytest.approx(2 + 6 + 2 + 12 / 4)
    assert per_parameter(zero=2, workers=4) == pytest.approx(2 + (12 + 4) / 4, abs=0.15)


@given(
    zero=st.sampled_from([0, 1, 2, 3]),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    workers=st.integers(1, 64),
    tokens=st.integers(64, 10**6),
    on_cpu=st.booleans(),
)
def test_more_ranks_and_checkpointing_never_take_more_and_more_tokens_never_less(zero, dtype, workers, tokens, on_cpu):
    batch = MicroBatch(tokens, 64, tokens // 2)
    now = estimate(LLAMA, dtype, batch, on_cpu, zero=zero, workers=workers)
    assert estimate(LLAMA, dtype, batch, on_cpu, zero=zero, workers=workers + 1).state_bytes <= now.state_bytes
    checkpointed = estimate(LLAMA, dtype, batch, on_cpu, zero=zero, workers=workers, activation_checkpointing=True)
    assert checkpointed.total_bytes <= now.total_bytes
    larger = MicroBatch(2 * tokens, 64, tokens)
    assert estimate(LLAMA, dtype, larger, on_cpu, zero=zero, workers=workers).total_bytes >= now.total_bytes


@given(dtype=st.sampled_from(["bfloat16", "float32"]), workers=st.integers(2, 64), zero=st.sampled_from([1, 2, 3]))
def test_what_is_offloaded_is_not_on_the_gpu(dtype, workers, zero):
    plain = estimate(LLAMA, dtype, on_cpu=False, zero=zero, workers=workers)
    moved = estimate(LLAMA, dtype, on_cpu=False, zero=zero, workers=workers, offload_optimizer=True)
    assert moved.offloaded_bytes >= moved.masters_bytes + moved.optimiser_bytes > 0
    assert moved.total_bytes - moved.offloaded_bytes < plain.total_bytes


def test_eight_bit_moments_take_a_quarter():
    plain, small = (estimate(LLAMA, "bfloat16", optimizer=name).optimiser_bytes for name in ("adamw", "adamw_8bit"))
    assert small == plain // 4
