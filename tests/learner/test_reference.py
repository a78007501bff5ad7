"""The reference model and the service around it."""

from __future__ import annotations

import asyncio
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

from learner.logprobs import LogprobModel, completion_logprobs
from learner.model import load_causal_lm
from learner.reference import ReferenceModel
from learner.reference_actor import ReferenceClient, ReferenceWorker
from learner.settings import ReferenceSettings
from learner.token_batch import ScoredRow
from system.core.errors import ConfigError, DataError, InfrastructureError
from system.core.model import ModelSettings
from system.core.protocols import TokenRow


def rows(count: int, seed: int = 0) -> list[TokenRow]:
    generator = np.random.default_rng(seed)
    return [
        TokenRow(
            generator.integers(6, 262, generator.integers(1, 9)), generator.integers(6, 262, generator.integers(1, 9))
        )
        for _ in range(count)
    ]


def settings_of(folder: Path) -> ModelSettings:
    return ModelSettings(path=str(folder), dtype="float32")


def test_at_version_zero_reference_and_policy_agree(tied_llama):
    policy = LogprobModel(load_causal_lm(settings_of(tied_llama)), 0.6)
    asked = rows(6)
    reference = ReferenceModel(settings_of(tied_llama), ReferenceSettings(batch_tokens=30), 0.6).logprobs(asked)
    ours = completion_logprobs(policy, [ScoredRow(row.prompt_tokens, row.completion_tokens) for row in asked], 1000)
    for left, right in zip(reference, ours, strict=True):
        assert left.dtype == np.float32
        np.testing.assert_allclose(left, right, atol=1e-5)


async def served(folder: Path, **settings: object) -> ReferenceWorker:
    worker = ReferenceWorker(settings_of(folder), ReferenceSettings(threads=1, **settings), 1.0)
    await worker.start()
    return worker


def test_requests_that_arrive_together_share_a_batch_and_get_their_own_answers(tiny_llama):
    async def scenario() -> None:
        worker = await served(tiny_llama, collect_s=0.05)
        asked = [rows(3, seed) for seed in range(5)]
        answers = await asyncio.gather(*(worker.logprobs(request) for request in asked))
        assert worker.batches == 1
        assert worker.served_rows == 15
        for request, answer in zip(asked, answers, strict=True):
            for left, right in zip(answer, await worker.logprobs(request), strict=True):
                np.testing.assert_allclose(left, right, atol=1e-5)
        await worker.close()

    asyncio.run(scenario())


def test_a_bad_request_fails_alone(tiny_llama):
    async def scenario() -> None:
        worker = await served(tiny_llama, collect_s=0.05)
        bad = [TokenRow(np.array([], np.int32), np.array([9]))]
        good, failed = await asyncio.gather(worker.logprobs(rows(2)), worker.logprobs(bad), return_exceptions=True)
        assert isinstance(failed, DataError)
        assert len(good) == 2
        await worker.close()

    asyncio.run(scenario())


def test_a_request_past_its_deadline_gets_an_error_and_is_not_computed(tiny_llama):
    async def scenario() -> None:
        worker = await served(tiny_llama, collect_s=0.3, deadline_s=0.05)
        started_s = time.monotonic()
        with pytest.raises(InfrastructureError, match="2 rows"):
            await worker.logprobs(rows(2))
        assert time.monotonic() - started_s < 0.3
        await asyncio.sleep(0.4)
        assert worker.served_rows == 0
        await worker.close()

    asyncio.run(scenario())


def test_closing_answers_whoever_waits(tiny_llama):
    async def scenario() -> None:
        worker = await served(tiny_llama, collect_s=5.0)
        waiting = asyncio.create_task(worker.logprobs(rows(1)))
        await asyncio.sleep(0.05)
        await worker.close()
        with pytest.raises(InfrastructureError, match="closed"):
            await waiting
        with pytest.raises(InfrastructureError, match="not serving"):
            await worker.logprobs(rows(1))

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_is_a_config_error(tmp_path):
    async def scenario() -> None:
        with pytest.raises(ConfigError, match=r"model\.path"):
            await served(tmp_path / "nowhere")

    asyncio.run(scenario())


def test_the_client_can_be_sent_to_other_processes():
    assert isinstance(pickle.loads(pickle.dumps(ReferenceClient(["actor"], 5.0))), ReferenceClient)
