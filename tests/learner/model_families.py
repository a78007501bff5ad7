"""Tiny random models of many families, with windows shorter than the rows that tests give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "initializer_range": 0.15,
    "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
LLAMA4 = {
    **SIZES, "intermediate_size_mlp": 96, "num_local_experts": 4, "attention_chunk_size": 8, "no_rope_layers": [1, 0],
    "interleave_moe_layer_step": 2, "floor_scale": 6,
}  # fmt: skip
TINY = {"vocab_size": 320, "num_attention_heads": 2, "num_hidden_layers": 2, "hidden_size": 64}

PACKED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SIZES),
    "llama_tied": ("llama", {**SIZES, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", SIZES),
    "qwen2_windows": ("qwen2", {**SIZES, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {**SIZES, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {**SIZES, **EXPERTS}),
    "gemma2": ("gemma2", {**SIZES, "sliding_window": 5, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gemma3": ("gemma3_text", {**SIZES, "sliding_window": 5, "sliding_window_pattern": 2}),
    "mistral": ("mistral", {**SIZES, "sliding_window": 5}),
    "gpt2": ("gpt2", {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 2, "initializer_range": 0.15}),
}
"""Families that compute packed rows by our attention: model type and configuration."""

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("gptj", {"vocab_size": 320, "n_embd": 64, "n_layer": 2, "n_head": 2, "rotary_dim": 16}),
    "falcon": ("falcon", {**TINY, "initializer_range": 0.15}),
}
"""Families with an attention of their own, which take a mask of all tokens by all tokens."""

PADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("mamba", {**TINY, "initializer_range": 0.15}),
    "bloom": ("bloom", {"vocab_size": 320, "hidden_size": 64, "n_layer": 2, "n_head": 2, "initializer_range": 0.15}),
    "qwen3_next": (
        "qwen3_next",
        {
            **SIZES, **EXPERTS, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2,
            "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        },
    ),
    "lfm2": (
        "lfm2",
        {
            **{key: SIZES[key] for key in SIZES if key not in ("head_dim", "initializer_range")},
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "llama4": ("llama4_text", LLAMA4),
    "llama4_whole": ("llama4_text", {**LLAMA4, "no_rope_layers": [0, 0]}),
    "gpt_oss": ("gpt_oss", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
}  # fmt: skip
"""Families that carry a state, see distances or places instead of positions, or have windows of another kind."""

FAMILIES = {**PACKED, **DENSE, **PADDED}


def save_family(name: str, folder: Path, seed: int = 0) -> Path:
    """A model folder without tokenizer."""
    model_type, options = FAMILIES[name]
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options)).save_pretrained(folder)
    return folder
