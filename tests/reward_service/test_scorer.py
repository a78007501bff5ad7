"""The weighted sum, its failures, data sources, outages, twins and speed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reward_service.answers import AnswerBook
from reward_service.processes import read_verdict
from reward_service.results import Judgement
from reward_service.scorer import LocalScorer, combine
from reward_service.settings import RewardSettings
from system.core.errors import ConfigError, InfrastructureError, ScoringDown
from system.core.protocols import Score, ScoreError
from tests.reward_service.conftest import request_of, score_once, with_scorer

RewardFile = Callable[..., RewardSettings]
ANSWER = RewardSettings(name="answer", use="exact_last_integer", workers=1)
numbers = st.floats(-1e6, 1e6)


def test_the_reward_is_the_weighted_sum_and_parts_are_unweighted(reward_file: RewardFile) -> None:
    style = reward_file("def reward(completion): return {'reward': 0.5, 'parts': {'tone': 0.25}}", weight=-2.0)
    score = score_once([ANSWER, style], request_of(["7"], label=7))["c0"]
    assert score.reward == 1.0 - 2.0 * 0.5
    assert score.parts == {"answer": 1.0, "style": 0.5, "style/tone": 0.25}
    assert score.error is None


def test_a_failed_part_makes_the_reward_null_never_a_partial_sum(reward_file: RewardFile) -> None:
    style = reward_file("def reward(completion): raise ValueError('no')")
    score = score_once([ANSWER, style], request_of(["7"], label=7))["c0"]
    assert score.reward is None
    assert score.parts == {"answer": 1.0}
    assert score.error is not None
    assert score.error.code == "raised"
    assert json.loads(score.info)["reward_error"]["style"]["code"] == "raised"


def test_a_reward_of_weight_zero_is_logged_and_its_failures_do_not_count(reward_file: RewardFile) -> None:
    style = reward_file("def reward(completion): return 1 / int(completion)", weight=0.0)
    scores = score_once([ANSWER, style], request_of(["0", "2"], label=2))
    assert [score.reward for score in scores.values()] == [0.0, 1.0]
    assert scores["c1"].parts == {"answer": 1.0, "style": 0.5}


@given(st.lists(st.tuples(numbers, st.none() | numbers), min_size=1, max_size=5))
def test_a_sum_exists_exactly_when_every_weighted_part_does(entries: list[tuple[float, float | None]]) -> None:
    rewards = [
        RewardSettings(name=f"r{index}", use="exact_last_integer", weight=weight)
        for index, (weight, _) in enumerate(entries)
    ]
    verdicts = {
        f"r{index}": ScoreError("raised", "no") if value is None else Judgement(value)
        for index, (_, value) in enumerate(entries)
    }
    score = combine("c0", rewards, verdicts)
    if any(value is None and weight != 0 for weight, value in entries):
        assert score.reward is None
        assert score.error is not None
    else:
        expected = sum(weight * value for weight, value in entries if value is not None)
        assert score.reward == pytest.approx(expected)
        assert score.error is None


def test_a_sum_that_float32_cannot_hold_is_invalid() -> None:
    score = combine("c0", [RewardSettings(name="r", use="exact_last_integer", weight=1e15)], {"r": Judgement(1e30)})
    assert (score.reward, score.error.code) == (None, "invalid")  # type: ignore[union-attr]


@given(
    st.dictionaries(
        st.sampled_from(["id", "reward", "parts", "info", "code", "message"]),
        st.none() | st.text() | st.floats() | st.dictionaries(st.text(), st.floats()),
    )
)
def test_any_reply_is_a_judgement_or_an_error(reply: dict[str, Any]) -> None:
    assert isinstance(read_verdict(reply), Judgement | ScoreError)


def test_a_source_is_judged_by_its_own_rewards(reward_file: RewardFile) -> None:
    code = reward_file("def reward(completion): return 5.0", sources=["code"])
    sums = ANSWER.model_copy(update={"sources": ("sums",)})

    async def use(scorer: LocalScorer) -> None:
        (score,) = await scorer.score(request_of(["7"], label=7, source="sums"))
        assert score.parts == {"answer": 1.0}
        (score,) = await scorer.score(request_of(["7"], label=7, source="code"))
        assert score.parts == {"style": 5.0}
        with pytest.raises(ConfigError, match="'prose'"):
            await scorer.score(request_of(["7"], source="prose"))

    with_scorer([sums, code], use)


def test_label_and_metadata_reach_the_function_exactly_as_written(reward_file: RewardFile) -> None:
    settings = reward_file(
        """
        def reward(completion, prompt, label, metadata, finish_reason, completion_tokens, id):
            seen = [completion, prompt, label, metadata, finish_reason, completion_tokens, id]
            return {"reward": 1.0, "info": {"seen": seen}}
        """
    )
    label = {"answers": [1, "zwei", None, 0.5], "nested": {"a": [True]}}
    request = request_of(["ü\ud800"], label=label, metadata='{"difficulty": 3}', completion_tokens=4)
    info = json.loads(score_once([settings], request)["c0"].info)
    seen = ["ü\ud800", "2+3=", label, {"difficulty": 3}, "stop", 4, "c0"]
    assert info["reward_info"]["style"]["seen"] == seen


def test_a_function_that_cannot_be_used_stops_the_start_with_the_mend(tmp_path: Path) -> None:
    lost = RewardSettings(name="lost", use=f"{tmp_path}/lost.py:reward")

    async def start(scorer: LocalScorer) -> None:
        await scorer.start()

    with pytest.raises(ConfigError, match=r"reward 'lost': .*lost\.py does not exist"):
        with_scorer([ANSWER, lost], start)
    with pytest.raises(ConfigError, match="reward 'lost'"):
        with_scorer([lost], lambda scorer: scorer.score(request_of("x")))


def outage(reward_file: RewardFile, tmp_path: Path, **settings: Any) -> tuple[RewardSettings, Path]:
    """A reward whose processes start only while a file is there, and die after every judgement."""
    switch = tmp_path / "switch"
    switch.touch()
    source = f"""
        import os, pathlib
        if not pathlib.Path({str(switch)!r}).exists():
            os._exit(9)
        def reward(completion): return 1.0
    """
    return reward_file(source, outage_s=0.5, **settings), switch


async def kill_all(scorer: LocalScorer) -> None:
    for pids in scorer.pids().values():
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.1)


def test_an_outage_that_lasts_ends_in_an_error_that_names_the_reward(reward_file: RewardFile, tmp_path: Path) -> None:
    settings, switch = outage(reward_file, tmp_path)

    async def use(scorer: LocalScorer) -> None:
        await scorer.start()
        switch.unlink()
        await kill_all(scorer)
        with pytest.raises(ScoringDown, match=r"reward 'style' .*for 0\.5 s; the last try: .*exit status 9"):
            await scorer.score(request_of("x"))

    with_scorer([settings], use)


def test_a_short_outage_is_waited_out(reward_file: RewardFile, tmp_path: Path) -> None:
    settings, switch = outage(reward_file, tmp_path)
    settings = settings.model_copy(update={"outage_s": 30.0})

    async def use(scorer: LocalScorer) -> None:
        await scorer.start()
        switch.unlink()
        await kill_all(scorer)
        scoring = asyncio.ensure_future(scorer.score(request_of("x")))
        await asyncio.sleep(0.5)
        assert not scoring.done()
        switch.touch()
        (score,) = await scoring
        assert score.reward == 1.0

    with_scorer([settings], use)


def test_a_skipped_outage_gives_nulls_until_it_is_over(reward_file: RewardFile, tmp_path: Path) -> None:
    settings, switch = outage(reward_file, tmp_path, on_outage="skip")

    async def use(scorer: LocalScorer) -> None:
        await scorer.start()
        switch.unlink()
        await kill_all(scorer)
        (score,) = await scorer.score(request_of("x"))
        assert (score.reward, score.error.code, score.error.retryable) == (None, "outage", True)  # type: ignore[union-attr]
        switch.touch()
        until_s = time.monotonic() + 30
        while score.reward is None and time.monotonic() < until_s:
            await asyncio.sleep(0.2)
            (score,) = await scorer.score(request_of("x"))
        assert score.reward == 1.0
        assert set(scorer.metrics()["style"].errors) == {"outage"}

    with_scorer([settings], use)


def test_waiting_for_a_process_does_not_count_against_the_deadline(reward_file: RewardFile) -> None:
    settings = reward_file("import time\ndef reward(completion): time.sleep(0.3); return 1.0", deadline_s=1.0)

    async def use(scorer: LocalScorer) -> None:
        requests = [request_of(["x"], request_id=f"run/{group}/0") for group in range(6)]
        scores = await asyncio.gather(*(scorer.score(request) for request in requests))
        assert [score.reward for (score,) in scores] == [1.0] * 6
        assert scorer.metrics()["style"].waiting_s > 1.0

    with_scorer([settings], use)


def test_a_slow_group_is_spread_over_the_processes(reward_file: RewardFile) -> None:
    settings = reward_file("import time\ndef reward(completion): time.sleep(0.2); return 1.0", workers=4)

    async def use(scorer: LocalScorer) -> None:
        await scorer.score(request_of(["x"]))
        await scorer.score(request_of(["x"] * 8))
        began_s = time.monotonic()
        scores = await scorer.score(request_of(["y"] * 8))
        assert time.monotonic() - began_s < 1.2
        assert [score.reward for score in scores] == [1.0] * 8

    with_scorer([settings], use)


def test_a_cancelled_request_frees_its_process(reward_file: RewardFile) -> None:
    settings = reward_file(
        "import time\ndef reward(completion): time.sleep(float(completion)); return 1.0", deadline_s=60
    )

    async def use(scorer: LocalScorer) -> None:
        await scorer.start()
        scoring = asyncio.ensure_future(scorer.score(request_of(["50"])))
        await asyncio.sleep(0.2)
        scoring.cancel()
        assert (await asyncio.wait({scoring}, timeout=5))[0]
        (score,) = await asyncio.wait_for(scorer.score(request_of(["0"])), 10)
        assert score.reward == 1.0

    with_scorer([settings], use)


def test_a_closed_scorer_refuses_requests() -> None:
    async def use(scorer: LocalScorer) -> None:
        await scorer.close()
        with pytest.raises(InfrastructureError, match="closed"):
            await scorer.score(request_of("7", label=7))

    with_scorer([ANSWER], use)


def test_two_items_of_one_id_and_a_request_without_items() -> None:
    async def use(scorer: LocalScorer) -> None:
        request = request_of(["7"], label=7)
        with pytest.raises(ValueError, match="two items of one id"):
            await scorer.score(type(request)("r", "sums", 0, request.items * 2))
        assert await scorer.score(type(request)("r", "sums", 0, ())) == []

    with_scorer([ANSWER], use)


def test_the_same_request_is_judged_once_also_while_under_way() -> None:
    judged: list[str] = []

    async def run() -> None:
        book = AnswerBook(kept=2)

        def judge(reward: float | None) -> Callable[[], Any]:
            async def answer() -> list[Score]:
                judged.append("judged")
                await asyncio.sleep(0.01)
                return [Score("c0", reward, error=None if reward is not None else ScoreError("timeout", "late"))]

            return answer

        twins = await asyncio.gather(*(book.ask(request_of("7"), judge(float(n))) for n in range(3)))
        assert [scores[0].reward for scores in twins] == [0.0, 0.0, 0.0]
        assert (await book.ask(request_of("7"), judge(9.0)))[0].reward == 0.0
        assert len(judged) == 1
        assert (await book.ask(request_of("8"), judge(8.0)))[0].reward == 8.0, "same id, another completion"
        assert (await book.ask(request_of("9"), judge(None)))[0].reward is None
        assert (await book.ask(request_of("9"), judge(9.0)))[0].reward == 9.0, "a failure is judged again"
        first = asyncio.ensure_future(book.ask(request_of("5"), judge(5.0)))
        second = asyncio.ensure_future(book.ask(request_of("5"), judge(6.0)))
        await asyncio.sleep(0)
        first.cancel()
        assert (await second)[0].reward == 5.0, "one caller's cancellation is not the other's"

    asyncio.run(run())


def test_32_short_completions_take_milliseconds() -> None:
    async def use(scorer: LocalScorer) -> list[float]:
        await scorer.start()
        took_s = []
        for group in range(10):
            request = request_of([f"the answer is {n}" for n in range(32)], label=3, request_id=f"run/{group}/0")
            began_s = time.monotonic()
            scores = await scorer.score(request)
            took_s.append(time.monotonic() - began_s)
            assert sum(score.reward or 0.0 for score in scores) == 1.0
        assert scorer.metrics()["answer"].judged == 320
        return took_s

    assert sorted(with_scorer([ANSWER], use))[5] < 0.1


def test_importing_every_module_imports_no_ray_torch_or_vllm() -> None:
    folder = Path(sys.modules["reward_service"].__file__ or "").parent
    modules = ", ".join(f"reward_service.{path.stem}" for path in folder.glob("*.py") if path.stem != "__init__")
    program = f"import reward_service, {modules}, sys; print([m for m in ('ray', 'torch', 'vllm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
