"""What vLLM reads from the environment, set before it is imported. What a user has set stays."""

from __future__ import annotations

import os

from system.core.errors import ConfigError
from system.core.weights.register import PLUGIN_NAME


def prepare_environment(threads: str | None) -> None:
    """Sets what vLLM reads from the environment, before it is imported; what a user has set stays.

    Args:
        threads: cores for the engine's computation, as vLLM's CPU binding writes them (``"0-1"``); None leaves vLLM's
            choice. Without a binding, vLLM computes on one thread.
    Raises:
        ConfigError: the environment hides the weight-transfer backends from vLLM's processes.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if threads is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = threads
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        raise ConfigError(
            f"VLLM_PLUGINS={allowed!r} hides '{PLUGIN_NAME}' from vLLM, so that no weights could be received; "
            f"unset VLLM_PLUGINS or add {PLUGIN_NAME} to it"
        )
