"""Learner pools of every shape train tiny models and send them to vLLM engines: the cells of test_sync_matrix.

An engine lives in a Ray actor and receives over gloo; it stays up for all learner pools of its model, and its process
for all models. A pool of one rank is in the test's process, one of two ranks in Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from safetensors.torch import load_file

from learner.pool import LearnerPool
from learner.rank import LearnerPlan
from learner.settings import LearnerSettings
from rollout_workers.engine import LocalEngine
from rollout_workers.fleet import Fleet, TransferPlan
from rollout_workers.settings import RolloutSettings
from system.core.deadlines import answer
from system.core.model import ModelSettings
from system.parts import LearnerPart
from system.probe import ProbeLimit
from system.sync import WeightSync
from tests.learner.conftest import make_groups
from tests.tiny_models import save_tiny_llama, save_tiny_qwen3, save_tiny_qwen3_moe

FAMILIES: dict[str, Callable[..., Path]] = {
    "llama": save_tiny_llama,
    "qwen3": save_tiny_qwen3,
    "qwen3_moe": save_tiny_qwen3_moe,
}
BUCKET_BYTES = {"one": 1 << 26, "many": 20_000}
SYNCS = 3
START_S, WAIT_S = 240.0, 60.0
ENGINE_COUNT = 2
PROBES = [np.random.default_rng(seed).integers(6, 262, 40).tolist() for seed in range(3)]


@dataclass(frozen=True)
class Shape:
    """How one learner pool is cut."""

    zero: int
    ranks: int


@dataclass(frozen=True)
class Cell:
    """One place of the matrix for a model."""

    zero: int
    ranks: int
    engines: int
    buckets: str


@dataclass(frozen=True)
class Gap:
    """How far an engine's log-probs of the probe prompts are from the learner's after one sync, in nats."""

    cell: Cell
    engine: str
    version: int
    mean: float
    max: float


class EngineHost:
    """A Ray actor with one engine at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._engine: LocalEngine | None = None

    async def open(self, model: str) -> None:
        if self._engine is not None:
            await self._engine.close()
        rollout = RolloutSettings(group_size=4, max_tokens=8, kv_cache_bytes=64 * 2**20)
        self._engine = LocalEngine(ModelSettings(path=model, dtype="float32"), rollout, name=self._name, backend="gloo")
        await self._engine.start(START_S)

    async def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        return await getattr(self._engine, method)(*arguments)


