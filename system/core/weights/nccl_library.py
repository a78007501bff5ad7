"""The NCCL library, as far as a weight sync needs it: one rank of a communicator that never blocks.

Every call returns at once; ``is_ready`` and ``is_done`` say whether its work is through, and raise what NCCL says went
wrong. Whoever polls them owns the deadline, and ends the communicator with ``abort`` from whatever state it is in.
(torch's own NCCL groups by default end the whole process when a collective fails; here it must be mendable.)
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from system.core.errors import ConfigError

UNIQUE_ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_CONFIG_MAGIC = 0xCAFE_BEEF
_CONFIG_VERSION = 21400
"""NCCL 2.14, the first that knows communicators that do not block; later ones take its configuration too."""


class NcclFailed(Exception):
    """A call failed, or what it started did; says what NCCL says."""


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * UNIQUE_ID_BYTES),)


class _Config(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


@cache
def _library() -> ctypes.CDLL:
    """The one that torch is linked to.

    Raises:
        ConfigError: this torch has none.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError as failure:
        raise ConfigError(
            f"sync.backend nccl_checked needs NCCL, and torch {torch.__version__} came without it ({failure}); "
            "install the CUDA build of torch, or set sync.backend to gloo"
        ) from None
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetErrorString.argtypes = [integer]
    library.ncclGetLastError.restype = ctypes.c_char_p
    library.ncclGetLastError.argtypes = [pointer]
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(_UniqueId)]
    library.ncclCommInitRankConfig.argtypes = [
        ctypes.POINTER(pointer), integer, _UniqueId, integer, ctypes.POINTER(_Config),
    ]  # fmt: skip
    library.ncclCommGetAsyncError.argtypes = [pointer, ctypes.POINTER(integer)]
    library.ncclBroadcast.argtypes = [pointer, pointer, ctypes.c_size_t, integer, integer, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    return library


def nccl_version() -> str:
    """Of the library that a sync would use. Raises ``ConfigError``: there is none."""
    code = ctypes.c_int()
    _check(_library().ncclGetVersion(ctypes.byref(code)))
    return f"{code.value // 10000}.{code.value // 100 % 100}.{code.value % 100}"


class NcclCommunicator:
    """Rank ``rank`` of ``world_size``, on ``device``. A failure leaves it fit for nothing but ``abort``."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        """Starts to meet the others; ``is_ready`` says when all have met."""
        self._device = device
        self._handle = ctypes.c_void_p()
        self._finished: Any = None
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, blocking=0)
        with torch.cuda.device(device):
            called = _library().ncclCommInitRankConfig(
                ctypes.byref(self._handle), world_size, _UniqueId.from_buffer_copy(unique_id), rank, config
            )
        _check(called)

    @staticmethod
    def new_unique_id() -> bytes:
        """What all ranks of one communicator must hold; made by the sender."""
        made = _UniqueId()
        _check(_library().ncclGetUniqueId(ctypes.byref(made)))
        return bytes(made)

    def is_ready(self) -> bool:
        """Whether the last call is through on this side. Raises ``NcclFailed``."""
        state = ctypes.c_int()
        _check(_library().ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
        _check(state.value, self._handle)
        return state.value != _IN_PROGRESS

    def start_broadcast(self, flat: Tensor, root: int) -> None:
        """Sends ``flat`` (uint8, on the device) from ``root`` to all, in order with the device's current stream."""
        self._finished = None
        place = ctypes.c_void_p(flat.data_ptr())
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            called = _library().ncclBroadcast(place, place, flat.numel(), _UINT8, root, self._handle, stream)
        _check(called, self._handle)

    def is_done(self) -> bool:
        """Whether the bytes of the last broadcast are through. Raises ``NcclFailed``."""
        if not self.is_ready():
            return False
        if self._finished is None:
            with torch.cuda.device(self._device):
                self._finished = torch.cuda.Event()
                self._finished.record(torch.cuda.current_stream())
        return bool(self._finished.query())

    def abort(self) -> None:
        """Ends the communicator and whatever it is doing; it cannot be used afterwards."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            _library().ncclCommAbort(handle)


def _check(result: int, handle: ctypes.c_void_p | None = None) -> None:
    if result in (_SUCCESS, _IN_PROGRESS):
        return
    library = _library()
    said, more = library.ncclGetErrorString(result), library.ncclGetLastError(handle)
    raise NcclFailed(" ".join(text.decode(errors="replace").strip() for text in (said, more) if text))
