"""The verifiers that ship: names for ``use:`` in a recipe's rewards, each a factory from options to a reward
function.

A factory's signature is the list of its options, the first line of its docstring what ``triptych list rewards``
prints. It checks its options and imports what it needs; it runs once per reward process. Packages add names by entry
points in the group ``triptych.rewards``, each a function as in ``functions`` (not a factory).
"""

from __future__ import annotations

import functools
import inspect
import json
import math as mathematics
import re
import types
import typing
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from reward_service.extraction import canonical_integer, last_integer, last_number, last_tag
from reward_service.functions import (
    FILE_USE,
    FunctionSpec,
    LoadError,
    RewardFunction,
    bind_function,
    load_file_function,
)
from reward_service.results import CannotJudge
from system.core.errors import nearest

ENTRY_POINTS = "triptych.rewards"
MATH_STEP_S = 5  # math-verify's alarm around one parse and around one comparison

_NUMBER = re.compile(r"[-+−]?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+−]?[0-9]+)?")

Factory = Callable[..., Callable[..., Any]]


def exact_last_integer() -> Callable[..., float]:
    """1 if the completion's last integer is the label, else 0.

    The label is an integer or the text of one. Numbers with decimals or exponents are passed over; "1,234" is 1234;
    ASCII digits only. The comparison is exact at any length.
    """

    def reward(completion: str, *, label: Any) -> float:
        return float(last_integer(completion) == _integer_label(label))

    return reward


def numeric_match(relative_tolerance: float = 1e-6, absolute_tolerance: float = 0.0) -> Callable[..., float]:
    """1 if the completion's last number equals the label within the tolerances, else 0."""
    if relative_tolerance < 0 or absolute_tolerance < 0:
        raise LoadError("numeric_match: a tolerance cannot be negative")

    def reward(completion: str, *, label: Any) -> float:
        expected = _number_label(label)
        found = last_number(completion)
        close = found is not None and mathematics.isclose(
            float(found), expected, rel_tol=relative_tolerance, abs_tol=absolute_tolerance
        )
        return float(close)

    return reward


def exact_match(strip: bool = True, ignore_case: bool = False, tag: str | None = None) -> Callable[..., float]:
    """1 if the completion (or what stands in its last <tag>) is the label, or one of a list of labels, else 0."""

    def normal(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    def reward(completion: str, *, label: Any) -> float:
        labels = label if isinstance(label, list | tuple) else [label]
        if not labels or not all(isinstance(entry, str | int) for entry in labels):
            raise CannotJudge(f"the label {label!r} is not a text, nor a list of texts")
        answer = completion if tag is None else last_tag(completion, tag)
        return float(answer is not None and normal(answer) in {normal(str(entry)) for entry in labels})

    return reward


def math(tag: str | None = None) -> Callable[..., float]:
    """1 if the completion's answer is mathematically equal to the label (math-verify: LaTeX, boxed, plain), else 0.

    An answer that cannot be parsed is wrong. One whose parsing or comparison takes over five seconds is not judged.
    """
    try:
        from math_verify import parse, verify
        from math_verify.errors import TimeoutException
    except ImportError:
        raise LoadError("the verifier 'math' needs the package math-verify; install it on every node") from None

    @functools.lru_cache(maxsize=256)
    def parsed_label(label: str) -> tuple[Any, ...]:
        return tuple(parse(f"${label}$", parsing_timeout=MATH_STEP_S) or parse(label, parsing_timeout=MATH_STEP_S))

    def reward(completion: str, *, label: Any) -> float:
        expected = parsed_label(str(label).strip().strip("$"))
        if not expected:
            raise CannotJudge(f"the label {label!r} is not mathematics that math-verify can parse")
        answer = completion if tag is None else (last_tag(completion, tag) or "")
        try:
            found = parse(answer, parsing_timeout=MATH_STEP_S, raise_on_error=True)
        except TimeoutException:
            raise CannotJudge(f"parsing the answer took over {MATH_STEP_S} s") from None
        except Exception:
            found = []  # what cannot be parsed is not the right answer
        return float(any(_equal(verify, TimeoutException, one, other) for one in expected for other in found))

    return reward


def reasoning_gym(task: str | None = None, partial: bool = False, tag: str = "answer") -> Callable[..., float]:
    """The reasoning-gym task's own scorer: 1 for full marks, else 0 (with partial: true its score as it is).

    The answer is what stands in the last <tag>, else the whole completion. The row's metadata holds the task's entry,
    as written by ``source: reasoning_gym``; its task is taken from there unless ``task`` names it.
    """
    try:
        from reasoning_gym.factory import DATASETS, get_score_answer_fn
    except ImportError:
        raise LoadError(
            "the verifier 'reasoning_gym' needs the package reasoning-gym; install it on every node"
        ) from None
    if task is not None and task not in DATASETS:
        raise LoadError(f"reasoning_gym has no task '{task}'{nearest(task, DATASETS)}")
    scorer_of = functools.lru_cache(maxsize=256)(get_score_answer_fn)

    @functools.lru_cache(maxsize=64)
    def entry_of(metadata: str) -> tuple[str, Any]:
        return _gym_entry(json.loads(metadata), task, scorer_of)

    def reward(completion: str, *, metadata: dict[str, Any]) -> float:
        name, entry = entry_of(json.dumps(metadata))
        answer = last_tag(completion, tag)
        score = float(scorer_of(name)(completion.strip() if answer is None else answer, entry))
        return score if partial else float(score >= 1.0)

    return reward


def regex(pattern: str, whole: bool = False, ignore_case: bool = False) -> Callable[..., float]:
    """1 if the pattern is found in the completion (whole: true: matches all of it), else 0."""
    try:
        compiled = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0))
    except re.error as failure:
        raise LoadError(f"regex: options.pattern is not a regular expression: {failure}") from None
    find = compiled.fullmatch if whole else compiled.search

    def reward(completion: str) -> float:
        return float(find(completion) is not None)

    return reward


