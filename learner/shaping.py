"""What becomes of a reward before the baseline, and which groups say enough to be learned from.

Pure functions of numbers. The penalty for long completions is added here, where token counts are known; which groups
carry signal is judged on the reward as it came, never on the shaped one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from system.core.errors import ConfigError


@dataclass(frozen=True)
class SoftOverlong:
    """The penalty added to the reward of long completions (DAPO, 2503.14476, eq. 13).

    Raises:
        ConfigError: ``cache_tokens`` is not in 1..max_tokens.
    """

    max_tokens: int
    """From here on the penalty is -1."""
    cache_tokens: int
    """The stretch below ``max_tokens`` over which it falls linearly from 0."""

    def __post_init__(self) -> None:
        if not 1 <= self.cache_tokens <= self.max_tokens:
            raise ConfigError(
                f"overlong_cache_tokens: {self.cache_tokens} must be in 1..{self.max_tokens} (overlong_max_tokens)"
            )

    def penalty(self, tokens: int) -> float:
        """Of a completion of ``tokens`` generated tokens, masked or not; in [-1, 0]."""
        beyond = tokens - (self.max_tokens - self.cache_tokens)
        return -min(max(beyond / self.cache_tokens, 0.0), 1.0)


def confident_margin(confidence: float, temperature: float) -> float:
    """The reward difference at which a Bradley-Terry preference sigma(difference / temperature) is sure enough.

    ``|2p - 1| >= confidence`` exactly when the difference is at least ``temperature ln((1 + c) / (1 - c))``.
    """
    return temperature * math.log((1.0 + confidence) / (1.0 - confidence))
