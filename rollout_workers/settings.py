"""What a recipe's ``rollout:`` section sets: how completions are sampled, and how the engines run.

Everything that would make the sampler's log-probs differ from the learner's is refused here, with the reason.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from system.core.settings import Settings

OWNED_ENGINE_OPTIONS: dict[str, str] = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "model.dtype",
    "tensor_parallel_size": "rollout.tensor_parallel",
    "max_num_seqs": "rollout.max_running_requests",
    "kv_cache_memory_bytes": "rollout.kv_cache_bytes",
    "logprobs_mode": "nothing: training needs the log-probs after temperature",
    "weight_transfer_config": "sync.backend",
    "generation_config": "nothing: stop tokens come from the model's folder",
}
"""vLLM engine arguments that Triptych sets, and where a recipe sets them instead."""


class RolloutSettings(Settings):
    """Sampling, deadlines and the engines of the rollout workers."""

    workers: int = Field(default=1, ge=0)
    """Rollout workers, each with an engine of its own; 0 pauses generation."""
    group_size: int = Field(default=8, ge=1)
    """Completions per prompt."""
    max_tokens: int = Field(default=1024, ge=1)
    """Longest completion, the stop token included."""
    temperature: float = Field(default=1.0, le=2.0)
    top_p: float = 1.0
    top_k: int = -1
    deadline_s: float = Field(default=600.0, gt=0)
    """A group that is not handed in this long after it was leased is given up and issued again."""
    attempts: int = Field(default=3, ge=1)
    """How often one completion is tried while its engine lives."""
    sync_mode: Literal["keep", "wait", "abort"] = "keep"
    """What running requests do during a weight sync. ``keep``: they freeze, then go on under the new version."""
    kv_cache: Literal["exact", "stale"] = "exact"
    """``exact``: running requests are prefilled again under the new weights, so that every log-prob is exact under the
    version its token carries. ``stale`` keeps the old keys and values: cheaper for long contexts, and not exact."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs of one engine."""
    max_running_requests: int = Field(default=64, ge=1)
    """Completions an engine generates at once; also how much work a worker leases."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """Memory for keys and values per engine process. Default: 1 GiB without a GPU, vLLM's own choice with one."""
    start_deadline_s: float = Field(default=600.0, gt=0)
    """How long an engine may take to start."""
    restarts: int = Field(default=3, ge=0)
    """How often a worker that was lost is built again, each worker for itself."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of vLLM's ``EngineArgs``, passed through."""

    @field_validator("temperature")
    @classmethod
    def _temperature_samples(cls, value: float) -> float:
        if value < 0.01:
            raise ValueError("must be at least 0.01: at 0 nothing is sampled, and there is nothing to learn from")
        return value

    @field_validator("top_p")
    @classmethod
    def _top_p_is_off(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(
                "must be 1.0 in training: a truncating sampler renormalises its log-probs, the learner's would differ"
            )
        return value

    @field_validator("top_k")
    @classmethod
    def _top_k_is_off(cls, value: int) -> int:
        if value not in (-1, 0):
            raise ValueError(
                "must be -1 in training: a truncating sampler renormalises its log-probs, the learner's would differ"
            )
        return value

    @field_validator("sync_mode")
    @classmethod
    def _sync_mode_is_there(cls, value: str) -> str:
        if value != "keep":
            raise ValueError(f"'{value}' is not available yet; use 'keep'")
        return value

    @field_validator("engine")
    @classmethod
    def _engine_leaves_ours_alone(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if name in OWNED_ENGINE_OPTIONS:
                raise ValueError(f"'{name}' is set by {OWNED_ENGINE_OPTIONS[name]}")
        return value

    @model_validator(mode="after")
    def _one_group_fits(self) -> RolloutSettings:
        if self.max_running_requests < self.group_size:
            raise ValueError(
                f"max_running_requests {self.max_running_requests} is smaller than group_size {self.group_size}: "
                "an engine could not take one group"
            )
        return self
