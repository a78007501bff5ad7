"""No process is left behind: children end with their parent, and a process is ended whatever it does.

Both work on processes that are stopped or hang: nothing is asked of them, the kernel kills them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from system.core.errors import InfrastructureError

if TYPE_CHECKING:
    import psutil

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.02
_SAME_PROCESS_S = 5.0
"""Two readings of one process's start may differ by a step of the clock; a process id is not used again as soon."""


def end_with_parent() -> None:
    """From now on this process is killed when its parent ends; for processes that ``multiprocessing`` started.

    Linux watches the *thread* that started the process, not its whole parent: that thread must stay for as long as the
    process should. Does nothing in any other process, and on other systems.
    """
    parent = multiprocessing.parent_process()
    if parent is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class ProcessPlace:
    """Where in a cluster a process runs; its start tells it from a later one with the same id."""

    node_id: str
    pid: int
    started_s: float
    """Wall clock."""


def place_of_this_process(node_id: str) -> ProcessPlace:
    import psutil

    return ProcessPlace(node_id, os.getpid(), psutil.Process().create_time())


def end_process(place: ProcessPlace, deadline_s: float) -> None:
    """Kills a process of this machine and all its descendants, and returns when they are gone. Idempotent.

    Raises:
        InfrastructureError: some are still there at the deadline.
    """
    import psutil

    try:
        process = psutil.Process(place.pid)
        if abs(process.create_time() - place.started_s) > _SAME_PROCESS_S:
            return
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    end_s = time.monotonic() + deadline_s
    while family := [member for member in family if not is_gone(member)]:
        if time.monotonic() > end_s:
            pids = ", ".join(str(member.pid) for member in family)
            raise InfrastructureError(
                f"processes {pids} are still there {deadline_s:g} s after they were killed: the kernel does not let go "
                "of them (a GPU driver or a network file system that hangs); restart the node"
            )
        time.sleep(_POLL_S)


def is_gone(process: psutil.Process) -> bool:
    """Whether the process has ended, be it that its parent has not collected it yet (a zombie)."""
    import psutil

    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
