"""Tiny random models with a byte-level tokenizer, made on the spot: real folders, loadable by vLLM and transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SPECIAL = ["<pad>", "<bos>", "<eos>", "<|user|>", "<|assistant|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% else %}<|user|>{% endif %}"
    "{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte plus six special tokens: 262 ids, any text encodes, any id decodes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(SPECIAL + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<|end|>",
        pad_token="<pad>",
        additional_special_tokens=["<eos>", "<|user|>", "<|assistant|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_tiny_llama(
    folder: Path,
    *,
    tied: bool = False,
    seed: int = 0,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
    initializer_range: float = 0.15,
    max_positions: int = 512,
) -> Path:
    """A 2-layer Llama of width 64 (about 0.2 M parameters). Its vocabulary of 320 exceeds the tokenizer's 262."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        initializer_range=initializer_range,
        bos_token_id=1,
        eos_token_id=5,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to(dtype)
    model.generation_config.eos_token_id = [5, 2]
    folder = Path(folder)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_tiny_qwen3(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A 2-layer Qwen3 (norms on queries and keys) of width 64."""
    torch.manual_seed(seed)
    return _save(Qwen3ForCausalLM(Qwen3Config(**_qwen_sizes(tied))), folder)


def save_tiny_qwen3_moe(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A 2-layer Qwen3-MoE of width 64: 4 experts in each layer, 2 of them for each token."""
    torch.manual_seed(seed)
    experts = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return _save(Qwen3MoeForCausalLM(Qwen3MoeConfig(**_qwen_sizes(tied), **experts)), folder)


def _qwen_sizes(tied: bool) -> dict[str, Any]:
    return {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 5,
        "pad_token_id": 0,
    }


def _save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
