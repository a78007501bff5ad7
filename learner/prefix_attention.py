"""Attention of a packed row in exact blocks: every run's queries against its prefix and its own keys, and no others.

Tiles (``learner.prefix_layout``) are computed one after the other by two matrix products and a softmax; the backward
pass computes the softmax again, so that between the passes nothing is kept but queries, keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.prefix_layout import PrefixLayout, Tile, tiles_of


@dataclass(frozen=True, eq=False)
class TilePlaces:
    """A tile's places in the packed row, on the device."""

    runs: int
    queries: Tensor
    """[runs * R] int64; place 0 where a run has ended."""
    keys: Tensor
    """[runs * K] int64: prefix, own tokens; place 0 for padding, which no query sees."""
    hidden: Tensor
    """[R, K - masked_from] bool: keys from ``masked_from`` on that a query does not see."""
    masked_from: int
    """Keys before it are seen by all queries."""
    real: Tensor | None
    """Indices into ``queries`` that are no padding; None: all."""
    padding: Tensor | None
    """The others."""

    @staticmethod
    def of(tile: Tile, device: torch.device | str) -> TilePlaces:
        asked = tile.query_places().ravel()
        keys = np.concatenate([tile.prefix_places(), tile.own_key_places()], axis=1).ravel()
        seen = tile.seen()
        masked_from = tile.prefix_keys if seen[:, : tile.prefix_keys].all() else 0
        padded = bool((asked < 0).any())

        def on_device(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        return TilePlaces(
            runs=len(tile.runs),
            queries=on_device(np.maximum(asked, 0)),
            keys=on_device(np.maximum(keys, 0)),
            hidden=on_device(~seen[:, masked_from:]),
            masked_from=masked_from,
            real=on_device(np.flatnonzero(asked >= 0)) if padded else None,
            padding=on_device(np.flatnonzero(asked < 0)) if padded else None,
        )


class PrefixMask:
    """What the layers of one attention window get in place of a mask tensor."""

    def __init__(self, layout: PrefixLayout, window: int | None, device: torch.device | str) -> None:
        self.layout = layout
        self.window = window
        self.device = device
        self.tiles = [TilePlaces.of(tile, device) for tile in tiles_of(layout, window)]
        self._biases: dict[torch.dtype, list[Tensor]] = {}
        self.block_mask: Any = None
        """Flex attention's form of it, where that was asked for."""
        self.layers_asked = 0

    def biases(self, dtype: torch.dtype) -> list[Tensor]:
        """Per tile what is added to the scores of the keys from ``masked_from`` on."""
        if dtype not in self._biases:
            self._biases[dtype] = [
                torch.zeros(tile.hidden.shape, dtype=dtype, device=self.device).masked_fill_(tile.hidden, float("-inf"))
                for tile in self.tiles
            ]
        return self._biases[dtype]


def tiled_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: PrefixMask, scaling: float | None, softcap: float | None = None
) -> Tensor:
    """Attention over rows that stand one behind the other in the mask's layout.

    Args:
        query: [rows, heads, L, width]; its heads share key heads in consecutive order.
    Returns:
        [rows, L, heads, value width].
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    by_token = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    return _TiledAttention.apply(*by_token, mask, scale, softcap).unflatten(0, (query.shape[0], query.shape[2]))


class _TiledAttention(torch.autograd.Function):
    """[L, heads, width] to [L, heads, value width]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: PrefixMask, scale: float, softcap: float | None
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.mask, ctx.scale, ctx.softcap = mask, scale, softcap
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for tile, bias in zip(mask.tiles, mask.biases(query.dtype), strict=True):
            asked = _queries(query, key.shape[1], tile).mul_(scale)
            weights, _ = _weights(asked, _keys(key, tile), tile, bias, softcap)
            attended = _by_token(weights @ _keys(value, tile), tile.runs, query.shape[1])
            if tile.real is None:
                out.index_copy_(0, tile.queries, attended)
            else:
                out.index_copy_(0, tile.queries[tile.real], attended[tile.real])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        exact = torch.promote_types(key.dtype, torch.float32)
        d_query = torch.empty_like(query)
        d_key, d_value = key.new_zeros(key.shape, dtype=exact), value.new_zeros(value.shape, dtype=exact)
        heads, key_heads = query.shape[1], key.shape[1]
        for tile, bias in zip(ctx.mask.tiles, ctx.mask.biases(query.dtype), strict=True):
            asked, keys, values = _queries(query, key_heads, tile).mul_(ctx.scale), _keys(key, tile), _keys(value, tile)
            d_out = _queries(gradients[0], key_heads, tile)
            weights, slope = _weights(asked, keys, tile, bias, ctx.softcap)
            d_value.index_add_(0, tile.keys, _key_rows(weights.transpose(1, 2) @ d_out, tile).to(exact))
            d_weights = d_out @ values.transpose(1, 2)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            if slope is not None:
                d_scores.mul_(slope)
            d_key.index_add_(0, tile.keys, _key_rows(d_scores.transpose(1, 2) @ asked, tile).to(exact))
            d_asked = _by_token((d_scores @ keys).mul_(ctx.scale), tile.runs, heads)
            if tile.real is None:
                d_query.index_copy_(0, tile.queries, d_asked)
            else:
                d_query.index_copy_(0, tile.queries[tile.real], d_asked[tile.real])
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), None, None, None


