"""What a rollout worker spends its time on, each second counted once.

Several things run at the same time; the clock runs for the one that stands first in ``ACTIVITIES``. So the seconds of
all kinds add up to the time since the meter was made. Pure: the time comes with every call.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

Activity = Literal["sync", "generate", "reward", "reference", "idle"]

ACTIVITIES: tuple[Activity, ...] = ("sync", "generate", "reward", "reference", "idle")


class ActivityMeter:
    """Cumulative exclusive seconds by kind."""

    def __init__(self, now_s: float) -> None:
        self._counted_to_s = now_s
        self._running: Counter[Activity] = Counter()
        self._seconds: dict[Activity, float] = dict.fromkeys(ACTIVITIES, 0.0)

    def enter(self, activity: Activity, now_s: float) -> None:
        """One more of ``activity`` runs from now on."""
        self._count(now_s)
        self._running[activity] += 1

    def leave(self, activity: Activity, now_s: float) -> None:
        """One of ``activity`` ended."""
        self._count(now_s)
        if self._running[activity] < 1:
            raise ValueError(f"left '{activity}' more often than it was entered")
        self._running[activity] -= 1

    def seconds(self, now_s: float) -> dict[str, float]:
        """Seconds of every kind up to now; they sum to the meter's age."""
        self._count(now_s)
        return {str(activity): seconds for activity, seconds in self._seconds.items()}

    def _count(self, now_s: float) -> None:
        current: Activity = next((activity for activity in ACTIVITIES if self._running[activity] > 0), "idle")
        self._seconds[current] += max(0.0, now_s - self._counted_to_s)
        self._counted_to_s = max(now_s, self._counted_to_s)
