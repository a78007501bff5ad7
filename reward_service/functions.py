"""Reward functions as the person who writes one sees them: what is passed, what a group function is, how one is
loaded.

A function takes what it names, by name::

    def reward(completion: str, *, label, **_) -> float: ...           # also: async def
    def reward_group(items: list[RewardItem]) -> list[float]: ...      # first parameter ``items``: the whole group

Known names are ``completion, prompt, label, metadata, finish_reason, completion_tokens, id``; others are options of
the recipe. Results are described in ``results``. Runs inside the reward process; imports the standard library only.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reward_service.results import InvalidResult
from system.core.errors import nearest

FILE_USE = re.compile(r"(?P<file>.+\.py):(?P<function>[A-Za-z_][A-Za-z0-9_]*)")
ITEM_NAMES = ("completion", "prompt", "label", "metadata", "finish_reason", "completion_tokens", "id")


class LoadError(Exception):
    """The function cannot be used as it is; the message names the file and the mend."""


@dataclass(frozen=True)
class FunctionSpec:
    """Which function a process runs: the reward's name, its ``use`` and its options."""

    reward: str
    use: str
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: str = "."
    """Where a relative ``FILE.py`` is looked for when the process's own working folder does not have it."""


@dataclass(frozen=True)
class RewardItem:
    """One completion to judge, as group functions get it."""

    id: str
    completion: str
    prompt: str | list[dict[str, Any]]
    label: Any
    metadata: dict[str, Any]
    finish_reason: str
    completion_tokens: int


@dataclass(frozen=True)
class RewardFunction:
    """A loaded function with its options bound."""

    function: Callable[..., Any]
    takes_group: bool
    asynchronous: bool
    passed: tuple[str, ...]
    options: Mapping[str, Any]

    def call(self, item: RewardItem) -> Any:
        """Judges one completion; an awaitable when the function is asynchronous."""
        return self.function(**{name: getattr(item, name) for name in self.passed}, **self.options)

    def call_group(self, items: list[RewardItem]) -> Any:
        """Judges all completions of a group in one call."""
        return self.function(items, **self.options)


def item_from_wire(fields: Mapping[str, Any]) -> RewardItem:
    """Makes an item of what came over the wire, where ``metadata`` is JSON text.

    Raises:
        InvalidResult: the metadata is not a JSON object.
    """
    try:
        metadata = json.loads(fields["metadata"])
    except ValueError as failure:
        raise InvalidResult(f"the row's metadata is not JSON: {failure}") from None
    if not isinstance(metadata, dict):
        raise InvalidResult("the row's metadata is not a JSON object")
    return RewardItem(**{**fields, "metadata": metadata})


def bind_function(function: Any, options: Mapping[str, Any], where: str) -> RewardFunction:
    """Checks a function's signature against what can be passed to it.

    Args:
        where: names the function in errors, ``"rewards/style.py:reward"``.

    Raises:
        LoadError: not a function, a parameter nobody can fill, an option it does not take.
    """
    if not callable(function) or inspect.isclass(function):
        raise LoadError(
            f"{where} is {type(function).__name__}, not a function; define 'def reward(completion, *, label, **_)'"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise LoadError(
            f"{where} has no readable signature; wrap it in 'def reward(completion, *, label, **_)'"
        ) from None
    takes_group = bool(parameters) and parameters[0].name == "items"
    own = parameters[1:] if takes_group else parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own)
    named = {p.name: p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    known = () if takes_group else ITEM_NAMES
    for parameter in own:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise LoadError(f"{where}: parameter '{parameter.name}' is positional-only; everything is passed by name")
    for option in options:
        if option in known or (takes_group and option == "items"):
            raise LoadError(f"{where}: option '{option}' has the name of something every function is passed; rename it")
        if option not in named and not anything:
            raise LoadError(f"{where} takes no option '{option}'{nearest(option, set(named) - set(known))}")
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in known and name not in options:
            mend = nearest(name, ("items",) if takes_group else (*ITEM_NAMES, "items"))
            raise LoadError(
                f"{where}: nothing is passed for parameter '{name}'{mend}; "
                "set it in the reward's options or give it a default"
            )
    if not takes_group and not anything and "completion" not in named:
        raise LoadError(f"{where} takes no 'completion'; define 'def reward(completion, *, label, **_)'")
    passed = tuple(ITEM_NAMES) if anything and not takes_group else tuple(name for name in known if name in named)
    call = type(function).__call__ if not inspect.isroutine(function) else function
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    return RewardFunction(function, takes_group, asynchronous, passed, dict(options))


def load_file_function(use: str, folder: str = ".") -> tuple[Any, str]:
    """Imports ``FILE.py:function``; siblings of the file can be imported by it.

    Returns:
        The object, and how errors name it.
    Raises:
        LoadError: no such file, a syntax error, an import that fails, no such function.
    """
    match = FILE_USE.fullmatch(use)
    if match is None:
        raise LoadError(f"'{use}' is not FILE.py:function")
    file = Path(match["file"]).expanduser()
    places = [file.absolute(), (Path(folder) / file).absolute()]
    path = next((place for place in places if place.is_file()), places[0])
    if not path.is_file():
        raise LoadError(f"reward file {path} does not exist; paths are relative to the working folder")
    module_name = f"triptych_reward_{path.stem}"
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    if module_spec is None or module_spec.loader is None:
        raise LoadError(f"reward file {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    sys.path.insert(0, str(path.parent))
    try:
        module_spec.loader.exec_module(module)
    except SyntaxError as failure:
        raise LoadError(f"{failure.filename or path}:{failure.lineno}: syntax error: {failure.msg}") from None
    except (Exception, SystemExit) as failure:
        raise LoadError(f"reward file {path} fails at import:\n{last_lines(failure)}") from None
    if not hasattr(module, match["function"]):
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
        raise LoadError(
            f"reward file {path} has no function '{match['function']}'{nearest(match['function'], functions)}"
        )
    return getattr(module, match["function"]), f"{path}:{match['function']}"


def last_lines(failure: BaseException, frames: int = 3) -> str:
    """The end of a traceback without this package's own frames, at most 2,000 characters."""
    trace = failure.__traceback__
    while trace is not None and trace.tb_next is not None and _is_machinery(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    lines = traceback.format_exception(type(failure), failure, trace, limit=-frames, chain=False)
    text = "".join(lines).rstrip()
    return text if len(text) <= 2000 else f"{text[:600]}\n...\n{text[-1400:]}"


def _is_machinery(filename: str) -> bool:
    return filename.startswith((str(Path(__file__).parent), "<frozen importlib"))
