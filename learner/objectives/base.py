"""The base of every objective: a scalar written as mathematics becomes coefficients dL/dlogprobs.

A subclass states ``name``, ``Options`` and a formula, ``loss`` or (``TokenObjective``) ``token_loss``; the base
filters, cleans, corrects, adds the KL and differentiates. The learner backpropagates ``sum(coefficients * logprobs)``.
With the advantages and denominators of the update handed in, losses and coefficients of its micro-batches add up
exactly to those of the whole, however it is cut. Nothing here knows a model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
from torch import Tensor

from learner.advantages import (
    Denominators,
    StepRows,
    pair_signs,
    step_advantages,
    step_denominators,
)
from learner.corrections import RULES, Correction, Drift, correct
from learner.kl import kl_estimate, reward_kl
from learner.objectives.batch import ObjectiveBatch
from learner.objectives.common_metrics import measure_groups, measure_ratios
from learner.objectives.inputs import LossInputs
from learner.objectives.masking import Mask
from learner.objectives.metrics import MetricCollector, MetricSums
from learner.objectives.settings import Aggregation, ObjectiveSettings, TokenSettings
from system.core.errors import ConfigError

LogprobKind = Literal["old", "reference", "rollout"]
Unit = Literal["row", "trajectory", "group"]
OptionsT = TypeVar("OptionsT", bound=ObjectiveSettings)
TokenOptionsT = TypeVar("TokenOptionsT", bound=TokenSettings)


@dataclass(frozen=True)
class ObjectiveResult:
    """What one batch contributes."""

    loss: float
    """This batch's share of the update's loss; shares add up."""
    coefficients: Tensor
    """[rows, T], dL/dlogprobs, of the log-probs' dtype and device; 0 where masked and on rows that take no part."""
    sums: MetricSums
    """Additive metrics of this batch."""

    @property
    def metrics(self) -> dict[str, float]:
        """``sums.means()``: ratio_mean, ess, clip_share, kl_reference and so on."""
        return self.sums.means()


@dataclass(frozen=True)
class StepPlan:
    """What a step computes once, over all its rows and ranks."""

    advantages: tuple[float | None, ...]
    """Per row, in order; None: the row takes no part, so its forward and backward pass can be skipped."""
    denominators: Denominators
    sums: MetricSums
    """zero_signal_share, too_few_scored, null_trajectories, advantage_abs_mean, rows_left_out; with a margin
    margin_kept_share, with a soft overlong penalty overlong_penalty_mean."""


