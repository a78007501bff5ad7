"""What crosses the wire in a weight sync: a manifest by value, then sealed buckets of bytes, in the manifest's order.

Sender and receivers compute the same bucket plan from the same manifest, so nothing but bytes has to be agreed on
while they flow. Every bucket ends in a trailer (magic, version, index, checksum): a receiver that is out of step, or
that holds other bytes than were sent, finds out before a single weight is loaded. Imports torch only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from system.core.errors import SyncFailed

DEFAULT_BUCKET_BYTES = 32 * 1024 * 1024

WIRE_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_ALIGN_BYTES = 16
_TRAILER_WORDS = 4
_TRAILER_BYTES = _TRAILER_WORDS * 8
_MAGIC = 0x7472_6970_7479_6368
_MASK = (1 << 64) - 1
_BLOCK_WORDS = 1 << 18
_BLOCK_MULTIPLIER = 0x9E37_79B9_7F4A_7C15
_WORD_MULTIPLIER = 0x2545_F491_4F6C_DD1D


class TransferBroken(SyncFailed):
    """The bytes did not arrive in time, or at all. Mendable: start again and send everything again."""

    tag: ClassVar[str] = "transfer broken"

    def __str__(self) -> str:
        return f"{self.tag}: {super().__str__()}"


class ChecksumMismatch(TransferBroken):
    """A bucket's bytes as received differ from those that were sent. Names the parameters it holds."""

    tag: ClassVar[str] = "checksum mismatch"


class WeightsRejected(SyncFailed):
    """The model does not take these names or shapes, or the source does not give what the manifest says.

    Not mendable: the engine that rejected them is discarded and rebuilt.
    """

    tag: ClassVar[str] = "weights rejected"

    def __str__(self) -> str:
        return f"{self.tag}: {super().__str__()}"


@dataclass(frozen=True)
class Report:
    """What a receiving process says after a call: strings and booleans only, for wires that know no classes."""

    updating: bool
    """An update was started and not finished."""
    failed: bool = False
    tag: str = ""
    """The kind of the failure; empty for one that is neither of the transfer nor of the weights."""
    text: str = ""

    @staticmethod
    def of(updating: bool, failure: Exception | None) -> Report:
        if failure is None:
            return Report(updating)
        if isinstance(failure, TransferBroken | WeightsRejected):
            return Report(updating, True, failure.tag, SyncFailed.__str__(failure))
        text = str(failure) if isinstance(failure, SyncFailed) else f"{type(failure).__name__}: {failure}"
        return Report(updating, True, "", text)

    def failure(self) -> SyncFailed | None:
        """The failure again, of the kind that it was."""
        kinds = (TransferBroken, ChecksumMismatch, WeightsRejected)
        return {kind.tag: kind for kind in kinds}.get(self.tag, SyncFailed)(self.text) if self.failed else None


@dataclass(frozen=True)
class Endpoint:
    """Where receivers find the sender; handed around by value."""

    address: str
    port: int


@dataclass(frozen=True)
class ParameterInfo:
    """One tensor on the wire: its name in the checkpoint on disk, the engine's dtype, its full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if self.dtype not in WIRE_DTYPES:
            raise ValueError(f"{self.name}: dtype {self.dtype!r}; on the wire: {', '.join(WIRE_DTYPES)}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return WIRE_DTYPES[self.dtype]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    """Consecutive parameters that cross together; ``offsets`` are aligned byte positions in the flat buffer."""

    index: int
    parameters: tuple[ParameterInfo, ...]
    offsets: tuple[int, ...]
    payload_bytes: int
    """A multiple of the alignment; the trailer follows."""

    @property
    def wire_bytes(self) -> int:
        return self.payload_bytes + _TRAILER_BYTES

    @property
    def names(self) -> list[str]:
        return [parameter.name for parameter in self.parameters]


@dataclass(frozen=True)
class Manifest:
    """Everything a receiver must know before the first byte: the version, and what is sent in which order."""

    version: int
    parameters: tuple[ParameterInfo, ...]
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", tuple(self.parameters))
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes: {self.bucket_bytes}; at least 1")
        names = [parameter.name for parameter in self.parameters]
        if len(set(names)) != len(names):
            raise ValueError(f"parameters named twice: {sorted({name for name in names if names.count(name) > 1})}")

    @property
    def total_bytes(self) -> int:
        """Bytes of the parameters, without alignment and trailers."""
        return sum(parameter.size_bytes for parameter in self.parameters)

    def buckets(self) -> tuple[Bucket, ...]:
        """The plan: parameters in order, cut before a bucket would exceed ``bucket_bytes``.

        A tensor larger than a bucket has one of its own. A pure function of the manifest.
        """
        buckets: list[Bucket] = []
        held: list[ParameterInfo] = []
        offsets: list[int] = []
        end = 0
        for parameter in self.parameters:
            size = _aligned(parameter.size_bytes)
            if held and end + size > self.bucket_bytes:
                buckets.append(Bucket(len(buckets), tuple(held), tuple(offsets), end))
                held, offsets, end = [], [], 0
            held.append(parameter)
            offsets.append(end)
            end += size
        if held:
            buckets.append(Bucket(len(buckets), tuple(held), tuple(offsets), end))
        return tuple(buckets)

    def to_dict(self) -> dict[str, Any]:
        """Lists, strings and numbers only, for wires that know no classes."""
        return {
            "version": self.version,
            "bucket_bytes": self.bucket_bytes,
            "parameters": [[info.name, info.dtype, list(info.shape)] for info in self.parameters],
        }

    @staticmethod
    def from_dict(plain: dict[str, Any]) -> Manifest:
        parameters = tuple(ParameterInfo(name, dtype, tuple(shape)) for name, dtype, shape in plain["parameters"])
        return Manifest(int(plain["version"]), parameters, int(plain["bucket_bytes"]))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


class Broadcast(Protocol):
    """A connected group in which rank 0 speaks and all others listen."""

    device: torch.device
    """Where the buckets that it carries are."""

    def broadcast(self, flat: Tensor, deadline_s: float) -> None:
        """Rank 0's uint8 ``flat`` lands in everyone's. Raises ``TransferBroken`` at the deadline or a lost peer."""
        ...

    def close(self) -> None:
        """Leaves the group; peers that wait for this one get an error. Idempotent."""
        ...


def new_buffer(bucket: Bucket, device: torch.device | str = "cpu", zeroed: bool = True) -> Tensor:
    """Room for one sealed bucket: uint8 [wire_bytes] on ``device``.

    Zeroed for the sender, so that alignment gaps are the same in every send; a receiver overwrites all of it.
    """
    make = torch.zeros if zeroed else torch.empty
    return make(bucket.wire_bytes, dtype=torch.uint8, device=device)


def pack(bucket: Bucket, tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copies ``tensors`` (in the bucket's order, any float dtype and device) into ``flat``, cast to the wire dtype.

    Raises:
        WeightsRejected: the source gave another number of tensors, or another shape, than the manifest says.
    """
    if len(tensors) != len(bucket.parameters):
        raise WeightsRejected(
            f"the source gave {len(tensors)} tensors for {len(bucket.parameters)} parameters of bucket {bucket.index}"
        )
    for parameter, target, tensor in zip(bucket.parameters, unpack(bucket, flat), tensors, strict=True):
        if tuple(tensor.shape) != parameter.shape:
            raise WeightsRejected(
                f"{parameter.name}: the source gave shape {tuple(tensor.shape)}, the manifest says {parameter.shape}"
            )
        target.copy_(tensor.detach())


