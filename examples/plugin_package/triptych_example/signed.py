"""An objective: GRPO's surrogate with only the sign of the advantage."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from learner.objectives import LossInputs, ObjectiveSettings, TokenObjective, TokenSettings


class SignedSettings(TokenSettings):
    """Options of signed."""

    strength: float = Field(default=1.0, gt=0.0)
    """Factor of every sign."""


class Signed(TokenObjective[SignedSettings]):
    """The ratio times the sign of the advantage.

    L = sum_it m (-strength rho sign(a)) / sum_it m, rho = exp(lp - lp_old), with the advantages of GRPO.
    """

    name = "signed"
    Options: ClassVar[type[ObjectiveSettings]] = SignedSettings

    def token_loss(self, inputs: LossInputs) -> Tensor:
        return -self.settings.strength * inputs.ratio * torch.sign(inputs.advantages)
