"""Log-probs of completion tokens: the one piece of model code that learner, reference worker and probe share.

The model's body runs over a ``TokenBatch``; the head runs only where a wanted token is predicted, and the softmax is
taken in float32 over ``logits / temperature``, piece by piece, so that no float32 array of [tokens, vocabulary] ever
exists. Logits are kept for the backward pass up to a fixed size and computed again beyond it, so memory does not grow
with tokens x vocabulary. The entropy of the predictions is taken from the same pieces where it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learner.attention import packed
from learner.packing import Layout, pack_rows
from learner.prefix_attention import dense_bias
from learner.token_batch import ScoredRow, TokenBatch, token_batch
from system.core.errors import ConfigError

SOFTMAX_CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}
"""Size of the float32 pieces of the softmax: what a CPU's cache holds; on a GPU, large enough to fill it."""
LOGITS_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}
"""Most logits that exist at a time. Half of it is kept for the backward pass where there are more, the rest computed
again."""

Piece = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Log-probs, and entropies where they are wanted, of hidden states [n, width] and their next tokens [n]."""


class LogprobModel(nn.Module):
    """A causal language model whose forward pass gives log-probs of chosen tokens instead of logits.

    ``causal_lm`` is a transformers model; the temperature is the run's sampling temperature. Batches are padded until
    ``learner.layout_choice.choose_layout`` found that the model computes packed rows.
    """

    def __init__(self, causal_lm: nn.Module, temperature: float) -> None:
        super().__init__()
        if not temperature > 0.0:
            raise ConfigError(f"rollout.temperature: must be positive to have log-probs (got {temperature})")
        self.causal_lm = causal_lm
        self.temperature = temperature
        self.layout: Layout = "padded"
        self.layout_reason = "not tried"
        self.dense_mask = False
        """Whether packed rows come with a mask of all tokens by all tokens, for attention that is not ours."""
        self.with_entropy = False
        """Whether a forward pass with gradient also gives ``entropies``."""
        self.entropies: Tensor | None = None
        """[N] float32 nats, of the last forward pass: of the distribution that each wanted token was predicted by, at
        the temperature of its log-prob. Without gradient; None where that was not wanted."""
        self._logit_scale, self._logit_cap = _head_conventions(causal_lm)

    def forward(self, batch: TokenBatch, temperature: float | None = None) -> Tensor:
        """[N] float32 log-probs of the batch's wanted tokens, at the run's temperature unless another is given."""
        temperature = self.temperature if temperature is None else temperature
        wanted = self._hidden(batch).flatten(0, 1)[batch.source]
        logprobs, self.entropies = self._head(wanted, batch.target, temperature)
        return logprobs

    @property
    def body(self) -> Any:
        """The part of the model that gives hidden states."""
        causal_lm: Any = self.causal_lm
        body = causal_lm.base_model
        return getattr(causal_lm, "model", body) if body is causal_lm else body  # Llama-4 says another name than this

    @property
    def keys_per_token(self) -> float:
        """As many keys cost a query as much as all the rest of a token's way through a layer.

        In multiplications: 2 for each key and unit of width, and 12 times the width squared for a Llama's matrices.
        """
        return 6.0 * self.causal_lm.config.get_text_config().hidden_size

    def _hidden(self, batch: TokenBatch) -> Tensor:
        """The body's last hidden states, [rows, L, width]."""
        body = self.body
        if batch.packed is None:
            return body(input_ids=batch.tokens, use_cache=False).last_hidden_state
        arguments = {"input_ids": batch.tokens, "position_ids": batch.position_ids, "use_cache": False}
        if self.dense_mask:
            dtype = next(self.causal_lm.parameters()).dtype
            bias = dense_bias(batch.packed.layout, dtype, batch.tokens.device)
            return body(**arguments, attention_mask=bias).last_hidden_state
        with packed(batch.packed):
            return body(**arguments).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's own logits of hidden states [N, width]: head, scale and soft cap. [N, vocabulary]."""
        return self._conventional(self.causal_lm.get_output_embeddings()(hidden))

    def _conventional(self, logits: Tensor) -> Tensor:
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._logit_cap is not None:
            logits = torch.tanh(logits / self._logit_cap) * self._logit_cap
        return logits

    def _head(self, hidden: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
        """Log-probs of ``target``, and entropies where they are wanted.

        To others the head's module is called once, forward and backward, in however many pieces it computes: ZeRO-3
        gathers weights around a module's call, so all ranks must make as many, and tokens differ between them.
        """
        head: Any = self.causal_lm.get_output_embeddings()
        with_entropy = self.with_entropy and torch.is_grad_enabled()
        compute = head.forward
        entropies: list[Tensor | None] = []

        def piece(states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
            return _TokenLogprobs.apply(self._conventional(compute(states)), tokens, temperature, with_entropy)

        def whole(states: Tensor) -> Tensor:
            logprobs, entropy = _joined(self._pieces(piece, states, target))
            entropies.append(entropy)
            return logprobs

        with _computing(head, whole):
            logprobs = head(hidden)
        return logprobs, entropies[0]

    def _pieces(self, piece: Piece, hidden: Tensor, target: Tensor) -> list[tuple[Tensor, Tensor | None]]:
        vocabulary: int = self.causal_lm.config.get_text_config().vocab_size
        most_bytes = LOGITS_BYTES.get(hidden.device.type, LOGITS_BYTES["cpu"])
        most = max(1, most_bytes // (vocabulary * hidden.element_size()))
        if len(target) <= most:
            return [piece(hidden, target)]
        if not torch.is_grad_enabled():
            return [piece(*part) for part in zip(hidden.split(most), target.split(most), strict=True)]
        half = max(1, most // 2)
        kept, *others = zip(hidden.split(half), target.split(half), strict=True)
        again = [checkpoint(piece, states, tokens, use_reentrant=False) for states, tokens in others]
        return [piece(*kept), *again]

    def check_head(self) -> None:
        """Holds this module's logits against the model's own on a few tokens.

        Raises:
            ConfigError: the model family treats its logits in a way that is not known here.
        """
        device = next(self.causal_lm.parameters()).device
        family = self.causal_lm.config.model_type
        if self.body is self.causal_lm:
            raise ConfigError(f"model.path: models of type '{family}' have no part that gives hidden states alone")
        tokens = torch.arange(4, device=device)[None]
        with torch.no_grad():
            own = self.causal_lm(input_ids=tokens, use_cache=False).logits[0].float()
            ours = self.logits(self.body(input_ids=tokens, use_cache=False).last_hidden_state[0]).float()
        if not torch.allclose(own, ours, rtol=1e-2, atol=1e-3 * float(own.abs().max())):
            raise ConfigError(
                f"model.path: models of type '{family}' change their logits after the head in an unknown way"
            )


def completion_logprobs(
    model: LogprobModel, rows: Sequence[ScoredRow], budget_tokens: int, temperature: float | None = None
) -> list[np.ndarray]:
    """Log-probs without gradient of every row's completion tokens, float32 of completion length, 0 where not wanted."""
    device = next(model.parameters()).device
    answers: list[np.ndarray] = [np.zeros(0, np.float32)] * len(rows)
    items = [row.pack_item(row.prefix, index) for index, row in enumerate(rows)]
    for members in pack_rows(items, budget_tokens, layout=model.layout):
        batch = token_batch([rows[index] for index in members], device, model.layout)
        with torch.no_grad():
            padded = batch.padded(model(batch, temperature)).cpu().numpy()
        for line, index in enumerate(members):
            answers[index] = padded[line, : len(rows[index].completion_tokens)].copy()
    return answers


@contextmanager
def _computing(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside, a call of ``module``, hooks and all, computes ``forward``."""
    own = module.__dict__.get("forward")
    module.forward = forward  # an attribute of the object goes before its class's method
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _joined(pieces: Sequence[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    entropies = [entropy for _, entropy in pieces if entropy is not None]
    return torch.cat([logprobs for logprobs, _ in pieces]), torch.cat(entropies) if entropies else None


class _TokenLogprobs(torch.autograd.Function):
    """log_softmax(logits / temperature)[target] in float32, keeping logits in their own dtype; and its entropy.

    The gradient is written over the logits, so that there is one array of their size and not two; nobody else may use
    them, and the backward pass runs once (autograd refuses the second). The entropy has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        accurate = torch.promote_types(logits.dtype, torch.float32)
        normaliser = logits.new_empty(len(target), dtype=accurate)
        logprobs = torch.empty_like(normaliser)
        entropy = torch.empty_like(normaliser) if with_entropy else None
        for part in _parts(logits):
            scaled = logits[part].to(accurate, copy=True).div_(temperature)
            wanted = target[part, None]
            every = torch.log_softmax(scaled, dim=-1)
            logprobs[part] = every.gather(1, wanted)[:, 0]
            normaliser[part] = scaled.gather(1, wanted)[:, 0] - logprobs[part]
            if entropy is not None:
                every.clamp_(min=torch.finfo(accurate).min)  # a token of probability 0 adds 0
                entropy[part] = -torch.linalg.vecdot(torch.exp(every, out=scaled), every)
        ctx.save_for_backward(logits, target, normaliser)
        ctx.temperature = temperature
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None]:
        logits, target, normaliser = ctx.saved_tensors
        weight = outputs[0] / ctx.temperature
        for part in _parts(logits):
            local = logits[part].to(normaliser.dtype, copy=True).div_(ctx.temperature)
            local.sub_(normaliser[part, None]).exp_().mul_(-weight[part, None])
            local.scatter_add_(1, target[part, None], weight[part, None])
            logits[part] = local.to(logits.dtype)
        return logits, None, None, None


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
