"""The recipe: the rooms' settings composed, and those that belong to the run as a whole.

A recipe is frozen and complete: every default is filled in, so that writing it down and reading it again gives the
same run. What one part alone can know is checked by that part's settings; what only all of them together show is
checked in ``system.recipe.checks``.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from learner.settings import LearnerSettings, ReferenceSettings
from reward_service.settings import RewardSettings
from rollout_workers.settings import RolloutSettings
from system.core.errors import ConfigError
from system.core.model import ModelSettings
from system.core.settings import Settings
from system.prompts.settings import DataSourceSettings, named_sources
from system.stream_settings import StreamSettings


class RunSettings(Settings):
    """Which run this is, how long it is, and what is kept of it."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Default: the recipe file's name."""
    folder: str = Field(default="runs/run", min_length=1)
    """Everything of the run is in it. Default: ``runs/NAME``."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    steps: int = Field(ge=1)
    checkpoint_every_steps: int = Field(default=5, ge=1)
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints that are kept."""
    stall_s: float = Field(default=600.0, gt=0)
    """Longest time without progress before the run stops and says who waits for what."""


class ObjectiveSettings(Settings):
    """Which objective; every further key is an option of that objective."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(default="grpo", min_length=1)
    file: str | None = None
    """A Python file that defines the objective ``name``."""
    correction: str | None = None
    """Off-policy correction; null: the objective's own (``token_tis`` for most) where groups may be stale, else
    ``none``."""

    @property
    def options(self) -> dict[str, Any]:
        """The options to build the objective with."""
        correction = {} if self.correction is None else {"correction": self.correction}
        return {**correction, **(self.model_extra or {})}


class SyncSettings(Settings):
    """How new weights reach the engines."""

    backend: Literal["auto", "gloo", "nccl_checked", "nccl"] = "auto"
    """auto: ``nccl_checked`` (from GPU to GPU) where learners and rollout workers both have GPUs, else ``gloo``, which
    reaches engines on CPUs and GPUs. vLLM's own ``nccl`` is refused: it verifies nothing."""
    deadline_s: float = Field(default=60.0, gt=0)
    """Longest time for one weight sync."""
    bucket_bytes: int = Field(default=32 * 2**20, ge=1)
    """Weights travel in pieces of this size; a larger tensor travels alone."""
    probe: bool = True
    """Compare a probe prompt's log-probs of every engine with the learner's after each sync."""


class EvaluationSettings(Settings):
    """Evaluation during the run."""

    every_steps: int = Field(default=0, ge=0)
    """0: never."""

    @field_validator("every_steps")
    @classmethod
    def _not_yet(cls, every_steps: int) -> int:
        if every_steps:
            raise ValueError("evaluation during a run is not yet available: leave it at 0")
        return every_steps


class ThreadSettings(Settings):
    """CPU threads of one process of each role; null: what the machine has."""

    engine: str | None = None
    """Cores that an engine is bound to, as ``0-3`` or ``0,2``."""
    learner: int | None = Field(default=None, ge=1)
    reference: int | None = Field(default=None, ge=1)

    @field_validator("engine", mode="before")
    @classmethod
    def _cores(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", value):
            raise ValueError("cores are written as 0-3 or 0,2")
        return value


class PlacementSettings(Settings):
    """What each process asks of the cluster; null GPUs: one where there are GPUs, none elsewhere."""

    gpus_per_rollout_worker: int | None = Field(default=None, ge=0)
    gpus_per_learner_worker: int | None = Field(default=None, ge=0)
    gpus_per_reference_worker: int | None = Field(default=None, ge=0)
    threads: ThreadSettings = Field(default_factory=ThreadSettings)


class LogSettings(Settings):
    """Where metrics go beside ``metrics.jsonl``."""

    tensorboard: bool = True
    wandb: dict[str, Any] | None = None
    """Arguments of ``wandb.init``; null: off. The key comes from the environment (``WANDB_API_KEY``)."""
    mlflow: dict[str, Any] | None = None
    """``tracking_uri``, ``experiment_name``; null: off."""


class Recipe(Settings):
    """Everything a run is made of."""

    run: RunSettings
    model: ModelSettings
    data: tuple[DataSourceSettings, ...] = Field(min_length=1)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    rewards: tuple[RewardSettings, ...] = Field(min_length=1)
    reference: ReferenceSettings = Field(default_factory=ReferenceSettings)
    stream: StreamSettings = Field(default_factory=StreamSettings)
    objective: ObjectiveSettings = Field(default_factory=ObjectiveSettings)
    learner: LearnerSettings = Field(default_factory=LearnerSettings)
    sync: SyncSettings = Field(default_factory=SyncSettings)
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    placement: PlacementSettings = Field(default_factory=PlacementSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    @model_validator(mode="after")
    def _fill_in(self) -> Recipe:
        """Names of data sources, and the off-policy correction that staleness and group size ask for."""
        object.__setattr__(self, "data", tuple(named_sources(self.data)))
        object.__setattr__(self, "objective", self._completed_objective())
        return self

    def _completed_objective(self) -> ObjectiveSettings:
        from learner.objectives import ObjectiveSettings as ObjectiveOptions
        from learner.objectives import objective_class

        chosen = self.objective
        try:
            options = objective_class(chosen.name, chosen.file).Options
        except ConfigError:  # the recipe's check says what is wrong with it
            options = ObjectiveOptions
        added = options.recipe_defaults(chosen.options, self.rollout.group_size, self.stream.max_staleness)
        return chosen.model_copy(update=added)
