"""Settings of the stream between rollout workers and learner (recipe key ``stream:``)."""

from __future__ import annotations

from pydantic import Field

from system.core.settings import Settings


class StreamSettings(Settings):
    """How many groups a step takes, and how far generation may run ahead of it."""

    groups_per_step: int = Field(default=4, ge=1)
    """Groups that one learner step trains on."""
    max_staleness: int = Field(default=4, ge=0)
    """Most policy versions between a group's oldest token and the step that trains it; 0: synchronous training."""
    refill_limit: int = Field(default=8, ge=1)
    """A step gives up after ``refill_limit * groups_per_step`` groups in a row were filtered out."""

    @property
    def outstanding_groups(self) -> int:
        """Groups that may be issued and not yet trained or dropped."""
        return (self.max_staleness + 1) * self.groups_per_step
