"""The trained weights under the names and shapes of the checkpoint on disk, gathered a few at a time.

In memory a model may hold its weights differently (transformers fuses experts, ties heads); what leaves here is what
a checkpoint of the model holds, each weight once. All ranks gather together, because under ZeRO 3 none has a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from learner.world import World
from system.core.weights.sender import WeightSource
from system.core.weights.wire import ParameterInfo

WholeParameters = Callable[[list[nn.Parameter]], AbstractContextManager[None]]


class PolicyWeights:
    """Source of a weight sync: ``parameters`` says what there is, ``gather`` gives the tensors of some of it."""

    def __init__(self, causal_lm: nn.Module, whole: WholeParameters, keep_copies: bool) -> None:
        """``keep_copies``: tensors are only complete inside ``whole``, so they are copied out of it (ZeRO 3)."""
        self._causal_lm = causal_lm
        self._whole = whole
        self._keep_copies = keep_copies
        self._units, self._infos = _plan(causal_lm)
        self._unit_of = {info.name: unit for unit, infos in enumerate(self._infos) for info in infos}
        self._last: tuple[int, dict[str, Tensor]] | None = None

    def parameters(self) -> list[ParameterInfo]:
        """Every weight of the checkpoint on disk, in a fixed order; a tied head is not listed twice."""
        return [info for infos in self._infos for info in infos]

    def gather(self, names: Sequence[str]) -> list[Tensor]:
        """The current values of the named weights, detached, in order; all ranks call it with the same names."""
        return [self._of_unit(self._unit_of[name])[name] for name in names]

    def release(self) -> None:
        """Forgets what the last ``gather`` left behind; called after a sync and before the weights change."""
        self._last = None

    @contextmanager
    def lead(self, world: World) -> Iterator[WeightSource]:
        """On rank 0: a source of which every ``gather`` takes the other ranks along, who ``follow`` until it ends.

        However it ends: a transfer that breaks at any bucket leaves no rank waiting in a gather.
        """
        try:
            yield _Leading(self, world)
        finally:
            world.broadcast(None)

    def follow(self, world: World) -> None:
        """On the other ranks: gathers what rank 0 gathers, as long as it leads."""
        names: Sequence[str] | None
        while (names := world.broadcast(None)) is not None:
            self.gather(names)

    def _of_unit(self, unit: int) -> dict[str, Tensor]:
        if self._last is not None and self._last[0] == unit:
            return self._last[1]
        self._last = None
        entries = {name: entry for name, entry in _entries(self._causal_lm).items() if name in self._units[unit]}
        parameters = [entry for entry in entries.values() if isinstance(entry, nn.Parameter)]
        with torch.no_grad(), self._whole(parameters):
            tensors = _on_disk(self._causal_lm, {name: entry.detach() for name, entry in entries.items()})
            if self._keep_copies:
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        self._last = (unit, tensors)
        return tensors


class _Leading:
    """Tells the other ranks what rank 0 gathers next, before it does."""

    def __init__(self, weights: PolicyWeights, world: World) -> None:
        self.parameters = weights.parameters
        self._weights = weights
        self._world = world

    def gather(self, names: Sequence[str]) -> list[Tensor]:
        self._world.broadcast(list(names))
        return self._weights.gather(names)


def _entries(causal_lm: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by their names in memory, tied ones once."""
    tied = set(getattr(causal_lm, "all_tied_weights_keys", None) or {})
    return {name: entry for name, entry in causal_lm.state_dict(keep_vars=True).items() if name not in tied}


def _on_disk(causal_lm: nn.Module, entries: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Any] = revert_weight_conversion(causal_lm, entries)
    return {
        name: value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
        for name, value in converted.items()
    }


def _plan(causal_lm: nn.Module) -> tuple[list[set[str]], list[list[ParameterInfo]]]:
    """Which entries in memory are converted together, and what each such unit gives.

    One entry is a unit of its own wherever converting it alone gives the same as converting all together.
    """
    shapes = {
        name: torch.empty(getattr(entry, "ds_shape", entry.shape), dtype=entry.dtype, device="meta")
        for name, entry in _entries(causal_lm).items()
    }
    together = _describe(_on_disk(causal_lm, shapes))
    alone = [({name}, _describe(_on_disk(causal_lm, {name: shape}))) for name, shape in shapes.items()]
    if {info for _, infos in alone for info in infos} == set(together) and sum(len(i) for _, i in alone) == len(
        together
    ):
        return [names for names, _ in alone], [infos for _, infos in alone]
    return [set(shapes)], [together]


def _describe(tensors: dict[str, Tensor]) -> list[ParameterInfo]:
    return [
        ParameterInfo(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
