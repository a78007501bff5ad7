"""Log-probs of completion tokens: the one piece of model code that learner, reference worker and probe share.

The model's body runs over right-padded rows (a causal model does not see what stands behind a token, so no mask is
needed); the head runs only at the positions that predict an asked-for token, and the softmax is taken in float32
over ``logits / temperature``, piece by piece, so that no float32 array of [tokens, vocabulary] ever exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learner.packing import PackItem, pack_rows
from system.core.errors import ConfigError

SOFTMAX_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}
"""Size of the float32 pieces of the softmax: what a CPU's cache holds; on a GPU, large enough to fill it."""
KEPT_LOGITS_BYTES = 1 << 30
"""Logits up to this size are kept for the backward pass; more are computed again, chunk by chunk."""
NO_GRAD_LOGITS_BYTES = 128 << 20
"""Most logits that exist at a time where no backward pass follows."""


@dataclass(frozen=True, eq=False)
class ScoredRow:
    """A prompt, its completion, and for which completion tokens log-probs are wanted (None: all)."""

    prompt_tokens: np.ndarray
    completion_tokens: np.ndarray
    wanted: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        """Positions that the model computes: prompt and completion, without the last token."""
        return max(1, len(self.prompt_tokens) + len(self.completion_tokens) - 1)


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Right-padded rows and where in them the wanted tokens are predicted (N of them)."""

    tokens: Tensor
    """[rows, L] int64."""
    row: Tensor
    """[N] int64, the row of each wanted token."""
    position: Tensor
    """[N] int64, the position whose hidden state predicts it."""
    target: Tensor
    """[N] int64, the token."""
    column: Tensor
    """[N] int64, its index in the completion."""
    completion_length: int
    """T, the longest completion."""

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    def padded(self, values: Tensor) -> Tensor:
        """[N] values laid out as [rows, T], zero where nothing is wanted."""
        return values.new_zeros(self.rows, self.completion_length).index_put((self.row, self.column), values)

    def selected(self, values: Tensor) -> Tensor:
        """[rows, T] values at the wanted tokens, [N]."""
        return values[self.row, self.column]


def token_batch(rows: Sequence[ScoredRow], device: torch.device | str = "cpu") -> TokenBatch:
    """Lays rows out for one forward pass.

    Raises:
        ValueError: a row without prompt tokens (nothing predicts its first completion token).
    """
    if any(len(row.prompt_tokens) == 0 for row in rows):
        raise ValueError("a row without prompt tokens: nothing predicts its first completion token")
    tokens = np.zeros((len(rows), max(row.tokens for row in rows)), np.int64)
    places: list[np.ndarray] = []
    for index, row in enumerate(rows):
        joined = np.concatenate([row.prompt_tokens, row.completion_tokens])
        tokens[index, : row.tokens] = joined[: row.tokens]
        length = len(row.completion_tokens)
        columns = np.arange(length) if row.wanted is None else np.flatnonzero(row.wanted)
        place = np.empty((4, len(columns)), np.int64)
        place[0] = index
        place[1] = len(row.prompt_tokens) - 1 + columns
        place[2] = row.completion_tokens[columns]
        place[3] = columns
        places.append(place)
    placed = torch.from_numpy(np.concatenate(places, axis=1)).to(device)
    return TokenBatch(
        tokens=torch.from_numpy(tokens).to(device),
        row=placed[0],
        position=placed[1],
        target=placed[2],
        column=placed[3],
        completion_length=max(len(row.completion_tokens) for row in rows),
    )


class LogprobModel(nn.Module):
    """A causal language model whose forward pass gives log-probs of chosen tokens instead of logits.

    ``causal_lm`` is a transformers model; the temperature is the run's sampling temperature.
    """

    def __init__(self, causal_lm: nn.Module, temperature: float) -> None:
        super().__init__()
        if not temperature > 0.0:
            raise ConfigError(f"rollout.temperature: must be positive to have log-probs (got {temperature})")
        self.causal_lm = causal_lm
        self.temperature = temperature
        self._logit_scale, self._logit_cap = _head_conventions(causal_lm)

    def forward(self, batch: TokenBatch, temperature: float | None = None) -> Tensor:
        """[N] float32 log-probs of the batch's wanted tokens, at the run's temperature unless another is given."""
        temperature = self.temperature if temperature is None else temperature
        body: Any = self.causal_lm.base_model
        hidden = body(input_ids=batch.tokens, use_cache=False).last_hidden_state
        wanted = hidden[batch.row, batch.position]
        return self._head_logprobs(wanted, batch.target, temperature)

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits of hidden states [N, width]: head, scale and soft cap. [N, vocabulary]."""
        logits = self.causal_lm.get_output_embeddings()(hidden)
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._logit_cap is not None:
            logits = torch.tanh(logits / self._logit_cap) * self._logit_cap
        return logits

    def _head_logprobs(self, hidden: Tensor, target: Tensor, temperature: float) -> Tensor:
        def piece(states: Tensor, tokens: Tensor) -> Tensor:
            return _TokenLogprobs.apply(self.logits(states), tokens, temperature)

        vocabulary: int = self.causal_lm.config.get_text_config().vocab_size
        bytes_per_token = vocabulary * hidden.element_size()
        training = torch.is_grad_enabled()
        most = max(1, (KEPT_LOGITS_BYTES if training else NO_GRAD_LOGITS_BYTES) // bytes_per_token)
        if len(target) <= most:
            return piece(hidden, target)
        pieces = zip(hidden.split(most), target.split(most), strict=True)
        if not training:
            return torch.cat([piece(states, tokens) for states, tokens in pieces])
        return torch.cat([checkpoint(piece, states, tokens, use_reentrant=False) for states, tokens in pieces])

    def check_head(self) -> None:
        """Holds this module's logits against the model's own on a few tokens.

        Raises:
            ConfigError: the model family treats its logits in a way that is not known here.
        """
        device = next(self.causal_lm.parameters()).device
        tokens = torch.arange(4, device=device)[None]
        with torch.no_grad():
            own = self.causal_lm(input_ids=tokens, use_cache=False).logits[0].float()
            body: Any = self.causal_lm.base_model
            ours = self.logits(body(input_ids=tokens, use_cache=False).last_hidden_state[0]).float()
        if not torch.allclose(own, ours, rtol=1e-2, atol=1e-3 * float(own.abs().max())):
            family = self.causal_lm.config.model_type
            raise ConfigError(
                f"model.path: models of type '{family}' change their logits after the head in an unknown way"
            )


def completion_logprobs(
    model: LogprobModel, rows: Sequence[ScoredRow], budget_tokens: int, temperature: float | None = None
) -> list[np.ndarray]:
    """Log-probs without gradient of every row's completion tokens, float32 of completion length, 0 where not wanted."""
    device = next(model.parameters()).device
    answers: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
    for members in pack_rows([PackItem(row.tokens, index, 0) for index, row in enumerate(rows)], budget_tokens):
        batch = token_batch([rows[index] for index in members], device)
        with torch.no_grad():
            padded = batch.padded(model(batch, temperature)).cpu().numpy()
        for line, index in enumerate(members):
            answers[index] = padded[line, : len(rows[index].completion_tokens)].copy()
    return answers


class _TokenLogprobs(torch.autograd.Function):
    """log_softmax(logits / temperature)[target] in float32, keeping logits in their own dtype."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, temperature: float) -> Tensor:
        accurate = torch.promote_types(logits.dtype, torch.float32)
        normaliser = logits.new_empty(len(target), dtype=accurate)
        logprobs = torch.empty_like(normaliser)
        for part in _parts(logits):
            scaled = logits[part].to(accurate, copy=True).div_(temperature)
            wanted = target[part, None]
            logprobs[part] = torch.log_softmax(scaled, dim=-1).gather(1, wanted)[:, 0]
            normaliser[part] = scaled.gather(1, wanted)[:, 0] - logprobs[part]
        ctx.save_for_backward(logits, target, normaliser)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None]:
        logits, target, normaliser = ctx.saved_tensors
        weight = outputs[0] / ctx.temperature
        gradient = torch.empty_like(logits)
        for part in _parts(logits):
            local = logits[part].to(normaliser.dtype, copy=True).div_(ctx.temperature)
            local.sub_(normaliser[part, None]).exp_().mul_(-weight[part, None])
            local.scatter_add_(1, target[part, None], weight[part, None])
            gradient[part] = local.to(logits.dtype)
        return gradient, None, None


def _parts(logits: Tensor) -> list[slice]:
    piece_bytes = SOFTMAX_CHUNK_BYTES.get(logits.device.type, SOFTMAX_CHUNK_BYTES["cpu"])
    rows = max(1, piece_bytes // (4 * logits.shape[1]))
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def _head_conventions(causal_lm: Any) -> tuple[float, float | None]:
    """Factor on the logits and soft cap of them, as the model family's configuration names them."""
    config = causal_lm.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    if getattr(config, "logits_scaling", None):
        scale /= float(config.logits_scaling)
    cap = getattr(config, "final_logit_softcapping", None)
    return scale, float(cap) if cap else None
