"""The rewards of a recipe: what is refused, what is listed, and that a dry run finds what cannot be used."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reward_service.catalog import check_rewards, describe_rewards
from reward_service.scorer import LocalScorer, build_scorer
from reward_service.settings import RewardSettings, check_reward_list
from system.core.errors import ConfigError
from system.core.settings import parse_settings
from tests.reward_service.conftest import request_of


def reward(**values: Any) -> RewardSettings:
    return parse_settings(RewardSettings, {"name": "answer", "use": "exact_last_integer", **values}, "rewards.0")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use": "exact_last_intger"}, r"rewards\.0\.use: no verifier of this name; did you mean 'exact_last_integer'"),
        ({"use": "https://scores.example/v1"}, "by URL are not yet available"),
        ({"use": "style.py"}, "FILE.py:function"),
        ({"use": "style.py:"}, "FILE.py:function"),
        ({"name": "a/b"}, r"rewards\.0\.name"),
        ({"weight": float("nan")}, r"rewards\.0\.weight"),
        ({"deadline_s": 0}, r"rewards\.0\.deadline_s"),
        ({"workers": 0}, r"rewards\.0\.workers"),
        ({"on_outage": "ignore"}, r"rewards\.0\.on_outage"),
        ({"wieght": 1.0}, r"rewards\.0\.wieght: unknown key; did you mean 'weight'"),
        ({"use": "regex"}, "'pattern' is required"),
        ({"options": {"x": 1}}, "no option 'x'"),
    ],
)
def test_a_wrong_setting_is_named_by_its_path_with_the_mend(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reward(**values)


def test_the_list_is_checked_as_a_whole() -> None:
    with pytest.raises(ConfigError, match="several entries are named 'answer'"):
        check_reward_list([reward(), reward(weight=0.5)], ["sums"])
    with pytest.raises(ConfigError, match="no data source 'sum'; did you mean 'sums'"):
        check_reward_list([reward(), reward(name="b", sources=["sum"])], ["sums"])
    with pytest.raises(ConfigError, match="nothing judges the data source 'code'"):
        check_reward_list([reward(sources=["sums"])], ["sums", "code"])
    with pytest.raises(ConfigError, match="nothing judges the data source 'sums'"):
        check_reward_list([reward(weight=0.0)], ["sums"])
    check_reward_list([reward(sources=["sums"]), reward(name="b", sources=["code"])], ["sums", "code"])


def test_the_factory_of_a_scorer_can_be_pickled() -> None:
    factory = pickle.loads(pickle.dumps(build_scorer([reward()], ["sums"])))
    assert isinstance(factory(), LocalScorer)


def test_every_reward_is_listed_with_its_options() -> None:
    listed = {entry.name: entry for entry in describe_rewards()}
    assert "exact_last_integer" in listed
    assert all(entry.summary and "\n" not in entry.summary for entry in listed.values())
    (penalty,) = describe_rewards("length_penalty")
    assert [(option.name, option.type, option.default) for option in penalty.options] == [
        ("max_tokens", "int", None),
        ("cache_tokens", "int", None),
    ]
    with pytest.raises(ConfigError, match="did you mean 'regex'"):
        describe_rewards("regexp")


def test_a_check_loads_every_function_and_names_each_that_cannot_be_used(
    reward_file: Callable[..., RewardSettings], tmp_path: Path
) -> None:
    good = reward_file("def reward(completion): return 1.0")
    check_rewards([good], ["sums"])
    missing = RewardSettings(name="lost", use=f"{tmp_path}/lost.py:reward")
    impossible = RewardSettings(name="long", use="length_penalty", options={"max_tokens": 1, "cache_tokens": 2})
    with pytest.raises(ConfigError) as refused:
        check_rewards([good, missing, impossible], ["sums"])
    assert "reward 'lost'" in str(refused.value)
    assert "lost.py does not exist" in str(refused.value)
    assert "reward 'long'" in str(refused.value)


def test_a_check_survives_a_file_that_ends_or_blocks_its_process(reward_file: Callable[..., RewardSettings]) -> None:
    with pytest.raises(ConfigError, match="exit status 7"):
        check_rewards([reward_file("import os\nos._exit(7)")], ["sums"])
    with pytest.raises(ConfigError, match="not ready within 1 s"):
        check_rewards([reward_file("while True: pass", start_deadline_s=1.0)], ["sums"])


def test_a_check_does_not_run_the_file_in_this_process(
    reward_file: Callable[..., RewardSettings], tmp_path: Path
) -> None:
    witness = tmp_path / "pid"
    check_rewards(
        [
            reward_file(f"""
        import os, pathlib
        pathlib.Path({str(witness)!r}).write_text(str(os.getpid()))
        def reward(completion): return 1.0
    """)
        ],
        ["sums"],
    )
    assert int(witness.read_text()) != os.getpid()


def test_a_relative_file_is_found_from_another_working_folder(
    reward_file: Callable[..., RewardSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward_file("def reward(completion): return 1.0")
    monkeypatch.chdir(tmp_path)
    factory = build_scorer([RewardSettings(name="style", use="style.py:reward")], ["sums"])
    monkeypatch.chdir("/")

    async def use() -> Any:
        scorer = factory()
        try:
            return await scorer.score(request_of("x"))
        finally:
            await scorer.close()

    assert [score.reward for score in asyncio.run(use())] == [1.0]
