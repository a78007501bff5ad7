"""A divergence: Neyman's chi-squared, f(u) = (1 - u)^2 / u, with g(r) = 1 - exp(-r) and f*(t) = 2 - 2 sqrt(1 - t)."""

from __future__ import annotations

import torch

from learner.divergences import Divergence

NEYMAN = Divergence(
    "neyman",
    positive_loss=lambda r: torch.expm1(-r),
    negative_loss=lambda r: -2.0 * torch.expm1(-0.5 * r),
    summary="Neyman's chi-squared: hard on good completions that became unlikely, gentle on bad ones.",
    generator="(1 - u)^2 / u",
    link="1 - exp(-r)",
    conjugate="2 - 2 sqrt(1 - t) for t <= 1",
    formulas=("exp(-r) - 1", "2 - 2 exp(-r / 2)"),
)