def format(tags: list[str] = ["think", "answer"]) -> Callable[..., float]:  # noqa: B006 - the name of a recipe; never changed
    """1 if the completion is exactly these tags in this order, each once, only white space between them, else 0."""
    if not tags:
        raise LoadError("format: options.tags is empty; name at least one tag")
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    layout = re.compile(r"\s*".join(["", *(f"<{re.escape(tag)}>.*</{re.escape(tag)}>" for tag in tags), ""]), re.DOTALL)

    def reward(completion: str) -> float:
        return float(all(completion.count(mark) == 1 for mark in marks) and layout.fullmatch(completion) is not None)

    return reward


def length_penalty(max_tokens: int, cache_tokens: int) -> Callable[..., float]:
    """0 up to max_tokens - cache_tokens generated tokens, then linear to -1 at max_tokens (DAPO, eq. 13)."""
    if not 1 <= cache_tokens <= max_tokens:
        raise LoadError(
            f"length_penalty: options.cache_tokens is {cache_tokens}; it must be in 1..max_tokens ({max_tokens})"
        )

    def reward(completion_tokens: int, **_: Any) -> float:
        return min(0.0, max(-1.0, (max_tokens - cache_tokens - completion_tokens) / cache_tokens))

    return reward


VERIFIERS: Mapping[str, Factory] = types.MappingProxyType(
    {
        factory.__name__: factory
        for factory in (
            exact_last_integer,
            exact_match,
            format,
            length_penalty,
            math,
            numeric_match,
            reasoning_gym,
            regex,
        )
    }
)


def plug_ins() -> dict[str, EntryPoint]:
    """Rewards of installed packages, by name; a name that ships is not replaced."""
    return {point.name: point for point in entry_points(group=ENTRY_POINTS) if point.name not in VERIFIERS}


def verifier_names() -> list[str]:
    """Every name that ``use:`` knows, sorted."""
    return sorted([*VERIFIERS, *plug_ins()])


