"""Questions of reasoning-gym's procedural tasks. Question i of a task is a pure function of (options, seed, i).

The whole entry (question, answer, the task's own metadata) becomes the row's metadata, so that the task's scorer can
judge the answer; the label is the entry's answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from datetime import date, datetime
from typing import Any

from system.core.errors import DataError, nearest
from system.prompts.rows import SourceRow
from system.prompts.settings import DataSourceSettings

DEFAULT_SIZE = 10_000
"""Questions in a pass, where the options do not say; they are made only when asked for."""


class ReasoningGymRows:
    """One task of reasoning-gym as a source of rows."""

    procedural = True

    def __init__(self, settings: DataSourceSettings, seed: int) -> None:
        """
        Raises:
            DataError: reasoning-gym is not installed, has no such task, or refuses the options.
        """
        where = f"data '{settings.name}'"
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as failure:
            raise DataError(f"{where}: {failure}; install it: pip install 'triptych[demo]'") from failure
        task = str(settings.task)
        if task not in DATASETS:
            raise DataError(f"{where}: reasoning-gym has no task '{task}'{_nearest_task(task, DATASETS)}")
        valid = [field.name for field in dataclasses.fields(DATASETS[task][1])]
        for option in settings.options:
            if option not in valid:
                raise DataError(f"{where}: task {task} has no option '{option}'{nearest(option, valid)}")
        derived = hashlib.blake2b(f"{seed}/{settings.name}".encode(), digest_size=4).digest()
        options = {"size": DEFAULT_SIZE, "seed": int.from_bytes(derived, "big"), **settings.options}
        try:
            self._dataset = reasoning_gym.create_dataset(task, **options)
        except (AssertionError, TypeError, ValueError) as failure:
            raise DataError(f"{where}: task {task} refuses its options: {failure}") from failure
        self._size = min(len(self._dataset), settings.limit or len(self._dataset))
        self._task = task
        self._seed = options["seed"]
        self._where = where

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> SourceRow:
        entry = self._dataset[index]
        return SourceRow(
            prompt_id=f"{self._task}/{self._seed}/{index}",
            question=entry["question"],
            label=entry["answer"],
            metadata=json.dumps(entry, ensure_ascii=False, default=_plain),
            where=f"{self._where} question {index}",
        )


def _nearest_task(task: str, tasks: Any) -> str:
    hint = nearest(task, tasks)
    return hint if hint.startswith("; did") else f"; it has {len(tasks)}, for example chain_sum, gcd, countdown"


def _plain(value: Any) -> Any:
    """JSON for what tasks put into their metadata beside plain values."""
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, date | datetime):
        return value.isoformat()
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
