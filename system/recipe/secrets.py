"""Secrets do not belong in a recipe, which is written to the run folder, logged and shared; the environment holds them.

``refuse_secrets`` is called on every recipe before anything else is done with it; its errors name the key, never the
value.
"""

from __future__ import annotations

import re
from typing import Any

from system.core.errors import ConfigError

_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|access_?key|private_?key|secret|secret_?key|password|passwd|credentials?|bearer|auth|token)$",
    re.IGNORECASE,
)
_HARMLESS_KEY = re.compile(r"(^|_)(bos|eos|pad|unk|sep|cls|mask|stop|image|audio)_token$", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|AKIA[A-Z0-9]{12,})"
    r"|://[^/\s:@]+:[^/\s@]+@|-----BEGIN [A-Z ]*PRIVATE KEY"
)


def refuse_secrets(values: Any, where: str = "") -> None:
    """
    Raises:
        ConfigError: a key that names a secret has a value, or a value looks like one.
    """
    if isinstance(values, dict):
        for key, value in values.items():
            place = f"{where}.{key}" if where else str(key)
            if isinstance(value, str) and value and _SECRET_KEY.search(str(key)) and not _HARMLESS_KEY.search(str(key)):
                raise ConfigError(_message(place))
            refuse_secrets(value, place)
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            refuse_secrets(value, f"{where}.{index}")
    elif isinstance(values, str) and _SECRET_VALUE.search(values):
        raise ConfigError(_message(where))


def _message(place: str) -> str:
    return (
        f"{place}: looks like a secret. A recipe is written to the run folder, so secrets come from the environment: "
        "remove it here and set the variable that its library reads (HF_TOKEN, WANDB_API_KEY, ...)"
    )
