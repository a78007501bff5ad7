"""GSPO (2507.18071): the clipped ratio of a whole sequence, as the geometric mean of its tokens' ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from learner.objectives.base import Objective
from learner.objectives.grpo import clip_ratio, clipped_surrogate
from learner.objectives.inputs import LossInputs
from learner.objectives.metrics import MetricCollector
from learner.objectives.settings import TOKEN_CORRECTIONS, ClipWidth, ObjectiveSettings

LOWEST_LOG_RATIO, HIGHEST_LOG_RATIO = -20.0, 10.0
"""log s is clamped to this before exp, from above as verl does."""


class GspoSettings(ObjectiveSettings):
    """Options of gspo. Its clips are a thousand times narrower than those of tokens, as its ratio is their mean."""

    refused: ClassVar[dict[str, str]] = {
        "aggregation": "the loss is one of whole sequences",
        "dual_clip": "the ratio is clipped per sequence, without a dual clip",
    }
    refused_corrections: ClassVar[Mapping[str, str]] = {
        name: "gspo's ratio is that of a whole sequence, which weights of single tokens do not fit; "
        "use sequence_tis, sequence_mask, geometric_mask, k3_mask or opsm"
        for name in TOKEN_CORRECTIONS
    } | {
        "bypass": "the mismatch between engine and learner alone exceeds gspo's clip, so its anchor is recomputed; "
        "use sequence_tis or a sequence mask"
    }
    stale_correction: ClassVar[str] = "sequence_tis"

    clip_low: ClipWidth = 3e-4
    """The sequence ratio's gain ends at 1 - clip_low; null: never."""
    clip_high: ClipWidth = 4e-4
    """The sequence ratio's gain ends at 1 + clip_high; null: never."""


class Gspo(Objective[GspoSettings]):
    """Clipped surrogate of sequence ratios, mean over trajectories.

    L = (1/B) sum_i -min(s_i a_i, clip(s_i, 1 - low, 1 + high) a_i), s_i = exp((1/T_i) sum_t m (lp - lp_old)), with the
    advantages of GRPO. Source: 2507.18071.
    """

    name = "gspo"
    Options: ClassVar[type[ObjectiveSettings]] = GspoSettings

    def loss(self, inputs: LossInputs) -> Tensor:
        losses = clipped_surrogate(
            _ratio(inputs), inputs.trajectories.advantages, self.settings.clip_low, self.settings.clip_high
        )
        return inputs.corrected_trajectories(losses).sum() / max(inputs.denominators.trajectories, 1)

    def measure(self, inputs: LossInputs, metrics: MetricCollector) -> None:
        """Share of trajectories whose gradient the clip takes away."""
        ratio, advantages = _ratio(inputs).detach(), inputs.trajectories.advantages
        beyond = ratio - clip_ratio(ratio, self.settings.clip_low, self.settings.clip_high)
        metrics.mean("clip_share", beyond * advantages > 0, torch.ones_like(ratio, dtype=torch.bool))


def _ratio(inputs: LossInputs) -> Tensor:
    """[trajectories] s, the geometric mean of pi / pi_old over a trajectory's tokens."""
    mean = inputs.trajectory_log_ratio / inputs.trajectory_tokens
    return torch.exp(mean.clamp(LOWEST_LOG_RATIO, HIGHEST_LOG_RATIO))
