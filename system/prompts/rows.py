"""Rows of a data source, by index: what stands there, unchanged. Nothing here knows tokens, order or weights.

Each reader checks at opening what would fail later (no file, no rows, no such column, broken JSON) and names the
file, the line and the mend in a ``DataError``. Reading a row is pure: same index, same row.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from system.core.errors import DataError, nearest
from system.prompts.settings import HUGGINGFACE, REASONING_GYM, DataSourceSettings


@dataclass(frozen=True)
class SourceRow:
    """One question as its source wrote it."""

    prompt_id: str
    question: Any
    """Text, or a list of chat messages."""
    label: Any
    metadata: str
    """JSON object."""
    where: str
    """Names the row in errors: ``FILE:LINE`` or ``SOURCE row INDEX``."""


class Rows(Protocol):
    """A source of rows."""

    procedural: bool
    """Rows are made when asked for, which may be slow: nobody goes through all of them."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> SourceRow: ...


def open_rows(settings: DataSourceSettings, seed: int) -> Rows:
    """Opens a source (``settings.name`` filled in). ``seed`` makes the questions of a procedural source.

    Raises:
        DataError: the source is missing, empty, broken or of an unknown kind.
    """
    if settings.source == REASONING_GYM:
        from system.prompts.procedural import ReasoningGymRows

        return ReasoningGymRows(settings, seed)
    if settings.source == HUGGINGFACE:
        return HuggingFaceRows(settings)
    path = Path(settings.source)
    if path.suffix not in (".jsonl", ".parquet"):
        hint = "" if path.suffix else nearest(settings.source, [REASONING_GYM, HUGGINGFACE])
        raise DataError(
            f"data '{settings.name}': {settings.source} is not a known kind of source{hint}. "
            f"Known: {REASONING_GYM}, {HUGGINGFACE}, a .jsonl file, a .parquet file"
        )
    if not path.is_file():
        beside = [entry.name for entry in path.parent.glob(f"*{path.suffix}")] if path.parent.is_dir() else []
        raise DataError(f"data '{settings.name}': no file {path}{nearest(path.name, beside) if beside else ''}")
    return JsonLinesRows(settings, path) if path.suffix == ".jsonl" else ParquetRows(settings, path)


class _Columns:
    """Which columns of a table become which part of a row."""

    def __init__(self, settings: DataSourceSettings, present: Sequence[str], where: str) -> None:
        self.name = str(settings.name)
        self.prompt = settings.prompt_column
        self.label = settings.label_column or ("label" if "label" in present else None)
        self.id = settings.id_column
        self.object = "metadata" if settings.metadata_columns is None and "metadata" in present else None
        self.metadata = list(settings.metadata_columns or ())
        self.needed = [
            column for column in (self.prompt, self.label, self.id, self.object, *self.metadata) if column is not None
        ]
        self.check(present, where)

    def check(self, present: Sequence[str], where: str) -> None:
        for column in self.needed:
            if column not in present:
                hint = nearest(column, present)
                listed = "" if hint.startswith("; valid") else f" Columns: {', '.join(sorted(present)) or 'none'}."
                raise DataError(f"{where}: no column '{column}'{hint}.{listed}")

    def row(self, values: dict[str, Any], index: int, where: str) -> SourceRow:
        if self.object is not None:
            metadata = _as_object(values[self.object], where)
        else:
            metadata = _as_json({column: values[column] for column in self.metadata}, where)
        return SourceRow(
            prompt_id=f"{self.name}/{index}" if self.id is None else str(values[self.id]),
            question=values[self.prompt],
            label=None if self.label is None else values[self.label],
            metadata=metadata,
            where=where,
        )


