"""The run's rollouts on disk: one Parquet file per step, in the schema of ``system.core.records``.

A step that was trained again after a return to a checkpoint gets a file of its own; the earlier one stays:

    rollouts/step_000012.parquet       incarnation 0
    rollouts/step_000012-i2.parquet    incarnation 2

A file appears whole or not at all. Readers take each step's highest incarnation. The folder is a path or an fsspec URL.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from system.core.errors import DataError
from system.core.records import SCHEMA, Row, rows_from_table
from system.stream import TakenStep

_NAME = re.compile(r"^step_(\d{6,})(?:-i(\d+))?\.parquet$")

Advantages = Mapping[tuple[int, int], float | None]
"""(group_id, trajectory_id) -> advantage as trained; None, or absent: the trajectory had none."""


def file_name(step: int, incarnation: int) -> str:
    return f"step_{step:06d}{f'-i{incarnation}' if incarnation else ''}.parquet"


def step_table(groups: Iterable[bytes], advantages: Advantages, step: int) -> pa.Table:
    """The rows of ``groups`` (each ``Group.to_bytes()``) in order, with the step and the advantages filled in."""
    batches = []
    for payload in groups:
        with pa.ipc.open_stream(payload) as reader:
            batches += list(reader)
    table = pa.Table.from_batches(batches, schema=SCHEMA)
    keys = zip(table["group_id"].to_pylist(), table["trajectory_id"].to_pylist(), strict=True)
    columns: dict[str, list[Any]] = {
        "step": [step] * table.num_rows,
        "advantage": [advantages.get(key) for key in keys],
    }
    for name, values in columns.items():
        index = SCHEMA.get_field_index(name)
        table = table.set_column(index, SCHEMA.field(index), pa.array(values, type=SCHEMA.field(index).type))
    return table


def write_step(
    folder: str | Path, taken: TakenStep, advantages: Advantages, step: int, incarnation: int
) -> tuple[Row, ...]:
    """Writes the groups that ``step`` trained, and returns their rows as written.

    Raises:
        OSError: the disk refused; nothing that looks like a step's file is left behind.
    """
    table = step_table(taken.groups, advantages, step)
    files, root = url_to_fs(str(folder))
    files.makedirs(root, exist_ok=True)
    name = file_name(step, incarnation)
    target, temporary = posixpath.join(root, name), posixpath.join(root, f".{name}.tmp")
    try:
        with files.open(temporary, "wb") as handle:
            pq.write_table(table, handle, compression="zstd")
        files.mv(temporary, target)
    except BaseException:
        if files.exists(temporary):
            files.rm(temporary)
        raise
    return rows_from_table(table)


def rollout_files(folder: str | Path) -> dict[int, str]:
    """Step -> name of its file of the highest incarnation, ascending; empty when nothing was written yet."""
    files, root = url_to_fs(str(folder))
    newest: dict[int, tuple[int, str]] = {}
    if files.exists(root):
        for path in files.ls(root, detail=False):
            match = _NAME.match(posixpath.basename(path))
            if match:
                step, incarnation = int(match[1]), int(match[2] or 0)
                newest[step] = max(newest.get(step, (-1, "")), (incarnation, match[0]))
    return {step: newest[step][1] for step in sorted(newest)}


def read_rollout_table(folder: str | Path, steps: Iterable[int] | None = None) -> pa.Table:
    """The rows of ``steps`` (default: all that are there), in the order they were trained, as an Arrow table.

    Raises:
        DataError: a step has no file, or its file cannot be read.
    """
    present = rollout_files(folder)
    wanted = list(present) if steps is None else sorted(set(steps))
    missing = [step for step in wanted if step not in present]
    if missing:
        there = f"steps {min(present)} to {max(present)} are there" if present else "nothing is there"
        raise DataError(f"{folder}: no rollouts of step {', '.join(map(str, missing))}; {there}")
    files, root = url_to_fs(str(folder))
    tables = []
    for step in wanted:
        try:
            with files.open(posixpath.join(root, present[step]), "rb") as handle:
                tables.append(pq.read_table(handle).cast(SCHEMA))
        except pa.ArrowInvalid as failure:
            raise DataError(f"{folder}/{present[step]} is not a whole Parquet file: {failure}") from failure
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table()


def read_rollouts(folder: str | Path, steps: Iterable[int] | None = None) -> tuple[Row, ...]:
    """``read_rollout_table`` as rows."""
    return rows_from_table(read_rollout_table(folder, steps))
