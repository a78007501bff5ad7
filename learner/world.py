"""The learner ranks as a process group: who they are, how they find each other, how they exchange small facts.

Rank 0 binds a port of its own choice at the address it is given, and the endpoint is handed around by value; a world
of one opens no port outside loopback. A process is in one world at a time; opening the same
place in it again joins the one that is there, and a world of one is kept for the life of the process.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from system.core.errors import InfrastructureError, LearnerLost

T = TypeVar("T")

_stores: list[dist.Store] = []


class RanksDisconnected(LearnerLost):
    """A rank lost the others: one of them is gone, or did not come to a collective in time."""


def is_disconnection(failure: RuntimeError) -> bool:
    """Whether a collective failed for want of another rank."""
    return isinstance(failure, dist.DistError) or "/gloo/" in str(failure)


@dataclass(frozen=True)
class Meeting:
    """Where the ranks meet: rank 0's address and port."""

    address: str
    port: int


class MeetingPoint:
    """Rank 0's listening socket, bound before anyone is told about it, so the port cannot be lost to someone else."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((address, 0))
        self._socket.listen(128)
        self.meeting = Meeting(address, self._socket.getsockname()[1])

    def detach(self) -> int:
        """The file descriptor, for the store that takes the socket over."""
        return self._socket.detach()

    def close(self) -> None:
        self._socket.close()


class World:
    """This rank's place among the learner ranks, with collective exchanges of plain values."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device

    @staticmethod
    def open(
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        meeting: Meeting | None = None,
        meeting_point: MeetingPoint | None = None,
    ) -> World:
        """Joins (or opens) the process group: gloo on CPUs, NCCL on GPUs.

        Args:
            meeting: rank 0's endpoint; needed where ``size`` > 1.
            meeting_point: on rank 0, the socket behind ``meeting``.
        Raises:
            InfrastructureError: the ranks did not meet within ``timeout_s``, or this process is in another world.
        """
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK="0", LOCAL_SIZE="1", CROSS_RANK="0", CROSS_SIZE="1"
        )
        if meeting is not None:
            os.environ.update(MASTER_ADDR=meeting.address, MASTER_PORT=str(meeting.port))
        if dist.is_initialized():
            if (dist.get_rank(), dist.get_world_size()) == (rank, size):
                return World(rank, size, device)
            raise InfrastructureError(
                f"learner rank {rank}: this process is already rank {dist.get_rank()} of {dist.get_world_size()}"
            )
        loopback = size == 1 or (meeting is not None and meeting.address.startswith("127."))
        if device.type == "cpu" and loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        try:
            store = _open_store(rank, size, timeout_s, meeting, meeting_point)
            dist.init_process_group(
                "gloo" if device.type == "cpu" else "nccl",
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout_s),
                device_id=None if device.type == "cpu" else device,
            )
        except (dist.DistError, RuntimeError) as failure:
            where = f"{meeting.address}:{meeting.port}" if meeting else "this process"
            raise InfrastructureError(
                f"learner rank {rank} of {size}: no process group at {where}: {failure}"
            ) from None
        _stores.append(store)
        return World(rank, size, device)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, by rank; a collective call."""
        if self.size == 1:
            return [value]
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank; a collective call."""
        if self.size == 1:
            return value
        carried: list[Any] = [value]
        dist.broadcast_object_list(carried, src=0)
        return carried[0]

    def close(self) -> None:
        """Leaves a world of several ranks."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
            _stores.clear()


def _open_store(
    rank: int, size: int, timeout_s: float, meeting: Meeting | None, meeting_point: MeetingPoint | None
) -> dist.Store:
    if size == 1:
        return dist.HashStore()
    if meeting is None or (rank == 0 and meeting_point is None):
        raise RuntimeError("a world of several ranks needs rank 0's endpoint")
    return dist.TCPStore(
        meeting.address,
        meeting.port,
        world_size=size,
        is_master=rank == 0,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=meeting_point.detach() if meeting_point is not None else None,
    )
