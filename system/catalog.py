"""What a recipe can name: objectives, rewards and divergences, with options and defaults, for ``triptych list``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from system.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class CatalogOption:
    """One option, as a recipe would write it."""

    name: str
    type: str
    default: str
    """``required`` where there is none."""
    description: str = ""


@dataclass(frozen=True)
class CatalogEntry:
    """One name that a recipe can use."""

    name: str
    summary: str
    """One line."""
    details: str = ""
    options: tuple[CatalogOption, ...] = ()


def catalog(kind: str, name: str | None = None) -> list[CatalogEntry]:
    """The entries of ``kind``, or the one named.

    Raises:
        ConfigError: no such kind or name; the nearest is named.
    """
    if kind not in _KINDS:
        raise ConfigError(f"no list of '{kind}'{nearest(kind, _KINDS)}")
    entries = _KINDS[kind]()
    if name is None:
        return entries
    for entry in entries:
        if entry.name == name:
            return [entry]
    raise ConfigError(f"no {kind.removesuffix('s')} '{name}'{nearest(name, [entry.name for entry in entries])}")


def print_catalog(kind: str, name: str | None = None) -> None:
    """Prints a list, or one entry with its options.

    Raises:
        ConfigError: no such kind or name.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    entries = catalog(kind, name)
    if not entries:
        console.print(f"no {kind}: no objective of this version takes one", highlight=False)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for entry in entries:
        table.add_row(escape(entry.name), escape(entry.summary))
    console.print(table, highlight=False)
    if name is None:
        return
    entry = entries[0]
    if entry.details:
        console.print(f"\n{escape(entry.details)}", highlight=False)
    if entry.options:
        options = Table(box=None, pad_edge=False)
        options.add_column("option", style="bold", no_wrap=True)
        options.add_column("default", no_wrap=True)
        options.add_column("meaning", overflow="fold")
        for option in entry.options:
            meaning = f"{option.description} ({option.type})".strip()
            options.add_row(escape(option.name), escape(option.default), escape(meaning))
        console.print()
        console.print(options, highlight=False)


def _objectives() -> list[CatalogEntry]:
    from learner.objectives import objective_class, objective_names

    return [_objective(name, objective_class(name)) for name in objective_names()]


def _objective(name: str, objective: Any) -> CatalogEntry:
    summary, _, details = (objective.__doc__ or "").strip().partition("\n")
    needs = ", ".join(sorted(objective(objective.Options.model_construct()).needs)) or "nothing"
    return CatalogEntry(
        name=name,
        summary=summary.strip(),
        details=f"{_joined(details)}\nLog-probs it needs beside the policy's, with its defaults: {needs}.".strip(),
        options=tuple(_option(key, field) for key, field in objective.Options.model_fields.items()),
    )


def _option(name: str, field: FieldInfo) -> CatalogOption:
    default = "required" if field.is_required() else _written(field.get_default(call_default_factory=True))
    return CatalogOption(name, _type(field.annotation), default, _joined(field.description or ""))


def _rewards() -> list[CatalogEntry]:
    from reward_service.catalog import describe_rewards

    return [
        CatalogEntry(
            name=reward.name,
            summary=reward.summary,
            details=_joined(reward.details),
            options=tuple(
                CatalogOption(
                    option.name,
                    option.type.replace("None", "null"),
                    "required" if option.default is None else _PYTHON.get(option.default, option.default),
                )
                for option in reward.options
            ),
        )
        for reward in describe_rewards()
    ]


_PYTHON = {"None": "null", "True": "true", "False": "false"}


def _divergences() -> list[CatalogEntry]:
    return []


def _written(value: Any) -> str:
    """A default as YAML writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _type(annotation: Any) -> str:
    """``Literal['k1', 'k3']`` as ``k1 | k3``; plain types by their names."""
    arguments = getattr(annotation, "__args__", None)
    if arguments is None:
        return "null" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))
    parts = [
        _written(part) if not isinstance(part, type) and not hasattr(part, "__args__") else _type(part)
        for part in arguments
    ]
    return " | ".join(parts)


def _joined(text: str) -> str:
    return " ".join(text.split())


_KINDS: dict[str, Callable[[], list[CatalogEntry]]] = {
    "objectives": _objectives,
    "rewards": _rewards,
    "divergences": _divergences,
}
