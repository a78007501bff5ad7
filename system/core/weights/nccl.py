"""NCCL as the carrier of a weight sync: from GPU to GPU.

The group meets over a ``Lifeline``, whose sender listens on a port that the system picks; NCCL then opens connections
of its own on the interfaces it finds (``NCCL_SOCKET_IFNAME`` chooses). Its communicator never blocks: every wait polls
it together with the lifeline, until a deadline. The first error on any side aborts the communicator there and is told
to the others, who would otherwise wait for bytes that never come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from system.core.errors import ConfigError
from system.core.weights.lifeline import Lifeline
from system.core.weights.nccl_library import UNIQUE_ID_BYTES, NcclCommunicator, NcclFailed
from system.core.weights.wire import Endpoint, TransferBroken

SENDER_RANK = 0
ABORT_S = 10.0
"""NCCL's own clean-up; a GPU that hangs must not keep the caller."""
_POLL_S = 0.0005
_LIFELINE_POLL_S = 0.05


class Communicator(Protocol):
    """What the group needs of NCCL; see ``NcclCommunicator``."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device) -> None: ...

    @staticmethod
    def new_unique_id() -> bytes: ...

    def is_ready(self) -> bool: ...

    def start_broadcast(self, flat: Tensor, root: int) -> None: ...

    def is_done(self) -> bool: ...

    def abort(self) -> None: ...


class NcclGroup:
    """One end of a broadcast group: ``open`` and ``connect`` on the sender, ``join`` on each receiver."""

    def __init__(self, device: torch.device, make: type[Communicator] = NcclCommunicator) -> None:
        """``device``: where the buckets are."""
        self.device = device
        self._make = make
        self._lifeline = Lifeline()
        self._communicator: Communicator | None = None
        self._name = "unconnected weight transfer"

    def open(self, address: str) -> Endpoint:
        """Starts listening on ``address`` at a free port. Raises ``TransferBroken`` when the address is not ours."""
        self.close()
        return self._lifeline.listen(address)

    def connect(self, world_size: int, deadline_s: float) -> None:
        """Waits until all ``world_size - 1`` receivers have joined."""
        end_s = time.monotonic() + deadline_s
        self._name = f"weight transfer, rank {SENDER_RANK} of {world_size}"
        with self._closing_on_failure():
            self._lifeline.gather(world_size, deadline_s)
            unique_id = self._make.new_unique_id()
            self._lifeline.tell(unique_id, end_s - time.monotonic())
            self._meet(unique_id, SENDER_RANK, world_size, end_s)

    def join(self, endpoint: Endpoint, rank: int, world_size: int, deadline_s: float) -> None:
        """Joins as ``rank`` in 1..world_size-1 and waits until the group is complete."""
        self.close()
        end_s = time.monotonic() + deadline_s
        self._name = f"weight transfer, rank {rank} of {world_size}"
        with self._closing_on_failure():
            self._lifeline.reach(endpoint, rank, deadline_s)
            unique_id = self._lifeline.hear(UNIQUE_ID_BYTES, end_s - time.monotonic())
            self._meet(unique_id, rank, world_size, end_s)

    def broadcast(self, flat: Tensor, deadline_s: float) -> None:
        communicator = self._communicator
        if communicator is None:
            raise TransferBroken("not connected; join the transfer group first")
        end_s = time.monotonic() + deadline_s
        with self._closing_on_failure():
            if deadline_s <= 0:
                raise TransferBroken("the deadline passed before all buckets were through")
            communicator.start_broadcast(flat, SENDER_RANK)
            self._until(communicator.is_done, end_s, f"a bucket was not through within {deadline_s:g} s")

    def close(self, reason: str = "it closed its end") -> None:
        """Leaves the group; peers that wait for this one get an error with the reason. Idempotent."""
        communicator, self._communicator = self._communicator, None
        self._lifeline.close(reason)
        if communicator is not None:
            aborting = threading.Thread(target=communicator.abort, name="nccl-abort", daemon=True)
            aborting.start()
            aborting.join(ABORT_S)

    def _meet(self, unique_id: bytes, rank: int, world_size: int, end_s: float) -> None:
        self._communicator = self._make(unique_id, rank, world_size, self.device)
        self._until(self._communicator.is_ready, end_s, "NCCL did not connect all ranks by the deadline")

    def _until(self, ready: Callable[[], bool], end_s: float, otherwise: str) -> None:
        look_s = 0.0
        while not ready():
            now_s = time.monotonic()
            if now_s >= look_s:
                self._lifeline.check()
                look_s = now_s + _LIFELINE_POLL_S
            if now_s >= end_s:
                raise TransferBroken(otherwise)
            time.sleep(_POLL_S)

    @contextmanager
    def _closing_on_failure(self) -> Iterator[None]:
        """The first error ends the group here, and tells the others why."""
        try:
            yield
        except (TransferBroken, NcclFailed) as failure:
            text = str(failure.args[0])
            self.close(text)
            raise TransferBroken(f"{self._name}: {text}") from None
        except BaseException as failure:
            self.close(f"{type(failure).__name__}: {failure}")
            raise


def own_gpu() -> torch.device:
    """The GPU of this process. Raises ``ConfigError``: it has none."""
    if not torch.cuda.is_available():
        raise ConfigError(
            "sync.backend: nccl_checked sends weights from GPU to GPU, and this process has none; use gloo, or give "
            "learners and rollout workers GPUs of their own (placement.gpus_per_..._worker)"
        )
    return torch.device("cuda", torch.cuda.current_device())
