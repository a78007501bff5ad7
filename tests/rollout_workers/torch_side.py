"""The learner's side of the engine tests: plain transformers models, their log-probs, and a weight source over one."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout_workers.contract import Engine
from rollout_workers.settings import RolloutSettings
from system.core.weights.sender import Sender, manifest_of
from system.core.weights.wire import Manifest, ParameterInfo, new_buffer, pack, parameters_of, seal

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
    """A model's folder as the sender sees it: names and tensors as on disk, a tied head once."""

    def __init__(self, folder: Path) -> None:
        self.tensors = load_file(folder / "model.safetensors")

    def parameters(self) -> list[ParameterInfo]:
        return parameters_of(self.tensors.items(), "float32")

    def gather(self, names: list[str]) -> list[torch.Tensor]:
        return [self.tensors[name] for name in names]


def send_some(sender: Sender, manifest: Manifest, source: TorchSource, count: int, flipped: int | None = None) -> None:
    """Sends ``count`` buckets, a byte of bucket ``flipped`` changed after it was sealed; then the sender leaves."""
    for bucket in manifest.buckets()[:count]:
        flat = new_buffer(bucket)
        pack(bucket, source.gather(bucket.names), flat)
        seal(bucket, manifest.version, flat)
        if bucket.index == flipped:
            flat[bucket.payload_bytes // 2] ^= 1
        sender._group.broadcast(flat, WAIT_S)
    sender.close()


async def connect(sender: Sender, engine: Engine, world: int = 1) -> None:
    """Builds a transfer group of the sender and an engine of ``world`` processes."""
    endpoint = sender.open()
    joining = engine.join_transfer(endpoint, 1, 1 + world, WAIT_S)
    await asyncio.gather(joining, asyncio.to_thread(sender.connect, 1 + world, WAIT_S))


async def sync(sender: Sender, engine: Engine, folder: Path, version: int, bucket_bytes: int = 20_000) -> Manifest:
    """One weight sync, as the run does it; the buckets cut through layers."""
    source = TorchSource(folder)
    manifest = manifest_of(source, version, bucket_bytes)
    await engine.begin_update(WAIT_S)
    await asyncio.gather(engine.receive(manifest, WAIT_S), asyncio.to_thread(sender.send, manifest, source, WAIT_S))
    await engine.finish_update(version, WAIT_S)
    return manifest


async def probe_gaps(engine: Engine, folder: Path, tokens: Sequence[int]) -> np.ndarray:
    """Differences of the probe tokens' log-probs, engine against transformers."""
    answered = np.asarray(await engine.probe(tokens, WAIT_S))
    return np.abs(answered - logprobs(folder, tokens))


async def probe_gap(engine: Engine, folder: Path, tokens: Sequence[int]) -> float:
    """The largest of them."""
    return float((await probe_gaps(engine, folder, tokens)).max())
