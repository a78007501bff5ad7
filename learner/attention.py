"""Scaled-dot-product attention, with a plain matrix form for short bfloat16 rows on CPUs.

torch's fused CPU kernel is several times slower than two matrix products in the backward pass of short bfloat16 rows.
Everything else (GPUs, float32, long rows, rows with a mask) goes to transformers' ``sdpa`` unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ATTENTION = "triptych_sdpa"
"""Name under which transformers finds ``attend``; ``register`` first."""

SHORT_ROW_TOKENS = 192
"""Up to here the plain form was measured to be faster (forward and backward, bfloat16)."""


def register() -> str:
    """Makes ``attend`` known to transformers; idempotent. Returns its name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    return ATTENTION


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [rows, heads, L, width] to [rows, L, heads, width]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    short = query.device.type == "cpu" and query.dtype == torch.bfloat16 and 1 < query.shape[2] <= SHORT_ROW_TOKENS
    causal = attention_mask is None and options.get("is_causal") in (None, True) and getattr(module, "is_causal", True)
    special = options.get("dropout") or options.get("position_bias") is not None
    if not (short and causal and key.shape[2] == query.shape[2]) or special:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    return _plain_causal(query, key, value, scaling), None


def _plain_causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """softmax(q k^T * scaling + causal mask) v, softmax in float32, key heads shared by consecutive query heads."""
    rows, heads, length, width = query.shape
    shared = heads // key.shape[1]
    folded = query.reshape(rows, key.shape[1], shared * length, width)
    scores = folded @ key.transpose(-1, -2)
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu_(1)
    scaled = scores.float().mul(width**-0.5 if scaling is None else scaling)
    masked = scaled.view(rows, key.shape[1], shared, length, length).masked_fill(future, float("-inf"))
    weights = torch.softmax(masked, dim=-1).to(query.dtype)
    attended = weights.view(rows, key.shape[1], shared * length, length) @ value
    return attended.view(rows, heads, length, -1).transpose(1, 2).contiguous()
