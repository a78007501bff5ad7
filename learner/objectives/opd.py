"""On-policy distillation: the reference model is a teacher, and each token moves by how much likelier it finds it."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from learner.advantages import StepRows
from learner.objectives.base import LogprobKind, Unit
from learner.objectives.grpo import Grpo
from learner.objectives.inputs import LossInputs
from learner.objectives.metrics import MetricCollector
from learner.objectives.settings import ClippedSettings, ClipWidth, ObjectiveSettings


class OpdSettings(ClippedSettings):
    """Options of opd. The teacher is named by the recipe's reference.path and shares the policy's tokenizer."""

    clip_low: ClipWidth = None
    clip_high: ClipWidth = None
    level: Literal["token", "sequence"] = "token"
    """What moves a token: the teacher's log-ratio of itself (token), or the sum over its completion (sequence), the
    exact gradient of KL(pi || teacher) with more variance."""
    reward_weight: float = Field(default=0.0, ge=0.0)
    """Factor of the group advantage of the rewards, added to the teacher's; 0: rewards are not read."""


class Opd(Grpo):
    """Per-token reverse KL to a teacher, on the policy's own samples.

    L = token mean of -rho a, a_it = lp_teacher - lp_old (detached) + reward_weight A_i, rho = exp(lp - lp_old), with
    PPO's clip as an option. At level: sequence a_it is the sum over the completion. Learns from every completion, also
    of groups of equal rewards. Source: on-policy distillation with the reverse KL (GKD, 2306.13649).
    """

    name = "opd"
    needs_teacher = True
    Options: ClassVar[type[ObjectiveSettings]] = OpdSettings
    settings: OpdSettings

    def __init__(self, settings: OpdSettings) -> None:
        super().__init__(settings)
        self.needs_rewards = settings.reward_weight > 0.0

    @property
    def policy_needs(self) -> frozenset[LogprobKind]:
        return frozenset({"reference", "old"})

    @property
    def unit(self) -> Unit:
        return "trajectory" if self.settings.level == "sequence" and super().unit == "row" else super().unit

    def advantages(self, rows: StepRows) -> list[float | None]:
        """Of the rewards; 0 where they are not read, and where a completion has nothing to compare with."""
        rewards = list(rows.rewards)
        if not self.needs_rewards and all(reward is None for reward in rewards):
            return [0.0] * len(rows)
        keys = zip(rows.group_ids, rows.trajectory_ids, strict=True)
        scored = {key for key, reward in zip(keys, rewards, strict=True) if reward is not None}
        sizes = Counter(group for group, _ in scored)
        values: list[float | None] = []
        for value, group, reward in zip(super().advantages(rows), rows.group_ids, rewards, strict=True):
            read = value is not None and self.needs_rewards
            takes_part = value is not None or (reward is not None and sizes[group] == 1)
            values.append(value if read else 0.0 if takes_part else None)
        return values

    def row_losses(self, inputs: LossInputs) -> Tensor:
        options = self.settings
        if (options.clip_low, options.clip_high, options.dual_clip) != (None, None, None):
            return super().row_losses(inputs)
        inputs.noted["clipped"] = inputs.leaf.new_zeros(len(inputs.leaf))
        gains = self.token_advantages(inputs).mul_(inputs.ratio_values)
        return -inputs.sloped_rows(gains, inputs.unbounded(gains))

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Nats per token that the policy of the start is away from its teacher, and what the clip takes away."""
        metrics.mean_of("teacher_kl", inputs.noted["teacher_kl"], inputs.tokens.total)
        metrics.mean_of("clip_share", inputs.noted["clipped"], inputs.tokens.total)

    def token_advantages(self, inputs: LossInputs) -> Tensor:
        """[rows, T], 0 outside the mask; the caller's own."""
        teacher = inputs.log_ratio.detach() - inputs.reference_log_ratio().detach()  # log pi_teacher - log pi_old
        inputs.noted["teacher_kl"] = -teacher.sum(dim=1)
        if self.settings.level == "sequence":
            teacher = inputs.tokens.keep(inputs.of_trajectory(inputs.trajectory_sum(teacher)))
        if self.settings.reward_weight > 0.0:
            teacher.add_(inputs.tokens.keep(self.settings.reward_weight * inputs.advantages))
        return teacher
