"""Rules of the house that no linter knows: who may import what, who may wait, how long a file may grow."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("system", "rollout_workers", "learner", "reward_service", "deploy")
SOURCES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
BARE_WAITS = {"result", "join", "wait", "acquire", "communicate", "get"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def importers_of(package: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in SOURCES if package in imports(path)}


def test_only_the_engine_and_the_weight_transfer_know_vllm() -> None:
    weight_transfer = {"system/core/weights/receiver.py", "system/core/weights/register.py"}
    beyond = {path for path in importers_of("vllm") if not path.startswith("rollout_workers/engine/")}
    assert beyond == weight_transfer


def test_only_one_module_knows_deepspeed() -> None:
    assert importers_of("deepspeed") == {"learner/deepspeed_engine.py"}


def test_rooms_know_of_system_only_its_core() -> None:
    beyond = []
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] not in ("rollout_workers", "learner", "reward_service"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            beyond += [f"{path.name}: {name}" for name in names if re.match(r"system(\.(?!core\b)|$)", name)]
    assert not beyond


def calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def test_only_one_module_starts_and_stops_ray() -> None:
    starters = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for call in calls(path)
        if dotted(call.func) in ("ray.init", "ray.shutdown")
    }
    assert starters == {"system/ray_session.py"}


def test_only_the_deadline_helper_calls_ray_get() -> None:
    waiters = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for call in calls(path)
        if dotted(call.func) in ("ray.get", "ray.wait")
    }
    assert waiters == {"system/core/deadlines.py"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_wait_without_a_deadline(path: Path) -> None:
    bare = [
        f"{path.name}:{call.lineno} {dotted(call.func)}()"
        for call in calls(path)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in BARE_WAITS
        and not call.args
        and not call.keywords
        and not (call.func.attr == "result" and dotted(call.func.value).endswith(("task", "future")))
    ]
    awaited = {
        node.value.lineno
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Await)
    }
    bare = [entry for entry in bare if int(entry.split(":")[1].split()[0]) not in awaited]
    assert not bare


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_holds_one_idea(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400


@pytest.mark.parametrize(
    "module",
    ["system", "system.core", "system.core.errors", "system.cli", "reward_service", "rollout_workers", "learner"],
)
def test_importing_a_package_imports_nothing_heavy(module: str) -> None:
    program = f"import {module}, sys; print([m for m in ('torch', 'ray', 'vllm', 'deepspeed') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
