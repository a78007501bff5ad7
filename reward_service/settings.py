"""The recipe's ``rewards:`` list: which function judges, with what weight, for how long. One entry per reward."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from reward_service.functions import FILE_USE
from reward_service.verifiers import check_options, is_verifier, verifier_names
from system.core.errors import ConfigError, nearest
from system.core.settings import Settings


class RewardSettings(Settings):
    """One reward. The reward of a completion is the weighted sum over all entries that apply to its data source."""

    name: str
    """Names the reward in ``reward_parts``, logs and errors; unique in the recipe."""
    use: str
    """A verifier's name (``triptych list rewards``), or ``FILE.py:function``, relative to the working folder."""
    weight: float = 1.0
    """Factor in the sum. 0: logged only, and its failures do not count."""
    deadline_s: float = Field(default=10.0, gt=0, le=3600)
    """How long one completion may be judged (by a group function: the group). Waiting for a process does not count."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the verifier or function as keyword arguments."""
    workers: int = Field(default=2, ge=1, le=256)
    """Processes at most; they start when there is work for them. Each judges one group, or part of one, at a time."""
    start_deadline_s: float = Field(default=60.0, gt=0, le=3600)
    """How long a process may take to start and to import the function."""
    outage_s: float = Field(default=60.0, ge=0)
    """How long scoring waits for processes that cannot be started before ``on_outage`` applies."""
    on_outage: Literal["fail", "skip"] = "fail"
    """``fail`` ends the run, naming the reward; ``skip`` gives null rewards until it works again."""
    sources: tuple[str, ...] | None = None
    """Names of the data sources this reward applies to; None: all."""

    @field_validator("name")
    @classmethod
    def _name_is_a_word(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise ValueError("a reward's name consists of letters, digits, '_', '.' and '-'")
        return name

    @field_validator("weight")
    @classmethod
    def _weight_is_finite(cls, weight: float) -> float:
        if not math.isfinite(weight):
            raise ValueError("the weight must be a finite number")
        return weight

    @field_validator("use")
    @classmethod
    def _use_is_known(cls, use: str) -> str:
        if re.match(r"[a-z]+://", use):
            raise ValueError("reward services by URL are not yet available; use a verifier's name or FILE.py:function")
        if FILE_USE.fullmatch(use):
            return use
        if ".py" in use:
            raise ValueError("name the function in the file, as FILE.py:function")
        if not is_verifier(use):
            raise ValueError(f"no verifier of this name{nearest(use, verifier_names())}, or use FILE.py:function")
        return use

    @model_validator(mode="after")
    def _options_are_known(self) -> RewardSettings:
        if not FILE_USE.fullmatch(self.use):
            check_options(self.use, self.options)
        return self

    def applies_to(self, source: str) -> bool:
        """Whether completions of the data source ``source`` are judged by this reward."""
        return self.sources is None or source in self.sources


def check_reward_list(rewards: Sequence[RewardSettings], sources: Sequence[str]) -> None:
    """Checks what only the whole list shows.

    Args:
        sources: names of the recipe's data sources.

    Raises:
        ConfigError: two rewards of one name, a reward for an unknown source, a source that no weighted reward judges.
    """
    names = [reward.name for reward in rewards]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ConfigError(f"rewards: several entries are named '{doubled[0]}'; give each reward a name of its own")
    for index, reward in enumerate(rewards):
        for source in reward.sources or ():
            if source not in sources:
                raise ConfigError(f"rewards.{index}.sources: no data source '{source}'{nearest(source, sources)}")
    for source in sources:
        if not any(reward.weight != 0 and reward.applies_to(source) for reward in rewards):
            raise ConfigError(
                f"rewards: nothing judges the data source '{source}'; add an entry with a weight other than 0"
            )