def _queries(values: Tensor, key_heads: int, tile: TilePlaces) -> Tensor:
    """[L, heads, width] to [key heads * runs, heads per key head * R, width], zero where a run has ended; a copy."""
    chosen = values.index_select(0, tile.queries)
    if tile.padding is not None:
        chosen.index_fill_(0, tile.padding, 0.0)
    heads, width = chosen.shape[1:]
    split = chosen.view(tile.runs, -1, key_heads, heads // key_heads, width).permute(2, 0, 3, 1, 4)
    return split.reshape(key_heads * tile.runs, -1, width).contiguous()


def _by_token(values: Tensor, runs: int, heads: int) -> Tensor:
    """The way back: [key heads * runs, heads per key head * R, width] to [runs * R, heads, width]."""
    key_heads = values.shape[0] // runs
    split = values.view(key_heads, runs, heads // key_heads, -1, values.shape[2])
    return split.permute(1, 3, 0, 2, 4).reshape(-1, heads, values.shape[2])


def _keys(values: Tensor, tile: TilePlaces) -> Tensor:
    """[L, key heads, width] to [key heads * runs, K, width]."""
    chosen = values.index_select(0, tile.keys).view(tile.runs, -1, *values.shape[1:])
    return chosen.permute(2, 0, 1, 3).reshape(-1, chosen.shape[1], values.shape[2])


def _key_rows(values: Tensor, tile: TilePlaces) -> Tensor:
    """The way back: [key heads * runs, K, width] to [runs * K, key heads, width]."""
    split = values.view(-1, tile.runs, values.shape[1], values.shape[2])
    return split.permute(1, 2, 0, 3).reshape(-1, split.shape[0], values.shape[2])


def _weights(
    asked: Tensor, keys: Tensor, tile: TilePlaces, bias: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """Softmax of the tile's scores, and the slope of the soft cap where there is one."""
    scores = asked @ keys.transpose(1, 2)
    slope = None
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        slope = 1.0 - bent.square()
        scores = bent * softcap
    scores.view(len(scores), -1, len(bias), scores.shape[2])[..., tile.masked_from :].add_(bias)
    return torch.softmax(scores, dim=-1), slope


def dense_bias(layout: PrefixLayout, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """[1, 1, L, L] for models with an attention of their own: 0 where a query sees a key, else the least number."""
    hidden = torch.from_numpy(~layout.visible()).to(device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)[
        None, None
    ]
