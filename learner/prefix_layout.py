"""How rows that share a prompt stand in one packed row, and the blocks in which their attention is computed. Pure.

A packed row is a list of runs without padding: each distinct prompt once, and behind it the completions that continue
it. A run sees its prefix (a prompt sees none) and itself, causally; nothing else. Positions continue from the prefix.
Invariants: every token of the packed row is in exactly one run; over the tiles of a layout every token asks exactly
once, and sees what the window leaves of its prefix and of its own run.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

QUERY_BLOCK_TOKENS = 256
"""Longer runs ask in blocks of this size, so that keys behind a block are not computed."""
TILE_SCORES = 1 << 17
"""Most scores (queries x keys) per head that one tile holds, unless a single run has more."""
PADDED_SHARE = 0.2
"""Runs of different length share a tile while at most this share of its queries is padding."""
KEY_MULTIPLE = 32
"""Keys of a tile are padded to it: matrix products and softmax are several times slower on odd sizes."""


@dataclass(frozen=True)
class Run:
    """``length`` consecutive tokens at ``start`` that continue the ``prefix_length`` tokens at ``prefix_start``."""

    prefix_start: int
    prefix_length: int
    start: int
    length: int


@dataclass(frozen=True)
class SharedRow:
    """What a packed row needs to know of a row: which prompt, how long, and the tokens computed behind it."""

    prefix: Hashable
    prefix_tokens: int
    own_tokens: int


@dataclass(frozen=True)
class PrefixLayout:
    """A packed row."""

    runs: tuple[Run, ...]
    """Without those of length 0."""
    tokens: int
    places: tuple[tuple[int, int], ...]
    """Per row in the order given: where its prompt starts and where its own tokens start."""

    def positions(self) -> np.ndarray:
        """[tokens] int64, each token's position in its sequence."""
        positions = np.empty(self.tokens, np.int64)
        for run in self.runs:
            positions[run.start : run.start + run.length] = np.arange(run.length) + run.prefix_length
        return positions

    def predictors(self, row: int, prefix_tokens: int, columns: np.ndarray) -> np.ndarray:
        """Where in the packed row the tokens ``columns`` of a completion are predicted; the first by its prompt."""
        prompt, own = self.places[row]
        return np.where(columns == 0, prompt + prefix_tokens - 1, own + columns - 1)

    def visible(self, window: int | None = None) -> np.ndarray:
        """[tokens, tokens] bool: which keys (columns) a query (row) sees. For models that take a plain mask."""
        seen = np.zeros((self.tokens, self.tokens), bool)
        for run in self.runs:
            queries = slice(run.start, run.start + run.length)
            seen[queries, queries] = np.tri(run.length, dtype=bool)
            seen[queries, run.prefix_start : run.prefix_start + run.prefix_length] = True
        if window is not None:
            positions = self.positions()
            seen &= positions[:, None] - positions[None, :] < window
        return seen


@dataclass(frozen=True)
class Tile:
    """Runs with prefixes of equal length whose own tokens ``first`` to ``last`` (exclusive) ask together."""

    runs: tuple[Run, ...]
    first: int
    last: int
    window: int | None

    @property
    def prefix_from(self) -> int:
        """The first prefix token that a query sees; its position too."""
        return self._oldest(self.runs[0].prefix_length)

    @property
    def own_from(self) -> int:
        """The first of a run's own tokens that a query sees."""
        return max(0, self._oldest(0))

    @property
    def prefix_keys(self) -> int:
        return max(0, self.runs[0].prefix_length - self.prefix_from)

    @property
    def keys(self) -> int:
        """Keys of each run, padding included."""
        exact = self.prefix_keys + self.last - self.own_from
        return -(-exact // KEY_MULTIPLE) * KEY_MULTIPLE

    def _oldest(self, prefix_length: int) -> int:
        return 0 if self.window is None else max(0, prefix_length + self.first - self.window + 1)

    def seen(self) -> np.ndarray:
        """[last - first, keys] bool; the same for all runs. Keys: prefix, own tokens, padding."""
        prefix_length = self.runs[0].prefix_length
        asking = prefix_length + np.arange(self.first, self.last)
        own = np.arange(self.own_from, self.own_from + self.keys - self.prefix_keys)
        keys = np.concatenate([np.arange(self.prefix_from, self.prefix_from + self.prefix_keys), prefix_length + own])
        seen = keys[None, :] <= asking[:, None]
        if self.window is not None:
            seen &= asking[:, None] - keys[None, :] < self.window
        return seen

    def query_places(self) -> np.ndarray:
        """[runs, last - first] int64 places in the packed row; -1 behind the end of a run."""
        return self._own_places(self.first, self.last - self.first)

    def own_key_places(self) -> np.ndarray:
        """[runs, keys - prefix_keys] int64 places in the packed row; -1 for padding."""
        places = self._own_places(self.own_from, self.keys - self.prefix_keys)
        places[:, self.last - self.own_from :] = -1
        return places

    def prefix_places(self) -> np.ndarray:
        """[runs, prefix_keys] int64 places in the packed row."""
        starts = np.array([run.prefix_start for run in self.runs])
        return starts[:, None] + self.prefix_from + np.arange(self.prefix_keys)[None, :]

    def _own_places(self, first: int, count: int) -> np.ndarray:
        own = first + np.arange(count)[None, :]
        starts, lengths = np.array([(run.start, run.length) for run in self.runs]).T[:, :, None]
        return np.where(own < lengths, starts + own, -1)


def lay_out(rows: Sequence[SharedRow]) -> PrefixLayout:
    """The packed row of ``rows``: prompts in order of first appearance, each followed by its rows in order."""
    followers: dict[Hashable, list[int]] = {}
    for index, row in enumerate(rows):
        followers.setdefault(row.prefix, []).append(index)
    runs: list[Run] = []
    places = [(0, 0)] * len(rows)
    end = 0
    for members in followers.values():
        prompt, length = end, rows[members[0]].prefix_tokens
        runs.append(Run(prompt, 0, prompt, length))
        end += length
        for index in members:
            places[index] = (prompt, end)
            own = rows[index].own_tokens
            if own:
                runs.append(Run(prompt, length, end, own))
            end += own
    return PrefixLayout(tuple(runs), end, tuple(places))


def tiles_of(layout: PrefixLayout, window: int | None = None) -> list[Tile]:
    """The blocks in which a layer with this window (in tokens, the asking one included; None: all) is computed."""
    tiles: list[Tile] = []
    for batch in _similar(layout.runs):
        longest = max(run.length for run in batch)
        for first in range(0, longest, QUERY_BLOCK_TOKENS):
            asking = [run for run in batch if run.length > first]
            last = min(first + QUERY_BLOCK_TOKENS, longest)
            tile = Tile(tuple(asking), first, last, window)
            at_once = max(1, TILE_SCORES // ((last - first) * tile.keys))
            tiles.extend(
                Tile(tuple(asking[start : start + at_once]), first, last, window)
                for start in range(0, len(asking), at_once)
            )
    return tiles


def _similar(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs with prefixes of equal length and of nearly equal length, those of one prefix side by side."""
    batches: list[list[Run]] = []
    exact = 0
    for run in sorted(runs, key=lambda run: (run.prefix_length, run.length, run.start)):
        batch = batches[-1] if batches else []
        fits = bool(batch) and batch[0].prefix_length == run.prefix_length
        if fits and exact + run.length >= (1.0 - PADDED_SHARE) * run.length * (len(batch) + 1):
            batch.append(run)
            exact += run.length
        else:
            batches.append([run])
            exact = run.length
    return [sorted(batch, key=lambda run: run.start) for batch in batches]
