"""f-HAL (2602.05946): f-GRPO on the policy's own groups, mixed with the same divergence on offline preference pairs."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from learner.objectives.f_grpo import FGrpo, FGrpoSettings
from learner.objectives.inputs import LossInputs
from learner.objectives.metrics import MetricCollector
from learner.objectives.settings import ObjectiveSettings


class FHalSettings(FGrpoSettings):
    """Options of f_hal. Weights, gamma, kappa and corrections concern the policy's own groups alone."""

    lambda_offline: float = Field(default=0.5, ge=0.0, le=1.0)
    """Share of the offline loss."""
    offline_file: str | None = Field(default=None, min_length=1)
    """Preference pairs: a .jsonl or .parquet file with the columns prompt (text or chat messages), chosen and rejected
    (text). A run needs it."""
    offline_pairs_per_step: int | None = Field(default=None, ge=1)
    """Pairs that a step learns from; null: stream.groups_per_step."""


class FHal(FGrpo):
    """Hybrid alignment loss.

    L = lambda L_FDO + (1 - lambda) L_fGRPO; L_FDO = mean over offline pairs of -g(r_chosen) + f*(g(r_rejected)),
    r = beta sum_t m (lp - lp_ref), without correction or importance weights. Source: 2602.05946.
    """

    name = "f_hal"
    Options: ClassVar[type[ObjectiveSettings]] = FHalSettings
    takes_pairs = True
    settings: FHalSettings

    def loss(self, inputs: LossInputs) -> Tensor:
        share = self.settings.lambda_offline
        loss = (1.0 - share) * self.sampled_loss(inputs)
        return loss if inputs.pairs is None else loss + share * self.pair_loss(inputs.pairs)

    def pair_loss(self, pairs: LossInputs) -> Tensor:
        """L_FDO."""
        losses = self.bent(self._pair_rewards(pairs), pairs.trajectories.advantages)
        return losses.sum() / max(pairs.denominators.pairs, 1)

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Beside f_grpo's: how far chosen completions stand above rejected ones, in implicit reward."""
        super().measure(inputs, metrics)
        if inputs.pairs is not None:
            signed = self._pair_rewards(inputs.pairs) * inputs.pairs.trajectories.advantages
            metrics.mean("offline_margin", 2.0 * signed, torch.ones_like(signed, dtype=torch.bool))

    def _pair_rewards(self, pairs: LossInputs) -> Tensor:
        return self.settings.beta * pairs.trajectory_reference_log_ratio
