"""Checkpoints of a run: written beside, renamed into place, and only then named by ``latest``.

    checkpoints/step_000010/  learner/...  hf/  state.json  manifest.json
    checkpoints/latest        the name of the newest complete one

A folder without a manifest, or whose files disagree with it, is never loaded. Only the newest ``keep`` remain.
``trained`` is final only when a checkpoint holds it; ``state.json`` stores the ledger, the step and the version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from system.core.errors import CheckpointDamaged
from system.run_folder import write_atomically

_NAME = re.compile(r"^step_(\d{6,})$")
_HASHED_UP_TO_BYTES = 64 * 1024 * 1024
"""Larger files are checked by their size: hashing tens of gigabytes would hold training up."""


@dataclass(frozen=True)
class RunProgress:
    """Where a run stands between two steps; with the learner's own files, all that is needed to go on."""

    step: int = 0
    """Steps learned; the next one has this index."""
    version: int = 0
    """Policy version of the weights in the checkpoint."""
    ledger: dict[str, Any] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    """Counters that run through the whole run (tokens, seconds)."""


class CheckpointStore:
    """The ``checkpoints`` folder of one run."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of ``step`` into; what an earlier attempt left there is removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".writing-*"):
            shutil.rmtree(leftover)
        target = self.folder / f".writing-step_{step:06d}"
        target.mkdir()
        return target

    def finish(self, written: Path, progress: RunProgress) -> Path:
        """Adds the progress and the manifest, moves the folder into place, names it, and prunes."""
        write_atomically(written / "state.json", json.dumps(asdict(progress)))
        write_atomically(written / "manifest.json", json.dumps(_manifest(written)))
        final = self.folder / f"step_{progress.step:06d}"
        if final.exists():
            shutil.rmtree(final)
        os.replace(written, final)
        _sync_folder(self.folder)
        write_atomically(self.folder / "latest", final.name)
        self._prune()
        return final

    def newest(self) -> tuple[Path, RunProgress] | None:
        """The newest complete checkpoint, or None for a run that has none.

        Raises:
            CheckpointDamaged: checkpoints exist, and none of them is whole.
        """
        damages = []
        for path in reversed(self._complete_or_not()):
            try:
                return path, read_progress(path)
            except CheckpointDamaged as damage:
                damages.append(str(damage))
        if damages:
            raise CheckpointDamaged("no checkpoint of this run can be loaded:\n" + "\n".join(damages))
        return None

    def _complete_or_not(self) -> list[Path]:
        if not self.folder.exists():
            return []
        return sorted((p for p in self.folder.iterdir() if _NAME.match(p.name)), key=lambda path: path.name)

    def _prune(self) -> None:
        for old in self._complete_or_not()[: -self.keep]:
            shutil.rmtree(old)


def read_progress(checkpoint: Path) -> RunProgress:
    """Checks every file against the manifest and returns the progress.

    Raises:
        CheckpointDamaged: naming the file that is missing or differs.
    """
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        raise CheckpointDamaged(f"{checkpoint}: no readable manifest.json; it was not written to its end") from None
    for name, expected in manifest.items():
        path = checkpoint / name
        if not path.exists():
            raise CheckpointDamaged(f"{checkpoint}: {name} is missing")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointDamaged(f"{path}: {path.stat().st_size} bytes, {expected['bytes']} were written")
        if "blake2b" in expected and _digest(path) != expected["blake2b"]:
            raise CheckpointDamaged(f"{path}: its content is not what was written")
    return RunProgress(**json.loads((checkpoint / "state.json").read_text(encoding="utf-8")))


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    manifest: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            size = path.stat().st_size
            entry: dict[str, Any] = {"bytes": size}
            if size <= _HASHED_UP_TO_BYTES:
                entry["blake2b"] = _digest(path)
            manifest[str(path.relative_to(folder))] = entry
    return manifest


def _digest(path: Path) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
