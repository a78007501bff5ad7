"""Weights for a sync are those of the checkpoint on disk: same names, same shapes, same values, each once."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from learner.model import load_causal_lm
from learner.weights import PolicyWeights
from system.core.model import ModelSettings
from system.core.weights.wire import ParameterInfo


def tiny_moe(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["tiny_llama", "tied_llama", "moe"])
def test_what_is_sent_is_what_stands_on_disk(kind, request, tmp_path):
    folder = tiny_moe(tmp_path) if kind == "moe" else request.getfixturevalue(kind)
    on_disk = load_file(folder / "model.safetensors")
    source = PolicyWeights(
        load_causal_lm(ModelSettings(path=str(folder), dtype="float32")), lambda _: nullcontext(), keep_copies=False
    )
    infos = source.parameters()
    assert {info.name for info in infos} == set(on_disk)
    assert len(infos) == len(on_disk)
    for info in infos:
        (tensor,) = source.gather([info.name])
        assert info == ParameterInfo(info.name, "float32", tuple(on_disk[info.name].shape))
        assert torch.equal(tensor, on_disk[info.name])


def test_gathered_weights_are_the_current_ones_after_a_release(tmp_path):
    model = load_causal_lm(ModelSettings(path=str(tiny_moe(tmp_path)), dtype="float32"))
    source = PolicyWeights(model, lambda _: nullcontext(), keep_copies=True)
    name = next(info.name for info in source.parameters() if "experts" in info.name)
    before = source.gather([name])[0].clone()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    source.release()
    assert torch.equal(source.gather([name])[0], before + 1.0)
