"""``triptych train``: from a recipe on disk to a finished run, with every way of ending it.

Claims the run folder (or goes on in it, when it holds this very run), builds the parts, runs the loop of
``system/run.py``, and writes how it ended into ``run.json``. A first Ctrl-C or SIGTERM ends the run at the next point
where a checkpoint can be written; a second one ends it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from system import ray_session
from system.core.errors import ConfigError, Interrupted, Preempted, TriptychError
from system.logs import configure_logging, quiet_libraries
from system.run_folder import RunFolder, RunRecord, is_alive, write_atomically

log = logging.getLogger("triptych.train")

STATUS_EVERY_S = 1.0
IMPATIENCE_S = 1.0
ENDINGS = {Interrupted: "interrupted", Preempted: "preempted"}


def run_training(path: Path, overrides: list[str], *, dry_run: bool, assume_gpus: int | None, local: bool) -> None:
    """Checks the recipe and runs it (or prints its plan)."""
    quiet_libraries()
    from system.recipe import check_recipe, load_recipe, print_plan

    console = Console(stderr=True)
    recipe = load_recipe(path, overrides)
    plan = check_recipe(recipe, assume_gpus=assume_gpus if dry_run else None, local=local)
    folder = RunFolder(recipe.run.folder)
    _check_same_recipe(folder, recipe)
    if dry_run:
        print_plan(plan, Console())
        return
    if folder.exists() and folder.read().state == "finished":
        console.print(
            f"This run is finished ({folder.read().step} steps). For another, set run.folder=...", highlight=False
        )
        _summary(folder)
        return
    with _claimed(folder):
        record = folder.begin(recipe.run.steps)
        _write_recipe(folder, recipe)
        configure_logging("driver", folder.logs, to_stderr=True)
        log.info(
            "%s: %s of %d steps, run folder %s", recipe.run.name, _start_or_go_on(record), recipe.run.steps, folder.path
        )
        for line in plan.learner_lines:
            log.info("%s: %s", line.label, line.value)
        try:
            asyncio.run(_run(recipe, plan, folder, record, local))
        except BaseException as ending:
            state = ENDINGS.get(type(ending), "failed")  # type: ignore[arg-type]
            folder.update(state=state, error=f"{type(ending).__name__}: {ending}", finished_unix_s=time.time())
            raise
        folder.update(state="finished", finished_unix_s=time.time())
    _summary(folder)


async def _run(recipe: Any, plan: Any, folder: RunFolder, record: RunRecord, local: bool) -> None:
    from system.checkpoint import CheckpointStore
    from system.progress import Progress
    from system.run import StopRequest, train

    if local:
        from system.local import open_parts
    else:
        if ray_session.is_local():
            ray_session.use_token(folder.token_file)
        from system.cluster import open_parts

    stop = StopRequest()
    _end_on_signals(stop, asyncio.current_task())
    store = CheckpointStore(folder.checkpoints, recipe.run.keep)
    try:
        async with open_parts(recipe, plan, folder, record) as parts, Progress(recipe.run.steps) as progress:
            stop.learning = True
            _end_on_signals(stop, asyncio.current_task())  # Ray put handlers of its own in their place
            async with _watched(folder, parts, progress, stop):
                await train(parts, recipe, folder, progress, stop, store)
    except asyncio.CancelledError:
        reason = stop.reason or Interrupted
        raise reason("stopped; what the last checkpoint holds is kept, run the same command again to go on") from None


def _end_on_signals(stop: Any, task: asyncio.Task[Any] | None) -> None:
    """The first signal asks for an orderly end; a Ctrl-C that follows it by a second ends at once.

    SIGTERM is never taken as impatience: whatever wraps this process may pass the same one on twice.
    """
    asked_s: list[float] = []

    def asked(reason: type[TriptychError]) -> None:
        now_s = time.monotonic()
        asked_s.append(now_s)
        stop.request(reason)
        impatient = reason is Interrupted and now_s - asked_s[0] > IMPATIENCE_S
        if task is not None and (impatient or not stop.learning):
            task.cancel()
        elif len(asked_s) == 1:
            log.info("stopping after the work at hand, with a checkpoint; Ctrl-C once more to stop at once")

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, asked, Interrupted)
    loop.add_signal_handler(signal.SIGTERM, asked, Preempted)


@contextlib.asynccontextmanager
async def _watched(folder: RunFolder, parts: Any, progress: Any, stop: Any) -> AsyncIterator[None]:
    """Tells the control actor what the run does, and hears whether somebody asked it to stop."""
    if parts.control is None:
        yield
        return
    from system.control import report

    token = folder.token()

    async def watch() -> None:
        while True:
            status = {**progress.status(), "waiting": await parts.stream.why_waiting()}
            if await report(parts.control, token, status) and stop.reason is None:
                log.info("asked to stop")
                stop.request(Interrupted)
            await asyncio.sleep(STATUS_EVERY_S)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _check_same_recipe(folder: RunFolder, recipe: Any) -> None:
    """A run folder belongs to one recipe.

    Raises:
        ConfigError: it holds a run of a different one; the message lists the keys that differ.
    """
    if not folder.exists() or not folder.recipe.exists():
        return
    from system.recipe import differing_keys, read_resolved

    differences = differing_keys(read_resolved(folder.recipe), recipe)
    if differences:
        raise ConfigError(
            f"{folder.path} holds a run of a different recipe. These keys differ (there -> here):\n  "
            + "\n  ".join(differences)
            + "\nGive this run its own run.folder, or go on with the recipe of that one."
        )


def _write_recipe(folder: RunFolder, recipe: Any) -> None:
    from system.recipe import resolved_yaml

    write_atomically(folder.recipe, resolved_yaml(recipe))


@contextlib.contextmanager
def _claimed(folder: RunFolder) -> Iterator[None]:
    """Holds the folder for this process; two drivers in one folder would write over each other."""
    folder.path.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder.path / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = folder.read() if folder.exists() else None
            pid = f" (pid {holder.pid})" if holder and is_alive(holder) else ""
            raise ConfigError(
                f"{folder.path} is in use by a running run{pid}: stop it with triptych run stop, or set run.folder=..."
            ) from None
        yield
    finally:
        os.close(descriptor)


def _start_or_go_on(record: RunRecord) -> str:
    return f"going on after step {record.step}" if record.incarnation > 0 else "starting"


def _summary(folder: RunFolder) -> None:
    from system.summary import print_summary

    print_summary(folder, Console())