def unpack(bucket: Bucket, flat: Tensor) -> list[Tensor]:
    """Views of ``flat``, one per parameter, in its dtype and shape. They keep ``flat`` alive; nothing is copied."""
    return [
        flat[offset : offset + parameter.size_bytes].view(parameter.torch_dtype).view(parameter.shape)
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True)
    ]


def seal(bucket: Bucket, version: int, flat: Tensor) -> None:
    """Writes the trailer: magic, version, index and the checksum of the payload."""
    words = [_MAGIC, version, bucket.index, checksum(flat[: bucket.payload_bytes])]
    flat[bucket.payload_bytes : bucket.wire_bytes].view(torch.int64).copy_(torch.tensor(words, dtype=torch.int64))


def verify(bucket: Bucket, version: int, flat: Tensor) -> None:
    """Holds the bytes in ``flat`` against the trailer that came with them.

    Raises:
        TransferBroken: another bucket, or another version, than the manifest says: the two sides are out of step.
        ChecksumMismatch: the payload is not what was sent; names the bucket and its parameters.
    """
    trailer = flat[bucket.payload_bytes : bucket.wire_bytes].view(torch.int64).tolist()
    magic, sent_version, sent_index, sent_checksum = trailer
    if magic != _MAGIC or sent_version != version or sent_index != bucket.index:
        raise TransferBroken(
            f"expected bucket {bucket.index} of version {version}, got bucket {sent_index} of version {sent_version}; "
            "sender and receiver do not hold the same manifest"
        )
    received = checksum(flat[: bucket.payload_bytes])
    if received != sent_checksum:
        raise ChecksumMismatch(
            f"bucket {bucket.index} of version {version}: sent {sent_checksum:#x}, received {received:#x}; "
            f"it holds {_name_some(bucket.names)}"
        )


def _name_some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def checksum(flat: Tensor) -> int:
    """A 64-bit checksum of bytes and their order, the same on CPU and GPU.

    With w_i the i-th little-endian int64 word of block b, m_i odd pseudo-random multipliers and P an odd constant, all
    modulo 2^64: ``sum_b P^(B-b) * sum_i m_i * w_i``. One changed word always changes it.

    Args:
        flat: uint8 [n], n a multiple of 8.
    Returns:
        A signed 64-bit integer.
    """
    words = flat.view(torch.int64)
    multipliers = _multipliers(str(flat.device))
    sums = [(block * multipliers[: len(block)]).sum() for block in words.split(_BLOCK_WORDS)] if len(words) else []
    total = len(words)
    for block_sum in torch.stack(sums).tolist() if sums else []:
        total = (total * _BLOCK_MULTIPLIER + block_sum) & _MASK
    return total - (1 << 64) if total >> 63 else total


@lru_cache(maxsize=8)
def _multipliers(device: str) -> Tensor:
    index = torch.arange(1, _BLOCK_WORDS + 1, dtype=torch.int64)
    mixed = index * _signed(_BLOCK_MULTIPLIER)
    mixed = (mixed ^ (mixed >> 29)) * _signed(_WORD_MULTIPLIER)
    return ((mixed ^ (mixed >> 32)) | 1).to(device)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def parameters_of(named_tensors: Iterable[tuple[str, Tensor]], dtype: str) -> list[ParameterInfo]:
    """The infos of plain named tensors as they go on the wire in ``dtype``."""
    return [ParameterInfo(name, dtype, tuple(tensor.shape)) for name, tensor in named_tensors]
