"""``triptych run list | status | stop``: what a person can do to a run from another terminal."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from system.control import ControlClient
from system.core.errors import ConfigError, InfrastructureError, TriptychError
from system.logs import quiet_libraries
from system.metrics import read_metrics
from system.run_folder import RunFolder, RunRecord, find_run, is_alive

POLL_S = 0.5


def print_runs(folder: Path) -> None:
    """A table of the runs below ``folder``."""
    records = sorted(folder.glob("*/run.json")) or sorted(folder.glob("run.json"))
    if not records:
        raise ConfigError(f"no runs below {folder} (no */run.json there)")
    table = Table("run", "state", "step", "reward", "incarnation", "folder", box=None)
    for path in records:
        run = RunFolder(path.parent)
        record = run.read()
        lines = read_metrics(run.metrics)
        reward = f"{lines[-1]['reward']:.3f}" if lines and lines[-1]["reward"] is not None else "-"
        table.add_row(
            run.path.name,
            shown_state(record),
            f"{record.step}/{record.steps}",
            reward,
            str(record.incarnation),
            str(path.parent),
        )
    Console().print(table)


def shown_state(record: RunRecord) -> str:
    """The recorded state; a run whose process is gone without a word is ``dead``."""
    if record.state in ("starting", "running") and not is_alive(record):
        return "dead (run the same command again)"
    return record.state


def print_status(name: str) -> None:
    """The run's record, its last metrics line and, while it runs, what its driver says now."""
    folder = find_run(name)
    record = folder.read()
    console = Console()
    console.print(f"{record.run_id}: {shown_state(record)}, step {record.step} of {record.steps}", highlight=False)
    if record.error:
        console.print(f"error: {record.error}", highlight=False, markup=False)
    lines = read_metrics(folder.metrics)
    if lines:
        last = lines[-1]
        shown = ("reward", "completion_tokens_per_s", "staleness_max", "step_s", "learn_s", "sync_s", "learner_wait_s")
        console.print(
            "  ".join(f"{key} {last[key]:.3g}" for key in shown if last.get(key) is not None), highlight=False
        )
    if is_alive(record) and record.ray_address:
        quiet_libraries()
        for key, value in ControlClient(folder).status().items():
            console.print(f"{key}: {value}", highlight=False, markup=False)


def stop_run(name: str, deadline_s: float) -> None:
    """Asks the run to end and waits until its driver is gone.

    Raises:
        InfrastructureError: it still runs after ``deadline_s``.
    """
    folder = find_run(name)
    record = folder.read()
    if not is_alive(record):
        raise ConfigError(f"run {record.run_id} is not running (state: {shown_state(record)})")
    try:
        if record.ray_address is None:
            os.kill(record.pid, signal.SIGINT)
        else:
            quiet_libraries()
            ControlClient(folder).stop()
    except TriptychError:
        if is_alive(folder.read()):
            raise
    started_s = time.monotonic()
    while is_alive(folder.read()):
        if time.monotonic() - started_s > deadline_s:
            raise InfrastructureError(
                f"run {record.run_id} (pid {record.pid}) still runs {deadline_s:g} s after it was asked to stop"
            )
        time.sleep(POLL_S)
    final = folder.read()
    print(f"{record.run_id}: {final.state} at step {final.step} of {final.steps}")
