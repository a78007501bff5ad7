"""Online DPO (2305.18290, 2402.04792): the better of a prompt's completions is preferred to the worse."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import logsigmoid

from learner.objectives.base import LogprobKind, Objective
from learner.objectives.inputs import LossInputs
from learner.objectives.metrics import MetricCollector
from learner.objectives.settings import TOKEN_CORRECTIONS, ObjectiveSettings
from system.core.errors import ConfigError


class PairSettings(ObjectiveSettings):
    """Options of online_dpo and ipo."""

    refused: ClassVar[dict[str, str]] = {"aggregation": "the loss is one of pairs of whole sequences"}
    refused_corrections: ClassVar[Mapping[str, str]] = {
        name: "a preference is one of whole sequences, which weights of single tokens do not fit; "
        "use sequence_tis (the product of both), sequence_mask, geometric_mask, k3_mask or opsm"
        for name in TOKEN_CORRECTIONS
    } | {"bypass": "it has no ratio to the policy of the start whose anchor could be the sampler"}
    stale_correction: ClassVar[str] = "none"
    """A preference between two completions holds whoever sampled them."""

    beta: float = Field(default=0.1, gt=0.0)
    """Implicit reward per nat of log pi / pi_ref."""


class PairObjective(Objective[PairSettings]):
    """A loss of the margin D_w - D_l between a group's best and worst completion."""

    Options: ClassVar[type[ObjectiveSettings]] = PairSettings
    coupling = "group"

    @abstractmethod
    def margin_loss(self, margins: Tensor) -> Tensor:
        """[groups] D_w - D_l in nats -> [groups]."""

    @property
    def policy_needs(self) -> frozenset[LogprobKind]:
        return frozenset({"reference"} if self.settings.correction == "none" else {"reference", "old"})

    def check_passes(self, epochs: int, minibatches: int) -> None:
        if epochs > 2:
            raise ConfigError(
                f"learner.epochs_per_step: {epochs}: {self.name} learns a preference in one or two passes; more "
                "drive both completions away from the reference. Set it to 1 or 2"
            )

    def loss(self, inputs: LossInputs) -> Tensor:
        margins, weights = self.pairs(inputs)
        inputs.noted.update(margins=margins.detach(), weights=weights)
        return (self.margin_loss(margins) * weights).sum() / max(inputs.denominators.groups, 1)

    def pairs(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """[groups] margin of each group's pair, and its weight: 0 where all its advantages are equal.

        Of equally good completions the first is taken. A correction weighs a pair by the product of both weights, so a
        mask that takes one completion takes the pair.
        """
        trajectories = inputs.trajectories
        best = _first_highest(trajectories.advantages, trajectories.groups, trajectories.group_count)
        worst = _first_highest(-trajectories.advantages, trajectories.groups, trajectories.group_count)
        ratios = inputs.trajectory_reference_log_ratio
        each = inputs.corrected_trajectories(torch.ones_like(ratios)).detach()
        differ = trajectories.advantages[best] > trajectories.advantages[worst]
        return ratios[best] - ratios[worst], differ * each[best] * each[worst]

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Margins in implicit reward, and how often the policy already prefers what the reward prefers."""
        margins, weights = inputs.noted["margins"], inputs.noted["weights"]
        metrics.mean("margin_mean", self.settings.beta * margins, weights > 0)
        metrics.mean("preference_accuracy", margins > 0, weights > 0)


class OnlineDpo(PairObjective):
    """Logistic loss of the margin between the best and the worst completion of a prompt.

    L = mean over prompts of -log sigmoid(beta (D_w - D_l)), D_i = sum_t m (lp - lp_ref). Groups of equal rewards have
    no preference and no gradient. Sources: DPO, 2305.18290; online, 2402.04792.
    """

    name = "online_dpo"

    def margin_loss(self, margins: Tensor) -> Tensor:
        return -logsigmoid(self.settings.beta * margins)


def _first_highest(values: Tensor, groups: Tensor, count: int) -> Tensor:
    """[count] index of each group's first highest value; every group has one.

    Args:
        values: [n].
        groups: [n] int64 in 0..count-1.
    """
    highest = values.new_full((count,), -torch.inf).scatter_reduce(0, groups, values, "amax")
    index = torch.arange(len(values), device=values.device)
    candidates = torch.where(values == highest[groups], index, len(values))
    return index.new_full((count,), len(values)).scatter_reduce(0, groups, candidates, "amin")
