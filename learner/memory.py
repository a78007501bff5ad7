"""What a learner rank will hold in memory, by cause, known before anything is started. Pure arithmetic.

Bytes per parameter are what DeepSpeed was measured to hold (``tests/learner/test_memory.py`` repeats it), also where
it is more than a textbook says: ZeRO copies float32 weights, sums bfloat16 gradients in float32, and reduces and
applies gradients through further copies. Activations are what autograd keeps of a Llama-like block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from learner.settings import LearnerSettings

PROCESS_BYTES = 600_000_000
"""A process with torch, transformers and DeepSpeed loaded."""
BUCKET_ELEMENTS = 50_000_000
"""Gradients and weights travel between ranks in pieces of this size, whose buffers ZeRO 2 and 3 keep. DeepSpeed's own
default costs 1 GB."""
LIVE_ELEMENTS = 1_000_000_000
"""Under ZeRO 3, most parameters that are whole at a time."""
PREFETCH_ELEMENTS = 50_000_000
"""Under ZeRO 3, most parameters that are on their way at a time."""
ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}
_NORMS_AROUND_BLOCKS = ("gemma2", "gemma3", "gemma3_text")
"""Model types with a norm before and after each block, which keep a float32 copy."""
_NORMS_OF_QUERIES = ("qwen3", "qwen3_moe", "gemma3", "gemma3_text", "olmo2", "olmoe")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a causal language model that its memory follows from."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    """Width of the feed-forward block; of all experts together that a token goes through."""
    vocabulary: int
    heads: int
    query_width: int
    """Query heads times their size."""
    key_value_width: int
    experts_per_token: int = 0
    """0: no mixture of experts."""
    norms_of_queries: bool = False
    norms_around_blocks: bool = False

    @staticmethod
    def of_config(config: Mapping[str, Any], parameters: int) -> ModelShape:
        """From a ``config.json``; what it does not say counts as 0."""
        inner = config.get("text_config")
        text = {**config, **inner} if isinstance(inner, Mapping) else dict(config)

        def size(*names: str) -> int:
            return next((int(text[name]) for name in names if text.get(name)), 0)

        hidden = size("hidden_size", "n_embd")
        heads = size("num_attention_heads", "n_head") or 1
        head = size("head_dim") or hidden // heads
        experts = size("num_experts_per_tok")
        width = (size("moe_intermediate_size") if experts else 0) or size("intermediate_size") or 4 * hidden
        kind = str(text.get("model_type", ""))
        return ModelShape(
            parameters=parameters,
            layers=size("num_hidden_layers", "n_layer"),
            hidden=hidden,
            intermediate=width * max(1, experts),
            vocabulary=size("vocab_size"),
            heads=heads,
            query_width=heads * head,
            key_value_width=(size("num_key_value_heads") or heads) * head,
            experts_per_token=experts,
            norms_of_queries=kind in _NORMS_OF_QUERIES,
            norms_around_blocks=kind in _NORMS_AROUND_BLOCKS,
        )


@dataclass(frozen=True)
class MicroBatch:
    """The largest that a rank will meet."""

    tokens: int
    """Positions computed, padding included."""
    row_tokens: int
    """Of its longest row."""
    wanted_tokens: int
    """Positions whose logits are computed."""


@dataclass(frozen=True)
class RankMemory:
    """Most bytes that one rank holds, by cause."""

    process_bytes: int
    weights_bytes: int
    gradients_bytes: int
    masters_bytes: int
    """The float32 copy of the weights that the optimiser changes."""
    optimiser_bytes: int
    """Adam's two moments."""
    buffers_bytes: int
    """DeepSpeed's own, there all the time."""
    exchange_bytes: int
    """DeepSpeed's copies beside the activations of a pass: of gradients on their way to other ranks, and under ZeRO 3
    of the weights in use."""
    update_bytes: int
    """DeepSpeed's copies of gradients at the end of a backward pass and in an update, when no activations are left."""
    activations_bytes: int
    """One micro-batch, as ``activation_checkpointing`` is set."""
    logits_bytes: int
    """What the head holds of one micro-batch: logits, their gradient, a piece of the softmax."""
    offloaded_bytes: int = 0
    """Of the above, what lies in the machine's memory and not on the GPU (``offload_optimizer``)."""

    @property
    def state_bytes(self) -> int:
        """What is there however small the micro-batch is: weights, gradients, masters, optimiser and buffers."""
        trained = self.gradients_bytes + self.masters_bytes + self.optimiser_bytes
        return self.weights_bytes + trained + self.buffers_bytes

    @property
    def total_bytes(self) -> int:
        """The most at one time, in a pass or in the update that follows it; offloaded bytes included."""
        passes = self.exchange_bytes + self.activations_bytes + self.logits_bytes
        return self.process_bytes + self.state_bytes + max(passes, self.update_bytes)


