"""GIFT (2510.23868): the group's log-ratios, normalised, are regressed on its normalised rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from learner.advantages import StepRows
from learner.kl import kl_estimate
from learner.objectives.base import LogprobKind, Objective
from learner.objectives.inputs import LossInputs
from learner.objectives.metrics import MetricCollector
from learner.objectives.settings import TOKEN_CORRECTIONS, ObjectiveSettings
from system.core.errors import ConfigError

LOG_RATIO_LIMIT = 50.0
"""Log-ratios of sequences are clamped to +-this for a group's statistics, so that one lost completion is not all."""

SMALLEST_STD = 1e-12
"""With eps 0 and no floor a group of equal log-ratios has no scale; its gradient stays finite."""

Anchor = Literal["old", "reference"]


class RegressionSettings(ObjectiveSettings):
    """What gift and gvpo share."""

    refused: ClassVar[dict[str, str]] = {"aggregation": "the loss is one of whole sequences"}
    refused_corrections: ClassVar[Mapping[str, str]] = {
        name: "weights inside group statistics are ill-defined; "
        "use sequence_mask, geometric_mask, k3_mask or opsm, whose survivors are regressed by themselves"
        for name in (*TOKEN_CORRECTIONS, "sequence_tis")
    } | {"bypass": "log-ratios to the sampler would carry its engine's rounding; use a sequence mask"}

    anchor: Anchor = "old"
    """Whom log-ratios are taken to: the policy at the start of the pass (old), or the reference model."""


RegressionT = TypeVar("RegressionT", bound=RegressionSettings)


