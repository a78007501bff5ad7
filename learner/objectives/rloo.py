"""RLOO (2402.14740): REINFORCE on whole completions, each against the mean of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from learner.objectives.base import LogprobKind, TokenObjective
from learner.objectives.inputs import LossInputs
from learner.objectives.settings import Aggregation, ObjectiveSettings, TokenSettings
from system.core.errors import ConfigError


class RlooSettings(TokenSettings):
    """Options of rloo. The paper's KL is kl_where: reward with kl_estimator: k1."""

    refused_corrections: ClassVar[Mapping[str, str]] = {
        "bypass": "rloo has no ratio whose anchor could be the sampler; use token_tis or a sequence correction"
    }

    advantage: str = "leave_one_out"
    aggregation: Aggregation = "sequence_sum"


class Rloo(TokenObjective[TokenSettings]):
    """Log-prob of the completion times the advantage over the others.

    L = -(1/B) sum_i a_i sum_t m lp, a_i = R_i - mean of R_j, j != i. On-policy: further passes need a correction,
    whose ratio then is that of the current policy to the sampler. Source: 2402.14740.
    """

    name = "rloo"
    Options: ClassVar[type[ObjectiveSettings]] = RlooSettings

    @property
    def policy_needs(self) -> frozenset[LogprobKind]:
        return frozenset()

    def token_loss(self, inputs: LossInputs) -> Tensor:
        return -inputs.advantages * inputs.logprobs

    def row_losses(self, inputs: LossInputs) -> Tensor:
        slopes = inputs.tokens.keep(-inputs.advantages)
        return inputs.sloped_rows(inputs.tokens.keep_(slopes * inputs.leaf.detach()), slopes)

    def check_passes(self, epochs: int, minibatches: int) -> None:
        if epochs * minibatches > 1 and self.settings.correction == "none":
            raise ConfigError(
                f"learner.epochs_per_step {epochs} x learner.minibatches_per_step {minibatches}: rloo without a ratio "
                "is right for one update per step; set both to 1, or objective.correction: token_tis"
            )
