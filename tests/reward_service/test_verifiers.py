"""The verifiers that ship, called as a reward process calls them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reward_service.functions import FunctionSpec, LoadError, RewardItem
from reward_service.results import CannotJudge
from reward_service.verifiers import VERIFIERS, check_options, load_reward


def judge(use: str, completion: str, label: Any = None, metadata: Any = None, tokens: int = 0, **options: Any) -> float:
    item = RewardItem("c0", completion, "prompt", label, metadata or {}, "stop", tokens)
    return load_reward(FunctionSpec("answer", use, options)).call(item)


@pytest.mark.parametrize("label", [7, "7", " 7 ", "007", "+7", 7.0])
def test_exact_last_integer_takes_a_label_in_any_spelling_of_the_integer(label: Any) -> None:
    assert judge("exact_last_integer", "so 3 + 4 = 7.", label) == 1.0
    assert judge("exact_last_integer", "so 3 + 4 = 8.", label) == 0.0
    assert judge("exact_last_integer", "no idea", label) == 0.0


@pytest.mark.parametrize("label", [None, "seven", "", 7.5, True, [7], "7 apples"])
def test_a_label_that_is_no_integer_gives_no_reward_at_all(label: Any) -> None:
    with pytest.raises(CannotJudge, match="label"):
        judge("exact_last_integer", "7", label)


def test_numeric_match_compares_within_its_tolerances() -> None:
    assert judge("numeric_match", "about 3.5", 3.5) == 1.0
    assert judge("numeric_match", "about 3.6", "3.5") == 0.0
    assert judge("numeric_match", "about 3.6", "3.5", absolute_tolerance=0.2) == 1.0
    assert judge("numeric_match", "it is 1,000.0", "1,000") == 1.0
    assert judge("numeric_match", "nothing", 0) == 0.0
    assert judge("numeric_match", "9e999", 1) == 0.0
    with pytest.raises(CannotJudge):
        judge("numeric_match", "1", "one")


def test_exact_match_compares_the_text_or_what_stands_in_the_tag() -> None:
    assert judge("exact_match", " Paris\n", "Paris") == 1.0
    assert judge("exact_match", "paris", "Paris") == 0.0
    assert judge("exact_match", "paris", "Paris", ignore_case=True) == 1.0
    assert judge("exact_match", "<answer>B</answer>", ["A", "B"], tag="answer") == 1.0
    assert judge("exact_match", "B", "B", tag="answer") == 0.0


@pytest.mark.parametrize(
    ("completion", "label", "reward"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 1/2", r"\frac{1}{2}", 1.0),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{3}", "4", 0.0),
        (r"\boxed{\frac{}", "4", 0.0),
        ("", "4", 0.0),
    ],
)
def test_math_judges_equality_not_spelling(completion: str, label: str, reward: float) -> None:
    assert judge("math", completion, label) == reward


def test_a_math_label_that_cannot_be_parsed_gives_no_reward() -> None:
    with pytest.raises(CannotJudge, match="label"):
        judge("math", "4", "")


def gym_entry(task: str, **options: Any) -> dict[str, Any]:
    """An entry as it comes back from a row's metadata."""
    reasoning_gym = pytest.importorskip("reasoning_gym")
    return json.loads(json.dumps(reasoning_gym.create_dataset(task, size=1, seed=3, **options)[0]))


def test_reasoning_gym_counts_full_marks_only() -> None:
    entry = gym_entry("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    right, wrong = entry["answer"], f"{entry['answer']}, or so I think"
    assert judge("reasoning_gym", right, metadata=entry) == 1.0
    assert judge("reasoning_gym", f"I add. <answer>{right}</answer>", metadata=entry) == 1.0
    assert judge("reasoning_gym", wrong, metadata=entry) == 0.0
    assert 0.0 < judge("reasoning_gym", wrong, metadata=entry, partial=True) < 1.0
    assert judge("reasoning_gym", right, metadata={"entry": entry}, task="chain_sum") == 1.0


def test_a_reasoning_gym_entry_whose_scorer_needs_tuples_survives_json() -> None:
    entry = gym_entry("rearc")
    assert judge("reasoning_gym", entry["answer"], metadata=entry) == 1.0


def test_a_row_without_its_reasoning_gym_entry_gives_no_reward() -> None:
    with pytest.raises(CannotJudge, match="entry"):
        judge("reasoning_gym", "1", metadata={"difficulty": 1})
    entry = gym_entry("chain_sum")
    with pytest.raises(CannotJudge, match="own answer"):
        judge("reasoning_gym", "1", metadata={**entry, "answer": ["1"]})


def test_regex_and_format_judge_the_form() -> None:
    assert judge("regex", "a\nb42", pattern=r"\d+$") == 1.0
    assert judge("regex", "a b42", pattern=r"\d+", whole=True) == 0.0
    assert judge("format", "<think>x\n</think>\n<answer>1</answer>\n") == 1.0
    assert judge("format", "<answer>1</answer><think>x</think>") == 0.0
    assert judge("format", "<think>x</think>so<answer>1</answer>") == 0.0
    assert judge("format", "<think>x<answer>1</answer></think>") == 0.0
    assert judge("format", "<think>x</think><answer>1</answer><answer>2</answer>") == 0.0


def test_length_penalty_is_the_soft_overlong_punishment_of_dapo() -> None:
    lengths = (16384, 16385, 18432, 20480, 20481)
    values = [judge("length_penalty", "", tokens=n, max_tokens=20480, cache_tokens=4096) for n in lengths]
    assert values == [0.0, -0.000244140625, -0.5, -1.0, -1.0]


@pytest.mark.parametrize(
    ("use", "options", "named"),
    [
        ("length_penalty", {"max_tokens": 8, "cache_tokens": 9}, "cache_tokens"),
        ("regex", {"pattern": "("}, "pattern"),
        ("format", {"tags": []}, "tags"),
        ("numeric_match", {"relative_tolerance": -1.0}, "tolerance"),
        ("reasoning_gym", {"task": "chain_sums"}, "did you mean 'chain_sum'"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(use: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(LoadError, match=named):
        load_reward(FunctionSpec("answer", use, options))


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("regex", {}, "'pattern' is required"),
        ("regex", {"patern": "x"}, "did you mean 'pattern'"),
        ("regex", {"pattern": 5}, "expected str"),
        ("reasoning_gym", {"partial": "yes"}, "expected bool"),
        ("length_penalty", {"max_tokens": True, "cache_tokens": 1}, "expected int"),
        ("format", {"tags": ["a", 1]}, "expected list"),
        ("exact_last_integer", {"strict": True}, "it has none"),
    ],
)
def test_options_are_checked_without_making_the_verifier(use: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_options(use, options)


def test_every_verifier_has_a_one_line_summary() -> None:
    for name, factory in VERIFIERS.items():
        assert (factory.__doc__ or "").splitlines()[0].endswith("."), name
