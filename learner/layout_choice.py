"""Whether a model computes packed rows: asked of the model itself, on a few tokens.

A model that carries state from token to token, or whose attention sees what it should not, gets padded rows instead;
the model then says why (``LogprobModel.layout_reason``). Call it before weights are spread over ranks. Some of it a
model's configuration says before anything is loaded (``why_padded``).
"""

from __future__ import annotations

import inspect
from typing import Any, get_args

import numpy as np
import torch

from learner.attention import ATTENTION
from learner.logprobs import LogprobModel
from learner.packing import Layout
from learner.settings import LayoutSetting
from learner.token_batch import ScoredRow, token_batch
from system.core.errors import ConfigError

TOLERANCE = {torch.float32: 2e-4, torch.float64: 1e-6}
"""Mean gap in nat between packed and padded log-probs; what rounding may do."""
HALF_TOLERANCE = 0.1
"""The same in bfloat16 and float16, whose rounding alone moves a log-prob by 0.03."""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
KNOWN_LAYERS = {"full_attention", "sliding_attention"}


def choose_layout(model: LogprobModel, wanted: LayoutSetting, key: str = "learner.layout") -> None:
    """Sets the model's ``layout``, ``layout_reason`` and ``dense_mask``.

    Args:
        key: the setting that ``wanted`` is the value of, for messages.
    Raises:
        ConfigError: ``shared_prefix`` is wanted and the model cannot.
    """
    if wanted == "padded":
        _set(model, "padded", f"{key} is padded")
        return
    config: Any = model.causal_lm.config
    obstacle = _obstacle(config, type(model.causal_lm), type(model.body))
    dense_mask = config.get_text_config()._attn_implementation != ATTENTION
    if obstacle is None and dense_mask and _has_windows(config):
        obstacle = "its attention is its own, with windows that one mask for all layers does not give"
    if obstacle is None:
        obstacle = _failure(model, dense_mask)
        if obstacle is None:
            how = ", under a mask of all tokens by all tokens" if dense_mask else ""
            _set(model, "shared_prefix", f"packed and padded log-probs agree{how}", dense_mask)
            return
    if wanted == "shared_prefix":
        raise _impossible(key, obstacle)
    _set(model, "padded", obstacle)


def why_padded(path: str, wanted: LayoutSetting, key: str = "learner.layout") -> str | None:
    """Why rows will be padded, as far as the configuration of the model at ``path`` says; None: it does not say so.

    Raises:
        ConfigError: ``shared_prefix`` is wanted and the model cannot.
    """
    if wanted == "padded":
        return f"{key} is padded"
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(path)
    except (OSError, ValueError):  # whoever loads the model says what is wrong
        return None
    classes = [known.get(type(config), None) for known in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING)]
    obstacle = _obstacle(config, *classes)
    if obstacle is not None and wanted == "shared_prefix":
        raise _impossible(key, obstacle)
    return obstacle


def _impossible(key: str, obstacle: str) -> ConfigError:
    return ConfigError(f"{key}: shared_prefix is not possible for this model: {obstacle}; set it to auto or padded")


def _set(model: LogprobModel, layout: Layout, reason: str, dense_mask: bool = False) -> None:
    model.layout, model.layout_reason, model.dense_mask = layout, reason, dense_mask


def _obstacle(config: Any, causal_lm: type | None, body: type | None) -> str | None:
    """What can be said against packed rows without trying them (on few tokens, where some of it would not show).

    Args:
        causal_lm: class of the model; None: not known.
        body: class of the part that gives hidden states.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    unknown = sorted(kinds - KNOWN_LAYERS)
    if unknown:
        return f"models of type '{config.model_type}' have layers of kind {', '.join(unknown)}"
    if getattr(causal_lm, "_is_stateful", False):
        return f"models of type '{config.model_type}' carry a state from token to token"
    if body is not None and "position_ids" not in inspect.signature(body.forward).parameters:  # type: ignore[attr-defined]
        return f"models of type '{config.model_type}' do not take the positions of tokens"
    if getattr(text, "attn_temperature_tuning", False):
        return f"models of type '{config.model_type}' scale attention by a token's place in the row, not its position"
    return None


def _has_windows(config: Any) -> bool:
    text = config.get_text_config()
    return bool(getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None))


def _failure(model: LogprobModel, dense_mask: bool) -> str | None:
    """What is wrong with packed rows, by trying them; None: nothing."""
    rows = _rows(model.causal_lm.config.get_text_config().vocab_size)
    before = model.dense_mask
    model.dense_mask = dense_mask
    device = next(model.parameters()).device
    packed, padded = (token_batch(rows, device, layout) for layout in LAYOUTS)
    try:
        with torch.no_grad():
            gap = float((model(packed) - model(padded)).abs().mean())
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError) as failure:
        return f"a packed row fails: {type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
    except ConfigError as failure:
        return str(failure)
    finally:
        model.dense_mask = before
    allowed = TOLERANCE.get(next(model.parameters()).dtype, HALF_TOLERANCE)
    if not gap <= allowed:
        return f"packed and padded log-probs differ by {gap:.2g} nat on average"
    layers = model.causal_lm.config.get_text_config().num_hidden_layers
    assert packed.packed is not None
    if not dense_mask and packed.packed.layers_asked != layers:
        return f"{packed.packed.layers_asked} of its {layers} layers have an attention that can be told what to see"
    return None


def _rows(vocabulary: int) -> list[ScoredRow]:
    """Two prompts; the first has twin completions, so that one that sees the other knows its every token."""
    generator = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return generator.integers(0, vocabulary, count)

    first, second, twin = tokens(7), tokens(4), tokens(6)
    return [ScoredRow(first, twin), ScoredRow(first, twin), ScoredRow(first, tokens(1)), ScoredRow(second, tokens(5))]
