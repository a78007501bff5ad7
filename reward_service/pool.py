"""The processes of one reward: at most ``workers`` of them, started when there is work.

Waiting for a slot counts against no deadline. A group whose function ran into its deadline twice is not tried
further, so that a function that always hangs costs a group two deadlines, not one per completion.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reward_service.functions import FunctionSpec
from reward_service.processes import EXIT_S, LoadRefused, Mode, RewardProcess, RunEnd, StartFailed, Verdict
from reward_service.settings import RewardSettings
from system.core.errors import ConfigError, InfrastructureError
from system.core.protocols import ScoreError

TIMEOUTS_PER_GROUP = 2
SPLIT_ABOVE_S = 0.05  # a group expected to take longer is spread over the processes
RETRY_FIRST_S = 0.1  # between two tries to start a process, doubling up to RETRY_LAST_S
RETRY_LAST_S = 5.0

WireItem = Mapping[str, Any]


class ProcessesDown(InfrastructureError):
    """No process could be started for ``outage_s``."""


@dataclass
class PoolCounters:
    """What a pool did so far."""

    started: int = 0
    replaced: int = 0
    """Processes killed at a deadline, or found dead."""
    running_s: float = 0.0
    waiting_s: float = 0.0
    """Time requests waited for a slot or for a process to start."""


class ProcessPool:
    """Judges items with one reward's function. Belongs to the event loop that first uses it."""

    def __init__(self, settings: RewardSettings, folder: str) -> None:
        self._settings = settings
        self._spec = FunctionSpec(settings.name, settings.use, dict(settings.options), folder)
        self._slots = asyncio.Semaphore(settings.workers)
        self._idle: list[RewardProcess] = []
        self._live: set[RewardProcess] = set()
        self._dying: list[RewardProcess] = []
        self._mode: Mode | None = None
        self._item_s = 0.0
        self._down_since_s: float | None = None
        self._next_try_s = 0.0
        self._cause = ""
        self._closed = False
        self.counters = PoolCounters()

    @property
    def pids(self) -> list[int]:
        """Processes that are alive, as far as known."""
        return [process.pid for process in self._live]

    async def start(self) -> None:
        """Starts the first process and loads the function.

        Raises:
            ConfigError: the function cannot be used.
            ProcessesDown: no process can be started.
        """
        async with self._slots:
            self._idle.append(await self._take_process())

    async def judge(self, items: Sequence[WireItem]) -> dict[str, Verdict]:
        """One verdict per item, by id.

        Raises:
            ConfigError: the function cannot be used (only before it was ever loaded).
            ProcessesDown: no process can be started.
        """
        if self._mode is None:
            await self.start()
        worth_splitting = self._mode == "item" and self._item_s * len(items) > SPLIT_ABOVE_S
        parts = min(self._settings.workers, len(items)) if worth_splitting else 1
        chunks = [items[part * len(items) // parts : (part + 1) * len(items) // parts] for part in range(parts)]
        verdicts: dict[str, Verdict] = {}
        for judged in await all_or_first_error([self._judge_chunk(chunk) for chunk in chunks]):
            verdicts.update(judged)
        return verdicts

    async def close(self) -> None:
        """Kills all processes, with what they started, and waits until they are gone."""
        self._closed = True
        for process in list(self._live):
            self._discard(process)
        until_s = time.monotonic() + EXIT_S
        while self._reap() and time.monotonic() < until_s:  # noqa: ASYNC110 - the kernel tells only when asked
            await asyncio.sleep(0.005)

    async def _judge_chunk(self, items: Sequence[WireItem]) -> dict[str, Verdict]:
        verdicts: dict[str, Verdict] = {}
        pending = {str(item["id"]): item for item in items}
        crashed_once: set[str] = set()
        timeouts = 0
        alone = False
        while pending:
            batch = list(pending)[:1] if alone else list(pending)
            end = await self._run([pending[item_id] for item_id in batch], verdicts)
            left = [item_id for item_id in batch if item_id not in verdicts]
            if end.kind == "done":
                for item_id in left:
                    verdicts[item_id] = self._error("invalid", item_id, "the function gave no answer for it")
            suspects = left[:1] if self._mode == "item" else left
            if end.kind == "timeout":
                timeouts += 1
                for item_id in suspects:
                    verdicts[item_id] = self._timeout(item_id)
                if timeouts >= TIMEOUTS_PER_GROUP:
                    for item_id in pending:
                        verdicts.setdefault(item_id, self._timeout(item_id, tried=False))
            if end.kind == "crashed":
                for item_id in suspects:
                    if item_id in crashed_once:
                        cause = f"the process ended while judging it, twice ({end.cause})"
                        verdicts[item_id] = self._error("crashed", item_id, cause)
                crashed_once.update(suspects)
                alone = self._mode == "async"
            pending = {item_id: item for item_id, item in pending.items() if item_id not in verdicts}
        return verdicts

    async def _run(self, items: Sequence[WireItem], verdicts: dict[str, Verdict]) -> RunEnd:
        asked_s = time.monotonic()
        async with self._slots:
            process = await self._take_process()
            began_s = time.monotonic()
            self.counters.waiting_s += began_s - asked_s
            try:
                end = await process.run(items, self._settings.deadline_s, verdicts)
            except BaseException:
                self._discard(process)
                raise
            took_s = time.monotonic() - began_s
            self.counters.running_s += took_s
            if end.kind == "done" and not self._closed:
                self._item_s = took_s / len(items)
                self._idle.append(process)
            else:
                self._discard(process)
                self.counters.replaced += 1
            return end

    async def _take_process(self) -> RewardProcess:
        while self._idle:
            process = self._idle.pop()
            if not process.has_exited():
                return process
            self._discard(process)
            self.counters.replaced += 1
        delay_s = RETRY_FIRST_S
        while True:
            if self._closed:
                raise InfrastructureError(f"reward '{self._settings.name}': its processes have been closed")
            if not self._is_down() or time.monotonic() >= self._next_try_s:
                process_or_cause = await self._try_start()
                if isinstance(process_or_cause, RewardProcess):
                    return process_or_cause
                self._cause = process_or_cause
                self._next_try_s = time.monotonic() + delay_s
            if self._is_down():
                raise ProcessesDown(
                    f"reward '{self._settings.name}' ({self._settings.use}): no process could be started for "
                    f"{self._settings.outage_s:g} s; the last try: {self._cause}"
                )
            await asyncio.sleep(min(delay_s, self._settings.outage_s))
            delay_s = min(2 * delay_s, RETRY_LAST_S)

    async def _try_start(self) -> RewardProcess | str:
        began_s = time.monotonic()
        self._reap()
        try:
            process = await RewardProcess.start(self._spec, self._settings.start_deadline_s)
        except LoadRefused as failure:
            if self._mode is None:
                raise ConfigError(f"reward '{self._settings.name}': {failure}") from None
            cause = str(failure)
        except StartFailed as failure:
            cause = str(failure)
        else:
            self._live.add(process)
            self._mode = process.mode
            self._down_since_s = None
            self.counters.started += 1
            return process
        if self._down_since_s is None:
            self._down_since_s = began_s
        return cause

    def _is_down(self) -> bool:
        return self._down_since_s is not None and time.monotonic() - self._down_since_s >= self._settings.outage_s

    def _discard(self, process: RewardProcess) -> None:
        process.kill()
        self._live.discard(process)
        if process in self._idle:
            self._idle.remove(process)
        self._dying.append(process)
        self._reap()

    def _reap(self) -> int:
        self._dying = [process for process in self._dying if not process.is_gone()]
        return len(self._dying)

    def _timeout(self, item_id: str, tried: bool = True) -> ScoreError:
        deadline_s = self._settings.deadline_s
        if tried:
            cause = f"not judged within {deadline_s:g} s; its process was killed"
        else:
            cause = f"not tried, because its group ran into the deadline of {deadline_s:g} s {TIMEOUTS_PER_GROUP} times"
        return self._error("timeout", item_id, cause, retryable=True)

    def _error(self, code: str, item_id: str, cause: str, retryable: bool = False) -> ScoreError:
        return ScoreError(code, f"reward '{self._settings.name}', item '{item_id}': {cause}", retryable)


async def all_or_first_error(coroutines: Sequence[Any]) -> list[Any]:
    """Results in order. The first error, or a cancellation, cancels the others and waits for their end."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
