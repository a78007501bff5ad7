"""Addresses of a weight sync: the sender listens on the one address it is given, at a port that the system picks."""

from __future__ import annotations

import socket

from system.core.weights.wire import Endpoint, TransferBroken


def listener_at(address: str) -> socket.socket:
    """Listens on ``address`` at a free port. Raises ``TransferBroken`` when the address is not this node's."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.bind(place)
        listener.listen(128)
    except OSError as failure:
        raise TransferBroken(f"cannot listen on {address}: {failure}; give an address of this node") from failure
    return listener


def address_towards(endpoint: Endpoint) -> str:
    """This node's own address on the route to the sender."""
    family, _, _, _, place = socket.getaddrinfo(endpoint.address, endpoint.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
