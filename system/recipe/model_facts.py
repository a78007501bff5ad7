"""What a model's folder says about it, read from its small files: no weights are loaded, no GPU is touched."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learner.memory import ModelShape
from system.core.errors import ConfigError
from system.prompts.tokens import TOKENIZER_FILES, context_tokens

_HUB_ID = re.compile(r"^[\w-][\w.-]*/[\w-][\w.-]*$")
_FOLDER_NAMES = ("models", "model", "runs", "checkpoints", "output", "outputs", "data")
"""First parts of a path that mean a folder here, not an organisation on the hub."""
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class ModelFacts:
    """Sizes from which the plan's numbers follow. None: the model does not say."""

    path: str
    architecture: str
    parameters: int | None
    context_tokens: int | None
    shape: ModelShape
    """Sizes of its parts; ``shape.parameters`` is 0 where ``parameters`` is None."""


def read_model(path: str) -> ModelFacts:
    """The facts of the model at ``path``: a folder in Hugging Face layout, or a hub id.

    Raises:
        ConfigError: no folder, or one without configuration, weights or tokenizer.
    """
    folder = Path(path)
    if not folder.exists() and _HUB_ID.match(path) and path.split("/")[0] not in _FOLDER_NAMES:
        return _facts(path, *_from_hub(path))
    if not folder.is_dir():
        raise ConfigError(
            f"model.path: no model folder at {path}; "
            f"`triptych model import SRC {path}` makes one (SRC: smollm2, a GGUF file, a model folder or a hub id)"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.path: {path} is not a model folder: it has no config.json")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model.path: {path} holds no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); save the model's there"
        )
    weights = sorted(folder.glob("*.safetensors"))
    if not weights and not any(folder.glob("*.bin")):
        raise ConfigError(f"model.path: {path} holds no weights (*.safetensors)")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except json.JSONDecodeError as failure:
        raise ConfigError(f"model.path: {folder / 'config.json'} is not valid JSON: {failure}") from None
    return _facts(path, config, sum(_parameters(file) for file in weights) if weights else None)


def _facts(path: str, config: dict[str, Any], parameters: int | None) -> ModelFacts:
    return ModelFacts(
        path=path,
        architecture=(config.get("architectures") or [config.get("model_type", "unknown")])[0],
        parameters=parameters,
        context_tokens=context_tokens(config),
        shape=ModelShape.of_config(config, parameters or 0),
    )


def _parameters(file: Path) -> int:
    """Elements of floating-point tensors, from the header of a safetensors file."""
    try:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    except (json.JSONDecodeError, UnicodeDecodeError, OverflowError, MemoryError):
        raise ConfigError(f"model.path: {file} is not a safetensors file") from None
    return sum(
        math.prod(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in _ELEMENT_BYTES
    )


def _from_hub(path: str) -> tuple[dict[str, Any], int | None]:
    """Configuration and number of parameters, which is counted on a model without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as failure:
        reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        raise ConfigError(
            f"model.path: {path} is neither a folder here nor a model that the hub gives: {reason}"
        ) from failure
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, ImportError):  # not a causal language model that is known here; the learner says so
        return dict(config.to_dict()), None
    return dict(config.to_dict()), sum(parameter.numel() for parameter in model.parameters())
