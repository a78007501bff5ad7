"""The channel between a scorer and a reward process: length-prefixed frames over a socket pair.

Requests are pickles (they carry labels exactly as the data source made them; only the parent writes them). Replies
are JSON, because the process runs other people's code and nothing it sends is executed here.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from typing import Any

HEADER = struct.Struct(">I")
REPLY_LIMIT_BYTES = 16 * 1024 * 1024  # a longer reply is a defect of the function or of the channel


def pack_request(request: Any) -> bytes:
    """A request as one frame."""
    payload = pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(payload)) + payload


def pack_reply(reply: dict[str, Any]) -> bytes:
    """A reply as one frame."""
    payload = json.dumps(reply).encode("ascii")
    return HEADER.pack(len(payload)) + payload


def receive_request(channel: socket.socket) -> Any | None:
    """The next request, or None when the parent has closed the channel."""
    header = _receive_exactly(channel, HEADER.size)
    if header is None:
        return None
    payload = _receive_exactly(channel, HEADER.unpack(header)[0])
    return None if payload is None else pickle.loads(payload)


def _receive_exactly(channel: socket.socket, length: int) -> bytes | None:
    received = bytearray()
    while len(received) < length:
        chunk = channel.recv(min(length - len(received), 1 << 20))
        if not chunk:
            return None
        received += chunk
    return bytes(received)
