"""Reward processes that hang, die, print, block and outlive: real ones, really killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reward_service.scorer import LocalScorer
from reward_service.settings import RewardSettings
from tests.reward_service.conftest import request_of, score_once, with_scorer

RewardFile = Callable[..., RewardSettings]


def is_alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie that nobody reaps does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    give_up_s = time.monotonic() + limit_s
    while time.monotonic() < give_up_s:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


def test_an_item_that_loops_forever_is_killed_and_the_others_keep_their_rewards(reward_file: RewardFile) -> None:
    settings = reward_file(
        """
        def reward(completion):
            while completion == "loop":
                pass
            return len(completion)
        """,
        deadline_s=0.5,
    )
    scores = score_once([settings], request_of(["a", "loop", "abc"]))
    assert [scores[f"c{index}"].reward for index in range(3)] == [1.0, None, 3.0]
    error = scores["c1"].error
    assert error is not None
    assert (error.code, error.retryable) == ("timeout", True)
    assert "reward 'style', item 'c1': not judged within 0.5 s" in error.message


def test_a_function_that_always_hangs_costs_a_group_two_deadlines_and_no_more(reward_file: RewardFile) -> None:
    settings = reward_file("import re\ndef reward(completion): re.match('(a+)+$', 'a' * 40 + 'b')", deadline_s=0.5)

    async def use(scorer: LocalScorer) -> tuple[float, list[Any], int]:
        await scorer.start()
        began_s = time.monotonic()
        scores = await scorer.score(request_of(["x"] * 8))
        return time.monotonic() - began_s, scores, scorer.metrics()["style"].processes_replaced

    took_s, scores, replaced = with_scorer([settings], use)
    assert {score.error.code for score in scores} == {"timeout"}
    assert {score.reward for score in scores} == {None}
    assert took_s < 4
    assert replaced == 2


def test_a_function_that_raises_gives_its_traceback_and_the_items_id(reward_file: RewardFile) -> None:
    settings = reward_file(
        """
        def reward(completion, label):
            return 1.0 / label
        """
    )
    error = score_once([settings], request_of(["x"], label=0))["c0"].error
    assert error is not None
    assert error.code == "raised"
    assert "item 'c0'" in error.message
    assert "style.py" in error.message
    assert "return 1.0 / label" in error.message
    assert error.message.endswith("ZeroDivisionError: float division by zero")


@pytest.mark.parametrize(
    "end", ["raise SystemExit(1)", "raise KeyboardInterrupt", "raise type('Odd', (BaseException,), {})()"]
)
def test_no_exception_ends_the_process(reward_file: RewardFile, end: str) -> None:
    settings = reward_file(f"def reward(completion):\n    if completion == 'x': {end}\n    return 1.0")
    scores = score_once([settings], request_of(["x", "y"]))
    assert scores["c0"].error.code == "raised"  # type: ignore[union-attr]
    assert scores["c1"].reward == 1.0


@pytest.mark.parametrize(
    ("death", "told"),
    [("os._exit(3)", "exit status 3"), ("os.kill(os.getpid(), 11)", "SIGSEGV"), ("os.kill(os.getpid(), 9)", "SIGKILL")],
)
def test_a_process_that_dies_is_replaced_and_only_its_item_is_lost(
    reward_file: RewardFile, death: str, told: str
) -> None:
    settings = reward_file(f"import os\ndef reward(completion):\n    if completion == 'die': {death}\n    return 1.0")
    scores = score_once([settings], request_of(["a", "die", "b"]))
    assert [scores[f"c{index}"].reward for index in range(3)] == [1.0, None, 1.0]
    error = scores["c1"].error
    assert error is not None
    assert error.code == "crashed"
    assert told in error.message
    assert "item 'c1'" in error.message


def until_exists(path: Path) -> None:
    until_s = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until_s, f"{path} did not appear"
        time.sleep(0.01)


def test_a_process_killed_from_outside_costs_no_reward(reward_file: RewardFile, tmp_path: Path) -> None:
    settings = reward_file(
        "import pathlib, time\n"
        f"def reward(completion): pathlib.Path({str(tmp_path)!r}, completion).touch(); time.sleep(0.2); return 1.0"
    )

    async def use(scorer: LocalScorer) -> None:
        await scorer.start()
        (idle,) = scorer.pids()["style"]
        os.kill(idle, signal.SIGKILL)
        scoring = asyncio.ensure_future(scorer.score(request_of(["a", "b", "c"])))
        await asyncio.to_thread(until_exists, tmp_path / "b")
        (busy,) = scorer.pids()["style"]
        assert busy != idle
        os.kill(busy, signal.SIGKILL)
        assert [score.reward for score in await scoring] == [1.0, 1.0, 1.0]

    with_scorer([settings], use)


def test_a_stopped_process_is_killed_at_the_deadline(reward_file: RewardFile) -> None:
    settings = reward_file("def reward(completion): return 1.0", deadline_s=0.5)

    async def use(scorer: LocalScorer) -> Any:
        await scorer.start()
        os.kill(scorer.pids()["style"][0], signal.SIGSTOP)
        return await scorer.score(request_of(["a", "b"]))

    first, second = with_scorer([settings], use)
    assert first.error.code == "timeout"
    assert second.reward == 1.0


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "'1.0'", "[1.0]", "object()", "{'score': 1.0}"])
def test_a_result_that_is_no_number_is_invalid_with_the_items_id(reward_file: RewardFile, value: str) -> None:
    scores = score_once(
        [reward_file(f"def reward(completion): return {value} if completion == 'x' else 1")], request_of("xy")
    )
    error = scores["c0"].error
    assert error is not None
    assert error.code == "invalid"
    assert "item 'c0'" in error.message
    assert scores["c0"].reward is None
    assert scores["c1"].reward == 1.0


def test_none_declines_the_item(reward_file: RewardFile) -> None:
    score = score_once([reward_file("def reward(completion): return None")], request_of("x"))["c0"]
    assert (score.reward, score.error.code) == (None, "declined")  # type: ignore[union-attr]


def test_what_a_function_prints_does_not_disturb_its_answers(
    reward_file: RewardFile, capfd: pytest.CaptureFixture
) -> None:
    settings = reward_file(
        """
        import os, sys
        def reward(completion):
            print("from print")
            os.write(1, b"from file descriptor 1\\n")
            os.system("echo from a child; cat")
            return 1.0
        """
    )
    scores = score_once([settings], request_of(["a", "b"]))
    assert [score.reward for score in scores.values()] == [1.0, 1.0]
    shown = capfd.readouterr()
    assert shown.out == ""
    assert all(line in shown.err for line in ("from print", "from file descriptor 1", "from a child"))


def test_asynchronous_items_are_judged_at_once_and_bounded_one_by_one(reward_file: RewardFile) -> None:
    settings = reward_file(
        """
        import asyncio
        loops = set()
        async def reward(completion):
            loops.add(id(asyncio.get_running_loop()))
            await asyncio.sleep(60 if completion == "slow" else 0.3)
            return len(loops)
        """,
        deadline_s=1.0,
    )

    async def use(scorer: LocalScorer) -> tuple[float, Any]:
        await scorer.score(request_of(["warm"]))
        began_s = time.monotonic()
        scores = await scorer.score(request_of(["a", "b", "slow", *"cdefgh"]))
        assert scorer.metrics()["style"].processes_replaced == 0
        return time.monotonic() - began_s, scores

    took_s, scores = with_scorer([settings], use)
    assert [score.reward for score in scores] == [1.0, 1.0, None, *[1.0] * 6]
    assert scores[2].error.code == "timeout"
    assert took_s < 2.0


def test_an_asynchronous_function_that_blocks_its_loop_is_killed(reward_file: RewardFile) -> None:
    settings = reward_file("import time\nasync def reward(completion): time.sleep(60)", deadline_s=0.3)
    scores = score_once([settings], request_of(["a", "b"]))
    assert {score.error.code for score in scores.values() if score.error} == {"timeout"}


def test_an_asynchronous_item_that_kills_the_process_takes_no_other_with_it(reward_file: RewardFile) -> None:
    settings = reward_file(
        """
        import asyncio, os
        async def reward(completion):
            if completion == "die":
                os._exit(1)
            await asyncio.sleep(0.05)
            return 1.0
        """
    )
    scores = score_once([settings], request_of(["a", "die", "b"]))
    assert [scores[f"c{index}"].reward for index in range(3)] == [1.0, None, 1.0]
    assert scores["c1"].error.code == "crashed"  # type: ignore[union-attr]


def test_a_group_function_judges_the_group_in_one_call(reward_file: RewardFile) -> None:
    settings = reward_file(
        """
        def reward(items):
            best = max(len(item.completion) for item in items)
            return [float(len(item.completion) == best) for item in items]
        """
    )
    scores = score_once([settings], request_of(["a", "abc", "ab"]))
    assert [score.reward for score in scores.values()] == [0.0, 1.0, 0.0]


def test_a_group_function_of_the_wrong_length_judges_nobody(reward_file: RewardFile) -> None:
    settings = reward_file("async def reward(items): return [1.0] * (len(items) - 1)")
    scores = score_once([settings], request_of(["a", "b"]))
    assert all(score.reward is None and score.error.code == "invalid" for score in scores.values())  # type: ignore[union-attr]
    assert "returned 1 results for 2 completions" in scores["c0"].error.message  # type: ignore[union-attr]
    assert "item 'c1'" in scores["c1"].error.message  # type: ignore[union-attr]


def test_it_works_in_an_event_loop_off_the_main_thread(reward_file: RewardFile) -> None:
    math = RewardSettings(name="math", use="math", workers=1)
    found: list[Any] = []
    request = request_of([r"\boxed{\frac{1}{2}}"], label="0.5")

    def work() -> None:
        found.append(score_once([reward_file("def reward(completion): return 1.0"), math], request))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert found[0]["c0"].reward == 2.0


def test_closing_ends_the_processes_and_what_they_started_at_once(reward_file: RewardFile, tmp_path: Path) -> None:
    witness = tmp_path / "pid"
    settings = reward_file(
        f"""
        import pathlib, subprocess
        def reward(completion):
            child = subprocess.Popen(["sleep", "600"])
            pathlib.Path({str(witness)!r}).write_text(str(child.pid))
            while True: pass
        """,
        deadline_s=60,
    )

    async def use(scorer: LocalScorer) -> tuple[float, list[int]]:
        scoring = asyncio.ensure_future(scorer.score(request_of("x")))
        assert await asyncio.to_thread(until, lambda: witness.exists() and witness.read_text() != "")
        pids = [*scorer.pids()["style"], int(witness.read_text())]
        began_s = time.monotonic()
        await scorer.close()
        took_s = time.monotonic() - began_s
        assert scoring.done() or (await asyncio.wait({scoring}, timeout=1))[0]
        scoring.cancel()
        return took_s, pids

    took_s, pids = with_scorer([settings], use)
    assert took_s < 2
    assert until(lambda: not any(map(is_alive, pids)))


ORPHAN_PROGRAM = """
import asyncio, sys
from reward_service.scorer import LocalScorer
from reward_service.settings import RewardSettings
from system.core.protocols import ScoreItem, ScoreRequest

