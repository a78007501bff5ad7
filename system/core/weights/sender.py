"""The learner's end of a weight sync: gather a bucket, then broadcast it, then the next.

Rank 0 holds a ``Sender``; where a gather is a collective, its source takes the other ranks along. The first error
closes the group, which wakes every receiver; ``open`` starts afresh.
Blocking calls with deadlines: run them off the event loop. Imports torch only.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from system.core.weights.gloo import GlooGroup
from system.core.weights.inline import InlineGroup
from system.core.weights.nccl import NcclGroup, own_gpu
from system.core.weights.wire import (
    DEFAULT_BUCKET_BYTES,
    Endpoint,
    Manifest,
    ParameterInfo,
    TransferBroken,
    new_buffer,
    pack,
    seal,
)

SenderBackend = Literal["gloo", "nccl_checked", "inline"]

LOOPBACK = "127.0.0.1"


class WeightSource(Protocol):
    """The current weights, as the checkpoint on disk names and shapes them. A tied head is listed once."""

    def parameters(self) -> list[ParameterInfo]:
        """Every entry of the state, in an order that is the same on all ranks; dtype is the engine's."""
        ...

    def gather(self, names: list[str]) -> list[Tensor]:
        """Full tensors of ``names``, in order; any dtype, any device.

        They are read before the next call, and never written.
        """
        ...


@dataclass(frozen=True)
class SendReport:
    """What one send moved, and where the time went."""

    version: int
    bytes: int
    buckets: int
    gather_s: float
    total_s: float


def manifest_of(source: WeightSource, version: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> Manifest:
    """The manifest of everything ``source`` holds, as ``version``."""
    return Manifest(version, tuple(source.parameters()), bucket_bytes)


class Sender:
    """Rank 0 of a transfer group: ``open``, ``connect``, then ``send`` as often as the membership stays the same."""

    def __init__(self, backend: SenderBackend = "gloo", address: str = LOOPBACK) -> None:
        """Args: address: this node's address that receivers can reach; loopback keeps every port on this machine."""
        self._group = _group_of(backend)
        self._address = address

    def open(self) -> Endpoint:
        """Leaves any former group and listens at a free port. Receivers join there while ``connect`` waits."""
        return self._group.open(self._address)

    def connect(self, world_size: int, deadline_s: float) -> None:
        """Waits for ``world_size - 1`` receivers (worker processes of all engines).

        Raises:
            TransferBroken: not all joined within the deadline; the group is closed.
        """
        try:
            self._group.connect(world_size, deadline_s)
        except BaseException:
            self.close()
            raise

    def send(self, manifest: Manifest, source: WeightSource, deadline_s: float) -> SendReport:
        """Gathers and broadcasts every bucket.

        Raises:
            TransferBroken: a receiver was lost or the deadline passed.
            WeightsRejected: the source does not give what the manifest says.
            Any error of ``source.gather``. The group is closed in every case.
        """
        start_s = time.monotonic()
        gather_s = 0.0
        buckets = manifest.buckets()
        try:
            for bucket in buckets:
                gather_start_s = time.monotonic()
                tensors = source.gather(bucket.names)
                gather_s += time.monotonic() - gather_start_s
                flat = new_buffer(bucket, self._group.device)
                pack(bucket, tensors, flat)
                del tensors
                seal(bucket, manifest.version, flat)
                remaining_s = deadline_s - (time.monotonic() - start_s)
                if remaining_s <= 0:
                    raise TransferBroken(
                        f"bucket {bucket.index} of {len(buckets)}: the deadline of {deadline_s:g} s passed"
                    )
                self._group.broadcast(flat, remaining_s)
        except BaseException:
            self.close()
            raise
        total_s = time.monotonic() - start_s
        return SendReport(manifest.version, manifest.total_bytes, len(buckets), gather_s, total_s)

    def close(self) -> None:
        """Leaves the group; receivers that wait get an error. Idempotent."""
        self._group.close()


def _group_of(backend: SenderBackend) -> GlooGroup | NcclGroup | InlineGroup:
    if backend == "nccl_checked":
        return NcclGroup(own_gpu())
    return InlineGroup() if backend == "inline" else GlooGroup()
