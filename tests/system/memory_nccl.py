"""A stand-in for the NCCL library between the threads of one process, also one that hangs or fails."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from typing import ClassVar

import torch
from torch import Tensor

from system.core.weights.nccl_library import UNIQUE_ID_BYTES, NcclFailed


class MemoryCommunicator:
    """As ``NcclCommunicator``; a broadcast is through for everyone once every rank has started it."""

    groups: ClassVar[dict[bytes, dict[int, MemoryCommunicator]]] = defaultdict(dict)

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size = rank, world_size
        self._group = self.groups[unique_id]
        self._group[rank] = self
        self._started = 0
        self._flat: Tensor | None = None
        self._copied = 0
        self.aborted = False

    @staticmethod
    def new_unique_id() -> bytes:
        return os.urandom(UNIQUE_ID_BYTES)

    def is_ready(self) -> bool:
        assert not self.aborted
        return len(self._group) == self._world_size

    def start_broadcast(self, flat: Tensor, root: int) -> None:
        assert not self.aborted
        self._flat = flat
        self._started += 1

    def is_done(self) -> bool:
        if not all(member._started >= self._started for member in self._group.values()):
            return False
        sender = self._group[0]
        assert self._flat is not None
        if self._rank != 0 and self._copied < self._started:
            assert sender._flat is not None
            if sender._flat.shape != self._flat.shape:
                raise NcclFailed("invalid usage")
            self._flat.copy_(sender._flat)
            self._copied = self._started
        return self._rank != 0 or all(
            member._copied >= self._started for member in self._group.values() if member._rank
        )

    def abort(self) -> None:
        self.aborted = True


class StuckCommunicator(MemoryCommunicator):
    """Meets the others; then nothing goes through any more, as when a peer is gone without a sign."""

    def is_ready(self) -> bool:
        return True

    def is_done(self) -> bool:
        return False


class NeverReadyCommunicator(MemoryCommunicator):
    """Never meets the others, as behind a firewall."""

    def is_ready(self) -> bool:
        return False


class FailingCommunicator(MemoryCommunicator):
    """Meets the others, and fails in the middle of a broadcast."""

    def is_done(self) -> bool:
        raise NcclFailed("remote process exited or there was a network error")


class HangingAbortCommunicator(StuckCommunicator):
    """Stuck, and its clean-up hangs too."""

    def abort(self) -> None:
        time.sleep(3600)
