"""The learner's side of the engine tests: plain transformers models, their log-probs, and a weight source over one."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollout_workers.contract import Engine
from rollout_workers.settings import RolloutSettings
from system.core.weights.sender import Sender, manifest_of
from system.core.weights.wire import Manifest, ParameterInfo, parameters_of

SMALL_KV_BYTES = 128 * 1024**2
WAIT_S = 60.0


def rollout_settings(**changes: object) -> RolloutSettings:
    return RolloutSettings.model_validate(
        {"group_size": 4, "max_tokens": 64, "kv_cache_bytes": SMALL_KV_BYTES, **changes}
    )


@functools.cache
def torch_model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs(folder: Path, tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
    """Of ``tokens[1:]``, each given all before it."""
    with torch.no_grad():
        logits = torch_model(folder)(torch.tensor([list(tokens)])).logits[0, :-1].float() / temperature
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(list(tokens[1:]))[:, None])
    return chosen[:, 0].numpy()


class TorchSource:
    """A transformers model as the sender sees it: names as on disk, a tied head once."""

    def __init__(self, folder: Path) -> None:
        model = torch_model(folder)
        tied = model.config.tie_word_embeddings
        self.tensors = {
            name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")
        }

    def parameters(self) -> list[ParameterInfo]:
        return parameters_of(self.tensors.items(), "float32")

    def gather(self, names: list[str]) -> list[torch.Tensor]:
        return [self.tensors[name] for name in names]


async def connect(sender: Sender, engine: Engine) -> None:
    endpoint = sender.open()
    await asyncio.gather(engine.join_transfer(endpoint, 1, 2, WAIT_S), asyncio.to_thread(sender.connect, 2, WAIT_S))


async def sync(sender: Sender, engine: Engine, folder: Path, version: int, bucket_bytes: int = 20_000) -> Manifest:
    """One weight sync, as the run does it; the buckets cut through layers."""
    source = TorchSource(folder)
    manifest = manifest_of(source, version, bucket_bytes)
    await engine.begin_update(WAIT_S)
    await asyncio.gather(engine.receive(manifest, WAIT_S), asyncio.to_thread(sender.send, manifest, source, WAIT_S))
    await engine.finish_update(version, WAIT_S)
    return manifest


async def probe_gap(engine: Engine, folder: Path, tokens: Sequence[int]) -> float:
    """Largest difference of a probe token's log-prob, engine against transformers."""
    answered = np.asarray(await engine.probe(tokens, WAIT_S))
    return float(np.abs(answered - logprobs(folder, tokens)).max())
