"""A running system whose transfers can be cut at a chosen point: real learner, Ray actors, vLLM engines, stream, sync.

Everything is what a run is made of, except that the test itself is the loop, and that the second worker's actor can be
told to raise inside its vLLM process. Killing and stopping need no such help: a cut runs at the chosen point on the
learner's side of the transfer, or just before the call of a phase.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil
import ray
import torch
from transformers import AutoModelForCausalLM

from learner.pool import LearnerPool
from learner.rank import LearnerPlan
from learner.settings import LearnerSettings
from rollout_workers.actor import CONCURRENT_CALLS, RolloutActor, RolloutClient, WorkerPlan
from rollout_workers.settings import RolloutSettings
from system.core.model import ModelSettings
from system.core.protocols import Prompt, Score, ScoreRequest
from system.core.records import Group, Row
from system.ledger_facts import LedgerLimits
from system.parts import LearnerPart
from system.probe import ProbeLimit
from system.rollouts import RolloutWorkers
from system.stream import StreamClient
from system.stream.actor import start_stream
from system.sync import SyncReport, WeightSync

Kind = Literal["kill_engine", "kill_actor", "stop_engine", "stop_actor", "raise"]

GROUP_SIZE, GROUPS_PER_STEP, MAX_TOKENS, MAX_STALENESS = 4, 8, 48, 2
SYNC_DEADLINE_S = 8.0
BUCKET_BYTES = 40_000
PROBE = list(range(6, 54))
START_S = 240.0


def prompts() -> Callable[[int], Prompt]:
    return lambda position: Prompt(
        f"p{position}", "test", tuple(6 + (7 * position + index) % 250 for index in range(12)), "p"
    )


class TokenScorer:
    """Reward: whether the first token is even, so that groups differ."""

    async def score(self, request: ScoreRequest) -> list[Score]:
        return [Score(item.id, float(item.completion_tokens % 3)) for item in request.items]

    async def close(self) -> None: ...


def raise_once(worker: Any, where: str, bucket: int) -> None:
    """Runs in vLLM's worker process: the next call of ``where`` raises there (of ``_load``: at ``bucket``)."""
    engine = worker.weight_transfer_engine
    original = getattr(engine, where)

    def raising(*arguments: Any) -> Any:
        if where == "_load" and arguments[0].index < bucket:
            return original(*arguments)
        setattr(engine, where, original)
        raise RuntimeError("out of memory, says the test")

    setattr(engine, where, raising)


class ArmedActor(RolloutActor):
    """A rollout worker whose engine can be told to raise."""

    async def arm(self, where: str, bucket: int) -> None:
        await self._engine._llm.collective_rpc(raise_once, args=(where, bucket))


class CutClient(RolloutClient):
    """Runs ``before[phase]`` just before the call of that phase."""

    def __init__(self, name: str, actor: Any) -> None:
        super().__init__(name, actor)
        self.before: dict[str, Callable[[], Any]] = {}

    async def _cut(self, phase: str) -> None:
        cut = self.before.pop(phase, None)
        if cut is not None:
            cut()

    async def join_transfer(self, *arguments: Any) -> None:
        await self._cut("join")
        await super().join_transfer(*arguments)

    async def begin_update(self, *arguments: Any) -> None:
        await self._cut("begin")
        await super().begin_update(*arguments)

    async def finish_update(self, *arguments: Any) -> None:
        await self._cut("finish")
        await super().finish_update(*arguments)

    async def probe(self, *arguments: Any) -> list[float]:
        await self._cut("probe")
        return await super().probe(*arguments)


