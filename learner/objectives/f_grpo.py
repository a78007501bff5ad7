"""f-GRPO (2602.05946): each completion moves along a curve of an f-divergence, by the sign of its advantage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from learner.divergences import find_divergence
from learner.objectives.base import LogprobKind, Objective
from learner.objectives.inputs import LossInputs
from learner.objectives.metrics import MetricCollector
from learner.objectives.settings import ObjectiveSettings
from system.core.errors import ConfigError

SIDES: tuple[tuple[Literal["positive", "negative"], float], ...] = (("positive", 1.0), ("negative", -1.0))


class FGrpoSettings(ObjectiveSettings):
    """Options of f_grpo."""

    refused: ClassVar[dict[str, str]] = {
        "aggregation": "level chooses between whole completions (sequence) and tokens",
    }
    refused_corrections: ClassVar[Mapping[str, str]] = {
        "bypass": "it has no clipped ratio whose anchor could be the sampler; use token_tis or a sequence correction"
    }

    divergence: str = "pearson"
    """kl, kl_ratio_link, reverse_kl, pearson, pearson_polynomial, hellinger, hellinger_ratio_link, js, gan, tv, one of
    an installed package, or FILE.py:NAME."""
    beta: float = Field(default=0.1, gt=0.0)
    """Implicit reward per nat of log pi / pi_ref."""
    kappa: float | None = Field(default=None, gt=0.0)
    """Factor of the loss; null: 1 + 1 / beta."""
    gamma: float = Field(default=0.0, ge=0.0)
    """Implicit reward per nat of log pi / pi_old, as the authors' code adds it with 1 (and kappa 1)."""
    level: Literal["sequence", "token"] = "sequence"
    """The curve bends the sum over a completion (sequence), or each token by itself (token), where it hardly bends."""
    weights: Literal["none", "snis", "snis_paper"] = "none"
    """Self-normalised importance weights within each side of the mean: none, tempered and capped (snis), or as the
    paper has them, which sequences of different length make collapse (snis_paper)."""
    weight_temperature: float = Field(default=1.0, gt=0.0)
    """snis: divides reward - log pi_old per token before the softmax."""
    weight_cap: float = Field(default=4.0, gt=0.0)
    """snis: no weight exceeds weight_cap over the number of completions on its side."""


