"""The one module that starts, joins and leaves Ray.

Inside a Ray job (``RAY_ADDRESS`` is set) the cluster is there already; otherwise a local one is started for this run
and ends with it, also when its driver is killed. Roles ask for GPUs when the machine has some, and for 0 CPUs: thread
counts are settings of the placement, and six roles do not fit two cores.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from system.core.errors import InfrastructureError

LOOPBACK = "127.0.0.2"
CONNECT_DEADLINE_S = 10.0
OBJECT_STORE_BYTES = 512 * 1024 * 1024
"""Groups of rollouts pass through it, weights do not."""


def start(namespace: str, token_file: Path) -> str:
    """Starts or joins Ray; returns the address that ``run status`` and ``run stop`` connect to.

    A local cluster listens on loopback and asks for the token in ``token_file`` (the run's own, mode 0600).
    """
    quiet: dict[str, Any] = {"namespace": namespace, "log_to_driver": False, "logging_level": "ERROR"}
    try:
        if os.environ.get("RAY_ADDRESS"):
            import ray

            context = ray.init(address="auto", **quiet)
        else:
            _use_token(token_file)
            import ray

            context = ray.init(
                address="local",
                _node_ip_address=LOOPBACK,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                **quiet,
            )
    except (ConnectionError, RuntimeError, OSError) as failure:
        raise InfrastructureError(f"Ray did not start: {failure}") from failure
    return str(context.address_info["gcs_address"])


def join(address: str, namespace: str, token_file: Path) -> None:
    """Connects this process to the cluster of a run.

    Raises:
        InfrastructureError: nothing listens there, or it does not accept the run's token.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_DEADLINE_S).close()
    except OSError as failure:
        raise InfrastructureError(f"no Ray cluster at {address}: {failure}") from None
    node = {}
    if host == LOOPBACK:
        _use_token(token_file)
        node["_node_ip_address"] = LOOPBACK
    import ray

    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR", **node)
    except (ConnectionError, RuntimeError, OSError) as failure:
        raise InfrastructureError(f"the Ray cluster at {address} does not answer: {failure}") from failure


def _use_token(token_file: Path) -> None:
    """Ray reads these when it is first imported, in this process and in those it starts."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    os.environ["RAY_gcs_server_request_timeout_seconds"] = str(int(CONNECT_DEADLINE_S))  # noqa: SIM112


def leave() -> None:
    """Disconnects; a cluster that ``start`` started ends."""
    import ray

    ray.shutdown()


def cluster_gpus() -> int:
    """GPUs of the cluster this process is connected to."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))
