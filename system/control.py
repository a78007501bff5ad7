"""The control actor: how ``triptych run status | stop`` reach a run from outside.

One named actor per run, in the run's own namespace, holding the last status the driver reported and the requests
people made. Requests need the run's token (a file of mode 0600 in the run folder), so that another user of the same
cluster can neither see nor touch the run. The driver polls it; the actor never calls the driver.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Any

from system import ray_session
from system.core.deadlines import wait_ray, within
from system.core.errors import ConfigError, InfrastructureError
from system.run_folder import RunFolder, RunRecord

CALL_DEADLINE_S = 10.0


@dataclass
class ControlState:
    """The pure part: the last status, and whether somebody asked the run to stop."""

    token: str
    status: dict[str, Any] = field(default_factory=dict)
    stop_requested: bool = False

    def check(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(), self.token.encode()):
            raise PermissionError("wrong token for this run")

    def report(self, token: str, status: dict[str, Any]) -> bool:
        """Called by the driver with its status; answers whether a stop was requested."""
        self.check(token)
        self.status = status
        return self.stop_requested

    def read(self, token: str) -> dict[str, Any]:
        self.check(token)
        return self.status

    def request_stop(self, token: str) -> None:
        self.check(token)
        self.stop_requested = True


def start_control(record: RunRecord, token: str) -> Any:
    """Starts the run's control actor in its namespace (Ray is connected already)."""
    import ray

    actor = ray.remote(num_cpus=0, max_concurrency=4)(ControlState)
    return actor.options(name=record.control_actor, namespace=record.ray_namespace).remote(token)


async def report(actor: Any, token: str, status: dict[str, Any]) -> bool:
    """Driver side: pushes the status, returns whether somebody asked for a stop."""
    return await within(actor.report.remote(token, status), CALL_DEADLINE_S, "control actor: report")


class ControlClient:
    """A person's side: finds the control actor of a run on its cluster."""

    def __init__(self, folder: RunFolder) -> None:
        self.record = folder.read()
        self.token = folder.token()
        if self.record.ray_address is None:
            raise InfrastructureError(f"run {self.record.run_id} runs without Ray; it has no control actor")
        ray_session.join(self.record.ray_address, self.record.ray_namespace, folder.token_file)
        import ray

        try:
            self.actor = ray.get_actor(self.record.control_actor, namespace=self.record.ray_namespace)
        except ValueError:
            raise ConfigError(f"run {self.record.run_id} is not running: its control actor is gone") from None

    def status(self) -> dict[str, Any]:
        return wait_ray(self.actor.read.remote(self.token), CALL_DEADLINE_S, "control actor: status")

    def stop(self) -> None:
        wait_ray(self.actor.request_stop.remote(self.token), CALL_DEADLINE_S, "control actor: stop")
