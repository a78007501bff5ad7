"""Code that is not ours: a user's Python file, or an entry point of an installed package.

Whatever keeps it from loading is a ``ConfigError`` that names the recipe's key, the thing and the reason.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from system.core.errors import ConfigError


def installed(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group, by name."""
    return {point.name: point for point in entry_points(group=group)}


def load_entry_point(point: EntryPoint, kind: type, key: str, *, subclass: bool = False) -> Any:
    """What an entry point stands for.

    Args:
        kind: an instance of it is expected, or with ``subclass`` a subclass.
        key: of the recipe, for errors.
    Raises:
        ConfigError: it does not load, or is something else.
    """
    try:
        found = point.load()
    except (ImportError, AttributeError) as failure:
        raise ConfigError(
            f"{key}: '{point.name}' is installed as {point.value}, which does not load: {failure}"
        ) from failure
    fits = isinstance(found, type) and issubclass(found, kind) if subclass else isinstance(found, kind)
    if not fits:
        what = f"{kind.__name__} class" if subclass else kind.__name__
        raise ConfigError(f"{key}: '{point.name}' is installed as {point.value}, which is no {what}")
    return found


def load_file(path: Path, key: str) -> ModuleType:
    """Runs a Python file under a module name of its own, so that it may share its stem with other modules.

    Raises:
        ConfigError: there is no such file, or it raises.
    """
    if not path.is_file():
        raise ConfigError(f"{key}: {path}: no such file (looked in {Path.cwd()})")
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    module_name = f"triptych_plugin_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{key}: {path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as failure:
        sys.modules.pop(module_name, None)
        raise ConfigError(f"{key}: {path}: does not load: {type(failure).__name__}: {failure}") from failure
    return module
