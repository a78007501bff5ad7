"""Which optimiser trains the weights: torch's fused AdamW, or the same with 8-bit moments from bitsandbytes.

Neither needs a compiler: torch's kernels for CPUs and GPUs are built in, and they also update what
``offload_optimizer`` keeps in the machine's memory.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from learner.settings import LearnerSettings
from system.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn


def check_optimizer(settings: LearnerSettings, on_cpu: bool) -> None:
    """
    Args:
        on_cpu: whether the ranks have no GPUs.
    Raises:
        ConfigError: this installation or these ranks cannot have the optimiser that ``settings`` ask for.
    """
    if settings.offload_optimizer and on_cpu:
        raise ConfigError(
            "learner.offload_optimizer: true moves the optimiser from a GPU into the machine's memory, but the learner "
            "has no GPU: everything is there already; set it to false"
        )
    if settings.optimizer == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise ConfigError(
            "learner.optimizer: adamw_8bit needs the package bitsandbytes, which is not installed here; "
            "pip install 'triptych[adamw_8bit]' on every node of the learner, or use adamw"
        )


def build_optimizer(module: nn.Module, settings: LearnerSettings) -> Any:
    """The optimiser of ``module``'s trainable parameters; its learning rate is set with every update."""
    import torch

    check_optimizer(settings, on_cpu=False)
    groups = _parameter_groups(module, settings.weight_decay)
    betas = settings.beta1, settings.beta2
    if settings.optimizer == "adamw_8bit":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(groups, lr=0.0, betas=betas, eps=settings.epsilon)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=settings.epsilon, fused=True)


def _parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if weight_decay == 0.0:
        return [{"params": trained, "weight_decay": 0.0}]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
