"""Plain in-memory parts for the worker's tests: a stream of leases, and an engine with prepared answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rollout_workers.contract import EngineMetrics, EngineOutput, EngineState
from system.core.protocols import Lease, Prompt
from system.core.records import DropReason, Group
from system.core.weights.wire import Endpoint, Manifest

Answer = Callable[[int, str], Awaitable[EngineOutput]]


def output(tokens: Sequence[int] = (7, 8, 5), version: int = 0, finish_reason: str = "stop") -> EngineOutput:
    return EngineOutput(
        list(tokens), [-0.5] * len(tokens), [version] * len(tokens), finish_reason, "".join(map(str, tokens))
    )


def lease(group_id: int, group_size: int = 4, deadline_s: float = 30.0, attempt: int = 0) -> Lease:
    prompt = Prompt(f"p{group_id}", "sums", (1, 2, 3), "1+1=", label="2", metadata='{"terms": 2}')
    return Lease(group_id, prompt, group_size, 0, attempt, 3, deadline_s)


class MemoryStream:
    """Hands out its leases in order and keeps what comes back."""

    def __init__(self, leases: Sequence[Lease] = ()) -> None:
        self.waiting = list(leases)
        self.asked: list[int] = []
        self.groups: dict[int, Group] = {}
        self.submits = 0
        self.given_up: dict[int, tuple[DropReason, str]] = {}
        self.returned = asyncio.Event()

    async def lease(self, worker: str, room: int) -> list[Lease]:
        self.asked.append(room)
        given, self.waiting = self.waiting[:room], self.waiting[room:]
        return given

    async def submit(self, worker: str, payload: bytes) -> str:
        group = Group.from_bytes(payload)
        self.groups[group.group_id] = group
        self.submits += 1
        self.returned.set()
        return "ready"

    async def give_up(self, worker: str, group_id: int, reason: DropReason, cause: str) -> None:
        self.given_up[group_id] = (reason, cause)
        self.returned.set()

    async def until_returned(self, count: int, deadline_s: float = 10.0) -> None:
        """Until ``count`` leases were handed in or given up."""
        async with asyncio.timeout(deadline_s):
            while self.submits + len(self.given_up) < count:
                self.returned.clear()
                await self.returned.wait()


class CannedEngine:
    """Answers every request by ``answer(seed, request_id)``."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.answer = answer
        self.state: EngineState = "serving"
        self.version = 0
        self.running: set[str] = set()
        self.requests: list[str] = []
        self.aborted: list[str] = []
        self.most_running = 0
        self.failure: Exception | None = None
        self.update_failure: Exception | None = None

    async def start(self, deadline_s: float) -> None: ...

    async def generate(self, prompt_tokens: Sequence[int], seed: int, max_tokens: int, request_id: str) -> EngineOutput:
        self.requests.append(request_id)
        self.running.add(request_id)
        self.most_running = max(self.most_running, len(self.running))
        try:
            if self.answer is not None:
                return await self.answer(seed, request_id)
            await asyncio.sleep(0)
            return output(version=self.version)
        except asyncio.CancelledError:
            self.aborted.append(request_id)
            raise
        finally:
            self.running.discard(request_id)

    async def join_transfer(self, endpoint: Endpoint, rank_offset: int, world_size: int, deadline_s: float) -> None: ...

    async def begin_update(self, deadline_s: float) -> None:
        if self.update_failure is not None:
            raise self.update_failure

    async def receive(self, manifest: Manifest, deadline_s: float) -> None: ...

    async def finish_update(self, version: int, deadline_s: float) -> None:
        self.version = version

    async def probe(self, tokens: Sequence[int], deadline_s: float) -> list[float]:
        return [-1.0] * (len(tokens) - 1)

    def metrics(self) -> EngineMetrics:
        return EngineMetrics(len(self.running), 0, self.state, self.version)

    async def check(self) -> None:
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None: ...
