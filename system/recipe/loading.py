"""Reading recipes: YAML, ``extends:``, ``key=value``; and writing them down resolved.

Precedence, lowest first: the rooms' defaults, the file named by ``extends:`` (relative to the recipe, one level), the
recipe, the overrides in the order given. Mappings are merged, lists are replaced; an override reaches into a list by
index (``data.0.weight=2``). Options belong to their objective: a recipe that names another than the one it extends
inherits none. Everything wrong is a ``ConfigError`` that names the file, line or key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from system.core.errors import ConfigError, nearest
from system.core.settings import parse_settings
from system.recipe.secrets import refuse_secrets
from system.recipe.settings import Recipe


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe at ``path`` with ``overrides`` (``key=value``, dotted), complete and validated key by key.

    Raises:
        ConfigError: no such file, broken YAML, an unknown key (with the nearest valid one), a wrong type or value.
    """
    path = Path(path)
    merged = _with_base(path)
    for override in overrides:
        merged = _overridden(merged, override)
    values = _plain(merged, path)
    refuse_secrets(values)
    run = values.get("run")
    if isinstance(run, dict):
        run.setdefault("name", re.sub(r"[^A-Za-z0-9_.-]", "-", path.stem).lstrip("_.-") or "run")
        run.setdefault("folder", f"runs/{run['name']}")
    try:
        return parse_settings(Recipe, values, "")
    except ConfigError as failure:
        raise ConfigError(f"{path}: {failure}") from None


def resolved_yaml(recipe: Recipe) -> str:
    """The recipe with every default filled in; ``read_resolved`` of it gives an equal recipe."""
    values = recipe.model_dump(mode="json")
    refuse_secrets(values)
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)
    if yaml.safe_load(text) != values:  # rare line separators survive only when escaped
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=False, width=120)
    return str(text)


def read_resolved(path: str | Path) -> Recipe:
    """The recipe that a run folder holds, as ``resolved_yaml`` wrote it.

    Raises:
        ConfigError: it is missing, or this version of Triptych does not understand it.
    """
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as failure:
        raise ConfigError(f"{path} cannot be read: {str(failure).splitlines()[0]}") from None
    try:
        return parse_settings(Recipe, values, "")
    except ConfigError as failure:
        raise ConfigError(f"{path}: {failure}") from None


FREE_TO_CHANGE = frozenset({"learner.tokens_per_microbatch", "learner.activation_checkpointing", "learner.entropy"})
"""Keys that say how much memory a pass takes or what is written about it, and not what is learnt: a run may go on with
others."""


def differing_keys(there: Recipe, here: Recipe) -> list[str]:
    """``key: value there -> value here`` for every dotted key that makes two recipes different runs, sorted."""
    one, other = _flat(there.model_dump(mode="json")), _flat(here.model_dump(mode="json"))
    return [
        f"{key}: {one.get(key, 'absent')} -> {other.get(key, 'absent')}"
        for key in sorted((one.keys() | other.keys()) - FREE_TO_CHANGE)
        if one.get(key, _ABSENT) != other.get(key, _ABSENT)
    ]


_ABSENT = object()


def _flat(values: Any, where: str = "") -> dict[str, Any]:
    if not isinstance(values, dict | list) or not values:
        return {where: values}
    items = values.items() if isinstance(values, dict) else enumerate(values)
    flat: dict[str, Any] = {}
    for key, value in items:
        flat.update(_flat(value, f"{where}.{key}" if where else str(key)))
    return flat


def _with_base(path: Path) -> DictConfig:
    recipe = _read(path)
    extends = recipe.pop("extends", None)
    if extends is None:
        return recipe
    if not isinstance(extends, str):
        raise ConfigError(f"{path}: extends names one other recipe, as extends: base.yaml")
    base_path = path.parent / extends
    if not base_path.is_file():
        raise ConfigError(f"{path}: extends {extends}, but there is no file {base_path}{_nearest_recipe(base_path)}")
    base = _read(base_path)
    if "extends" in base:
        raise ConfigError(f"{path}: extends {extends}, which extends another recipe itself; only one level is allowed")
    if _objective_name(recipe) not in (None, _objective_name(base)):
        base.pop("objective", None)
    merged = OmegaConf.merge(base, recipe)
    assert isinstance(merged, DictConfig)
    return merged


def _objective_name(recipe: DictConfig) -> Any:
    objective = recipe.get("objective")
    return objective.get("name") if isinstance(objective, DictConfig) else None


def _read(path: Path) -> DictConfig:
    if not path.is_file():
        raise ConfigError(f"no recipe at {path}{_nearest_recipe(path)}")
    try:
        loaded = OmegaConf.load(path)
    except yaml.MarkedYAMLError as failure:
        mark = failure.problem_mark or failure.context_mark
        line = f":{mark.line + 1}" if mark is not None else ""
        problem = (failure.problem or str(failure)).splitlines()[0]
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OmegaConfBaseException, OSError) as failure:
        raise ConfigError(f"{path}: not a readable YAML file: {str(failure).splitlines()[0]}") from None
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: a recipe is a mapping of sections (run, model, data, ...)")
    if not loaded:
        raise ConfigError(f"{path}: an empty recipe; recipes/quickstart.yaml is one to begin with")
    return loaded


def _overridden(recipe: DictConfig, override: str) -> DictConfig:
    key, sign, text = override.partition("=")
    key = key.strip()
    if not sign or not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
        raise ConfigError(f"'{override}' is not an override; write key=value with the full dotted key (run.steps=10)")
    try:
        value = OmegaConf.from_dotlist([f"value={text}"]).get("value")
    except (yaml.YAMLError, OmegaConfBaseException) as failure:
        raise ConfigError(f"{key}: the value {text!r} is not valid YAML: {str(failure).splitlines()[0]}") from None
    parts = key.split(".")
    section: Any = recipe
    for depth, part in enumerate(parts[:-1]):
        here = ".".join(parts[: depth + 1])
        if isinstance(section, ListConfig):
            section = section[_list_index(section, part, here)]
        else:
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
        if not isinstance(section, DictConfig | ListConfig):
            raise ConfigError(f"{key}: {here} is a plain value ({section!r}); it has no keys of its own")
    last: Any = _list_index(section, parts[-1], key) if isinstance(section, ListConfig) else parts[-1]
    section[last] = value
    return recipe


def _list_index(section: ListConfig, part: str, key: str) -> int:
    if not part.isdigit() or int(part) >= len(section):
        raise ConfigError(f"{key}: a list of {len(section)} is indexed with 0..{len(section) - 1}, not '{part}'")
    return int(part)


def _plain(recipe: DictConfig, path: Path) -> dict[str, Any]:
    written = OmegaConf.to_container(recipe, resolve=False)
    for key, value in _flat(written).items():
        if isinstance(value, str) and "${oc.env" in value:
            raise ConfigError(f"{path}: {key}: recipes do not read the environment; it sets secrets only")
    try:
        values = OmegaConf.to_container(recipe, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as failure:
        raise ConfigError(f"{path}: {str(failure).splitlines()[0]}") from None
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def _nearest_recipe(path: Path) -> str:
    if not path.parent.is_dir():
        return ""
    beside = [entry.name for entry in path.parent.iterdir() if entry.suffix in (".yaml", ".yml")]
    hint = nearest(path.name, beside)
    return hint if hint.startswith("; did") else ""
