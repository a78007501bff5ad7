"""What an engine is started with, and the check that vLLM's processes will know how to receive weights."""

from __future__ import annotations

from typing import Any

from rollout_workers.contract import WeightBackend
from rollout_workers.settings import RolloutSettings
from system.core.errors import ConfigError, nearest
from system.core.model import ModelSettings
from system.core.weights.register import PLUGIN_NAME, register

CPU_KV_CACHE_BYTES = 1024**3


def check_backend(backend: WeightBackend) -> None:
    """Raises ``ConfigError`` unless every vLLM process will know the weight-transfer ``backend``."""
    from importlib.metadata import entry_points

    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if PLUGIN_NAME not in {point.name for point in entry_points(group="vllm.general_plugins")}:
        raise ConfigError(
            f"the entry point '{PLUGIN_NAME}' is not installed, so vLLM's processes would not know how to receive "
            "weights; install Triptych into this environment (pip install, not only PYTHONPATH)"
        )
    register()
    if backend not in WeightTransferEngineFactory._registry:
        known = sorted(WeightTransferEngineFactory._registry)
        raise ConfigError(f"vLLM knows no weight-transfer backend '{backend}'{nearest(backend, known)}")


def engine_arguments(model: ModelSettings, rollout: RolloutSettings, backend: WeightBackend) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``EngineArgs``.

    On CPU a prompt is never prefilled in pieces: vLLM draws a token after each piece and winds the request's seeded
    generator back, which a CPU generator cannot do; the engine would die.

    Raises:
        ConfigError: ``rollout.engine`` names an argument that vLLM does not have.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    known = EngineArgs.__dataclass_fields__
    for name in rollout.engine:
        if name not in known:
            raise ConfigError(f"rollout.engine.{name}: vLLM has no such argument{nearest(name, known)}")
    on_cpu = current_platform.is_cpu()
    arguments: dict[str, Any] = {
        "model": model.path,
        "dtype": model.dtype,
        "tensor_parallel_size": rollout.tensor_parallel,
        "max_num_seqs": rollout.max_running_requests,
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": backend},
        "enforce_eager": on_cpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **({"enable_chunked_prefill": False} if on_cpu else {}),
        **rollout.engine,
    }
    kv_cache_bytes = rollout.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None)
    if kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = kv_cache_bytes
    return arguments