async def main():
    busy = RewardSettings(name="busy", use=sys.argv[1] + ":reward", deadline_s=600, workers=1)
    idle = RewardSettings(name="idle", use="exact_last_integer", workers=1)
    scorer = LocalScorer([busy, idle])
    await scorer.start()
    print(*[pid for pids in scorer.pids().values() for pid in pids], flush=True)
    item = ScoreItem("c0", "p", "x", "stop", label=1)
    await scorer.score(ScoreRequest("r", "sums", 0, (item,)))

asyncio.run(main())
"""


def test_no_process_outlives_a_parent_killed_with_sigkill(tmp_path: Path) -> None:
    path, witness = tmp_path / "style.py", tmp_path / "pid"
    path.write_text(
        "import pathlib, re, subprocess\n"
        "def reward(completion):\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        f"    pathlib.Path({str(witness)!r}).write_text(str(child.pid))\n"
        "    re.match('(a+)+$', 'a' * 60 + 'b')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN_PROGRAM, str(path)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert until(lambda: witness.exists() and witness.read_text() != "", 20)
        pids.append(int(witness.read_text()))
        assert len(pids) == 3
        assert all(map(is_alive, pids))
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()  # type: ignore[union-attr]
    assert until(lambda: not any(map(is_alive, pids)), 5)


def test_secrets_of_the_environment_do_not_reach_error_texts(
    reward_file: RewardFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "sk-very-secret-0123")
    settings = reward_file("import os\ndef reward(completion): raise ValueError(os.environ['JUDGE_API_KEY'])")
    error = score_once([settings], request_of("x"))["c0"].error
    assert error is not None
    assert "sk-very-secret" not in error.message
    assert "<JUDGE_API_KEY>" in error.message


def test_a_reward_process_imports_no_heavy_package(reward_file: RewardFile) -> None:
    settings = reward_file(
        """
        import sys
        HEAVY = ("torch", "ray", "vllm", "numpy", "pyarrow", "pydantic", "asyncio")
        def reward(completion):
            return {"reward": 1.0, "info": {"heavy": [name for name in HEAVY if name in sys.modules]}}
        """
    )
    assert score_once([settings], request_of("x"))["c0"].info == '{"reward_info": {"style": {"heavy": []}}}'
