"""When engine and learner disagree too much about the probe prompt. Pure.

In float32 the limit is absolute. In bf16 two correct implementations differ, so the mean gap of the run's first
verified sync is the yardstick, and three times that is a failure; an engine that is rebuilt later is held against the
same yardstick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from system.core.errors import SyncFailed

FLOAT32_LIMIT_NATS = 1e-4
"""Largest difference of a probe token's log-prob in float32, engine against learner."""
YARDSTICK_FACTOR = 3.0
YARDSTICK_FLOOR_NATS = 0.02
"""In bf16 two correct implementations differ by about 0.03 nat on average; a gap below the floor is never a failure."""


class ProbeDisagrees(SyncFailed):
    """The weights in an engine are not those that the learner has, though every byte arrived."""


@dataclass(frozen=True)
class ProbeLimit:
    """``yardstick`` is None in float32, and until it has been measured."""

    float32: bool
    yardstick: float | None = None

    def verdict(self, gaps: np.ndarray) -> str | None:
        """None when the gaps are fine, else why not."""
        if not np.isfinite(gaps).all():
            return "a probe log-prob is not a finite number"
        if self.float32:
            worst = float(gaps.max())
            return None if worst <= FLOAT32_LIMIT_NATS else f"largest gap {worst:.2e} nat, limit {FLOAT32_LIMIT_NATS:g}"
        if self.yardstick is None:
            return None
        limit = YARDSTICK_FACTOR * max(self.yardstick, YARDSTICK_FLOOR_NATS)
        mean = float(gaps.mean())
        return None if mean <= limit else f"mean gap {mean:.3f} nat, limit {limit:.3f} (3 x the first sync's)"

    def gaps(self, answered: Sequence[float], expected: Sequence[float]) -> np.ndarray:
        """Absolute differences per token, in nats.

        Raises:
            ProbeDisagrees: another number of tokens, or above the limit.
        """
        if len(answered) != len(expected):
            raise ProbeDisagrees(f"the probe has {len(answered)} log-probs, the learner's {len(expected)}")
        gaps = np.abs(np.asarray(answered, dtype=np.float64) - np.asarray(expected, dtype=np.float64))
        problem = self.verdict(gaps)
        if problem is not None:
            raise ProbeDisagrees(f"the weights that arrived are not the learner's: {problem}")
        return gaps

    def measured(self, gaps: Sequence[np.ndarray]) -> ProbeLimit:
        """The limit after a sync with these gaps, one array per engine: the first one in bf16 sets the yardstick."""
        if self.float32 or self.yardstick is not None or not gaps:
            return self
        return ProbeLimit(False, max(float(gap.mean()) for gap in gaps))