class TransferScene:
    """Two rollout workers that generate all the time, and one learner rank in this process."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = ModelSettings(path=str(model), dtype="float32")
        self.folder = folder
        self.rollout = RolloutSettings(
            group_size=GROUP_SIZE, max_tokens=MAX_TOKENS, kv_cache_bytes=128 * 2**20, max_running_requests=32
        )
        self.version = 0
        self.taken: list[int] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.opened = AsyncExitStack()

    async def open(self) -> TransferScene:
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
        self.opened.callback(ray.shutdown)
        limits = LedgerLimits(GROUPS_PER_STEP, MAX_STALENESS, deadline_s=60.0)
        self.stream: StreamClient = await start_stream(limits, GROUP_SIZE, prompts)
        self.workers = RolloutWorkers(
            ["rollout-0", "rollout-1"], self._build, self.stream, restarts=99, start_deadline_s=START_S
        )
        self.workers.fleet.pause_before_rebuild_s = lambda name: 0.0  # type: ignore[method-assign]
        self.opened.push_async_callback(self.workers.close)
        learner = LearnerSettings(zero=0, learning_rate=1e-2, epsilon=1e-2, threads=1)
        self.pool = LearnerPool(LearnerPlan(self.model, learner, {"name": "grpo"}), local=True)
        self.opened.push_async_callback(self.pool.close)
        await asyncio.gather(self.pool.start(), self.workers.start())
        self.learner = LearnerPart(self.pool, "gloo")
        self.sync = WeightSync(
            self.learner,
            self.workers,
            deadline_s=SYNC_DEADLINE_S,
            bucket_bytes=BUCKET_BYTES,
            probe_tokens=PROBE,
            limit=ProbeLimit(float32=True),
        )
        await self.remember()
        await self.sync.publish(0)
        return self

    async def close(self) -> None:
        await self.opened.aclose()

    def _build(self, name: str) -> CutClient:
        plan = WorkerPlan(
            name=name, model=self.model, rollout=self.rollout, run_name="cuts", run_seed=3,
            stream=partial(_same, self.stream), scorer=TokenScorer, threads="0-1",
        )  # fmt: skip
        options = {
            "num_cpus": 0,
            "max_concurrency": CONCURRENT_CALLS,
            "runtime_env": {"env_vars": {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OMP_WAIT_POLICY": "PASSIVE"}},
        }
        return CutClient(name, ray.remote(ArmedActor).options(**options).remote(plan))

    @property
    def victim(self) -> CutClient:
        return self.workers._clients["rollout-1"]  # type: ignore[return-value]

    def buckets(self) -> int:
        rank = self.pool._ranks.ranks[0]._rank  # type: ignore[attr-defined]
        return len(rank.weight_manifest(0, BUCKET_BYTES).buckets())

    async def arm(self, kind: Kind, point: str | int) -> None:
        """The next sync is cut at ``point``: before a phase, or before a bucket is sent."""
        if kind == "raise":
            where = {"join": "init_transfer_engine", "begin": "start_weight_update", "finish": "finish_weight_update"}
            bucket = point if isinstance(point, int) else 0
            await self.victim.actor.arm.remote(where.get(str(point), "_load"), bucket)
            return
        cut = partial(_end, kind, self.victim.place.pid)
        if isinstance(point, str):
            self.victim.before[point] = cut
            return
        source = self.pool._ranks.ranks[0]._rank.weight_source()  # type: ignore[attr-defined]
        gather, seen = source.gather, iter(range(10**6))

        def cutting(names: Sequence[str]) -> Any:
            if next(seen) == point:
                source.gather = gather
                cut()
            return gather(names)

        source.gather = cutting

    async def step(self) -> SyncReport:
        """Learns a step's groups, sends the new weights, commits."""
        taken = await self.stream.take(self.version, 60.0)
        assert taken is not None, await self.stream.why_waiting()
        self.check_rows([row for payload in taken.groups for row in Group.from_bytes(payload).rows])
        self.taken.extend(taken.group_ids)
        await self.learner.step(taken.groups, len(self.taken), self.version)
        self.version += 1
        await self.remember()
        report = await self.sync.publish(self.version)
        await self.stream.commit(self.version)
        return report

    async def remember(self) -> None:
        folder = self.folder / f"v{self.version}"
        await self.pool.save_hf(folder)
        self.weights[self.version] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()

    def check_rows(self, rows: Sequence[Row]) -> None:
        """Every token has the log-prob that its version's verified weights give it: none was sampled in between."""
        model = AutoModelForCausalLM.from_pretrained(self.model.path, dtype=torch.float32)
        for version in sorted({int(version) for row in rows for version in row.versions}):
            model.load_state_dict(self.weights[version])
            for row in rows:
                mine = torch.as_tensor(row.versions == version)
                if not mine.any():
                    continue
                tokens = torch.tensor([[*row.prompt_tokens.tolist(), *row.completion_tokens.tolist()]])
                with torch.no_grad():
                    logits = model(tokens).logits[0, len(row.prompt_tokens) - 1 : -1]
                expected = logits.log_softmax(-1).gather(1, tokens[0, len(row.prompt_tokens) :, None])[:, 0]
                gaps = (torch.as_tensor(row.rollout_logprobs) - expected).abs()[mine]
                assert float(gaps.max()) < 2e-4, (row.group_id, version, float(gaps.max()))

    async def until_whole(self, deadline_s: float = START_S) -> float:
        """As the loop does while it waits: lets rebuilt workers catch up, until both serve. Returns the seconds."""
        began_s = time.monotonic()
        while len(self.workers.fleet.named("healthy")) < 2:
            await self.workers.check()
            await self.sync.catch_up(self.version)
            assert time.monotonic() - began_s < deadline_s, self.workers.fleet.members()
            await asyncio.sleep(0.2)
        return time.monotonic() - began_s


def _same(client: StreamClient) -> StreamClient:
    return client


def _end(kind: Kind, actor_pid: int) -> None:
    """Kills or stops the actor, or the vLLM process that receives the weights."""
    pid = actor_pid
    if kind.endswith("engine"):
        children = psutil.Process(actor_pid).children(recursive=True)
        (pid,) = [child.pid for child in children if "Worker" in child.name() or "Worker" in "".join(child.cmdline())]
    os.kill(pid, signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP)
