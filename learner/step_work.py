"""What an update over given prompts will compute in either layout, before anything is sampled. Pure arithmetic.

Prompts are real ones, completions are taken to have the same length; the packing is that of the learner itself, ranks
are weighed by tokens alone. Of a large update a part is packed and the rest is taken to be like it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from learner.packing import Layout, PackItem, computed_tokens, pack_rows, spread_over_ranks

MOST_ROWS = 512
"""Completions that are packed, so that a plan comes at once."""


@dataclass(frozen=True)
class UpdateWork:
    """Forward and backward passes of one optimiser update."""

    tokens: float
    """Positions computed on all ranks, padding included."""
    microbatches: float
    """Of the rank that has most."""
    microbatch_tokens: float
    """Mean over all of them."""


def update_work(
    prompt_tokens: Sequence[int],
    group_size: int,
    completion_tokens: int,
    ranks: int,
    budget_tokens: int,
    layout: Layout,
) -> UpdateWork:
    """The work of an update over one group for each of ``prompt_tokens``.

    Args:
        completion_tokens: length of every completion; the last token of each is not computed.
        budget_tokens: ``learner.tokens_per_microbatch``.
        layout: as the learner lays rows out.
    Raises:
        ValueError: no prompts.
    """
    if not prompt_tokens:
        raise ValueError("no prompts to estimate an update from")
    packed = prompt_tokens[: max(1, MOST_ROWS // group_size)]
    scale = len(prompt_tokens) / len(packed)
    own = max(0, completion_tokens - 1)
    items = [
        PackItem(length + own, group, trajectory, group, length)
        for group, length in enumerate(packed)
        for trajectory in range(group_size)
    ]
    counts: list[int] = []
    sizes: list[int] = []
    for rows in spread_over_ranks(items, ranks, layout=layout):
        mine = [items[row] for row in rows]
        batches = pack_rows(mine, budget_tokens, layout=layout)
        counts.append(len(batches))
        sizes.extend(computed_tokens(mine, batch, layout) for batch in batches)
    return UpdateWork(sum(sizes) * scale, max(counts) * scale, fmean(sizes))


def mean_work(works: Sequence[UpdateWork]) -> UpdateWork:
    """The mean over several updates."""
    return UpdateWork(
        fmean(work.tokens for work in works),
        fmean(work.microbatches for work in works),
        fmean(work.microbatch_tokens for work in works),
    )


def prompt_share(prompt_tokens: Sequence[int], completion_tokens: int) -> float:
    """Share of the rows' tokens that is prompt, 0..1, each row by itself."""
    prompts = fmean(prompt_tokens)
    return prompts / (prompts + max(0, completion_tokens - 1))