class Objective(ABC, Generic[OptionsT]):
    """A function from log-probs to a scalar, and what it needs. Instances are immutable and safe to share."""

    name: ClassVar[str]
    Options: ClassVar[type[ObjectiveSettings]] = ObjectiveSettings
    coupling: Literal["completion", "group"] = "completion"
    """What the gradient mixes: ``completion`` can be cut anywhere, ``group`` needs whole groups in a batch, as it
    does with ``lone_responses: drop``."""
    needs_rewards: bool = True
    """False where ``advantages`` is overridden to do without them; null rewards leave the loss either way."""
    needs_teacher: ClassVar[bool] = False
    """Whether the reference must be another model than the policy at its start."""
    takes_pairs: ClassVar[bool] = False
    """Whether it learns from offline pairs (``LossInputs.pairs``) beside the run's own groups."""

    def __init__(self, settings: OptionsT) -> None:
        self.settings = settings
        if settings.lone_responses == "drop":
            self.coupling = "group"

    @abstractmethod
    def loss(self, inputs: LossInputs) -> Tensor:
        """The policy part of the loss, a scalar: this batch's share of the update's loss. KL terms are added to it."""

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Metrics of this objective beside the common ones; called without gradient."""

    @property
    def policy_needs(self) -> frozenset[LogprobKind]:
        """Log-probs the formula itself reads."""
        return frozenset({"old"})

    @property
    def kl_aggregation(self) -> tuple[Aggregation, int | None]:
        """How the KL per token is averaged, with max_tokens where that needs it."""
        return "sequence_mean_token_mean", None

    def check(self, group_size: int) -> None:
        """Refuses group sizes under which the objective cannot learn.

        Raises:
            ConfigError: with the mend.
        """
        if group_size < 2:
            raise ConfigError(
                f"rollout.group_size: {group_size}: objective {self.name} compares the completions of a prompt; "
                "set it to 2 or more"
            )

    def check_passes(self, epochs: int, minibatches: int) -> None:
        """Refuses more updates per step than the objective bears.

        Args:
            epochs: passes over the groups of a step.
            minibatches: updates per pass.
        Raises:
            ConfigError: with the mend.
        """

    @property
    def needs(self) -> frozenset[LogprobKind]:
        """Log-probs a batch should hold. ``old`` left out means the current ones, the others are required."""
        needed = set(self.policy_needs)
        if self.settings.correction == "bypass":
            needed -= {"old"}
        if self.settings.kl_coefficient > 0.0:
            needed |= {"reference"} if self.settings.kl_where == "loss" else {"reference", "old"}
        if self.settings.correction != "none":
            needed |= {"rollout"}
        return frozenset(needed)

    @property
    def unit(self) -> Unit:
        """The least that a batch must hold whole: a trajectory may have several rows, where it was cut in segments."""
        return "group" if self.coupling == "group" else "trajectory"

    @property
    def needs_logprobs_first(self) -> bool:
        """Whether ``prepare`` depends on the policy's log-probs, so that a pass without gradient comes before it."""
        return self.settings.has_kl_in_reward or self._survivors_differ

    @property
    def _survivors_differ(self) -> bool:
        rule = RULES.get(self.settings.correction)
        return self.settings.denominator == "survivors" and rule is not None and rule.masks

    def advantages(self, rows: StepRows) -> list[float | None]:
        """The advantage of every row the run sampled in a step, None where it takes no part."""
        return step_advantages(rows, **self.settings.advantage_options)

    def prepare(self, rows: StepRows) -> StepPlan:
        """Advantages, denominators and group metrics of a whole step.

        When a step has several updates, each divides by ``step_denominators`` of its own rows, with these advantages.
        """
        offline = rows.offline or [False] * len(rows)
        sampled, paired = ([index for index, flag in enumerate(offline) if flag == wanted] for wanted in (False, True))
        own = rows.select(sampled)
        advantages: list[float | None] = [None] * len(rows)
        for indices, values in ((sampled, self.advantages(own)), (paired, pair_signs(rows.select(paired)))):
            for index, value in zip(indices, values, strict=True):
                advantages[index] = value
        sums = measure_groups(own, [advantages[index] for index in sampled], self.settings)
        return StepPlan(tuple(advantages), step_denominators(rows, advantages), sums)

    def __call__(self, batch: ObjectiveBatch) -> ObjectiveResult:
        """Loss share, coefficients and metrics of a batch.

        Raises:
            ValueError: log-probs named by ``needs`` are missing, or neither rewards nor advantages are given.
        """
        with torch.inference_mode(False), torch.enable_grad():
            inputs, plan = self._inputs(batch)
            loss = self.loss(inputs)
            if self.settings.has_kl_in_loss:
                loss = loss + self.settings.kl_coefficient * inputs.aggregate(
                    kl_estimate(self.settings.kl_estimator, inputs.reference_log_ratio(), inputs.ratio),
                    *self.kl_aggregation,
                )
            coefficients = None
            if loss.requires_grad:
                (coefficients,) = torch.autograd.grad(loss, inputs.leaf, allow_unused=True)
            if coefficients is None:
                coefficients = torch.zeros_like(inputs.leaf, requires_grad=False)
        with torch.no_grad():
            collector = MetricCollector()
            collector.total("loss", loss)
            measure_ratios(inputs, collector)
            self.measure(inputs, collector)
            sums = collector.read()
        value = sums.totals.pop("loss")
        return ObjectiveResult(value, coefficients, sums if plan is None else sums + plan.sums)

    def surviving(self, batch: ObjectiveBatch) -> Denominators:
        """Counts under ``denominator: survivors``: what the correction keeps of this batch, advantages handed in.

        Tokens and completions of micro-batches add up; trajectories and groups do when none is split.
        """
        return self._inputs(batch)[0].denominators

    def _inputs(self, batch: ObjectiveBatch) -> tuple[LossInputs, StepPlan | None]:
        self._require(batch)
        device, dtype = batch.logprobs.device, _float_dtype(batch.logprobs)

        def given(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.detach().to(device, dtype)

        written = batch.mask.to(device)
        plan: StepPlan | None = None
        advantages = batch.advantages
        if advantages is None:
            kl = None
            if self.settings.has_kl_in_reward:
                assert batch.reference_logprobs is not None
                old = batch.logprobs if batch.old_logprobs is None else batch.old_logprobs
                kl = reward_kl(
                    old.to(device, dtype),
                    batch.reference_logprobs.to(device, dtype),
                    written,
                    self.settings.kl_estimator,
                )
            plan = self.prepare(batch.step_rows(kl))
            advantages = _as_tensor(plan.advantages)
        advantages = advantages.detach().to(device, dtype)
        part = ~advantages.isnan()
        if batch.rewards is not None:
            part = part & batch.rewards.to(device).isfinite()
        offline = torch.zeros_like(part) if batch.offline is None else batch.offline.to(device)
        trained = Mask(written if bool(part.all()) else written & part[:, None])
        tokens = trained if batch.offline is None else Mask(trained.where & ~offline[:, None])

        leaf, old, rollout = given(batch.logprobs), given(batch.old_logprobs), given(batch.rollout_logprobs)
        assert leaf is not None
        assert batch.trajectory_ids is not None
        leaf = (leaf.clone() if leaf.is_inference() else leaf).requires_grad_()
        if self.settings.correction == "bypass" and rollout is not None:
            old = rollout
        inputs = LossInputs(
            leaf=leaf,
            given_old=old,
            given_reference=given(batch.reference_logprobs),
            given_rollout=rollout,
            trained=trained,
            tokens=tokens,
            counted=tokens,
            advantages=torch.where(part, advantages, torch.zeros_like(advantages))[:, None],
            rewards=None if batch.rewards is None else batch.rewards.to(device, dtype),
            group_ids=batch.group_ids.to(device),
            trajectory_ids=batch.trajectory_ids.to(device),
            lengths=None if batch.lengths is None else batch.lengths.to(device),
            denominators=batch.denominators or Denominators(0, 0, 0, 0),
            correction=None,
        )
        correction = self._correct(inputs)
        counted = tokens
        if correction is not None and self.settings.denominator == "survivors":
            counted = Mask(correction.kept & tokens.where)
        inputs = replace(
            inputs,
            counted=counted,
            correction=correction,
            denominators=batch.denominators
            or _count(torch.where(offline[:, None], trained.where, counted.where), batch),
        )
        if batch.offline is None:
            return inputs, plan
        paired = Mask(trained.where & offline[:, None])
        return replace(inputs, pairs=replace(inputs, tokens=paired, counted=paired, correction=None)), plan

    @torch.no_grad()
    def _correct(self, inputs: LossInputs) -> Correction | None:
        options, sampler = self.settings, inputs.given_rollout
        if options.correction not in RULES or sampler is None:
            return None
        leaf = inputs.leaf.detach()
        drift = Drift(
            inputs.tokens.difference(leaf if inputs.given_old is None else inputs.given_old, sampler),
            inputs.tokens.difference(leaf, sampler),
            inputs.mask,
            inputs.advantages,
            inputs.group_ids,
            inputs.trajectory_ids,
        )
        drop_lone = options.lone_responses == "drop"
        return correct(options.correction, drift, options.correction_low, options.correction_high, drop_lone)

    def _require(self, batch: ObjectiveBatch) -> None:
        needed = set(self.needs)
        if self.settings.has_kl_in_reward and batch.advantages is not None:
            needed = needed - {"reference"} | self.policy_needs
        for kind, logprobs in (("reference", batch.reference_logprobs), ("rollout", batch.rollout_logprobs)):
            if kind in needed and logprobs is None:
                raise ValueError(f"objective {self.name} with these options needs {kind}_logprobs; hand them in")
        if batch.offline is not None and not self.takes_pairs and bool(batch.offline.any()):
            raise ValueError(f"objective {self.name} learns from no offline pairs; leave out rows with offline=True")
        if self.needs_rewards and batch.rewards is None and batch.advantages is None:
            raise ValueError(f"objective {self.name} needs rewards or advantages; hand in one of them")


class TokenObjective(Objective[TokenOptionsT]):
    """An objective that is a mean over tokens, cut anywhere."""

    Options: ClassVar[type[ObjectiveSettings]] = TokenSettings

    @property
    def unit(self) -> Unit:
        rule = RULES.get(self.settings.correction)
        by_row = super().unit == "trajectory" and (rule is None or rule.scope == "token")
        return "row" if by_row else super().unit

    @abstractmethod
    def token_loss(self, inputs: LossInputs) -> Tensor:
        """[rows, T], before correction and aggregation; values outside the mask do not matter."""

    def row_losses(self, inputs: LossInputs) -> Tensor:
        """[rows] sums of the token losses under correction and mask.

        An objective may override it with an equal form that takes fewer passes over memory.
        """
        return inputs.tokens.row_sums(inputs.corrected(self.token_loss(inputs)))

    def loss(self, inputs: LossInputs) -> Tensor:
        return inputs.aggregate_rows(self.row_losses(inputs), *self.kl_aggregation)

    @property
    def kl_aggregation(self) -> tuple[Aggregation, int | None]:
        return self.settings.aggregation, self.settings.max_tokens


AnyObjective = Objective[Any]


def _float_dtype(logprobs: Tensor) -> torch.dtype:
    return torch.float64 if logprobs.dtype == torch.float64 else torch.float32


def _as_tensor(advantages: Sequence[float | None]) -> Tensor:
    return torch.tensor([float("nan") if value is None else value for value in advantages], dtype=torch.float64)


def _count(counted: Tensor, batch: ObjectiveBatch) -> Denominators:
    rows = replace(batch, mask=counted.to(batch.mask.device)).step_rows()
    return step_denominators(rows, [0.0] * len(batch))
