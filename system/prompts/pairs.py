"""Offline preference pairs: two completions of a prompt, one chosen and one rejected, as the learner's groups of two.

The pair of a position is a pure function of (seed, position), like a prompt; a pass over the file is a permutation.
Pairs longer than the model's context are skipped, and the next that fits is taken. Ids are below 0 (-1 - position), so
that no pair is ever taken for a group that the run sampled; nobody's log-probs were recorded, so those are NaN.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from system.core.errors import DataError
from system.core.records import Group, Row
from system.prompts.permutation import permuted_index
from system.prompts.rows import open_rows
from system.prompts.settings import DataSourceSettings, named_sources
from system.prompts.tokens import PromptEncoder, load_tokenizer

COLUMNS = ("chosen", "rejected")


class OfflinePairs:
    """A file of preferences, by position."""

    def __init__(self, file: str, tokenizer: Any, seed: int, longest_tokens: int | None = None) -> None:
        """Opens the file.

        Args:
            file: .jsonl or .parquet with the columns prompt (text or chat messages), chosen and rejected (text).
            longest_tokens: of prompt and completion together; None: no limit is known.
        Raises:
            DataError: no such file, a column is missing, or its first pair cannot be read.
            ConfigError: the prompts are chats and the model has no chat template.
        """
        (settings,) = named_sources([DataSourceSettings(source=file, metadata_columns=list(COLUMNS))])
        self.file = file
        self._tokenizer = tokenizer
        self._encoder = PromptEncoder(settings, tokenizer)
        self._rows = open_rows(settings, seed)
        self._key = f"{seed}/pairs/{file}"
        self._longest = longest_tokens
        self.skipped: set[int] = set()
        """Rows found too long so far."""
        self.group(0)

    def __len__(self) -> int:
        return len(self._rows)

    def group(self, position: int) -> Group:
        """The pair of a position (0, 1, 2, ...), the chosen completion with reward 1, the rejected one with 0.

        Raises:
            DataError: a row is no pair, or no row fits the model's context.
        """
        epoch, place = divmod(position, len(self))
        for step in range(len(self)):
            index = permuted_index(f"{self._key}/{epoch}", (place + step) % len(self), len(self))
            group = self._read(index, -1 - position)
            if group is not None:
                return group
        raise DataError(
            f"{self.file}: none of {len(self):,} pairs fits the model's context of {self._longest} tokens; "
            "shorten them, or take them out of objective.offline_file"
        )

    def _read(self, index: int, group_id: int) -> Group | None:
        if index in self.skipped:
            return None
        row = self._rows.row(index)
        texts = json.loads(row.metadata)
        prompt = self._encoder.tokens(self._encoder.render(self._encoder.question(row.question, row.where)), row.where)
        completions = [self._completion(texts[column], f"{row.where}: {column}") for column in COLUMNS]
        if self._longest is not None and len(prompt) + max(map(len, completions)) > self._longest:
            self.skipped.add(index)
            return None
        return Group(
            tuple(
                Row(
                    group_id=group_id,
                    trajectory_id=trajectory,
                    prompt_id=row.prompt_id,
                    source=self.file,
                    prompt_tokens=np.asarray(prompt),
                    completion_tokens=np.asarray(tokens),
                    rollout_logprobs=np.full(len(tokens), np.nan),
                    versions=np.zeros(len(tokens)),
                    finish_reason="stop",
                    seed=0,
                    worker="offline",
                    completion_text=texts[column],
                    reward=float(column == "chosen"),
                )
                for trajectory, (column, tokens) in enumerate(zip(COLUMNS, completions, strict=True))
            )
        )

    def _completion(self, text: Any, where: str) -> list[int]:
        """Token ids with the token that ends an answer, as the engine samples it."""
        if not isinstance(text, str):
            raise DataError(f"{where}: a completion must be text, got {type(text).__name__}")
        ends = self._tokenizer.eos_token_id
        tokens = list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        tokens += [] if ends is None else [ends]
        if not tokens:
            raise DataError(f"{where}: the completion is empty, and the model's tokenizer has no token that ends it")
        return tokens


@dataclass(frozen=True)
class OfflinePairsFactory:
    """Opens the file in the process that uses it."""

    file: str
    model_path: str
    seed: int
    pairs_per_step: int
    longest_tokens: int | None = None

    def __call__(self) -> OfflinePairs:
        return OfflinePairs(self.file, load_tokenizer(self.model_path), self.seed, self.longest_tokens)
