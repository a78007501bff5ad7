"""What vLLM reads from the environment, set before it is imported. What a user has set stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def vllm_in_this_process() -> Iterator[None]:
    """Lets vLLM run in this process, and undoes what it does to the process's thread count."""
    import torch

    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before
        torch.set_num_threads = set_threads
        set_threads(threads)
