"""Settings of the data sources: where prompts come from, and how a row becomes a prompt.

``data:`` in a recipe is a list of these. A key that has no effect for the kind of source is refused, so that a
recipe never promises something that does not happen. ``named_sources`` gives every source its unique name, under
which rewards, metrics and records know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from system.core.errors import ConfigError
from system.core.settings import Settings

REASONING_GYM = "reasoning_gym"
HUGGINGFACE = "huggingface"

_ONLY_REASONING_GYM = ("task", "options")
_ONLY_HUGGINGFACE = ("dataset", "subset", "split")
_ONLY_TABLES = ("prompt_column", "label_column", "metadata_columns", "id_column")


class DataSourceSettings(Settings):
    """One source of prompts."""

    source: str = Field(min_length=1)
    """``reasoning_gym``, ``huggingface``, or the path of a ``.jsonl`` or ``.parquet`` file."""
    name: str | None = Field(default=None, min_length=1, pattern=r"^[^/\s]+$")
    """Unique in the recipe; default: the task, the file's stem or the data set's name."""
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of the prompts, relative to the other sources' weights. Quotas are exact."""
    limit: int | None = Field(default=None, gt=0)
    """Use only the first ``limit`` rows."""

    task: str | None = None
    """reasoning_gym: the task's name, for example ``chain_sum``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """reasoning_gym: the task's own options, and ``size`` (number of questions) and ``seed`` of its questions."""

    dataset: str | None = None
    """huggingface: the id of a data set on the hub, or a local folder."""
    subset: str | None = None
    """huggingface: the configuration of the data set, where it has several."""
    split: str = "train"
    """huggingface: which split."""

    prompt_column: str = "prompt"
    """Column with the question: text, or a list of chat messages ``{role, content}``."""
    label_column: str | None = None
    """Column whose value the reward is given as label, exactly as written; null: ``label`` where there is one."""
    metadata_columns: list[str] | None = None
    """Columns the reward is given as metadata, by name; null: the object in ``metadata`` where there is one."""
    id_column: str | None = None
    """Column with a stable id of the row; null: ``NAME/ROW``."""

    suffix: str = ""
    """Appended to the question (to the last user message of a chat)."""
    system_prompt: str | None = None
    """Put before the question as a system message; needs a chat template."""
    chat_template: dict[str, Any] | Literal[False] | None = None
    """Arguments for the model's chat template (may be ``{}``); ``false``: plain text; null: one if there is one."""
    max_prompt_tokens: int | None = Field(default=None, gt=0)
    """Longer prompts are skipped and counted; null: what the model's context leaves beside the completion."""

    @field_validator("chat_template", mode="before")
    @classmethod
    def _refuse_true(cls, value: Any) -> Any:
        if value is True:
            raise ValueError("true has no meaning here: give {} (apply the template), false (plain text) or null")
        return value

    @model_validator(mode="after")
    def _refuse_keys_without_effect(self) -> DataSourceSettings:
        if self.source == REASONING_GYM:
            self._refuse(_ONLY_HUGGINGFACE + _ONLY_TABLES)
            if self.task is None:
                raise ValueError("source reasoning_gym needs 'task', for example task: chain_sum")
        elif self.source == HUGGINGFACE:
            self._refuse(_ONLY_REASONING_GYM)
            if self.dataset is None:
                raise ValueError("source huggingface needs 'dataset': an id on the hub, or a local folder")
        else:
            self._refuse(_ONLY_REASONING_GYM + _ONLY_HUGGINGFACE)
        if self.system_prompt is not None and self.chat_template is False:
            raise ValueError("system_prompt needs a chat template, but chat_template is false")
        return self

    def _refuse(self, keys: Sequence[str]) -> None:
        kind = self.source if self.source in (REASONING_GYM, HUGGINGFACE) else f"file {self.source}"
        for key in keys:
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if getattr(self, key) != default:
                raise ValueError(f"'{key}' has no effect for source {kind}: leave it out")

    @property
    def derived_name(self) -> str:
        """The name of a source that was given none."""
        if self.source == REASONING_GYM:
            return str(self.task)
        where = self.dataset if self.source == HUGGINGFACE else self.source
        return PurePath(str(where)).stem.replace(" ", "_") or "data"


def named_sources(sources: Sequence[DataSourceSettings]) -> list[DataSourceSettings]:
    """The sources with their names filled in, each unique.

    Raises:
        ConfigError: no source at all, or two sources were given the same name.
    """
    if not sources:
        raise ConfigError("data: no source; a run needs at least one, for example {source: prompts.jsonl}")
    given = [source.name for source in sources if source.name is not None]
    for name in given:
        if given.count(name) > 1:
            raise ConfigError(f"data: two sources are named '{name}'; names must differ")
    taken = set(given)
    named = []
    for source in sources:
        if source.name is None:
            name, number = source.derived_name, 1
            while name in taken:
                number += 1
                name = f"{source.derived_name}-{number}"
            taken.add(name)
            source = source.model_copy(update={"name": name})
        named.append(source)
    return named
