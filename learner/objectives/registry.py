"""Objectives by name: modules of this package, entry points of installed packages, a user's Python file.

A module is found because it stands in the folder; it defines an ``Objective`` subclass with a ``name``, nothing is
listed anywhere. Every failure to find, load or configure one is a ``ConfigError`` with the mend.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import learner.objectives as package
from learner.objectives.base import AnyObjective, Objective
from learner.plugins import installed, load_entry_point, load_file
from system.core.errors import ConfigError, nearest
from system.core.settings import parse_settings

ENTRY_POINT_GROUP = "triptych.objectives"
"""name -> the Objective subclass, in the metadata of an installed package."""


def objective_names() -> list[str]:
    """Names that ``build_objective`` knows without a file, sorted."""
    return sorted({*_built_in(), *installed(ENTRY_POINT_GROUP)})


def objective_class(name: str, file: str | Path | None = None) -> type[AnyObjective]:
    """The class of an objective.

    Args:
        name: of a built-in or installed objective, or of one that ``file`` defines.
        file: a user's Python file; its directory need not be importable.
    Raises:
        ConfigError: nothing has this name, or the file cannot be loaded.
    """
    if file is not None:
        return _from_file(name, Path(file))
    if name in _built_in():
        return _built_in()[name]
    points = installed(ENTRY_POINT_GROUP)
    if name in points:
        found: type[AnyObjective] = load_entry_point(points[name], Objective, "objective.name", subclass=True)
        return found
    raise ConfigError(f"objective.name: unknown objective '{name}'{nearest(name, objective_names())}")


def build_objective(name: str, *, file: str | Path | None = None, **options: Any) -> AnyObjective:
    """An objective with its options, as ``objective:`` of a recipe names them.

    Raises:
        ConfigError: unknown name or option (with the nearest valid one), or a value that cannot be.
    """
    chosen = objective_class(name, file)
    for option, mend in chosen.Options.refused.items():
        if option in options:
            raise ConfigError(f"objective.{option}: {name} has no such option; {mend}")
    return chosen(parse_settings(chosen.Options, options, "objective"))


@cache
def _built_in() -> dict[str, type[AnyObjective]]:
    classes: dict[str, type[AnyObjective]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        classes |= _objectives_in(importlib.import_module(f"{package.__name__}.{module.name}"))
    return classes


def _objectives_in(module: ModuleType) -> dict[str, type[AnyObjective]]:
    return {
        member.name: member
        for member in vars(module).values()
        if inspect.isclass(member)
        and issubclass(member, Objective)
        and member.__module__ == module.__name__
        and not inspect.isabstract(member)
        and hasattr(member, "name")
    }


def _from_file(name: str, path: Path) -> type[AnyObjective]:
    found = _objectives_in(load_file(path, "objective.file"))
    if name in found:
        return found[name]
    if found:
        raise ConfigError(
            f"objective.name: {path} defines {', '.join(sorted(found))}, not '{name}'{nearest(name, found)}"
        )
    raise ConfigError(
        f"objective.file: {path} defines no objective; write a subclass of learner.objectives.TokenObjective "
        f"(or Objective) there, with its formula and name = '{name}'"
    )
