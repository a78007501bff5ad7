"""A line from every receiver to the sender: over it a group meets, and each side learns at once that another is gone.

The sender ``listen``s and ``gather``s a line for every rank, then ``tell``s all of them the same bytes; a receiver
``reach``es it and ``hear``s them. After that nothing is said until the end: whoever leaves says why and closes, and
``check`` raises that on the other sides. A process that ends closes its lines without a word. Nobody waits without a
deadline; ``check`` does not wait at all.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress

from system.core.weights.addresses import listener_at
from system.core.weights.wire import Endpoint, TransferBroken

_HELLO = struct.Struct("!8sI")
_MAGIC = b"triptych"
_HELLO_S = 2.0
"""For a caller to say who it is; a stranger must not keep the group from meeting."""
_REASON_BYTES = 1000


class Lifeline:
    """One end: of all lines on the sender, of its own on a receiver."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._lines: dict[int, socket.socket] = {}

    def listen(self, address: str) -> Endpoint:
        self._listener = listener_at(address)
        return Endpoint(address, int(self._listener.getsockname()[1]))

    def gather(self, world_size: int, deadline_s: float) -> None:
        """Waits for the lines of ranks 1..world_size-1. Raises ``TransferBroken``: some did not come."""
        if self._listener is None:
            raise TransferBroken("connect before open: the sender listens nowhere")
        end_s = time.monotonic() + deadline_s
        while missing := sorted(set(range(1, world_size)) - self._lines.keys()):
            self._listener.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                line, _ = self._listener.accept()
            except TimeoutError:
                raise TransferBroken(f"not all joined within {deadline_s:g} s: ranks {missing} did not") from None
            rank = _heard_hello(line, max(0.001, min(_HELLO_S, end_s - time.monotonic())))
            if rank in missing:
                self._lines[rank] = line
            else:
                line.close()

    def tell(self, message: bytes, deadline_s: float) -> None:
        """Says ``message`` to all receivers."""
        for rank, line in self._lines.items():
            line.settimeout(max(0.001, deadline_s))
            try:
                line.sendall(message)
            except OSError as failure:
                raise TransferBroken(f"rank {rank} left while the group met: {failure}") from None

    def reach(self, endpoint: Endpoint, rank: int, deadline_s: float) -> None:
        """Opens the line of ``rank``. Raises ``TransferBroken``: nobody listens there."""
        place = (endpoint.address, endpoint.port)
        try:
            line = socket.create_connection(place, timeout=max(0.001, deadline_s))
        except OSError as failure:
            raise TransferBroken(f"no sender at {endpoint.address}:{endpoint.port}: {failure}") from None
        self._lines[0] = line
        with suppress(OSError):
            line.sendall(_HELLO.pack(_MAGIC, rank))

    def hear(self, size_bytes: int, deadline_s: float) -> bytes:
        """What the sender tells all. Raises ``TransferBroken``: it left, or says nothing."""
        try:
            return _read(self._lines[0], size_bytes, deadline_s)
        except TimeoutError:
            raise TransferBroken(f"not all joined within {deadline_s:g} s") from None
        except OSError as failure:
            raise TransferBroken(f"the sender left before all had joined: {failure}") from None

    def check(self) -> None:
        """Raises ``TransferBroken`` when another side has left, with its reason."""
        for rank, line in self._lines.items():
            line.setblocking(False)
            try:
                said = line.recv(_REASON_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                said = b""
            who = "the sender" if rank == 0 else f"rank {rank}"
            raise TransferBroken(f"{who} left: {said.decode('utf-8', 'replace') or 'its process ended'}")

    def close(self, reason: str) -> None:
        """Leaves, saying why. Idempotent."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.setblocking(False)
            with suppress(OSError):
                line.send(reason.encode("utf-8")[:_REASON_BYTES])
            line.close()


def _heard_hello(line: socket.socket, deadline_s: float) -> int | None:
    try:
        magic, rank = _HELLO.unpack(_read(line, _HELLO.size, deadline_s))
    except OSError:
        return None
    return rank if magic == _MAGIC else None


def _read(line: socket.socket, size_bytes: int, deadline_s: float) -> bytes:
    end_s = time.monotonic() + deadline_s
    read = b""
    while len(read) < size_bytes:
        line.settimeout(max(0.001, end_s - time.monotonic()))
        piece = line.recv(size_bytes - len(read))
        if not piece:
            raise ConnectionResetError("the connection was closed")
        read += piece
    return read
