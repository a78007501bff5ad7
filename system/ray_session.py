"""The one module that starts, joins and leaves Ray.

Inside a Ray job (``RAY_ADDRESS`` is set) the cluster is there already; otherwise a local one is started for this run
and ends with it, also when its driver is killed. Roles ask for GPUs when the machine has some, and for 0 CPUs: thread
counts are settings of the placement, and six roles do not fit two cores.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from system.core.errors import InfrastructureError
from system.logs import configure_role

LOOPBACK = "127.0.0.2"
CONNECT_DEADLINE_S = 10.0
LOCAL_STARTS = 3
"""Ray gives its own processes 30 s to come up, too little on a machine that is busy at that moment."""
OBJECT_STORE_BYTES = 512 * 1024 * 1024
"""Groups of rollouts pass through it, weights do not."""


def start(namespace: str) -> str:
    """Starts or joins Ray; returns the address that ``run status`` and ``run stop`` connect to.

    A local cluster listens on loopback and asks for the run's own token; call ``use_token`` before Ray is imported.
    """
    settings: dict[str, Any] = {
        "address": "auto", "namespace": namespace, "log_to_driver": False, "logging_level": "ERROR",
        "runtime_env": {"worker_process_setup_hook": configure_role},
    }  # fmt: skip
    starts = 1
    if is_local():
        starts = LOCAL_STARTS
        settings.update(
            address="local",
            _node_ip_address=LOOPBACK,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
        )
    problem: Exception | None = None
    for _ in range(starts):
        try:
            return str(_initialised(settings).address_info["gcs_address"])
        except Exception as failure:  # Ray raises bare exceptions too
            problem = failure
            leave()
    raise InfrastructureError(f"Ray did not start: {problem}") from problem


def _initialised(settings: dict[str, Any]) -> Any:
    import ray

    return ray.init(**settings)


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
        use_token(token_file)
        node["_node_ip_address"] = LOOPBACK
    import ray

    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR", **node)
    except (ConnectionError, RuntimeError, OSError) as failure:
        raise InfrastructureError(f"the Ray cluster at {address} does not answer: {failure}") from failure


def use_token(token_file: Path) -> None:
    """A local cluster of this process, or joined by it, has the token in ``token_file`` (mode 0600).

    Ray reads its authentication mode when it is first imported, so nothing may have imported it yet. Its workers,
    which do all the work of the run, get the priority of this process instead of Ray's niceness of 15.
    """
    if "ray" in sys.modules:
        raise RuntimeError("Ray was imported before its token was chosen")
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ["RAY_gcs_server_request_timeout_seconds"] = str(int(CONNECT_DEADLINE_S))  # noqa: SIM112


def is_local() -> bool:
    """Whether ``start`` will start a cluster of its own."""
    return not os.environ.get("RAY_ADDRESS")


def leave() -> None:
    """Disconnects; a cluster that ``start`` started ends."""
    import ray

    ray.shutdown()


def cluster_gpus() -> int:
    """GPUs of the cluster this process is connected to."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))