def rank_memory(
    shape: ModelShape, dtype: str, settings: LearnerSettings, batch: MicroBatch, on_cpu: bool
) -> RankMemory:
    """The estimate for each of ``settings.workers`` ranks.

    Args:
        dtype: ``bfloat16`` or ``float32``, of the weights.
        on_cpu: whether the rank has no GPU.
    """
    count, zero, element = shape.parameters, settings.zero, ELEMENT_BYTES[dtype]
    own = count / settings.workers
    optimised = own if zero >= 1 else count
    half = dtype == "bfloat16"
    masters = 4 * optimised if half or zero >= 1 else 0
    moments = (2 if settings.optimizer == "adamw_8bit" else 8) * optimised
    copies = (_offloaded_copies if settings.offload_optimizer else _copies)(count, own, element, zero)
    exchange = copies.exchange
    if zero == 3 and settings.workers > 1:
        exchange += element * (min(count, LIVE_ELEMENTS) + min(count, PREFETCH_ELEMENTS))
    return RankMemory(
        process_bytes=PROCESS_BYTES,
        weights_bytes=int(element * (own if zero == 3 else count)),
        gradients_bytes=int(copies.gradients),
        masters_bytes=int(masters),
        optimiser_bytes=int(moments),
        buffers_bytes=int(copies.buffers),
        exchange_bytes=int(exchange),
        update_bytes=int(copies.update),
        activations_bytes=activation_bytes(shape, dtype, batch, settings.activation_checkpointing),
        logits_bytes=logits_bytes(shape, dtype, batch, on_cpu),
        offloaded_bytes=int(masters + moments + copies.offloaded) if settings.offload_optimizer else 0,
    )


@dataclass(frozen=True)
class _Copies:
    """Bytes of gradients and of DeepSpeed's copies of them; see ``RankMemory``."""

    gradients: float
    buffers: float = 0.0
    exchange: float = 0.0
    update: float = 0.0
    offloaded: float = 0.0
    """Of ``gradients`` and ``buffers``."""


def _copies(count: int, own: float, element: int, zero: int) -> _Copies:
    half, bucket = element == 2, element * min(count, BUCKET_ELEMENTS)
    if zero == 0:
        return _Copies(element * count, update=4 * count)
    if zero == 1 and half:
        return _Copies(4 * count, update=4 * count)
    if zero == 1:
        return _Copies(4 * count, exchange=bucket, update=max(0.0, 8 * own - 4 * count))
    if zero == 2:
        return _Copies(4 * own, exchange=bucket, update=0 if half else bucket + 4 * own)
    return _Copies(4 * own, buffers=bucket, update=4 * own)


def _offloaded_copies(count: int, own: float, element: int, zero: int) -> _Copies:
    """In the machine's memory: a sum of gradients, what the optimiser is given of it, and weights on their way back."""
    half, bucket = element == 2, element * min(count, BUCKET_ELEMENTS)
    if zero == 3:
        return _Copies(8 * own, buffers=bucket, offloaded=8 * own)
    back = element * own
    if zero == 2:
        return _Copies(8 * own, buffers=back, exchange=bucket, offloaded=8 * own + back)
    sums = (8 if half else 4) * own
    passing = element * count + bucket + (2 * count if half else 0)
    return _Copies(sums, buffers=back, exchange=passing, offloaded=sums + back)


def activation_bytes(shape: ModelShape, dtype: str, batch: MicroBatch, checkpointing: bool) -> int:
    """What autograd keeps of the model's body for the backward pass of one micro-batch.

    Of each norm its float32 input and its output, of each matrix product its input, of the feed-forward block four
    tensors of its width, queries, keys, values and what attention makes of them. With ``checkpointing`` each layer's
    input, and one layer in full.
    """
    element = ELEMENT_BYTES[dtype]
    norms, norm_output = (4, 4) if shape.norms_around_blocks else (2, element)
    layer = shape.hidden * (norms * (4 + norm_output) + 2 * element)
    layer += element * (4 * shape.intermediate + 2 * shape.query_width + 2 * shape.key_value_width)
    layer += 2 * element * shape.hidden * shape.experts_per_token
    if shape.norms_of_queries:
        layer += (4 + norm_output) * (shape.query_width + shape.key_value_width)
    kept = element * shape.hidden * shape.layers + layer if checkpointing else layer * shape.layers
    return batch.tokens * (kept + (4 + element) * shape.hidden)


def logits_bytes(shape: ModelShape, dtype: str, batch: MicroBatch, on_cpu: bool) -> int:
    """Logits of the wanted tokens as far as the head keeps them at a time, in ``dtype``; gradients take their place."""
    from learner.logprobs import LOGITS_BYTES, SOFTMAX_CHUNK_BYTES

    element, device = ELEMENT_BYTES[dtype], "cpu" if on_cpu else "cuda"
    kept = min(batch.wanted_tokens * shape.vocabulary * element, LOGITS_BYTES[device])
    piece = min(SOFTMAX_CHUNK_BYTES[device], batch.wanted_tokens * shape.vocabulary * 4)
    return kept + 2 * piece + batch.wanted_tokens * shape.hidden * element