class GroupRegression(Objective[RegressionT]):
    """Log-ratios of a group's completions regressed on their advantages."""

    Options: ClassVar[type[ObjectiveSettings]] = RegressionSettings
    coupling = "group"

    @property
    def policy_needs(self) -> frozenset[LogprobKind]:
        return frozenset({self.settings.anchor}) | ({"old"} if self.settings.correction != "none" else set())

    def check_passes(self, epochs: int, minibatches: int) -> None:
        if epochs > 1:
            raise ConfigError(
                f"learner.epochs_per_step: {epochs}: {self.name} is right for one pass, since nothing corrects for the "
                "policy that moves away from its samples; set it to 1"
            )

    def log_ratios(self, inputs: LossInputs) -> Tensor:
        """[trajectories] D_i = sum over trained tokens of log pi - log pi_anchor."""
        of_old = self.settings.anchor == "old"
        return inputs.trajectory_log_ratio if of_old else inputs.trajectory_reference_log_ratio

    def regressed(self, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Which trajectories enter the loss, [trajectories] bool, and their advantages, [trajectories].

        A mask takes trajectories out before advantages and statistics are taken. Groups of fewer than two, and groups
        without signal unless ``zero_variance: as_is``, do not enter.
        """
        trajectories, advantages = inputs.trajectories, inputs.trajectories.advantages
        enter = inputs.kept_trajectories()
        if not bool(enter.all()):
            lost = trajectories.group_sum((~enter).to(advantages.dtype))[trajectories.groups] > 0
            among_survivors, have_one = self._among(inputs, enter)
            advantages = torch.where(lost, among_survivors, advantages)
            enter = torch.where(lost, have_one, enter)
        number = trajectories.group_sum(enter.to(advantages.dtype))
        enter = enter & (number >= 2)[trajectories.groups]
        if self.settings.zero_variance != "as_is":
            signal = trajectories.group_sum(torch.where(enter, advantages.abs(), torch.zeros_like(advantages)))
            enter = enter & (signal > 0)[trajectories.groups]
        return enter, advantages

    def _among(self, inputs: LossInputs, survivors: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages of the survivors of a mask among themselves, and who then has one."""
        trajectories, options = inputs.trajectories, self.settings
        if trajectories.rewards is None:
            raise ValueError(f"objective {self.name} with correction: {options.correction} needs rewards; hand them in")
        kl = None
        if options.has_kl_in_reward:
            delta = inputs.old - inputs.required_reference
            kl = inputs.trajectory_sum(kl_estimate(options.kl_estimator, delta, torch.ones_like(delta))).tolist()
        rewards = zip(trajectories.rewards.tolist(), survivors.tolist(), strict=True)
        rows = StepRows(
            rewards=[reward if survives else None for reward, survives in rewards],
            group_ids=trajectories.groups.tolist(),
            trajectory_ids=list(range(len(survivors))),
            token_counts=[int(count) for count in inputs.trajectory_sum(inputs.mask.float()).tolist()],
            kl=kl,
            lengths=None if inputs.lengths is None else inputs.trajectory_lengths().tolist(),
        )
        found = self.advantages(rows)
        numbers = [0.0 if value is None else value for value in found]
        known = torch.tensor([value is not None for value in found], device=survivors.device)
        return trajectories.advantages.new_tensor(numbers), known


class GiftSettings(RegressionSettings):
    """Options of gift. The paper's form is anchor: reference with statistics: graph and std_floor: 0."""

    stale_correction: ClassVar[str] = "k3_mask"

    beta: float = Field(default=1.0, gt=0.0)
    """Factor of the normalised log-ratios. The loss does not fix their scale, so it is no weight of a KL."""
    statistics: Literal["detached", "graph"] = "detached"
    """Whether the group's mean and deviation of log-ratios are constants, or part of the gradient."""
    std_floor: float = Field(default=0.5, ge=0.0)
    """Nats: smallest deviation that log-ratios are divided by, and so how far one pass may spread a group. 0: none,
    as in the authors' code, whose first gradient after every rollout is then of size 1 / eps."""


class Gift(GroupRegression[GiftSettings]):
    """Squared distance of normalised log-ratios from normalised rewards.

    L = mean over trajectories of (A_i - beta (D_i - mean D) / (max(std D, std_floor) + eps))^2,
    D_i = sum_t m (lp - lp_anchor), A_i = (R_i - mean R) / (std R + eps); statistics over the group, with ddof.
    Groups of equal rewards have no gradient and stay in the denominator. Without the
    floor the first gradient after a rollout is of size 1 / eps, and anchored at the reference the loss is 0 at any tiny
    spread. Source: 2510.23868 and its authors' code.
    """

    name = "gift"
    Options: ClassVar[type[ObjectiveSettings]] = GiftSettings

    def loss(self, inputs: LossInputs) -> Tensor:
        enter, advantages = self.regressed(inputs)
        ratios = self.log_ratios(inputs)
        mean, std = self._statistics(inputs, ratios, enter)
        if self.settings.statistics == "detached":
            mean, std = mean.detach(), std.detach()
        scale = (std.clamp(min=self.settings.std_floor) + self.settings.eps).clamp(min=SMALLEST_STD)
        normalised = (ratios - mean[inputs.trajectories.groups]) / scale[inputs.trajectories.groups]
        losses = (advantages - self.settings.beta * normalised).square()
        total = torch.where(enter, losses, torch.zeros_like(losses)).sum()
        return total / max(inputs.denominators.trajectories, 1)

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Spread of the log-ratios within groups, in nats, and the share of groups that it is below the floor."""
        enter, _ = self.regressed(inputs)
        _, std = self._statistics(inputs, self.log_ratios(inputs), enter)
        groups = inputs.trajectories.group_sum(enter.to(std.dtype)) > 0
        metrics.mean("group_log_ratio_std", std, groups)
        metrics.mean("std_floor_share", std < self.settings.std_floor, groups)

    def _statistics(self, inputs: LossInputs, ratios: Tensor, enter: Tensor) -> tuple[Tensor, Tensor]:
        """[groups] mean and standard deviation over the trajectories that enter."""
        trajectories = inputs.trajectories
        clamped = torch.where(enter, ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), torch.zeros_like(ratios))
        number = trajectories.group_sum(enter.to(ratios.dtype))
        mean = trajectories.group_sum(clamped) / number.clamp(min=1.0)
        deviation = torch.where(enter, clamped - mean[trajectories.groups], torch.zeros_like(ratios))
        variance = trajectories.group_sum(deviation.square()) / (number - self.settings.ddof).clamp(min=1.0)
        spread = variance > 0
        return mean, torch.where(
            spread, torch.where(spread, variance, torch.ones_like(variance)).sqrt(), 0.0 * variance
        )
