"""The learning rate as a pure function of the settings and the number of the update."""

from __future__ import annotations

import math

from learner.settings import LearnerSettings
from system.core.errors import ConfigError


def learning_rate_at(settings: LearnerSettings, update: int, total_updates: int | None) -> float:
    """Learning rate of optimiser update ``update`` (the first is 0).

    Rises linearly over ``warmup_steps`` updates to the peak, which the last of them has; then stays, or falls to zero
    at ``total_updates`` along a line or half a cosine. Updates beyond ``total_updates`` keep the last value above zero.

    Raises:
        ConfigError: a falling schedule without ``total_updates``.
    """
    if update < settings.warmup_steps:
        return settings.learning_rate * (update + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.learning_rate
    if total_updates is None:
        raise ConfigError(f"learner.schedule: '{settings.schedule}' needs the number of updates of the run (run.steps)")
    falling = max(1, total_updates - settings.warmup_steps)
    done = min(update - settings.warmup_steps, falling - 1) / falling
    if settings.schedule == "linear":
        return settings.learning_rate * (1.0 - done)
    return settings.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))
