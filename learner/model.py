"""Loads a causal language model for training or as the frozen reference.

Learner and reference worker load the same folder through this one function, so that their log-probs are equal at
version 0. Dropout is off in every model that comes from here: the log-probs of a policy are a function of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from learner import attention
from system.core.errors import ConfigError
from system.core.model import ModelSettings

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_causal_lm(settings: ModelSettings, device: torch.device | str = "cpu") -> nn.Module:
    """The model of ``settings`` with its weights, in its dtype, without dropout.

    Its attention is ``learner.attention``'s, or the family's own where that cannot be replaced.

    Raises:
        ConfigError: the folder is missing, or holds no causal language model that transformers can load.
    """
    if settings.lora is not None:
        raise ConfigError("model.lora: adapters are not yet available; leave it null to train all weights")
    _require_folder(settings.path)
    try:
        try:
            model, loading = _from_folder(settings, attention.register())
        except (ValueError, KeyError):
            model, loading = _from_folder(settings, None)
    except (OSError, ValueError, KeyError) as failure:
        raise ConfigError(f"model.path: {settings.path} does not load as a causal language model: {failure}") from None
    missing = sorted(set(loading["missing_keys"]) | {str(entry) for entry in loading["mismatched_keys"]})
    if missing:
        raise ConfigError(
            f"model.path: {settings.path} has no weights for {len(missing)} parameters of {type(model).__name__} "
            f"({', '.join(missing[:3])}...); they would be random"
        )
    _switch_dropout_off(model)
    return model.to(device)


def _from_folder(settings: ModelSettings, attention_name: str | None) -> Any:
    """Model and loading report; None: the family's own choice of attention."""
    from transformers import AutoModelForCausalLM

    with _without_progress_bars():
        return AutoModelForCausalLM.from_pretrained(
            settings.path,
            dtype=DTYPES[settings.dtype],
            attn_implementation=attention_name,
            output_loading_info=True,
        )


def save_checkpoint_folder(causal_lm: nn.Module, source: str, folder: Path) -> None:
    """Writes weights and configuration of ``causal_lm``, with tokenizer and generation config of model ``source``."""
    from transformers import AutoTokenizer

    with _without_progress_bars():
        causal_lm.save_pretrained(folder)
    try:
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    except (OSError, ValueError) as failure:
        raise ConfigError(f"model.path: {source} has no tokenizer to save beside the weights: {failure}") from None


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _require_folder(path: str) -> None:
    looks_local = path.startswith(("/", "./", "../", "~")) or path.count("/") != 1 or Path(path).exists()
    if not looks_local:
        return
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"model.path: {path} is not a folder; give a folder in Hugging Face layout or a hub id")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {path} has no config.json, so it is not a model in Hugging Face layout")


def _switch_dropout_off(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "dropout_rate", "resid_pdrop", "attn_pdrop", "embd_pdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
