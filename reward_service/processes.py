"""Reward processes: started fresh (never forked), killed at their deadline with everything they started, and
replaced.

A process runs one function for one request at a time and answers item by item, so the item at which it hangs or dies
is known and the others keep their answers. A process that cannot be started is an outage; one that dies while judging
is the item's failure, after a second try on a fresh process. Used by the scorer, from any event loop in any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from reward_service.frames import HEADER, REPLY_LIMIT_BYTES, pack_request
from reward_service.functions import FunctionSpec
from reward_service.results import CannotJudge, InvalidResult, Judgement, read_result
from system.core.errors import InfrastructureError
from system.core.protocols import ScoreError

Verdict = Judgement | ScoreError
Mode = Literal["item", "async", "group"]

LIVENESS_S = 0.5  # how often a silent process is looked at; its end is normally seen at once, by the channel closing
ASYNC_GRACE_S = (
    1.0  # an asynchronous function is cancelled at its deadline and gets this long to end before it is killed
)
EXIT_S = 2.0  # how long a killed process may take to be gone
BOOTSTRAP = (
    "import json, sys; channel, lifeline, path = sys.argv[1:4]; sys.path[:] = json.loads(path); sys.argv[1:] = []; "
    "from reward_service.worker import main; main(int(channel), int(lifeline))"
)


class LoadRefused(InfrastructureError):
    """The process runs, but the function cannot be used; the message names the file and the mend."""


class StartFailed(InfrastructureError):
    """A process could not be started, or was not ready in time."""


class ProcessTimeout(Exception):
    """No reply before the deadline."""


class ProcessDied(Exception):
    """The process ended, or sent something that is not a reply."""


@dataclass(frozen=True)
class RunEnd:
    """How a request ended, and for a crash how the process did."""

    kind: Literal["done", "timeout", "crashed"]
    cause: str = ""


class RewardProcess:
    """One process with one loaded function. Not shared: whoever holds it sends one request at a time."""

    def __init__(self, spec: FunctionSpec) -> None:
        ours, theirs = socket.socketpair()
        lifeline_read, lifeline_write = os.pipe()
        path = json.dumps([entry for entry in sys.path if isinstance(entry, str)])
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, str(theirs.fileno()), str(lifeline_read), path],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline_read),
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        except OSError:
            ours.close()
            os.close(lifeline_write)
            raise
        finally:
            theirs.close()
            os.close(lifeline_read)
        self._lifeline = os.fdopen(lifeline_write, "wb", buffering=0)
        self._socket: socket.socket | None = ours
        self._spec = spec
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self.mode: Mode = "item"

    @property
    def pid(self) -> int:
        return self._popen.pid

    @classmethod
    async def start(cls, spec: FunctionSpec, deadline_s: float) -> RewardProcess:
        """Starts a process and waits until its function is loaded.

        Raises:
            LoadRefused: the function cannot be used.
            StartFailed: no process, or not ready within ``deadline_s``.
        """
        try:
            process = cls(spec)
        except OSError as failure:
            raise StartFailed(f"no process could be started: {failure}") from None
        try:
            await process._connect()
            reply = await process._next_reply(time.monotonic() + deadline_s)
            if "refused" in reply:
                raise LoadRefused(str(reply["refused"]))
            process.mode = reply["mode"]
        except ProcessTimeout:
            process.kill()
            raise StartFailed(f"a process was not ready within {deadline_s:g} s") from None
        except (ProcessDied, KeyError) as failure:
            process.kill()
            raise StartFailed(f"a process ended while it loaded the function: {failure}") from None
        except BaseException:
            process.kill()
            raise
        return process

    async def run(
        self, items: Sequence[Mapping[str, Any]], deadline_s: float, verdicts: MutableMapping[str, Verdict]
    ) -> RunEnd:
        """Judges items; puts each verdict into ``verdicts`` as it arrives. After anything but "done", kill the process.

        Args:
            deadline_s: for one item at a time, or for all of them when the function takes the group or is asynchronous.
        """
        assert self._writer is not None
        allowed_s = deadline_s if self.mode == "item" else deadline_s + ASYNC_GRACE_S
        open_ids = {str(item["id"]) for item in items}
        self._writer.write(pack_request({"items": list(items), "deadline_s": deadline_s}))
        until_s = time.monotonic() + allowed_s
        try:
            while "done" not in (reply := await self._next_reply(until_s)):
                item_id = reply.get("id")
                if item_id not in open_ids:
                    raise ProcessDied("it sent an answer for an item nobody asked about")
                open_ids.remove(item_id)
                verdicts[item_id] = read_verdict(reply)
                if self.mode == "item":
                    until_s = time.monotonic() + allowed_s
        except ProcessTimeout:
            return RunEnd("timeout")
        except ProcessDied as failure:
            return RunEnd("crashed", str(failure))
        return RunEnd("done")

    def has_exited(self) -> bool:
        """Whether the process has ended. Does not reap it, so its process group can still be killed safely."""
        return self._exit_status() is not None

    def kill(self) -> None:
        """Kills the process and all it started; returns at once. ``is_gone`` says when it has been reaped."""
        if self._popen.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        self._lifeline.close()
        if self._writer is not None:
            self._writer.transport.abort()
        elif self._socket is not None:
            self._socket.close()
        self._popen.poll()

    def is_gone(self) -> bool:
        """Whether a killed process has ended and been reaped."""
        return self._popen.poll() is not None

    async def _connect(self) -> None:
        assert self._socket is not None
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        self._writer.write(pack_request(self._spec))

    async def _next_reply(self, until_s: float) -> dict[str, Any]:
        reading_task = asyncio.ensure_future(self._read_frame())
        try:
            while True:
                remaining_s = until_s - time.monotonic()
                if remaining_s <= 0:
                    raise ProcessTimeout
                await asyncio.wait({reading_task}, timeout=min(remaining_s, LIVENESS_S))
                if reading_task.done():
                    return reading_task.result()
                if self.has_exited():
                    raise ProcessDied(await self._how_it_ended())
        finally:
            reading_task.cancel()

    async def _read_frame(self) -> dict[str, Any]:
        assert self._reader is not None
        try:
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if length > REPLY_LIMIT_BYTES:
                raise ProcessDied(f"it sent a reply of {length} bytes; at most {REPLY_LIMIT_BYTES} are read")
            reply = json.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ProcessDied(await self._how_it_ended()) from None
        except ValueError:
            raise ProcessDied("it sent something that is not a reply") from None
        if not isinstance(reply, dict):
            raise ProcessDied("it sent something that is not a reply")
        return reply

    async def _how_it_ended(self) -> str:
        until_s = time.monotonic() + EXIT_S
        while (status := self._exit_status()) is None:
            if time.monotonic() > until_s:
                return "it closed its channel"
            await asyncio.sleep(0.005)
        return status

    def _exit_status(self) -> str | None:
        try:
            status = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return "it ended"
        if status is None:
            return None
        if status.si_code == os.CLD_EXITED:
            return f"exit status {status.si_status}"
        return f"killed by {signal.Signals(status.si_status).name}"


def read_verdict(reply: Mapping[str, Any]) -> Verdict:
    """What one reply says about its item; validated again here, because the process runs other people's code."""
    if "code" in reply:
        return ScoreError(str(reply["code"]), str(reply.get("message", "")), retryable=reply["code"] == "timeout")
    try:
        judged = read_result({"reward": reply.get("reward"), "parts": reply.get("parts")})
        info = reply.get("info", "{}")
        if not isinstance(info, str) or not isinstance(json.loads(info), dict):
            raise InvalidResult("info is not a JSON object")
        return Judgement(judged.reward, judged.parts, info)
    except (CannotJudge, ValueError, RecursionError) as failure:
        return ScoreError("invalid", f"item '{reply.get('id')}': {failure}")