def is_verifier(name: str) -> bool:
    return name in VERIFIERS or name in plug_ins()


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Checks names and types of a shipped verifier's options without making it; a plug-in's are checked at load.

    Raises:
        ValueError: an unknown option, a missing one, or one of another type.
    """
    if name not in VERIFIERS:
        return
    parameters = inspect.signature(VERIFIERS[name]).parameters
    hints = typing.get_type_hints(VERIFIERS[name])
    for option, value in options.items():
        if option not in parameters:
            mend = nearest(option, parameters) or "; it has none"
            raise ValueError(f"{name} has no option '{option}'{mend}")
        if not _fits(value, hints[option]):
            raise ValueError(f"{name}: option '{option}' is {value!r}; expected {type_name(hints[option])}")
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in options:
            raise ValueError(f"{name}: option '{option}' is required, but missing")


def load_reward(spec: FunctionSpec) -> RewardFunction:
    """The function of a spec, ready to be called.

    Raises:
        LoadError: it cannot be; the message names the file or verifier and the mend.
    """
    if FILE_USE.fullmatch(spec.use):
        function, where = load_file_function(spec.use, spec.folder)
        return bind_function(function, spec.options, where)
    if spec.use in VERIFIERS:
        try:
            check_options(spec.use, spec.options)
        except ValueError as failure:
            raise LoadError(str(failure)) from None
        return bind_function(VERIFIERS[spec.use](**spec.options), {}, spec.use)
    points = plug_ins()
    if spec.use not in points:
        raise LoadError(f"no verifier '{spec.use}'{nearest(spec.use, verifier_names())}")
    point = points[spec.use]
    try:
        function = point.load()
    except Exception as failure:
        raise LoadError(f"the reward '{spec.use}' of {point.value} cannot be imported: {failure}") from None
    return bind_function(function, spec.options, f"{spec.use} ({point.value})")


def type_name(hint: Any) -> str:
    """A type as the documentation of options writes it: ``"int"``, ``"str | None"``."""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return isinstance(value, list | tuple) and all(_fits(entry, typing.get_args(hint)[0]) for entry in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and mathematics.isfinite(value)
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _integer_label(label: Any) -> str:
    if isinstance(label, float) and label.is_integer():
        label = int(label)
    canonical = canonical_integer(str(label)) if isinstance(label, str | int) and not isinstance(label, bool) else None
    if canonical is None:
        raise CannotJudge(f"the label {label!r} is not an integer; exact_last_integer needs one in the label column")
    return canonical


def _number_label(label: Any) -> float:
    if isinstance(label, int | float) and not isinstance(label, bool):
        number = float(label)
    else:
        text = str(label).strip()
        plain = text.replace(",", "").replace("−", "-")
        number = float(plain) if _NUMBER.fullmatch(text) else mathematics.nan
    if not mathematics.isfinite(number):
        raise CannotJudge(f"the label {label!r} is not a finite number; numeric_match needs one in the label column")
    return number


def _equal(verify: Callable[..., bool], timeout: type[BaseException], expected: Any, found: Any) -> bool:
    try:
        return verify([expected], [found], timeout_seconds=MATH_STEP_S, raise_on_error=True)
    except timeout:
        raise CannotJudge(f"comparing the answer with the label took over {MATH_STEP_S} s") from None
    except Exception:
        return False  # not comparable, so not equal


def _gym_entry(metadata: Any, task: str | None, scorer_of: Callable[[str], Any]) -> tuple[str, Any]:
    """The task and its entry; the entry's lists are tuples again where the scorer needs that (JSON has no tuples)."""
    entry = next((metadata[key] for key in ("entry", "reasoning_gym") if isinstance(metadata.get(key), dict)), metadata)
    inner = entry.get("metadata")
    if "answer" not in entry or not isinstance(inner, dict):
        raise CannotJudge("the row's metadata holds no reasoning-gym entry (keys 'answer' and 'metadata')")
    name = task or inner.get("source_dataset")
    if not name:
        raise CannotJudge("the reasoning-gym entry does not say its task; set options.task")
    scorer = scorer_of(name)
    if entry["answer"] is None or _full_marks(scorer, entry):
        return name, entry
    tupled = {**entry, "metadata": _tuples(inner)}
    if _full_marks(scorer, tupled):
        return name, tupled
    raise CannotJudge(f"the scorer of '{name}' does not accept the entry's own answer; was its metadata changed?")


def _full_marks(scorer: Callable[..., float], entry: dict[str, Any]) -> bool:
    try:
        return float(scorer(entry["answer"], entry)) >= 1.0
    except Exception:
        return False  # the entry in this form is not one the scorer can read


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(entry) for entry in value)
    return {key: _tuples(entry) for key, entry in value.items()} if isinstance(value, dict) else value
