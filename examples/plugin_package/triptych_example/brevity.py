"""A reward: 1 for an empty answer, falling to 0 at ``longest`` tokens."""

from __future__ import annotations


def brevity(completion: str, *, completion_tokens: int, longest: int = 512) -> float:
    """Share of ``longest`` that the completion leaves unused."""
    return max(0.0, 1.0 - completion_tokens / longest)
