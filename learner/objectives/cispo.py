"""CISPO (2506.13585): the capped ratio as a detached weight of the log-prob, so that clipped tokens keep gradient."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from learner.objectives.base import TokenObjective
from learner.objectives.grpo import clip_ratio
from learner.objectives.inputs import LossInputs
from learner.objectives.metrics import MetricCollector
from learner.objectives.settings import ClipWidth, ObjectiveSettings, TokenSettings


class CispoSettings(TokenSettings):
    """Options of cispo."""

    refused: ClassVar[dict[str, str]] = {
        "epsilon_high": "write clip_high, where the cap is 1 + clip_high (an epsilon_high of 5.0 is clip_high: 4.0)",
        "dual_clip": "no token loses its gradient, so there is nothing to bound",
    }

    clip_low: ClipWidth = None
    """The weight is at least 1 - clip_low; null: no lower bound."""
    clip_high: ClipWidth = 0.28
    """The weight is at most 1 + clip_high; null: no cap."""


class Cispo(TokenObjective[CispoSettings]):
    """Log-prob weighted by the advantage and the detached, capped ratio.

    L = sum_it m (-sg(clip(rho, 1 - low, 1 + high)) a lp) / sum_it m, by default without the lower bound, with the
    advantages of GRPO. Source: 2506.13585.
    """

    name = "cispo"
    Options: ClassVar[type[ObjectiveSettings]] = CispoSettings

    def token_loss(self, inputs: LossInputs) -> Tensor:
        weights = clip_ratio(inputs.ratio_values, self.settings.clip_low, self.settings.clip_high)
        return -weights * inputs.advantages * inputs.logprobs

    def row_losses(self, inputs: LossInputs) -> Tensor:
        ratio, options = inputs.ratio_values, self.settings
        low = 0.0 if options.clip_low is None else 1.0 - options.clip_low
        weights = ratio.clamp(low, math.inf if options.clip_high is None else 1.0 + options.clip_high)
        inputs.noted["capped"] = torch.ne(weights, ratio, out=torch.empty_like(ratio)).sum(dim=1)
        slopes = inputs.tokens.keep_(weights.mul_(-inputs.advantages))
        return inputs.sloped_rows(inputs.tokens.keep_(slopes * inputs.leaf.detach()), slopes)

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Share of trained tokens whose weight is capped."""
        metrics.mean_of("clip_share", inputs.noted["capped"], inputs.tokens.total)
