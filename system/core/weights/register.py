"""The entry point that every vLLM process calls at its start: makes the weight-transfer backends known to vLLM, and
ties the process's life to its parent's, so that a killed rollout worker leaves nothing behind.

Idempotent, and cheap: the module that implements the backends is imported when an engine is created with one of them.
"""

from __future__ import annotations

from system.core.processes import end_with_parent

PLUGIN_NAME = "triptych_weight_transfer"
"""The entry point's name in the group ``vllm.general_plugins``; ``VLLM_PLUGINS`` must not hide it."""

_ENGINES = {
    "gloo": "GlooWeightTransferEngine",
    "nccl_checked": "NcclCheckedWeightTransferEngine",
    "inline": "InlineWeightTransferEngine",
}


def register() -> None:
    """Registers the backends with vLLM's factory; in a child process of an engine, also ``end_with_parent``."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    end_with_parent()
    for name, engine in _ENGINES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "system.core.weights.receiver", engine)
