"""What a reward function may return, and what it means. Pure; used where the function runs and again where the
answer arrives.

A result is a number, or ``{"reward": number, "parts": {name: number}, "info": {...}}``, or None for "cannot be
judged". Numbers are finite also in float32, as records store them. True and False are 1 and 0. Text is never a
number.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FLOAT32_MAX = 3.4028234663852886e38
INFO_LIMIT_BYTES = 65536  # of one completion's info; it is stored in the row's metadata


class InvalidResult(ValueError):
    """The function returned something that is not a result; the message says what and what was expected."""


class CannotJudge(Exception):
    """Raised by a reward function that cannot judge this completion: its reward is null, never 0."""


@dataclass(frozen=True)
class Judgement:
    """A judged completion."""

    reward: float
    parts: dict[str, float] = field(default_factory=dict)
    info: str = "{}"
    """JSON object."""


def read_number(value: Any, what: str) -> float:
    """``value`` as a float that is finite in float32.

    Accepts Python and numpy numbers and booleans, and zero-dimensional arrays and tensors.

    Raises:
        InvalidResult: text, None, a container, NaN, an infinity, or a magnitude that float32 cannot hold.
    """
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise InvalidResult(f"{what} is {_shown(value)}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or abs(number) > FLOAT32_MAX:
        raise InvalidResult(f"{what} is {_shown(value)}, not a finite float32 number")
    return number


def read_result(value: Any) -> Judgement:
    """Validates what a reward function returned for one completion.

    Raises:
        CannotJudge: None, or a dictionary whose reward is None.
        InvalidResult: anything else that is not a result.
    """
    if value is None:
        raise CannotJudge("the function returned None")
    if not isinstance(value, Mapping):
        return Judgement(read_number(value, "the result"))
    unknown = sorted(str(key) for key in value if key not in ("id", "reward", "parts", "info"))
    if unknown:
        raise InvalidResult(f"the result has unknown keys {unknown}; valid: reward, parts, info")
    if "reward" not in value:
        raise InvalidResult("the result has no key 'reward'")
    if value["reward"] is None:
        raise CannotJudge("the function returned a reward of None")
    return Judgement(read_number(value["reward"], "the reward"), _read_parts(value.get("parts")), _read_info(value))


def match_results(ids: Sequence[str], value: Any) -> dict[str, Any]:
    """Assigns what a group function returned to the items it judged; each entry is still to be read by ``read_result``.

    The function returns a mapping from id to result, or one list entry per item: all entries dictionaries with their
    ``id``, or none of them with one, then in the order of the items.

    Raises:
        InvalidResult: an id is missing, unknown or doubled, or the list has another length than the group.
    """
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif (isinstance(value, Sequence) and not isinstance(value, str | bytes)) or hasattr(value, "tolist"):
        entries = value.tolist() if hasattr(value, "tolist") else list(value)
        if not isinstance(entries, list) or len(entries) != len(ids):
            given = len(entries) if isinstance(entries, list) else "one number"
            raise InvalidResult(f"the group function returned {given} results for {len(ids)} completions")
        named = [isinstance(entry, Mapping) and "id" in entry for entry in entries]
        if any(named) and not all(named):
            raise InvalidResult("the group function gave some results an id and others none")
        pairs = [(entry["id"], entry) for entry in entries] if any(named) else list(zip(ids, entries, strict=True))
    else:
        raise InvalidResult(f"the group function returned {_shown(value)}, not one result per completion")
    matched = {str(key): entry for key, entry in pairs}
    if len(matched) != len(pairs) or set(matched) != set(ids):
        missing = sorted(set(ids) - set(matched))
        unknown = sorted(set(matched) - set(ids))
        raise InvalidResult(f"the group function's ids do not match the group's: missing {missing}, unknown {unknown}")
    return matched


def _read_parts(parts: Any) -> dict[str, float]:
    if parts is None:
        return {}
    if not isinstance(parts, Mapping) or not all(isinstance(name, str) for name in parts):
        raise InvalidResult(f"parts is {_shown(parts)}, not a dictionary from name to number")
    return {name: read_number(part, f"part '{name}'") for name, part in parts.items()}


def _read_info(value: Mapping[str, Any]) -> str:
    info = value.get("info")
    if info is None:
        return "{}"
    if not isinstance(info, Mapping):
        raise InvalidResult(f"info is {_shown(info)}, not a dictionary")
    try:
        text = json.dumps(dict(info), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as failure:
        raise InvalidResult(f"info cannot be written as JSON: {failure}") from None
    if len(text) > INFO_LIMIT_BYTES:
        raise InvalidResult(f"info takes {len(text)} bytes; at most {INFO_LIMIT_BYTES} are stored")
    return text


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as failure:
        text = f"<no repr: {type(failure).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."