class FGrpo(Objective[FGrpoSettings]):
    """Variational bound of an f-divergence between good and bad completions.

    L = mean over prompts of (kappa / G) sum_i |a_i| w_i (-g(s_i) where a_i > 0, f*(g(s_i)) where a_i < 0),
    s_i = beta sum_t m (lp - lp_ref) + gamma sum_t m (lp - lp_old), with the advantages of GRPO. The exponentials in g
    and f* go on linearly beyond |s| = 10. At level: token the same of each token, mean over all tokens. Weights of
    tokens from a correction act on the gradient alone, since the curve bends whole sequences. Source: 2602.05946.
    """

    name = "f_grpo"
    Options: ClassVar[type[ObjectiveSettings]] = FGrpoSettings

    def __init__(self, settings: FGrpoSettings) -> None:
        super().__init__(settings)
        self.divergence = find_divergence(settings.divergence)
        if settings.weights != "none":
            self.coupling = "group"

    def __reduce__(self) -> Any:
        """A divergence may be made of functions that do not travel; the other process finds it by its name."""
        return type(self), (self.settings,)

    @property
    def policy_needs(self) -> frozenset[LogprobKind]:
        options = self.settings
        reads_old = options.gamma > 0.0 or options.weights != "none" or options.correction != "none"
        return frozenset({"reference", "old"}) if reads_old else frozenset({"reference"})

    def check_passes(self, epochs: int, minibatches: int) -> None:
        if epochs > 1 and self.settings.gamma == 0.0:
            raise ConfigError(
                f"learner.epochs_per_step: {epochs}: {self.name} with gamma 0 knows no policy of the start, so it is "
                "right for one pass; set it to 1, or objective.gamma: 1.0 (with kappa: 1.0) for a few passes"
            )

    def loss(self, inputs: LossInputs) -> Tensor:
        return self.sampled_loss(inputs)

    def sampled_loss(self, inputs: LossInputs) -> Tensor:
        """Of the groups that the policy sampled."""
        if self.settings.level == "token":
            return self.kappa * inputs.aggregate(inputs.corrected(self._token_losses(inputs)), "token_mean")
        trajectories = inputs.trajectories
        rewards = self._sequence_rewards(inputs)
        losses = self.bent(rewards, trajectories.advantages * self._importance(inputs))
        if inputs.correction is not None and inputs.correction.sequence_weights is not None:
            losses = inputs.corrected_trajectories(losses)
        elif inputs.correction is not None:
            losses = torch.where(inputs.kept_trajectories(), losses, torch.zeros_like(losses))
        share = losses / trajectories.sizes[trajectories.groups]
        return self.kappa * share.sum() / max(inputs.denominators.groups, 1)

    def bent(self, rewards: Tensor, advantages: Tensor) -> Tensor:
        """|a| (-g(r) where a > 0, f*(g(r)) where a < 0), elementwise; 0 where a = 0."""
        losses = torch.zeros_like(rewards)
        for side, sign in SIDES:
            here = (advantages * sign > 0).expand_as(rewards)
            curve = self.divergence.positive if side == "positive" else self.divergence.negative
            values = curve(torch.where(here, rewards, torch.zeros_like(rewards)))
            losses = torch.where(here, values, losses)
        return losses * advantages.abs()

    @property
    def kappa(self) -> float:
        return 1.0 + 1.0 / self.settings.beta if self.settings.kappa is None else self.settings.kappa

    @property
    def kl_aggregation(self) -> tuple[Any, int | None]:
        return ("token_mean" if self.settings.level == "token" else "sequence_mean_token_mean"), None

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Implicit rewards, and the share of completions (tokens) that a curve's linear continuation moves."""
        if self.settings.level == "token":
            rewards, advantages, counted = self._implicit(inputs, inputs.logprobs), inputs.advantages, inputs.mask
        else:
            rewards, advantages = self._sequence_rewards(inputs), inputs.trajectories.advantages
            counted = torch.ones_like(advantages, dtype=torch.bool)
        on_tangent = torch.zeros_like(counted)
        for side, sign in SIDES:
            on_tangent = on_tangent | (self.divergence.on_tangent(rewards, side) & (advantages * sign > 0))
        metrics.mean("implicit_reward_mean", rewards, counted)
        metrics.maximum("implicit_reward_abs_max", rewards.abs(), counted)
        metrics.mean("tangent_share", on_tangent, counted & (advantages != 0))
        if self.settings.weights != "none":
            trajectories = inputs.trajectories
            metrics.effective_share("weight_ess", self._importance(inputs), trajectories.advantages != 0)

    def _token_losses(self, inputs: LossInputs) -> Tensor:
        weights = self._importance(inputs)
        if self.settings.weights != "none":
            weights = inputs.of_trajectory(weights)
        return self.bent(self._implicit(inputs, inputs.logprobs), inputs.advantages * weights)

    def _sequence_rewards(self, inputs: LossInputs) -> Tensor:
        """[trajectories] s_i."""
        options, correction = self.settings, inputs.correction
        if correction is not None and correction.sequence_weights is None:
            return inputs.trajectory_sum(self._implicit(inputs, inputs.gradient_weighted))
        rewards = options.beta * inputs.trajectory_reference_log_ratio
        return rewards + options.gamma * inputs.trajectory_log_ratio if options.gamma > 0.0 else rewards

    def _implicit(self, inputs: LossInputs, logprobs: Tensor) -> Tensor:
        """[rows, T] implicit reward of each token."""
        options = self.settings
        rewards = options.beta * (logprobs - inputs.required_reference)
        return rewards + options.gamma * (logprobs - inputs.old) if options.gamma > 0.0 else rewards

    def _importance(self, inputs: LossInputs) -> Tensor:
        """[trajectories], or one for all."""
        options = self.settings
        if options.weights == "none":
            return inputs.advantages.new_ones(1)
        trajectories, logprobs = inputs.trajectories, inputs.trajectory_sum(inputs.old)
        if trajectories.rewards is None:
            raise ValueError(f"objective {self.name} with weights: {options.weights} needs rewards; hand them in")
        sides = 2 * trajectories.groups + (trajectories.advantages > 0)
        if options.weights == "snis_paper":
            return self_normalised_weights(trajectories.rewards, logprobs, sides)
        tokens = inputs.trajectory_sum(inputs.mask.to(logprobs.dtype)).clamp(min=1.0)
        weights = self_normalised_weights(trajectories.rewards, logprobs / tokens, sides, options.weight_temperature)
        return torch.minimum(weights, options.weight_cap / torch.bincount(sides).to(weights.dtype)[sides])


def self_normalised_weights(rewards: Tensor, logprobs: Tensor, sides: Tensor, temperature: float = 1.0) -> Tensor:
    """softmax over each side of (+-R - log pi_old) / temperature: +R above the group's mean, -R elsewhere (f-GRPO).

    Args:
        rewards: [n].
        logprobs: [n], log pi_old of each completion, or its mean over tokens.
        sides: [n] int64, 2 x group + (above the mean); completions of equal number share a softmax.
    Returns:
        [n], 1 in sum on every side.
    """
    exponents = (torch.where(sides % 2 == 1, rewards, -rewards).to(logprobs.dtype) - logprobs) / temperature
    count = int(sides.max()) + 1 if sides.numel() else 0
    highest = exponents.new_full((count,), -torch.inf).scatter_reduce(0, sides, exponents, "amax")
    weights = torch.exp(exponents - highest[sides])
    return weights / weights.new_zeros(count).index_add(0, sides, weights)[sides]
