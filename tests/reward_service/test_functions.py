"""Signatures and loading of people's own reward functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reward_service.functions import FunctionSpec, LoadError, RewardItem, bind_function, item_from_wire, last_lines
from reward_service.results import InvalidResult
from reward_service.verifiers import load_reward

ITEM = RewardItem("c0", "text", "prompt", 5, {"difficulty": 2}, "length", 9)


def test_a_function_is_passed_what_it_names() -> None:
    def reward(completion: str, *, label: int, finish_reason: str, metadata: dict, bonus: float = 1.0) -> list[Any]:
        return [completion, label, finish_reason, metadata["difficulty"], bonus]

    assert bind_function(reward, {"bonus": 3.0}, "f").call(ITEM) == ["text", 5, "length", 2, 3.0]


def test_a_function_with_keyword_arguments_is_passed_everything() -> None:
    names = set(bind_function(lambda completion, **rest: rest, {"bonus": 1}, "f").call(ITEM))
    assert names == {"prompt", "label", "metadata", "finish_reason", "completion_tokens", "id", "bonus"}


def test_a_first_parameter_named_items_makes_a_group_function() -> None:
    bound = bind_function(lambda items, scale=1: [len(items) * scale], {"scale": 2}, "f")
    assert bound.takes_group
    assert bound.call_group([ITEM, ITEM]) == [4]


class JudgeObject:
    async def __call__(self, completion: str) -> float:
        return 1.0


def test_asynchronous_functions_and_objects_are_recognised() -> None:
    async def reward(completion: str) -> float:
        return 1.0

    assert bind_function(reward, {}, "f").asynchronous
    assert bind_function(JudgeObject(), {}, "f").asynchronous
    assert not bind_function(lambda completion: 1.0, {}, "f").asynchronous


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda completions, **_: 1.0, {}, "'completions'; did you mean 'completion'"),
        (lambda completion, answer: 1.0, {}, "'answer'"),
        (lambda label: 1.0, {}, "takes no 'completion'"),
        (lambda: 1.0, {}, "takes no 'completion'"),
        (lambda completion, /: 1.0, {}, "positional-only"),
        (lambda completion, bonus=1: 1.0, {"bonsu": 1}, "did you mean 'bonus'"),
        (lambda completion, **_: 1.0, {"label": 1}, "rename"),
        (lambda items, label: [1.0], {}, "'label'"),
        (JudgeObject, {}, "not a function"),
        (3, {}, "not a function"),
    ],
)
def test_a_signature_nobody_can_fill_is_refused_with_the_mend(function: Any, options: dict, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        bind_function(function, options, "style.py:reward")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def reward(completion:\n", r"style\.py:1: syntax error"),
        ("import json\nimport no_such_module\n", "no_such_module"),
        ("raise RuntimeError('broken')\n", "fails at import:\n(.|\n)*RuntimeError: broken"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        ("def rewards(completion): return 1.0\n", "no function 'reward'; did you mean 'rewards'"),
        ("reward = 1.0\n", "not a function"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_mend(tmp_path: Path, source: str, message: str) -> None:
    path = tmp_path / "style.py"
    path.write_text(source)
    with pytest.raises(LoadError, match=message) as refused:
        load_reward(FunctionSpec("style", f"{path}:reward"))
    assert str(path) in str(refused.value)


def test_a_missing_file_is_named_with_its_whole_path() -> None:
    with pytest.raises(LoadError, match=r"/no/such/style\.py does not exist"):
        load_reward(FunctionSpec("style", "/no/such/style.py:reward"))


def test_a_traceback_shows_the_functions_own_lines() -> None:
    def reward(completion: str) -> float:
        return {}["missing"]

    try:
        bind_function(reward, {}, "f").call(ITEM)
    except KeyError as failure:
        text = last_lines(failure)
    assert "test_functions.py" in text
    assert text.endswith("KeyError: 'missing'")
    assert len(last_lines(ValueError("x" * 10_000))) < 2100


@pytest.mark.parametrize("metadata", ["", "{", "[1]", "null"])
def test_metadata_that_is_no_json_object_is_invalid(metadata: str) -> None:
    with pytest.raises(InvalidResult, match="metadata"):
        item_from_wire({"id": "c0", "metadata": metadata})
