"""Options of objectives: frozen, checked when made, every default visible in the plan.

``ObjectiveSettings`` holds what all objectives share (advantage, filters, KL, correction); ``TokenSettings`` adds how
token losses are averaged, ``ClippedSettings`` the clip of a probability ratio. An objective subclasses one of them and
changes defaults, with the types of this module, which carry the limits. An option that has no effect beside the others
is refused, as is one that cannot be right.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from learner import advantages, corrections
from learner.advantages import ZeroVariance
from learner.kl import KlEstimator
from system.core.errors import nearest
from system.core.settings import Settings

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_sum", "sequence_sum_norm"]
ClipWidth = Annotated[float, Field(ge=0.0)] | None
DualClip = Annotated[float, Field(gt=1.0)] | None


class ObjectiveSettings(Settings):
    """Options that every objective has."""

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    refused: ClassVar[dict[str, str]] = {}
    """Options people will look for in vain, with what to write instead."""

    advantage: str = "group_zscore"
    """group_zscore, group_mean, leave_one_out or batch_whitened."""
    ddof: Literal[0, 1] = 1
    """Degrees of freedom taken off in the group's standard deviation."""
    eps: float = Field(default=1e-6, ge=0.0)
    """Added to the group's standard deviation; 0 is legal."""
    unbiased_variance: bool = True
    """Variance of batch_whitened: unbiased (verl), or biased (OpenRLHF)."""
    zero_variance: ZeroVariance = "keep"
    """Groups of equal rewards: zero advantage but counted (keep), left out (drop), left out and replaced by new
    prompts (refill), or not treated at all (as_is)."""
    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference model."""
    kl_estimator: KlEstimator = "k3"
    """k2, k3 or k3_weighted in the loss; k1 in the reward."""
    kl_where: Literal["loss", "reward"] = "loss"
    """Whether the KL is added to the loss, or taken off the reward before the baseline."""
    correction: str = "none"
    """Off-policy correction of tokens sampled by older weights: none or token_tis."""
    correction_low: float | None = Field(default=None, gt=0.0)
    """Lower bound on the ratio between the policy and the sampler, where the correction has one."""
    correction_high: float | None = Field(default=None, gt=0.0)
    """Upper bound on that ratio, where the correction has one (token_tis: 2.0)."""
    denominator: Literal["kept_all", "survivors"] = "kept_all"
    """Whether tokens that a correction masks stay in the denominator."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """An option whose default a subclass changes keeps its documentation."""
        for name, option in cls.model_fields.items():
            for parent in cls.__mro__[1:]:
                if option.description is None and issubclass(parent, Settings) and name in parent.model_fields:
                    option.description = parent.model_fields[name].description

    @model_validator(mode="before")
    @classmethod
    def _fill_bounds(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = values.get("correction", cls.model_fields["correction"].default)
        rule = corrections.RULES.get(name) if isinstance(name, str) else None
        if rule is None:
            return values
        filled = dict(values)
        for key, default in (("correction_low", rule.low), ("correction_high", rule.high)):
            if filled.get(key) is None and default is not None:
                filled[key] = default
        return filled

    @field_validator("advantage")
    @classmethod
    def _known_advantage(cls, name: str) -> str:
        return _choice(name, advantages.ESTIMATORS, advantages.ANNOUNCED, "advantage")

    @field_validator("correction")
    @classmethod
    def _known_correction(cls, name: str) -> str:
        return _choice(name, corrections.available_corrections(), corrections.ANNOUNCED, "correction")

    @model_validator(mode="after")
    def _consistent(self) -> ObjectiveSettings:
        rule = corrections.RULES.get(self.correction)
        for key, used in (
            ("correction_low", rule is not None and rule.low is not None),
            ("correction_high", rule is not None and rule.high is not None),
        ):
            if getattr(self, key) is not None and not used:
                raise ValueError(f"{key} has no effect with correction: {self.correction}; leave it out")
        if not self.unbiased_variance and self.advantage != "batch_whitened":
            raise ValueError(
                f"unbiased_variance has no effect with advantage: {self.advantage}; leave it out, "
                "or use advantage: batch_whitened"
            )
        if self.kl_where == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator: k1 in the loss has zero expected gradient; "
                "use k2, k3 or k3_weighted, or put k1 in the reward (kl_where: reward)"
            )
        if self.kl_where == "reward" and self.kl_estimator != "k1":
            raise ValueError(
                f"kl_estimator: {self.kl_estimator} is biased in the reward; use kl_estimator: k1 with kl_where: reward"
            )
        if "kl_coefficient" not in self.model_fields_set and self.kl_coefficient == 0.0:
            for key in ("kl_estimator", "kl_where"):
                if key in self.model_fields_set:
                    raise ValueError(f"{key} has no effect while kl_coefficient is 0; set kl_coefficient")
        return self

    @property
    def has_kl_in_loss(self) -> bool:
        return self.kl_coefficient > 0.0 and self.kl_where == "loss"

    @property
    def has_kl_in_reward(self) -> bool:
        return self.kl_coefficient > 0.0 and self.kl_where == "reward"


class TokenSettings(ObjectiveSettings):
    """Options of objectives that are a mean over tokens."""

    aggregation: Aggregation = "token_mean"
    """token_mean; or per completion: sequence_mean_token_mean, sequence_sum, sequence_sum_norm (sum / max_tokens)."""
    max_tokens: int | None = Field(default=None, ge=1)
    """The constant length that sequence_sum_norm divides by: the longest completion the recipe allows."""

    @model_validator(mode="after")
    def _max_tokens_with_its_aggregation(self) -> TokenSettings:
        if self.aggregation == "sequence_sum_norm" and self.max_tokens is None:
            raise ValueError("aggregation: sequence_sum_norm divides by max_tokens; set it to rollout.max_tokens")
        if self.aggregation != "sequence_sum_norm" and self.max_tokens is not None:
            raise ValueError(f"max_tokens has no effect with aggregation: {self.aggregation}; leave it out")
        return self


class ClippedSettings(TokenSettings):
    """Options of objectives with a clipped probability ratio."""

    clip_low: ClipWidth = 0.2
    """The ratio's gain ends at 1 - clip_low; null: never."""
    clip_high: ClipWidth = 0.2
    """The ratio's gain ends at 1 + clip_high; null: never."""
    dual_clip: DualClip = None
    """For negative advantages the loss is at most dual_clip x |advantage|; null: unbounded."""


def _choice(name: str, available: Any, announced: tuple[str, ...], what: str) -> str:
    if name in available:
        return name
    if name in announced:
        raise ValueError(f"{what} '{name}' is not yet available; available: {', '.join(available)}")
    raise ValueError(f"unknown {what} '{name}'{nearest(name, available)}")
