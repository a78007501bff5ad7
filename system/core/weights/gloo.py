"""Gloo as the carrier of a weight sync: TCP between processes, for machines without NCCL.

The sender listens on a port that the system picks, bound to the one address it is given (loopback on a single-node
run); no other port is opened beyond that interface. Dropping the group closes its connections, so peers that wait get
an error at once instead of at their deadline. Every wait has a deadline.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from system.core.weights.addresses import address_towards, listener_at
from system.core.weights.wire import Endpoint, TransferBroken

SENDER_RANK = 0


class GlooGroup:
    """One end of a broadcast group: ``open`` and ``connect`` on the sender, ``join`` on each receiver."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._store: dist.TCPStore | None = None
        self._group: dist.ProcessGroupGloo | None = None
        self._name = "unconnected weight transfer"
        self._address = ""

    def open(self, address: str) -> Endpoint:
        """Starts listening on ``address`` at a free port. Raises ``TransferBroken`` when the address is not ours."""
        self.close()
        listener = listener_at(address)
        port = int(listener.getsockname()[1])
        self._store = dist.TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._address = address
        return Endpoint(address, port)

    def connect(self, world_size: int, deadline_s: float) -> None:
        """Waits until all ``world_size - 1`` receivers have joined."""
        if self._store is None:
            raise TransferBroken("connect before open: the sender listens nowhere")
        self._build(self._store, SENDER_RANK, world_size, deadline_s, self._address)

    def join(self, endpoint: Endpoint, rank: int, world_size: int, deadline_s: float) -> None:
        """Joins as ``rank`` in 1..world_size-1 and waits until the group is complete."""
        self.close()
        try:
            self._store = dist.TCPStore(
                endpoint.address,
                endpoint.port,
                is_master=False,
                timeout=timedelta(seconds=deadline_s),
                wait_for_workers=False,
            )
        except RuntimeError as failure:
            raise TransferBroken(
                f"no sender at {endpoint.address}:{endpoint.port}: {_what_gloo_says(failure)}"
            ) from None
        self._build(self._store, rank, world_size, deadline_s, address_towards(endpoint))

    def broadcast(self, flat: Tensor, deadline_s: float) -> None:
        if self._group is None:
            raise TransferBroken("not connected; join the transfer group first")
        if deadline_s <= 0:
            self.close()
            raise TransferBroken(f"{self._name}: the deadline passed before all buckets were through")
        options = dist.BroadcastOptions()
        options.rootRank = SENDER_RANK
        options.rootTensor = 0
        options.timeout = timedelta(seconds=deadline_s)
        try:
            self._group.broadcast([flat], options).wait(options.timeout)
        except RuntimeError as failure:
            text = _what_gloo_says(failure)
            self.close()
            raise TransferBroken(f"{self._name}: {text}") from None

    def close(self) -> None:
        self._group = None
        self._store = None

    def _build(self, store: dist.TCPStore, rank: int, world_size: int, deadline_s: float, address: str) -> None:
        self._group = None
        self._name = f"weight transfer, rank {rank} of {world_size}"
        store.set_timeout(timedelta(seconds=deadline_s))
        try:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=deadline_s)
            self._group = dist.ProcessGroupGloo(
                dist.PrefixStore(f"group{world_size}", store), rank, world_size, options
            )
        except RuntimeError as failure:
            text = _what_gloo_says(failure)
            self.close()
            raise TransferBroken(f"{self._name}: not all joined within {deadline_s:g} s: {text}") from None


def _what_gloo_says(failure: BaseException) -> str:
    """What gloo says, without its source location and its advice."""
    text = str(failure).strip() or type(failure).__name__
    return text.splitlines()[0].split("] ", 1)[-1].split(". This is typically", 1)[0]
