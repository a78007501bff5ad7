"""Weights for a sync are those of the checkpoint on disk, each once; ranks that gather together also stop together."""

from __future__ import annotations

import queue
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from learner.model import load_causal_lm
from learner.weights import PolicyWeights
from system.core.model import ModelSettings
from system.core.weights.wire import ParameterInfo, TransferBroken


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


class TwoInThreads:
    """A world of two whose broadcast is a queue."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def broadcast(self, value: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            self._told.put(value)
            return value
        return self._told.get(timeout=10.0)


@pytest.mark.parametrize("breaks_at", [0, 1, 5, None])
def test_the_other_ranks_gather_what_rank_0_gathers_and_stop_where_it_stops(tiny_llama, breaks_at):
    model = load_causal_lm(ModelSettings(path=str(tiny_llama), dtype="float32"))
    gathered: tuple[list[int], list[int]] = ([], [])

    def source(rank: int) -> PolicyWeights:
        def whole(parameters: list[torch.nn.Parameter]) -> nullcontext[None]:
            gathered[rank].extend(id(parameter) for parameter in parameters)
            return nullcontext()

        return PolicyWeights(model, whole, keep_copies=True)

    weights, following, world = source(0), source(1), TwoInThreads()
    follower = threading.Thread(target=following.follow, args=(world,))
    follower.start()
    try:
        with weights.lead(world) as leading:
            for number, info in enumerate(leading.parameters()):
                if number == breaks_at:
                    raise TransferBroken("the receiver left")
                leading.gather([info.name])
    except TransferBroken:
        assert breaks_at is not None
    follower.join(10.0)
    assert not follower.is_alive()
    assert gathered[0] == gathered[1]
    assert len(gathered[0]) == (len(weights.parameters()) if breaks_at is None else breaks_at)
