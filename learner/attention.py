"""The learner's attention function: packed rows in exact blocks, everything else as fast as the machine can.

A packed row's layout travels in place of the attention mask: transformers asks our mask function once per kind of
layer, which knows the layer's window, and hands its answer to ``attend``. Short bfloat16 rows on CPUs, and models
that bend their scores (``softcap``), take the same blocks without a shared prefix: torch's fused CPU kernel is several
times slower in the backward pass of short rows, and transformers' ``sdpa`` leaves the soft cap out. Long packed rows on
GPUs go to flex attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from learner.prefix_attention import PrefixMask, tiled_attention
from learner.prefix_layout import PrefixLayout, SharedRow, lay_out
from system.core.errors import ConfigError

ATTENTION = "triptych_sdpa"
"""Name under which transformers finds ``attend``; ``register`` first."""

SHORT_ROW_TOKENS = 512
"""Up to here the blocks were measured to be faster than the fused kernel (forward and backward, bfloat16, CPU)."""

FLEX_ROW_TOKENS = 1024
"""Packed rows from here on go to flex attention on a GPU; shorter ones are not worth its compilation."""


class LayoutUnsupported(ConfigError):
    """The model's layers see something else than their prefix, or a window of it."""


class PackedRow:
    """A packed row on its device, with the masks of its layers."""

    def __init__(self, layout: PrefixLayout, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.device = torch.device(device)
        self._reach = max(run.prefix_length + run.length for run in layout.runs)
        self._masks: dict[int | None, PrefixMask] = {}

    def mask(self, window: int | None) -> PrefixMask:
        """Of layers that see ``window`` tokens, the asking one included; None: all."""
        window = None if window is None or window >= self._reach else window
        if window not in self._masks:
            self._masks[window] = PrefixMask(self.layout, window, self.device)
        return self._masks[window]

    @property
    def layers_asked(self) -> int:
        """How many layers have computed their attention by this row so far."""
        return sum(mask.layers_asked for mask in self._masks.values())


_packed_row: ContextVar[PackedRow | None] = ContextVar("packed_row", default=None)


@contextmanager
def packed(row: PackedRow) -> Iterator[None]:
    """Inside, models loaded with ``ATTENTION`` take their tokens for this packed row."""
    token = _packed_row.set(row)
    try:
        yield
    finally:
        _packed_row.reset(token)


def register() -> str:
    """Makes ``attend`` known to transformers; idempotent. Returns its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, mask_of)
    return ATTENTION


def mask_of(**arguments: Any) -> Any:
    """transformers' mask interface: a ``PrefixMask`` for a packed row, else what its ``sdpa`` gets.

    Raises:
        LayoutUnsupported: a packed row, and layers that are neither causal nor causal within a window.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    row = _packed_row.get(None)
    if row is None:
        return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**arguments)
    window = arguments.get("local_size")
    if arguments.get("use_vmap") or (window is not None and window != arguments["config"].sliding_window):
        raise LayoutUnsupported("its layers see neither all that came before nor a sliding window of it")
    return row.mask(window)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | PrefixMask | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [rows, heads, L, width] to [rows, L, heads, width].

    Raises:
        LayoutUnsupported: a packed row, and a model that wants more of its attention than is known here.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    special = any(options.get(name) is not None for name in ("position_bias", "s_aux", "cache"))
    if isinstance(attention_mask, PrefixMask):
        if special or options.get("dropout"):
            raise LayoutUnsupported("its attention takes a bias or sinks")
        attention_mask.layers_asked += 1
        if query.device.type == "cuda" and query.shape[2] >= FLEX_ROW_TOKENS:
            return _flexible(module, query, key, value, attention_mask, scaling, softcap), None
        return tiled_attention(query, key, value, attention_mask, scaling, softcap), None
    rows, length = query.shape[0], query.shape[2]
    causal = attention_mask is None and options.get("is_causal") in (None, True) and getattr(module, "is_causal", True)
    square = key.shape[2] == length and not special and not options.get("dropout")
    short = query.device.type == "cpu" and query.dtype == torch.bfloat16 and 1 < length <= SHORT_ROW_TOKENS
    if causal and square and (short or softcap is not None):
        mask = _plain_rows(rows, length, query.device).mask(None)
        return tiled_attention(query, key, value, mask, scaling, softcap), None
    if softcap is not None and isinstance(attention_mask, Tensor):
        return _capped(query, key, value, attention_mask, scaling, softcap), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


@lru_cache(maxsize=64)
def _plain_rows(rows: int, length: int, device: torch.device) -> PackedRow:
    return PackedRow(lay_out([SharedRow(row, length, 0) for row in range(rows)]), device)


def _capped(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None, softcap: float
) -> Tensor:
    """Attention with bent scores under any mask, without regard to speed."""
    shared = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = (query @ keys.transpose(2, 3)).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    bent = torch.tanh(scores / softcap) * softcap
    if attention_mask.dtype == torch.bool:
        bent = bent.masked_fill(~attention_mask, float("-inf"))
    else:
        bent = bent + attention_mask
    return (torch.softmax(bent, dim=-1).to(query.dtype) @ values).transpose(1, 2).contiguous()


def _flexible(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PrefixMask,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    """Flex attention, which leaves out blocks in which no query sees a key."""
    from transformers.integrations.flex_attention import flex_attention_forward

    if mask.block_mask is None:
        from torch.nn.attention.flex_attention import create_block_mask

        length = mask.layout.tokens
        mask.block_mask = create_block_mask(sees(mask), None, None, length, length, device=str(query.device))
    return flex_attention_forward(module, query, key, value, mask.block_mask, scaling=scaling, softcap=softcap)[0]


def sees(mask: PrefixMask) -> Any:
    """A packed row's mask as flex attention asks for it: a function of row, head, query and key places."""
    layout, window = mask.layout, mask.window
    run_of, prefix_of = np.empty((2, layout.tokens), np.int64)
    by_start = {run.start: number for number, run in enumerate(layout.runs)}
    for number, run in enumerate(layout.runs):
        inside = slice(run.start, run.start + run.length)
        run_of[inside] = number
        prefix_of[inside] = by_start[run.prefix_start]
    runs, prefixes, positions = (
        torch.from_numpy(values).to(mask.device) for values in (run_of, prefix_of, layout.positions())
    )

    def seen(_row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (query >= key) & ((runs[query] == runs[key]) | (prefixes[query] == runs[key]))
        return visible if window is None else visible & (positions[query] - positions[key] < window)

    return seen
