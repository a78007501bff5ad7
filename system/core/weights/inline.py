"""The carrier of a weight sync inside one process: sender and receivers are threads that meet in a registry.

The same calls and the same sealed buckets as between processes, so that a run without Ray exercises the same path.
Every wait has a deadline; whoever closes wakes everyone else with an error.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from system.core.weights.wire import Endpoint, TransferBroken

INLINE_ADDRESS = "inline"


class _Meeting:
    """One transfer group. ``changed`` guards every field."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.joined: set[int] = set()
        self.closed = False
        self.sequence = 0
        self.payload: Tensor | None = None
        self.taken: set[int] = set()

    def wait_until(self, ready: Callable[[], bool], deadline_s: float, what: str) -> None:
        """With ``changed`` held: returns when ``ready()``, raises at the deadline or when the other side closed."""
        arrived = self.changed.wait_for(lambda: self.closed or ready(), timeout=max(0.0, deadline_s))
        if ready():
            return
        if not arrived:
            raise TransferBroken(f"{what} within {deadline_s:g} s")
        raise TransferBroken(f"{what}: the other side left")


_numbers = itertools.count(1)
_meetings: dict[int, _Meeting] = {}


class InlineGroup:
    """One end of an in-process group: ``open`` and ``connect`` on the sender, ``join`` on each receiver."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._number: int | None = None
        self._meeting: _Meeting | None = None
        self._rank = 0
        self._world_size = 1
        self._heard = 0

    def open(self, address: str = INLINE_ADDRESS) -> Endpoint:
        """Registers a meeting point; ``address`` has no meaning inside one process."""
        self.close()
        self._number = next(_numbers)
        self._meeting = _meetings[self._number] = _Meeting()
        return Endpoint(INLINE_ADDRESS, self._number)

    def connect(self, world_size: int, deadline_s: float) -> None:
        """Waits until all ``world_size - 1`` receivers have joined."""
        meeting = self._joined_meeting()
        self._world_size = world_size
        with meeting.changed:
            meeting.wait_until(
                lambda: len(meeting.joined) >= world_size - 1,
                deadline_s,
                f"in-process weight transfer of {world_size}: not all joined",
            )

    def join(self, endpoint: Endpoint, rank: int, world_size: int, deadline_s: float) -> None:
        """Joins as ``rank`` in 1..world_size-1."""
        self.close()
        meeting = _meetings.get(endpoint.port)
        if endpoint.address != INLINE_ADDRESS or meeting is None:
            raise TransferBroken(f"no sender at {endpoint.address}:{endpoint.port} in this process")
        self._meeting, self._rank, self._world_size, self._heard = meeting, rank, world_size, meeting.sequence
        with meeting.changed:
            meeting.joined.add(rank)
            meeting.changed.notify_all()

    def broadcast(self, flat: Tensor, deadline_s: float) -> None:
        meeting = self._joined_meeting()
        try:
            if self._rank == 0:
                self._speak(meeting, flat, deadline_s)
            else:
                self._listen(meeting, flat, deadline_s)
        except TransferBroken:
            self.close()
            raise

    def close(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            with meeting.changed:
                meeting.closed = True
                meeting.changed.notify_all()
        if self._number is not None:
            _meetings.pop(self._number, None)
            self._number = None

    def _joined_meeting(self) -> _Meeting:
        if self._meeting is None:
            raise TransferBroken("not connected; join the transfer group first")
        return self._meeting

    def _speak(self, meeting: _Meeting, flat: Tensor, deadline_s: float) -> None:
        with meeting.changed:
            meeting.payload, meeting.taken = flat, set()
            meeting.sequence += 1
            meeting.changed.notify_all()
            listeners = self._world_size - 1
            meeting.wait_until(
                lambda: len(meeting.taken) >= listeners,
                deadline_s,
                f"in-process weight transfer: not taken by all {listeners} receivers",
            )
            meeting.payload = None

    def _listen(self, meeting: _Meeting, flat: Tensor, deadline_s: float) -> None:
        with meeting.changed:
            meeting.wait_until(
                lambda: meeting.sequence > self._heard, deadline_s, "in-process weight transfer: nothing was sent"
            )
            payload = meeting.payload
            if payload is None or payload.shape != flat.shape:
                raise TransferBroken("in-process weight transfer: sender and receiver do not hold the same manifest")
            flat.copy_(payload)
            self._heard = meeting.sequence
            meeting.taken.add(self._rank)
            meeting.changed.notify_all()
