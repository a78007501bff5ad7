"""Objectives by name: modules of this package, entry points of installed packages, a user's Python file.

A module is found because it stands in the folder; it defines an ``Objective`` subclass with a ``name``, nothing is
listed anywhere. Every failure to find, load or configure one is a ``ConfigError`` with the mend.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import learner.objectives as package
from learner.objectives.base import AnyObjective, Objective
from system.core.errors import ConfigError, nearest
from system.core.settings import parse_settings

ENTRY_POINT_GROUP = "triptych.objectives"
"""name -> the Objective subclass, in the metadata of an installed package."""


def objective_names() -> list[str]:
    """Names that ``build_objective`` knows without a file, sorted."""
    return sorted({*_built_in(), *_installed()})


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
    installed = _installed()
    if name in installed:
        return _from_entry_point(installed[name])
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


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def _from_entry_point(point: EntryPoint) -> type[AnyObjective]:
    try:
        found = point.load()
    except (ImportError, AttributeError) as failure:
        raise ConfigError(
            f"objective.name: '{point.name}' is installed as {point.value}, which does not load: {failure}"
        ) from failure
    if not (inspect.isclass(found) and issubclass(found, Objective)):
        raise ConfigError(f"objective.name: '{point.name}' is installed as {point.value}, which is no Objective class")
    return found


def _from_file(name: str, path: Path) -> type[AnyObjective]:
    if not path.is_file():
        raise ConfigError(f"objective.file: {path}: no such file (looked in {Path.cwd()})")
    found = _objectives_in(_load(path))
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


def _load(path: Path) -> ModuleType:
    """Runs the file under a module name of its own, so that it may share its stem with other modules."""
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    module_name = f"triptych_objective_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"objective.file: {path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as failure:
        sys.modules.pop(module_name, None)
        raise ConfigError(f"objective.file: {path}: does not load: {type(failure).__name__}: {failure}") from failure
    return module
