"""The base of every settings model: frozen, no unknown keys, durations in ``_s``, sizes in ``_bytes`` or ``_tokens``.

Numbers are finite, below ``LARGEST``, and never written as true or false; durations are below ``LONGEST_S``. Each room
defines its own settings next to what they configure; ``system.recipe`` only composes them.
"""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from system.core.errors import ConfigError, nearest

LARGEST = 2.0**63
LONGEST_S = 1e8
"""Three years."""


class Settings(BaseModel):
    """A frozen pydantic model that refuses unknown keys."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_numbers(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            kinds = _plain_types(field.annotation) if field is not None else set()
            if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
                raise ValueError(f"{name} must be a number, not {str(value).lower()}")
            if isinstance(value, int | float) and abs(value) > (LONGEST_S if name.endswith("_s") else LARGEST):
                raise ValueError(f"{name} is {value:g}: larger than anything that makes sense here")
        return values


def parse_settings(model: type[Settings], values: dict[str, Any], where: str) -> Any:
    """Validates ``values`` as ``model``; a ``ConfigError`` names each wrong key by its dotted path under ``where``."""
    try:
        return model.model_validate(values)
    except ValidationError as failure:
        errors = failure.errors()
        inner = [error["loc"] for error in errors]
        told = [  # a list whose items are wrong is not also too short
            error
            for error in errors
            if not (
                error["type"] == "too_short" and any(loc[: len(error["loc"])] == error["loc"] != loc for loc in inner)
            )
        ]
        raise ConfigError("\n".join(_explain(model, where, error) for error in told)) from None


def _explain(model: type[Settings], where: str, error: Any) -> str:
    path = [str(part) for part in error["loc"]]
    dotted = ".".join([where, *path]) if where else ".".join(path)
    if error["type"] == "extra_forbidden":
        return f"{dotted}: unknown key{nearest(path[-1], _keys_at(model, path[:-1]))}"
    if error["type"] == "missing":
        return f"{dotted}: required, but missing"
    message = error["msg"].removeprefix("Value error, ").replace("valid tuple", "list")
    shown = error.get("input")
    given = f" (got {shown!r})" if isinstance(shown, str | int | float | bool) and str(shown) not in message else ""
    return f"{dotted or where or 'recipe'}: {message[0].lower() + message[1:] if message else 'invalid'}{given}"


def _keys_at(model: Any, path: list[str]) -> list[str]:
    for part in path:
        if part.isdigit():
            continue
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return []
        model = _settings_in(field.annotation)
    return list(getattr(model, "model_fields", {}))


def _plain_types(annotation: Any) -> set[Any]:
    """The types a field admits, unions unfolded."""
    inner = get_args(annotation)
    return {annotation} if not inner else set().union(*(_plain_types(each) for each in inner))


def _settings_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _settings_in(argument)
        if found is not None:
            return found
    return None
