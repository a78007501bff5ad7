"""The prompt stream: prompt = order(seed, position). A pure function; the only state a run saves is its next position.

Three pure maps follow one another: position -> source (``quotas``), the source's n-th turn -> row (a permutation
per epoch; the end of an epoch is not the end of the stream), row -> tokens (``tokens``). Two equal prompts are two
positions. Prompts longer than their source's limit are skipped without harm to purity: tables of up to
``INDEXED_ROWS`` rows are measured once at opening and over-long rows leave the epoch; in larger or procedural
sources rows are measured only when their turn comes, and an over-long row gives its turn to the next that fits in
the epoch's order. Which of the two holds depends on the source alone, so the same position gives the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from system.core.errors import ConfigError, DataError
from system.core.protocols import Prompt
from system.prompts.permutation import permuted_index
from system.prompts.quotas import SourceQuotas
from system.prompts.rows import SourceRow, open_rows
from system.prompts.settings import DataSourceSettings, named_sources
from system.prompts.tokens import PromptEncoder, load_tokenizer

INDEXED_ROWS = 20_000
"""Tables up to this size are measured at opening: a few seconds."""


@dataclass(frozen=True)
class SourceSummary:
    """What is known of a source: for the plan, and for people."""

    name: str
    rows: int
    share: float
    """Of all prompts, 0..1."""
    longest_allowed_tokens: int | None
    applies_template: bool
    measured: int
    """Rows whose length has been looked at so far."""
    skipped: int
    """Of those, the ones that are too long."""
    longest_skipped: str | None
    """The longest of them: its id and length."""

    def __str__(self) -> str:
        form = "chat template" if self.applies_template else "plain text"
        text = f"{self.rows:,} prompts, {self.share:.1%} of the stream, {form}"
        if self.longest_allowed_tokens is not None:
            text += f", at most {self.longest_allowed_tokens} tokens"
        if self.skipped:
            text += f"; {self.skipped:,} of {self.measured:,} measured are longer and skipped ({self.longest_skipped})"
        return text


class PromptStream:
    """Gives the prompt of every position, for ever."""

    def __init__(
        self,
        sources: Sequence[DataSourceSettings],
        tokenizer: Any,
        seed: int,
        *,
        longest_prompt_tokens: int | None = None,
    ) -> None:
        """Opens every source.

        Args:
            tokenizer: of the model that is trained.
            longest_prompt_tokens: what the model's context leaves for a prompt; a source may ask for less.

        Raises:
            DataError: a source is missing, empty or broken, or all its prompts are too long.
            ConfigError: the sources contradict each other or the model.
        """
        if longest_prompt_tokens is not None and longest_prompt_tokens < 1:
            raise ConfigError("rollout.max_tokens: the model's context leaves no room for a prompt beside a completion")
        self._quotas = SourceQuotas([source.weight for source in sources] or [1.0])
        self._sources = [
            _SourceOrder(source, tokenizer, seed, longest_prompt_tokens) for source in named_sources(sources)
        ]

    def prompt(self, position: int) -> Prompt:
        """The prompt of a position (0, 1, 2, ...)."""
        source, turn = self._quotas.place(position)
        return self._sources[source].prompt(turn)

    __call__ = prompt

    @property
    def source_names(self) -> list[str]:
        return [source.name for source in self._sources]

    def summary(self) -> list[SourceSummary]:
        """One entry per source, in the recipe's order."""
        return [source.summary(float(share)) for source, share in zip(self._sources, self._quotas.shares, strict=True)]


@dataclass(frozen=True)
class PromptStreamFactory:
    """Makes the stream inside the process that uses it; crosses process borders itself."""

    sources: tuple[DataSourceSettings, ...]
    model_path: str
    seed: int
    longest_prompt_tokens: int | None = None

    def __call__(self) -> PromptStream:
        return PromptStream(
            self.sources,
            load_tokenizer(self.model_path),
            self.seed,
            longest_prompt_tokens=self.longest_prompt_tokens,
        )


class _SourceOrder:
    """The n-th prompt of one source."""

    def __init__(self, settings: DataSourceSettings, tokenizer: Any, seed: int, longest: int | None) -> None:
        self.name = str(settings.name)
        self._encoder = PromptEncoder(settings, tokenizer)
        self._rows = open_rows(settings, seed)
        limits = [limit for limit in (settings.max_prompt_tokens, longest) if limit is not None]
        self._limit = min(limits) if limits else None
        self._key = f"{seed}/{self.name}"
        self._lengths: dict[int, int] = {}
        """Of rows that are too long."""
        self._fitting: set[int] = set()
        self._kept: list[int] | None = None
        self._read = lru_cache(maxsize=1024)(self._read_row)
        if self._rows.procedural or len(self._rows) > INDEXED_ROWS:
            self._index(0)
        else:
            self._kept = [index for index in range(len(self._rows)) if self._fits(index)]
            if not self._kept:
                raise self._nothing_fits()

    def prompt(self, turn: int) -> Prompt:
        row, tokens = self._read(self._index(turn))
        return Prompt(
            prompt_id=row.prompt_id,
            source=self.name,
            tokens=tokens,
            text=self._encoder.question(row.question, row.where),
            label=row.label,
            metadata=row.metadata,
        )

    def summary(self, share: float) -> SourceSummary:
        worst = max(self._lengths, key=lambda index: self._lengths[index], default=None)
        return SourceSummary(
            name=self.name,
            rows=len(self._rows),
            share=share,
            longest_allowed_tokens=self._limit,
            applies_template=self._encoder.applies_template,
            measured=len(self._lengths) + len(self._fitting),
            skipped=len(self._lengths),
            longest_skipped=None
            if worst is None
            else f"longest: {self._rows.row(worst).prompt_id}, {self._lengths[worst]} tokens",
        )

    def _index(self, turn: int) -> int:
        size = len(self._rows) if self._kept is None else len(self._kept)
        epoch, place = divmod(turn, size)
        for step in range(size):
            index = permuted_index(f"{self._key}/{epoch}", (place + step) % size, size)
            if self._kept is not None:
                return self._kept[index]
            if self._fits(index):
                return index
        raise self._nothing_fits()

    def _fits(self, index: int) -> bool:
        if index in self._fitting:
            return True
        if index in self._lengths:
            return False
        _, tokens = self._read(index)
        if self._limit is None or len(tokens) <= self._limit:
            self._fitting.add(index)
            return True
        self._lengths[index] = len(tokens)
        return False

    def _read_row(self, index: int) -> tuple[SourceRow, tuple[int, ...]]:
        row = self._rows.row(index)
        tokens = self._encoder.tokens(self._encoder.render(self._encoder.question(row.question, row.where)), row.where)
        if not tokens:
            raise DataError(f"{row.where}: an empty prompt")
        return row, tokens

    def _nothing_fits(self) -> DataError:
        shortest = min(self._lengths.values())
        return DataError(
            f"data '{self.name}': none of {len(self._rows):,} prompts fits in {self._limit} tokens; the shortest has "
            f"{shortest}. Raise max_prompt_tokens, or lower rollout.max_tokens if the model's context is the limit"
        )
