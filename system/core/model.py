"""Which model: one path and dtype for learner, reference worker and engines."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from system.core.settings import Settings


class ModelSettings(Settings):
    """The starting policy, and the frozen reference."""

    path: str = Field(min_length=1)
    """A local folder in Hugging Face layout, or a hub id."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    lora: dict[str, Any] | None = None
