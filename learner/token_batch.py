"""Rows of tokens laid out for one forward pass, and where in it the log-probs of wanted tokens come from.

Two layouts: ``padded`` is one row per completion, prompt included, padded on the right (a causal model does not see
what stands behind a token, so no mask is needed); ``shared_prefix`` is one packed row in which each distinct prompt
stands once, followed by its completions (``learner.prefix_layout``). A completion's last token is never computed: it
predicts nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from learner.attention import PackedRow
from learner.packing import Layout, PackItem
from learner.prefix_layout import SharedRow, lay_out


@dataclass(frozen=True, eq=False)
class ScoredRow:
    """A prompt, its completion, and for which completion tokens log-probs are wanted (None: all)."""

    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    wanted: np.ndarray | None = None

    @property
    def own_tokens(self) -> int:
        """Positions behind the prompt that the model computes."""
        return max(0, len(self.completion_tokens) - 1)

    @property
    def tokens(self) -> int:
        """Positions that the model computes where nothing is shared."""
        return len(self.prompt_tokens) + self.own_tokens

    @cached_property
    def prefix(self) -> bytes:
        """Equal for rows with the same prompt."""
        return self.prompt_tokens.astype(np.int64).tobytes()

    @property
    def columns(self) -> np.ndarray:
        """Indices of the wanted completion tokens."""
        return np.arange(len(self.completion_tokens)) if self.wanted is None else np.flatnonzero(self.wanted)

    def pack_item(self, group: Hashable, trajectory: Hashable) -> PackItem:
        """The row as packing sees it."""
        return PackItem(self.tokens, group, trajectory, self.prefix, len(self.prompt_tokens))


@dataclass(frozen=True)
class TokenCounts:
    """What forward and backward passes computed, and what the rows in them needed."""

    computed: int = 0
    """Padding included."""
    row: int = 0
    """Of the rows, each computed by itself and without padding."""
    prompt: int = 0
    """Those of ``row`` that are prompts."""
    shared: int = 0
    """Those of ``prompt`` that were not computed, because another row of the same pass has them."""

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            self.computed + other.computed, self.row + other.row, self.prompt + other.prompt, self.shared + other.shared
        )

    @property
    def padding_share(self) -> float:
        """Share of the computed tokens that is padding."""
        return 1.0 - (self.row - self.shared) / self.computed if self.computed else 0.0

    @property
    def shared_prompt_share(self) -> float:
        """Share of the prompt tokens that were not computed."""
        return self.shared / self.prompt if self.prompt else 0.0


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Tokens of ``lines`` scored rows, and where the N wanted ones among them are predicted."""

    tokens: Tensor
    """[rows, L] int64: right-padded rows, or one packed row."""
    source: Tensor
    """[N] int64, the place in the flattened ``tokens`` whose hidden state predicts the wanted token."""
    target: Tensor
    """[N] int64, the token."""
    line: Tensor
    """[N] int64, its row among those that were laid out."""
    column: Tensor
    """[N] int64, its index in the completion."""
    lines: int
    completion_length: int
    """T, the longest completion."""
    counts: TokenCounts
    packed: PackedRow | None = None
    """Layout of a packed row."""
    position_ids: Tensor | None = None
    """[1, L] int64, of a packed row."""

    def padded(self, values: Tensor) -> Tensor:
        """[N] values laid out as [lines, T], zero where nothing is wanted."""
        return values.new_zeros(self.lines, self.completion_length).index_put((self.line, self.column), values)

    def selected(self, values: Tensor) -> Tensor:
        """[lines, T] values at the wanted tokens, [N]."""
        return values[self.line, self.column]


def token_batch(rows: Sequence[ScoredRow], device: torch.device | str = "cpu", layout: Layout = "padded") -> TokenBatch:
    """Lays rows out for one forward pass.

    Raises:
        ValueError: a row without prompt tokens (nothing predicts its first completion token).
    """
    if any(len(row.prompt_tokens) == 0 for row in rows):
        raise ValueError("a row without prompt tokens: nothing predicts its first completion token")
    return _packed_batch(rows, device) if layout == "shared_prefix" else _padded_batch(rows, device)


def _padded_batch(rows: Sequence[ScoredRow], device: torch.device | str) -> TokenBatch:
    tokens = np.zeros((len(rows), max(row.tokens for row in rows)), np.int64)
    sources = []
    for index, row in enumerate(rows):
        tokens[index, : row.tokens] = np.concatenate([row.prompt_tokens, row.completion_tokens])[: row.tokens]
        sources.append(index * tokens.shape[1] + len(row.prompt_tokens) - 1 + row.columns)
    return _batch(rows, tokens, sources, device)


def _packed_batch(rows: Sequence[ScoredRow], device: torch.device | str) -> TokenBatch:
    layout = lay_out([SharedRow(row.prefix, len(row.prompt_tokens), row.own_tokens) for row in rows])
    tokens = np.empty((1, layout.tokens), np.int64)
    sources = []
    for index, (row, (prompt, own)) in enumerate(zip(rows, layout.places, strict=True)):
        tokens[0, prompt : prompt + len(row.prompt_tokens)] = row.prompt_tokens
        tokens[0, own : own + row.own_tokens] = row.completion_tokens[: row.own_tokens]
        sources.append(layout.predictors(index, len(row.prompt_tokens), row.columns))
    positions = torch.from_numpy(layout.positions())[None].to(device)
    return _batch(rows, tokens, sources, device, PackedRow(layout, device), positions)


def _batch(
    rows: Sequence[ScoredRow],
    tokens: np.ndarray,
    sources: Sequence[np.ndarray],
    device: torch.device | str,
    packed: PackedRow | None = None,
    position_ids: Tensor | None = None,
) -> TokenBatch:
    columns = [row.columns for row in rows]
    targets = [row.completion_tokens[chosen] for row, chosen in zip(rows, columns, strict=True)]
    lines = [np.full(len(chosen), index) for index, chosen in enumerate(columns)]
    wanted = np.stack([np.concatenate(parts) for parts in (sources, targets, lines, columns)]).astype(np.int64)
    source, target, line, column = torch.from_numpy(wanted).to(device)
    exact = sum(row.tokens for row in rows)
    prompts = sum(len(row.prompt_tokens) for row in rows)
    return TokenBatch(
        tokens=torch.from_numpy(tokens).to(device),
        source=source,
        target=target,
        line=line,
        column=column,
        lines=len(rows),
        completion_length=max(len(row.completion_tokens) for row in rows),
        counts=TokenCounts(tokens.size, exact, prompts, exact - tokens.size if packed is not None else 0),
        packed=packed,
        position_ids=position_ids,
    )
