"""The main program of a reward process: loads one function, judges items until the parent closes the channel.

One reply per item as soon as it is judged, so that the parent knows which one is running. The process and everything
it started die with the parent, whatever the function is doing: the kernel kills the process group when the lifeline
closes. What the function prints goes to stderr. Synchronous functions run in the main thread, without a running event
loop.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from reward_service.frames import pack_reply, receive_request
from reward_service.functions import FunctionSpec, LoadError, RewardFunction, RewardItem, item_from_wire, last_lines
from reward_service.results import CannotJudge, InvalidResult, match_results, read_result
from reward_service.verifiers import load_reward

if TYPE_CHECKING:
    import asyncio

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
PARENT_CHECK_S = 1.0
_SECRET_LENGTH = 8  # shorter values are words, not secrets


def main(channel_fd: int, lifeline_fd: int) -> None:
    """Serves requests on the socket ``channel_fd`` until it closes."""
    die_with_parent(lifeline_fd)
    os.set_inheritable(channel_fd, False)
    os.set_inheritable(lifeline_fd, False)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = socket.socket(fileno=channel_fd)

    def reply(message: dict[str, Any]) -> None:
        channel.sendall(pack_reply(message))

    spec = receive_request(channel)
    if spec is None:
        return
    try:
        judge = Judge(load_reward(spec), spec, reply)
    except LoadError as failure:
        reply({"refused": without_secrets(str(failure))})
        return
    except BaseException as failure:
        reply({"refused": without_secrets(f"{spec.use} cannot be loaded:\n{last_lines(failure)}")})
        return
    try:
        reply({"mode": judge.mode})
        while (request := receive_request(channel)) is not None:
            judge.run(request["items"], request["deadline_s"])
            reply({"done": True})
    except ConnectionError:
        pass  # the parent is gone, and with it who would read an answer
    os._exit(0)


class Judge:
    """Runs one function over the items of requests and sends one reply per item."""

    def __init__(self, function: RewardFunction, spec: FunctionSpec, reply: Callable[[dict[str, Any]], None]) -> None:
        self.function = function
        self._reward = spec.reward
        self._reply = reply
        self._runner: asyncio.Runner | None = None

    @property
    def mode(self) -> str:
        """``item`` one after the other, ``async`` all items at once, ``group`` one call for all."""
        if self.function.takes_group:
            return "group"
        return "async" if self.function.asynchronous else "item"

    def run(self, wire_items: list[dict[str, Any]], deadline_s: float) -> None:
        """Judges the items of one request. ``deadline_s`` bounds asynchronous functions; the parent bounds others."""
        items = []
        for wire_item in wire_items:
            try:
                items.append(item_from_wire(wire_item))
            except InvalidResult as failure:
                self._send_error(wire_item["id"], "invalid", str(failure))
        if not items:
            return
        if self.function.takes_group:
            self._run_group(items, deadline_s)
        elif self.function.asynchronous:
            self._run_in_loop(self._all_at_once(items, deadline_s))
        else:
            for item in items:
                self._judge_one(item, deadline_s)

    def _judge_one(self, item: RewardItem, deadline_s: float) -> None:
        try:
            value = self.function.call(item)
            if hasattr(value, "__await__"):
                value = self._run_in_loop(_bounded(value, deadline_s))
        except BaseException as failure:
            self._send_failure(item.id, failure, deadline_s)
        else:
            self._send_result(item.id, value)

    async def _all_at_once(self, items: list[RewardItem], deadline_s: float) -> None:
        import asyncio

        async def one(item: RewardItem) -> None:
            try:
                value = await _bounded(self.function.call(item), deadline_s)
            except BaseException as failure:
                self._send_failure(item.id, failure, deadline_s)
            else:
                self._send_result(item.id, value)

        await asyncio.gather(*(one(item) for item in items))

    def _run_group(self, items: list[RewardItem], deadline_s: float) -> None:
        try:
            value = self.function.call_group(items)
            if hasattr(value, "__await__"):
                value = self._run_in_loop(_bounded(value, deadline_s))
            results = match_results([item.id for item in items], value)
        except BaseException as failure:
            for item in items:
                self._send_failure(item.id, failure, deadline_s)
            return
        for item in items:
            self._send_result(item.id, results[item.id])

    def _run_in_loop(self, coroutine: Any) -> Any:
        import asyncio

        if self._runner is None:
            self._runner = asyncio.Runner()
        return self._runner.run(coroutine)

    def _send_result(self, item_id: str, value: Any) -> None:
        try:
            judged = read_result(value)
        except (InvalidResult, CannotJudge) as failure:
            self._send_failure(item_id, failure, 0.0)
            return
        self._reply({"id": item_id, "reward": judged.reward, "parts": judged.parts, "info": judged.info})

    def _send_failure(self, item_id: str, failure: BaseException, deadline_s: float) -> None:
        if isinstance(failure, _DeadlinePassed):
            self._send_error(item_id, "timeout", f"not judged within {deadline_s:g} s")
        elif isinstance(failure, CannotJudge):
            self._send_error(item_id, "declined", str(failure))
        elif isinstance(failure, InvalidResult):
            self._send_error(item_id, "invalid", str(failure))
        else:
            self._send_error(item_id, "raised", last_lines(failure))

    def _send_error(self, item_id: str, code: str, message: str) -> None:
        text = f"reward '{self._reward}', item '{item_id}': {message}"
        self._reply({"id": item_id, "code": code, "message": without_secrets(text)})


class _DeadlinePassed(Exception):
    """An asynchronous function was cancelled at its deadline."""


async def _bounded(awaitable: Any, deadline_s: float) -> Any:
    import asyncio

    try:
        async with asyncio.timeout(deadline_s) as deadline:
            return await awaitable
    except TimeoutError:
        if deadline.expired():
            raise _DeadlinePassed from None
        raise


def die_with_parent(lifeline_fd: int) -> None:
    """Ties the life of this process group to the other end of the pipe ``lifeline_fd``.

    On Linux the kernel itself sends SIGKILL to the group when the pipe closes, so it works also while a function holds
    the interpreter's lock. A thread does the same where the kernel cannot, and when a sibling inherited the pipe.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline_fd, fcntl.F_SETSIG, int(signal.SIGKILL))
        fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, fcntl.fcntl(lifeline_fd, fcntl.F_GETFL) | os.O_ASYNC)

    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent and not select.select([lifeline_fd], [], [], PARENT_CHECK_S)[0]:
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def without_secrets(text: str) -> str:
    """``text`` without the values of environment variables whose names say that they are secret."""
    for name, value in os.environ.items():
        if len(value) >= _SECRET_LENGTH and _SECRET_NAME.search(name):
            text = text.replace(value, f"<{name}>")
    return text
