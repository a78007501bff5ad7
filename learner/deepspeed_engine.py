"""DeepSpeed, behind the few calls that the learner makes. The only module that imports it.

Micro-batching is the caller's: ``backward`` accumulates, ``last=True`` marks the micro-batch after which gradients are
complete, ``update`` applies them. Gradients are *summed* over ranks and micro-batches (DeepSpeed's own averaging is
undone), so whoever divides by global counts gets the same gradient however the work was cut. Every rank makes the
same calls in the same order.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from learner.memory import BUCKET_ELEMENTS, LIVE_ELEMENTS, PREFETCH_ELEMENTS
from learner.optimizers import build_optimizer
from learner.settings import LearnerSettings
from learner.world import World
from system.core.errors import CheckpointDamaged, TriptychError

CHECKPOINT_TAG = "engine"


class NonFiniteError(TriptychError):
    """Loss or gradient is infinite or not a number; the weights were left as they were."""


class TrainingEngine:
    """One rank of a DeepSpeed-trained module."""

    def __init__(self, module: nn.Module, settings: LearnerSettings, world: World) -> None:
        deepspeed = _import_deepspeed(world)
        self.module = module
        self.world = world
        self.zero = settings.zero
        self._clip = settings.gradient_clip
        self._half = next(module.parameters()).dtype == torch.bfloat16
        configuration = _configuration(settings, self._half, sum(entry.numel() for entry in module.parameters()))
        configuration["zero_optimization"].update(_offload(settings, world.device))
        with _without_chatter():
            self._engine, self._optimizer, _, _ = deepspeed.initialize(
                model=module,
                optimizer=build_optimizer(module, settings),
                config=configuration,
                dist_init_required=False,
            )
        if self._half and self.zero == 0:
            # This optimiser takes a trial step to create its state, which counts in Adam's bias correction.
            self._optimizer.optimizer.state.clear()
        if self._half and self.zero <= 1 and world.size == 1 and not settings.offload_optimizer:
            # There is nobody to sum gradients with; DeepSpeed would copy all of them there and back. An offloaded
            # optimiser, though, gets its gradients on this way alone.
            self._engine.enable_backward_allreduce = False
        self._gathered = deepspeed.zero.GatheredParameters

    def forward(self, *inputs: Any) -> Tensor:
        """Runs the module with gradients."""
        return self._engine(*inputs)

    def backward(self, loss: Tensor, last: bool) -> None:
        """Adds the gradient of ``loss`` to what is accumulated; collective under ZeRO 2 and 3, and where ``last``."""
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss * self.world.size, scale_wrt_gas=False)

    def update(self, learning_rate: float) -> float:
        """Applies the accumulated gradient; collective.

        Returns:
            Norm of the whole gradient before clipping.
        Raises:
            NonFiniteError: the gradient is not finite; no weight was changed.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        if not self._half and self.zero == 0:
            return self._update_unwrapped()
        self._engine.step()
        norm = self._engine.get_global_grad_norm()
        norm = math.nan if norm is None else float(norm)
        if not math.isfinite(norm) or getattr(self._engine.optimizer, "overflow", False):
            raise _non_finite(norm)
        return norm

    def _update_unwrapped(self) -> float:
        """float32 without ZeRO has no optimiser of DeepSpeed's that would compute the norm."""
        gradients = [parameter.grad for parameter in self.module.parameters() if parameter.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm):
            self._engine.zero_grad()
            raise _non_finite(norm)
        if 0.0 < self._clip < norm:
            torch._foreach_mul_(gradients, self._clip / (norm + 1e-6))
        self._engine.step()
        return norm

    @contextmanager
    def whole(self, parameters: list[nn.Parameter]) -> Iterator[None]:
        """Inside, these parameters are complete on every rank (they always are below ZeRO 3); collective."""
        if self.zero < 3:
            yield
            return
        with self._gathered(parameters):
            yield

    def save(self, folder: Path) -> None:
        """Writes weights and optimiser into ``folder``, every rank its own part; collective."""
        self._engine.save_checkpoint(str(folder), tag=CHECKPOINT_TAG, save_latest=False)

    def load(self, folder: Path) -> None:
        """Restores weights and optimiser as ``save`` wrote them, bit by bit; collective.

        Raises:
            CheckpointDamaged: a part is missing or cannot be read.
        """
        try:
            with _without_chatter():
                path, _ = self._engine.load_checkpoint(str(folder), tag=CHECKPOINT_TAG)
        except (OSError, RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError) as failure:
            raise CheckpointDamaged(f"checkpoint {folder}: the optimiser's part cannot be read: {failure}") from failure
        if path is None:
            raise CheckpointDamaged(f"checkpoint {folder}: the optimiser's part '{CHECKPOINT_TAG}' is missing")

    def close(self) -> None:
        self._engine.destroy()


def choose_accelerator(device: torch.device) -> None:
    """Tells DeepSpeed where it runs; before anything imports it (transformers does), so that it need not guess."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)


@contextmanager
def _without_chatter() -> Iterator[None]:
    """DeepSpeed prints memory reports to standard output."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        yield


def _import_deepspeed(world: World) -> Any:
    choose_accelerator(world.device)
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # The shared-memory collectives are compiled at first use, which needs a compiler on every node.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo" if world.device.type == "cpu" else "nccl", auto_mpi_discovery=False)
    _forget_groups_of_an_ended_world(deepspeed.utils.groups)
    return deepspeed


def _forget_groups_of_an_ended_world(groups: Any) -> None:
    """DeepSpeed keeps the process groups of the first world of a process, though that world may have been ended by
    others without its knowledge: a vLLM engine in the same process does so when it closes."""
    kept = groups._WORLD_GROUP
    if kept is not None and kept not in dist.distributed_c10d._world.pg_group_ranks:
        groups._release_process_group_references()


def _configuration(settings: LearnerSettings, half: bool, parameters: int) -> dict[str, Any]:
    wrapped = half or settings.zero > 0
    configuration: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.gradient_clip if wrapped else 0.0,
        "zero_optimization": {
            "stage": settings.zero,
            "overlap_comm": False,
            "reduce_bucket_size": min(parameters, BUCKET_ELEMENTS),
            "allgather_bucket_size": min(parameters, BUCKET_ELEMENTS),
            "stage3_prefetch_bucket_size": PREFETCH_ELEMENTS,
            "stage3_max_live_parameters": LIVE_ELEMENTS,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
    }
    if half:
        # Gradients are added up in float32 as soon as they are there, so that those of all weights in bfloat16 never
        # exist at once; and they are summed over the ranks as they are.
        configuration["bf16"] = {"enabled": True, "check_grad_overflow": True, "immediate_grad_update": True}
        if settings.zero <= 1:
            configuration["communication_data_type"] = "fp32"
        if settings.zero > 0:
            configuration["data_types"] = {"grad_accum_dtype": "fp32"}
    return configuration


def _offload(settings: LearnerSettings, device: torch.device) -> dict[str, Any]:
    if not settings.offload_optimizer:
        return {}
    return {"offload_optimizer": {"device": "cpu", "pin_memory": device.type == "cuda"}}


def _non_finite(norm: float) -> NonFiniteError:
    return NonFiniteError(
        f"the gradient's norm is {norm}; the update was not applied. Lower learner.learning_rate, or look at the last "
        "step's rollouts for log-probs of -inf"
    )