class JsonLinesRows:
    """A file with one JSON object per line. Every line is checked at opening; only their places are kept."""

    procedural = False

    def __init__(self, settings: DataSourceSettings, path: Path) -> None:
        self._path = path
        self._offsets = array("q")
        self._lines = array("q")
        columns: _Columns | None = None
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"{path}:{number}"
                    present = list(_parsed_line(line, where))
                    if columns is None:
                        columns = _Columns(settings, present, where)
                    else:
                        columns.check(present, where)
                    self._offsets.append(offset)
                    self._lines.append(number)
                offset += len(line)
                if settings.limit is not None and len(self._offsets) >= settings.limit:
                    break
        if columns is None:
            raise DataError(f"data '{settings.name}': {path} is empty; it needs one JSON object per line")
        self._columns = columns

    def __len__(self) -> int:
        return len(self._offsets)

    def row(self, index: int) -> SourceRow:
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            line = file.readline()
        where = f"{self._path}:{self._lines[index]}"
        values = _parsed_line(line, where)
        self._columns.check(list(values), where)
        return self._columns.row(values, index, where)


class ParquetRows:
    """A Parquet file; only the columns in use are read."""

    procedural = False

    def __init__(self, settings: DataSourceSettings, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        self._path = path
        try:
            present = parquet.read_schema(path).names
            self._columns = _Columns(settings, present, str(path))
            table = parquet.read_table(path, columns=list(dict.fromkeys(self._columns.needed)), memory_map=True)
        except (pa.ArrowInvalid, OSError) as failure:
            raise DataError(f"data '{settings.name}': {path} is not a readable Parquet file: {failure}") from failure
        self._table = table if settings.limit is None else table.slice(0, settings.limit)
        if self._table.num_rows == 0:
            raise DataError(f"data '{settings.name}': {path} has no rows")

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> SourceRow:
        values = self._table.slice(index, 1).to_pylist()[0]
        return self._columns.row(values, index, f"{self._path} row {index}")


class HuggingFaceRows:
    """A split of a Hugging Face data set: an id on the hub, a folder of data files, or one that `datasets` saved."""

    procedural = False

    def __init__(self, settings: DataSourceSettings) -> None:
        import datasets

        self._what = f"data '{settings.name}': data set {settings.dataset}"
        folder = Path(str(settings.dataset))
        try:
            if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
                loaded = datasets.load_from_disk(str(folder))
                if isinstance(loaded, datasets.DatasetDict):
                    if settings.split not in loaded:
                        raise DataError(f"{self._what}: no split '{settings.split}'{nearest(settings.split, loaded)}")
                    loaded = loaded[settings.split]
            else:
                loaded = datasets.load_dataset(str(settings.dataset), settings.subset, split=settings.split)
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as failure:
            reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
            raise DataError(f"{self._what} cannot be loaded: {reason}") from failure
        if settings.limit is not None:
            loaded = loaded.select(range(min(settings.limit, len(loaded))))
        if len(loaded) == 0:
            raise DataError(f"{self._what} has no rows in split '{settings.split}'")
        self._columns = _Columns(settings, loaded.column_names, self._what)
        self._rows = loaded.select_columns(list(dict.fromkeys(self._columns.needed)))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> SourceRow:
        return self._columns.row(self._rows[index], index, f"{self._what} row {index}")


def _parsed_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as failure:  # also integers of thousands of digits, and endless nesting
        raise DataError(f"{where}: not valid JSON: {failure}") from None
    if not isinstance(values, dict):
        raise DataError(f"{where}: expected a JSON object with columns, got {type(values).__name__}")
    return values


def _as_object(value: Any, where: str) -> str:
    """A metadata column: an object, or the text of one, which is kept character by character."""
    if value is None:
        return "{}"
    if isinstance(value, str):
        try:
            if isinstance(json.loads(value), dict):
                return value
        except (ValueError, RecursionError):
            pass
        raise DataError(f"{where}: metadata is text, but not a JSON object: {value[:60]!r}")
    if not isinstance(value, dict):
        raise DataError(f"{where}: metadata must be a JSON object, got {type(value).__name__}")
    return _as_json(value, where)


def _as_json(values: dict[str, Any], where: str) -> str:
    if not values:
        return "{}"
    try:
        return json.dumps(values, ensure_ascii=False)
    except (TypeError, ValueError) as failure:
        raise DataError(f"{where}: metadata cannot be written as JSON: {failure}") from failure
