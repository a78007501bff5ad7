"""IPO (2310.12036): the margin between better and worse completion is regressed on a constant."""

from __future__ import annotations

from torch import Tensor

from learner.objectives.online_dpo import PairObjective


class Ipo(PairObjective):
    """Squared distance of the margin from 1 / (2 beta) nats, between the best and the worst completion of a prompt.

    L = mean over prompts of (D_w - D_l - 1 / (2 beta))^2, D_i = sum_t m (lp - lp_ref). Groups of equal rewards have no
    preference and no gradient. Source: 2310.12036.
    """

    name = "ipo"

    def margin_loss(self, margins: Tensor) -> Tensor:
        return (margins - 0.5 / self.settings.beta).square()
