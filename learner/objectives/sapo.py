"""SAPO (2511.20347): a soft gate around the ratio in place of the clip."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from learner.objectives.base import TokenObjective
from learner.objectives.inputs import LossInputs
from learner.objectives.settings import Aggregation, ObjectiveSettings, TokenSettings


class SapoSettings(TokenSettings):
    """Options of sapo."""

    aggregation: Aggregation = "sequence_mean_token_mean"
    tau_positive: float = Field(default=1.0, gt=0.0)
    """Steepness of the gate for advantages above 0."""
    tau_negative: float = Field(default=1.05, gt=0.0)
    """Steepness of the gate for the other advantages."""


class Sapo(TokenObjective[SapoSettings]):
    """Sigmoid-gated ratio times the advantage.

    L = (1/B) sum_i (1/T_i) sum_t m (-(4/tau) sigmoid(tau (rho - 1)) a), tau = tau_positive where a > 0, else
    tau_negative, with the advantages of GRPO. The gate has slope 1 at rho = 1. Source: 2511.20347.
    """

    name = "sapo"
    Options: ClassVar[type[ObjectiveSettings]] = SapoSettings

    def token_loss(self, inputs: LossInputs) -> Tensor:
        tau = self._tau(inputs.advantages)
        return -4.0 / tau * torch.sigmoid(tau * (inputs.ratio - 1.0)) * inputs.advantages

    def row_losses(self, inputs: LossInputs) -> Tensor:
        """With h = tanh(tau (rho - 1) / 2) the loss is -(2/tau) (1 + h) a, and its slope -(1 - h^2) rho a."""
        half, negative, ratio = 0.5 * self._tau(inputs.advantages), -inputs.advantages, inputs.ratio_values
        gate = (ratio * half).sub_(half).tanh_()
        slopes = torch.addcmul(torch.ones_like(half), gate, gate, value=-1.0).mul_(ratio).mul_(negative)
        losses = gate.add_(1.0).mul_(negative / half)
        return inputs.sloped_rows(inputs.tokens.keep_(losses), inputs.tokens.keep_(inputs.unbounded(slopes)))

    def _tau(self, advantages: Tensor) -> Tensor:
        positive = torch.full_like(advantages, self.settings.tau_positive)
        return torch.where(advantages > 0, positive, torch.full_like(advantages, self.settings.tau_negative))
