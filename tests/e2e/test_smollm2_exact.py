"""SmolLM2-135M in float32: learner and engine agree before the first update and after each weight sync."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from learner.pool import LearnerPool
from learner.rank import LearnerPlan
from learner.settings import LearnerSettings
from rollout_workers.engine import RolloutEngine
from rollout_workers.settings import RolloutSettings
from system.core.model import ModelSettings
from system.core.records import Group, Row
from system.models import import_model
from system.parts import LearnerPart
from tests.e2e.conftest import ROOT

pytestmark = pytest.mark.long

WAIT_S = 300.0
PROMPTS = [[1, 4093, 198, 1780, 314, 216, 34, 1232, 216, 35, 47, 2], [1, 9690, 198, 2683, 359, 253, 5356, 5646, 2]]


async def sampled(engine: RolloutEngine) -> list[Row]:
    outputs = await asyncio.gather(*(engine.generate(PROMPTS[i % 2], 1000 + i, 24, f"s{i}") for i in range(16)))
    return [
        Row(
            group_id=i % 2, trajectory_id=i // 2, prompt_id="p", source="s", prompt_tokens=np.array(PROMPTS[i % 2]),
            completion_tokens=np.array(out.tokens), rollout_logprobs=np.array(out.logprobs),
            versions=np.array(out.versions), finish_reason=out.finish_reason, seed=1000 + i, worker="w",
            completion_text=out.text, reward=float(len(out.text) % 3),
        )
        for i, out in enumerate(outputs)
    ]  # fmt: skip


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_learner_agree_before_the_first_update_and_after_three_syncs(temperature: float) -> None:
    path = import_model("smollm2", ROOT / "models" / "smollm2")
    asyncio.run(scenario(path, temperature))


async def scenario(path: Path, temperature: float) -> None:
    model = ModelSettings(path=str(path), dtype="float32")
    rollout = RolloutSettings(group_size=8, max_tokens=24, temperature=temperature)
    plan = LearnerPlan(model, LearnerSettings(learning_rate=1e-5), {"name": "grpo"}, temperature=temperature)
    engine = RolloutEngine(model, rollout, name="engine", threads="0-1", backend="gloo")
    pool = LearnerPool(plan, local=True)
    learner = LearnerPart(pool, "gloo", "127.0.0.1")
    try:
        await engine.start(WAIT_S)
        await pool.start()
        rows = await sampled(engine)
        groups = [Group(tuple(row for row in rows if row.group_id == group_id)) for group_id in (0, 1)]
        gaps = await learner_gaps(pool, rows)
        print(f"T={temperature}: sampler against learner: mean {gaps.mean():.1e}, max {gaps.max():.1e} nat")
        assert gaps.mean() < 1e-5
        endpoint = await learner.open_transfer(WAIT_S)
        await asyncio.gather(engine.join_transfer(endpoint, 1, 2, WAIT_S), learner.connect_transfer(2, WAIT_S))
        probe = PROMPTS[0] + PROMPTS[1]
        for version in (1, 2, 3):
            report = await pool.step(groups, version - 1, version - 1)
            assert report.updates == 1
            manifest = await learner.manifest(version, 32 << 20)
            await engine.begin_update(WAIT_S)
            await asyncio.gather(engine.receive(manifest, WAIT_S), learner.send_weights(manifest, WAIT_S))
            await engine.finish_update(version, WAIT_S)
            expected = np.array(await learner.probe(probe))
            gap = np.abs(np.array(await engine.probe(probe, WAIT_S)) - expected)
            print(f"version {version}: probe gap mean {gap.mean():.1e}, max {gap.max():.1e} nat")
            assert gap.max() <= 1e-4
    finally:
        await pool.close()
        await engine.close()


async def learner_gaps(pool: LearnerPool, rows: list[Row]) -> np.ndarray:
    """|sampler - learner| of every sampled token, at the run's temperature."""
    gaps = []
    for row in rows:
        tokens = [*row.prompt_tokens.tolist(), *row.completion_tokens.tolist()]
        logprobs = (await pool.probe(tokens, pool.plan.temperature))[len(row.prompt_tokens) - 1 :]
        gaps.append(np.abs(np.array(logprobs) - row.rollout_logprobs))
    return np.concatenate(gaps)