class HostedEngine:
    """The engine of a host, as a weight sync sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._host: Any = ray.remote(EngineHost).options(num_cpus=0).remote(name)

    async def open(self, model: Path) -> None:
        await answer(self._host.open.remote(str(model)), START_S, f"{self.name}: start")

    async def join_transfer(self, endpoint: Any, rank: int, world_size: int, deadline_s: float) -> None:
        await self._call("join_transfer", endpoint, rank, world_size, deadline_s)

    async def begin_update(self, deadline_s: float) -> None:
        await self._call("begin_update", deadline_s)

    async def receive(self, manifest: Any, deadline_s: float) -> None:
        await self._call("receive", manifest, deadline_s)

    async def finish_update(self, version: int, deadline_s: float) -> None:
        await self._call("finish_update", version, deadline_s)

    async def probe(self, tokens: Sequence[int], deadline_s: float) -> list[float]:
        return await self._call("probe", tokens, deadline_s)

    async def admit(self, version: int) -> None:
        pass

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await answer(self._host.call.remote(method, arguments), WAIT_S, f"{self.name}: {method}")


class Present:
    """Members of a sync that are all there, and stay."""

    def __init__(self, engines: Sequence[HostedEngine]) -> None:
        self._engines = list(engines)
        self._fleet = Fleet()
        for engine in engines:
            self._fleet.add(engine.name)

    def receivers(self) -> list[Any]:
        return list(self._engines)

    def late(self) -> list[Any]:
        return []

    def transfer_plan(self, receivers: Sequence[Any]) -> TransferPlan:
        return self._fleet.transfer_plan([receiver.name for receiver in receivers])

    def admitted(self, receiver: Any) -> None:
        pass

    def lose(self, receiver: Any, cause: str) -> bool:
        raise AssertionError(f"{receiver.name}: {cause}")


class SyncMatrix:
    """The engines, and what was measured so far."""

    def __init__(self) -> None:
        self.engines = [HostedEngine(f"engine-{number}") for number in range(ENGINE_COUNT)]
        self.gaps: list[tuple[str, Gap]] = []

    async def measure(self, family: str, tied: bool, shapes: Sequence[Shape], folder: Path) -> list[Gap]:
        """Every cell that the pools of these shapes reach, for one model."""
        model = FAMILIES[family](folder / "model", tied=tied)
        await asyncio.gather(*(engine.open(model) for engine in self.engines))
        found: list[Gap] = []
        for shape in shapes:
            found += await self._measure_pool(model, shape, folder / f"trained-{shape.zero}-{shape.ranks}")
        self.gaps += [(f"{family} {'tied' if tied else 'untied'}", gap) for gap in found]
        return found

    async def _measure_pool(self, model: Path, shape: Shape, trained: Path) -> list[Gap]:
        async with AsyncExitStack() as opened:
            pool = LearnerPool(learner_plan(model, shape), local=shape.ranks == 1, actor_options=options(shape))
            opened.push_async_callback(pool.close)
            await pool.start()
            steps = iter(range(1, 1000))
            found = []
            for engines in range(1, ENGINE_COUNT + 1):
                for buckets in BUCKET_BYTES:
                    cell = Cell(shape.zero, shape.ranks, engines, buckets)
                    found += await self._measure_cell(pool, cell, steps)
            await pool.save_hf(trained)
            refuse_unmoved(model, trained)
            return found

    async def _measure_cell(self, pool: LearnerPool, cell: Cell, steps: Iterator[int]) -> list[Gap]:
        engines = self.engines[: cell.engines]
        manifest = await pool.weight_manifest(0, BUCKET_BYTES[cell.buckets])
        assert (len(manifest.buckets()) == 1) == (cell.buckets == "one")
        sync = WeightSync(
            LearnerPart(pool, "gloo"),
            Present(engines),
            deadline_s=WAIT_S,
            bucket_bytes=BUCKET_BYTES[cell.buckets],
            probe_tokens=PROBES[0],
            limit=ProbeLimit(float32=True),
        )
        found = []
        before = await learner_logprobs(pool)
        for version in (next(steps) for _ in range(SYNCS)):
            await pool.step(make_groups(seed=version), version, version - 1)
            expected = await learner_logprobs(pool)
            assert np.abs(expected - before).max() > 1e-2, f"{cell}: step {version} moved the policy too little to tell"
            before = expected
            report = await sync.publish(version)
            assert (len(report.workers), report.rounds) == (cell.engines, 1), f"{cell}: {report}"
            for engine in engines:
                gaps = np.abs(np.concatenate([await engine.probe(probe, WAIT_S) for probe in PROBES]) - expected)
                found.append(Gap(cell, engine.name, version, float(gaps.mean()), float(gaps.max())))
        await pool.close_transfer()
        return found


async def learner_logprobs(pool: LearnerPool) -> np.ndarray:
    return np.concatenate([await pool.probe(probe) for probe in PROBES])


def learner_plan(model: Path, shape: Shape) -> LearnerPlan:
    settings = LearnerSettings(workers=shape.ranks, zero=shape.zero, learning_rate=3e-3, threads=1)
    return LearnerPlan(ModelSettings(path=str(model), dtype="float32"), settings, {"name": "grpo"})


def options(shape: Shape) -> list[dict[str, Any]]:
    return [{"num_cpus": 0}] * shape.ranks


def refuse_unmoved(model: Path, trained: Path) -> None:
    """Every weight on disk, each expert's among them, must differ from the start."""
    start, end = (load_file(folder / "model.safetensors") for folder in (model, trained))
    assert {name: weight.shape for name, weight in start.items()} == {
        name: weight.shape for name, weight in end.items()
    }
    still = [name for name in start if torch.equal(start[name], end[name])]
    assert not still, f"not moved by training: {', '.join(still)}"
