"""Makes the weight-transfer backends known to vLLM: the entry point that every vLLM process calls at its start.

Idempotent, and cheap: the module that implements them is imported when an engine is created with one of them.
"""

from __future__ import annotations

PLUGIN_NAME = "triptych_weight_transfer"
"""The entry point's name in the group ``vllm.general_plugins``; ``VLLM_PLUGINS`` must not hide it."""

_ENGINES = {"gloo": "GlooWeightTransferEngine", "inline": "InlineWeightTransferEngine"}


def register() -> None:
    """Registers the backends ``gloo`` and ``inline`` with vLLM's factory."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, engine in _ENGINES.items():
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, "system.core.weights.receiver", engine)
