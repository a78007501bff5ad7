"""The engine's end of a weight sync: vLLM weight-transfer backends that receive sealed buckets and verify each.

``CheckedWeightTransferEngine`` is the bucket loop and the reload's life cycle; a backend adds only its carrier. Between
``start`` and ``finish`` the model is in pieces, so the caller keeps generation paused from before ``start`` until
``finish`` succeeded. After a broken transfer ``finish`` closes vLLM's half-open reload and ``start`` opens a new one;
after rejected weights the engine is to be discarded.

Nothing raises into vLLM: an exception would lose its class on the way, and of an engine with several processes vLLM
reads replies only up to the first that failed, taking the rest for those of the next call. So each call keeps its
failure, and the caller asks for the ``Report`` after each. Runs in vLLM's worker processes; alone here, it imports
vLLM.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, Protocol

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.utils.nccl import unpinned_nccl_env

from system.core.weights.gloo import GlooGroup
from system.core.weights.inline import InlineGroup
from system.core.weights.nccl import NcclGroup
from system.core.weights.wire import (
    Broadcast,
    Bucket,
    Endpoint,
    Manifest,
    Report,
    WeightsRejected,
    new_buffer,
    unpack,
    verify,
)


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """How an engine joins a transfer group; its i-th worker process takes rank ``rank_offset + i``."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    deadline_s: float


@dataclass
class ManifestInfo(WeightTransferUpdateInfo):
    """One whole update: ``Manifest.to_dict()`` and the seconds it may take."""

    manifest: dict[str, Any]
    deadline_s: float


class ReceiverGroup(Broadcast, Protocol):
    """A carrier's listening end."""

    def join(self, endpoint: Endpoint, rank: int, world_size: int, deadline_s: float) -> None: ...


def _kept(call: Callable[..., None]) -> Callable[..., None]:
    """Keeps what ``call`` raises for the report instead of raising it."""

    @functools.wraps(call)
    def keeping(engine: CheckedWeightTransferEngine, *arguments: Any) -> None:
        engine.failure = None
        try:
            call(engine, *arguments)
        except Exception as failure:
            engine.failure = failure

    return keeping


class CheckedWeightTransferEngine(WeightTransferEngine[JoinInfo, ManifestInfo]):
    """Receives every bucket of a manifest, verifies it, and loads it; subclasses name the carrier.

    A bucket keeps its own memory until the layers it feeds are complete: vLLM holds on to the received tensors until
    then, so buffers are never reused.
    """

    init_info_cls = JoinInfo
    update_info_cls = ManifestInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group = self.make_group()
        self.failure: Exception | None = None
        self._updating = False
        self._reload_open = False
        self._missing: set[str] = set()
        self._parameter_names = {name for name, _ in model.named_parameters()}

    def make_group(self) -> ReceiverGroup:
        raise NotImplementedError

    def __call__(self) -> tuple[Any, ...]:
        """The report on the last call; vLLM's ``collective_rpc`` reaches it as the worker's attribute."""
        return astuple(Report.of(self._updating, self.failure))

    @_kept
    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        endpoint = Endpoint(init_info.address, init_info.port)
        self.join_group(endpoint, init_info.rank_offset + worker, init_info.world_size, init_info.deadline_s)

    def join_group(self, endpoint: Endpoint, rank: int, world_size: int, deadline_s: float) -> None:
        self._group.join(endpoint, rank, world_size, deadline_s)

    @_kept
    def start_weight_update(self) -> None:
        self._updating = True
        self._open_reload()

    @_kept
    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @_kept
    def finish_weight_update(self) -> None:
        self._updating = False
        missing, self._missing = self._missing, set()
        self._close_reload()
        for module in self._tied_heads():
            module.quant_method.process_weights_after_loading(module)
        if missing and self.model_config.quantization is None:
            raise WeightsRejected(f"the update left out {len(missing)} parameters: {', '.join(sorted(missing)[:4])}")

    def _open_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._close_reload()
        for module in self.model.modules():
            method: Any = getattr(module, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None
        initialize_layerwise_reload(self.model)
        self._reload_open = True
        self._missing = set(self._parameter_names)

    def receive_weights(self, update_info: ManifestInfo) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        manifest = Manifest.from_dict(update_info.manifest)
        end_s = time.monotonic() + update_info.deadline_s
        try:
            with disable_mtp_completeness_check():
                for bucket in manifest.buckets():
                    flat = new_buffer(bucket, self._group.device, zeroed=False)
                    self._group.broadcast(flat, end_s - time.monotonic())
                    verify(bucket, manifest.version, flat)
                    self._load(bucket, flat)
        except BaseException:
            self._group.close()
            raise

    def shutdown(self) -> None:
        self._group.close()

    def _load(self, bucket: Bucket, flat: torch.Tensor) -> None:
        tensors = zip(bucket.names, unpack(bucket, flat), strict=True)
        try:
            loaded = self.model.load_weights(list(tensors))
        except (ValueError, KeyError, AttributeError, AssertionError, RuntimeError, IndexError, TypeError) as failure:
            raise WeightsRejected(
                f"bucket {bucket.index} ({', '.join(bucket.names[:4])}, ...): {type(failure).__name__}: {failure}"
            ) from failure
        self._missing = self._missing - loaded if loaded is not None else set()

    def _close_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._reload_open:
            self._reload_open = False
            finalize_layerwise_reload(self.model, self.model_config)

    def _tied_heads(self) -> list[Any]:
        """Output heads that share their weight with the embedding: no checkpoint entry feeds their packed copy."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

        embeddings = [
            module
            for module in self.model.modules()
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        ]
        weights = {id(module.weight) for module in embeddings}
        return [
            module
            for module in self.model.modules()
            if isinstance(module, ParallelLMHead) and id(module.weight) in weights
        ]


class GlooWeightTransferEngine(CheckedWeightTransferEngine):
    """Backend ``gloo``: from another process, over TCP."""

    def make_group(self) -> ReceiverGroup:
        return GlooGroup()


class InlineWeightTransferEngine(CheckedWeightTransferEngine):
    """Backend ``inline``: from another thread of this process."""

    def make_group(self) -> ReceiverGroup:
        return InlineGroup()


class NcclCheckedWeightTransferEngine(CheckedWeightTransferEngine, NCCLWeightTransferEngine):
    """Backend ``nccl_checked``: from another GPU. vLLM's engine of the same carrier, with our buckets in its place."""

    def make_group(self) -> ReceiverGroup:
        return NcclGroup(self.device)

    def join_group(self, endpoint: Endpoint, rank: int, world_size: int, deadline_s: float) -> None:
        """Without the settings that vLLM keeps for its own communicators: the sender has them not."""
        with unpinned_nccl_env():
            super().join_group(endpoint, rank, world_size, deadline_s)
