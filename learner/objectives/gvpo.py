"""GVPO (2504.19599): centred log-ratios are regressed on centred rewards, without dividing by their spread."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from learner.objectives.gift import GroupRegression, RegressionSettings
from learner.objectives.inputs import LossInputs
from learner.objectives.metrics import MetricCollector
from learner.objectives.settings import ObjectiveSettings


class GvpoSettings(RegressionSettings):
    """Options of gvpo. The scale of rewards matters: nothing divides by their spread."""

    stale_correction: ClassVar[str] = "none"
    """Its optimum does not depend on who sampled."""

    advantage: str = "group_mean"
    beta: float = Field(default=0.1, gt=0.0)
    """Reward per nat of log-ratio: the optimum is pi_anchor exp(R / beta)."""


class Gvpo(GroupRegression[GvpoSettings]):
    """Squared distance of centred log-ratios from centred rewards.

    L = mean over prompts of (1 / (2 (G - 1))) sum_i ((beta D_i - mean of beta D) - (R_i - mean R))^2,
    D_i = sum_t m (lp - lp_anchor), the mean of log-ratios detached. Groups of equal rewards have no gradient and stay
    in the denominator; zero_variance: as_is regresses them too. Source: 2504.19599 and its authors' code.
    """

    name = "gvpo"
    Options: ClassVar[type[ObjectiveSettings]] = GvpoSettings

    def loss(self, inputs: LossInputs) -> Tensor:
        trajectories = inputs.trajectories
        enter, advantages = self.regressed(inputs)
        rewards = self.settings.beta * self.log_ratios(inputs)
        zeros = torch.zeros_like(rewards)
        number = trajectories.group_sum(enter.to(rewards.dtype))
        mean = trajectories.group_sum(torch.where(enter, rewards, zeros)).detach() / number.clamp(min=1.0)
        losses = (rewards - mean[trajectories.groups] - advantages).square()
        share = torch.where(enter, losses, zeros) / (2.0 * (number - 1.0).clamp(min=1.0))[trajectories.groups]
        return share.sum() / max(inputs.denominators.groups, 1)

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Implicit rewards: how far the anchor is behind, in reward."""
        enter, _ = self.regressed(inputs)
        metrics.mean("implicit_reward_abs_mean", (self.settings.beta * self.log_ratios(inputs)).abs(), enter)
