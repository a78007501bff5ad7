"""What a recipe can name: objectives, rewards and divergences, with options and defaults, for ``triptych list``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
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
    formula: str = ""
    """One line beside the summary, where that is short enough for a list."""
    source: str = ""
    """Where its mathematics comes from."""
    own: frozenset[str] = frozenset()
    """Options that the others of its kind do not have, or have with another default."""


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
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for entry in entries:
        lines = [entry.summary] if name is not None else [entry.summary, *_in_short(entry)]
        table.add_row(escape(entry.name), escape("\n".join(lines)))
    console.print(table, highlight=False)
    if name is None:
        shared = [option for option in entries[0].options if entries[0].own and option.name not in entries[0].own]
        if shared:
            console.print("\nOptions of all, where nothing else is said above:", highlight=False)
            console.print(_options_table(shared), highlight=False)
        return
    entry = entries[0]
    for text in (entry.details, f"Source: {entry.source}" if entry.source else ""):
        if text:
            console.print(f"\n{escape(text)}", highlight=False)
    if entry.options:
        console.print()
        console.print(_options_table(entry.options), highlight=False)


def _in_short(entry: CatalogEntry) -> list[str]:
    """Its formula, its own options with their defaults, and its source."""
    options = [f"{option.name}: {option.default}" for option in entry.options if option.name in entry.own]
    return [line for line in (entry.formula, ", ".join(options), entry.source) if line]


def _options_table(options: Sequence[CatalogOption]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("option", style="bold", no_wrap=True)
    table.add_column("default", no_wrap=True)
    table.add_column("meaning", overflow="fold")
    for option in options:
        meaning = f"{option.description} ({option.type})".strip()
        table.add_row(escape(option.name), escape(option.default), escape(meaning))
    return table


def _objectives() -> list[CatalogEntry]:
    from learner.objectives import objective_class, objective_names

    return [_objective(name, objective_class(name)) for name in objective_names()]


def _objective(name: str, objective: Any) -> CatalogEntry:
    from learner.objectives import ObjectiveSettings

    summary, _, details = inspect.cleandoc(objective.__doc__ or "").partition("\n")
    text, marked, source = _joined(details).replace("Sources: ", "Source: ").rpartition("Source: ")
    built = objective(objective.Options.model_construct())
    facts = [
        f"Log-probs it needs beside the policy's, with its defaults: {', '.join(sorted(built.needs)) or 'none'}.",
        "Its gradient mixes the completions of a group." if built.coupling == "group" else "",
        *(f"correction: {name} is refused: {why}." for name, why in objective.Options.refused_corrections.items()),
    ]
    shared = ObjectiveSettings.model_fields
    fields = objective.Options.model_fields
    own = frozenset(key for key, field in fields.items() if key not in shared or field.default != shared[key].default)
    return CatalogEntry(
        name=name,
        summary=summary.strip(),
        details="\n".join([text.strip() if marked else _joined(details), *filter(None, facts)]).strip(),
        options=tuple(option_of(key, fields[key]) for key in sorted(fields, key=lambda key: key not in own)),
        source=source.strip().rstrip(".") if marked else "",
        own=own,
    )


def option_of(name: str, field: FieldInfo) -> CatalogOption:
    """A field of a settings model that was made with ``use_attribute_docstrings``."""
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
    from learner.divergences import divergence_names, find_divergence

    return [_divergence(find_divergence(name)) for name in divergence_names()]


def _divergence(divergence: Any) -> CatalogEntry:
    positive, negative = divergence.slopes_at_zero
    formulas = [
        ("f(u)", divergence.generator),
        ("link g(r)", divergence.link),
        ("conjugate f*(t)", divergence.conjugate),
        ("a > 0: -g(r)", divergence.formulas[0]),
        ("a < 0: f*(g(r))", divergence.formulas[1]),
        ("slopes at r = 0", f"{positive:.3f}, {negative:+.3f}"),
        (
            "linear beyond |r| = 10",
            ", ".join(f"a {'>' if side == 'positive' else '<'} 0" for side in divergence.tangent),
        ),
        ("hazard", divergence.hazard),
    ]
    width = max(len(label) for label, _ in formulas)
    return CatalogEntry(
        name=divergence.name,
        summary=divergence.summary,
        formula=f"a > 0: {divergence.formulas[0]}; a < 0: {divergence.formulas[1]}" if all(divergence.formulas) else "",
        details="\n".join(f"{label:<{width}}  {text}" for label, text in formulas if text),
    )


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
