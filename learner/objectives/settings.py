"""Options of objectives: frozen, checked when made, every default visible in the plan.

``ObjectiveSettings`` holds what all objectives share (advantage, filters, shaping, KL, correction); ``TokenSettings``
adds how token losses are averaged, ``ClippedSettings`` the clip of a probability ratio. An objective subclasses one of
them and changes defaults, with the types of this module, which carry the limits. An option that has no effect beside
the others is refused, as is one that cannot be right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from learner import advantages, corrections
from learner.advantages import Scale, ZeroVariance
from learner.kl import KlEstimator
from learner.shaping import SoftOverlong, confident_margin
from system.core.errors import ConfigError, nearest
from system.core.settings import Settings

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_sum", "sequence_sum_norm"]
ClipWidth = Annotated[float, Field(ge=0.0)] | None
DualClip = Annotated[float, Field(gt=1.0)] | None
MaxTokens = Annotated[int, Field(ge=1)] | None

TOKEN_CORRECTIONS = tuple(name for name, rule in corrections.RULES.items() if rule.scope == "token")
"""Those that weigh tokens one by one."""


class ObjectiveSettings(Settings):
    """Options that every objective has."""

    model_config = ConfigDict(use_attribute_docstrings=True, allow_inf_nan=False)

    refused: ClassVar[dict[str, str]] = {}
    """Options people will look for in vain, with what to write instead."""
    refused_corrections: ClassVar[Mapping[str, str]] = {}
    """Corrections that do not go with this objective, with the reason and the mend."""
    stale_correction: ClassVar[str] = "token_tis"
    """The correction of a recipe that names none while its groups may be stale."""

    advantage: str = "group_zscore"
    """group_zscore, group_mean, leave_one_out, batch_whitened, soft_margin (tanh) or probit (erf)."""
    ddof: Literal[0, 1] = 1
    """Degrees of freedom taken off in the group's standard deviation (group_zscore)."""
    eps: float = Field(default=1e-6, ge=0.0)
    """Added to the group's standard deviation (group_zscore); 0 is legal."""
    reward_std_floor: float = Field(default=0.0, ge=0.0)
    """Noise of the reward, added in quadrature to the group's standard deviation (group_zscore)."""
    reward_temperature: float | None = Field(default=None, gt=0.0)
    """Scale of a Bradley-Terry preference, fitted on held-out pairs: of soft_margin and of margin_confidence."""
    reward_noise: float | None = Field(default=None, gt=0.0)
    """Standard deviation of the noise of one reward: of probit."""
    unbiased_variance: bool = True
    """Variance of batch_whitened: unbiased (verl), or biased (OpenRLHF)."""
    zero_variance: ZeroVariance = "keep"
    """Groups of equal rewards: zero advantage but counted (keep), left out (drop), left out and replaced by new
    prompts (refill), or not treated at all (as_is)."""
    margin: float | None = Field(default=None, gt=0.0)
    """Groups whose rewards differ by less are treated as equal."""
    margin_confidence: float | None = Field(default=None, gt=0.0, lt=1.0)
    """The same by a preference's confidence |2p - 1|: margin = reward_temperature ln((1 + c) / (1 - c)); 0.2 is
    usual."""
    overlong_max_tokens: int | None = Field(default=None, ge=1)
    """Soft overlong penalty: completions of this many tokens lose 1 of their reward (DAPO)."""
    overlong_cache_tokens: int | None = Field(default=None, ge=1)
    """The penalty grows linearly over this many tokens before overlong_max_tokens."""
    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference model."""
    kl_estimator: KlEstimator = "k3"
    """In the loss k2, k3 or k3_weighted (k2 and k3_weighted have the gradient of the reverse KL); in the reward k1,
    the others are biased there."""
    kl_where: Literal["loss", "reward"] = "loss"
    """Whether the KL is added to the loss, or taken off the reward before the baseline."""
    k1_for_comparison: bool = False
    """Allows k1 in the loss, which has zero expected gradient on-policy, for runs that compare with it."""
    correction: str = "none"
    """Off-policy correction of what older weights sampled: none, decoupled, token_tis, icepop, sequence_tis,
    sequence_mask, geometric_mask, k3_mask, opsm or bypass."""
    correction_low: float | None = Field(default=None, gt=0.0)
    """Lower bound on the ratio between the policy and the sampler (icepop, sequence_mask 0.5; geometric_mask 0.999)."""
    correction_high: float | None = Field(default=None, gt=0.0)
    """Upper bound on that ratio (token_tis, sequence_tis, sequence_mask 2; icepop 5; geometric_mask 1.001), or the
    threshold of k3_mask (0.01) and opsm (0.5). Long answers bear narrow masks, short ones need wider."""
    lone_responses: Literal["keep", "drop"] = "keep"
    """What a correction that masks sequences leaves of a pair when it takes one of the two: a signed sample without
    its counterpart (keep), or nothing (drop; what a recipe with group_size 2 gets unless it says otherwise)."""
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
        return _choice(name, tuple(advantages.ESTIMATORS), "advantage")

    @field_validator("correction")
    @classmethod
    def _known_correction(cls, name: str) -> str:
        return _choice(name, corrections.CORRECTIONS, "correction")

    @model_validator(mode="after")
    def _correction_fits(self) -> ObjectiveSettings:
        if self.correction in self.refused_corrections:
            raise ValueError(f"correction: {self.correction}: {self.refused_corrections[self.correction]}")
        rule = corrections.RULES.get(self.correction)
        for key, used in (
            ("correction_low", rule is not None and rule.low is not None),
            ("correction_high", rule is not None and rule.high is not None),
        ):
            if getattr(self, key) is not None and not used:
                raise ValueError(f"{key} has no effect with correction: {self.correction}; leave it out")
        if self.lone_responses == "drop" and not corrections.masks_sequences(self.correction):
            raise ValueError(f"lone_responses: drop has no effect with correction: {self.correction}; leave it out")
        low, high = self.correction_low, self.correction_high
        if low is not None and high is not None and low > high:
            raise ValueError(f"correction_low {low:g} is above correction_high {high:g}: nothing would be kept")
        return self

    @model_validator(mode="after")
    def _advantage_fits(self) -> ObjectiveSettings:
        estimator = self.advantage
        for key, needed_by in (("reward_temperature", "soft_margin"), ("reward_noise", "probit")):
            if estimator == needed_by and getattr(self, key) is None:
                raise ValueError(f"advantage: {needed_by} needs {key}")
        calibrated = self.margin_confidence is not None
        if calibrated and self.reward_temperature is None:
            raise ValueError("margin_confidence needs reward_temperature, fitted on held-out preference pairs")
        if calibrated and self.margin is not None:
            raise ValueError("margin and margin_confidence are two ways to say the same; set one of them")
        if self.zero_variance == "as_is" and (calibrated or self.margin is not None):
            raise ValueError("a margin has no effect with zero_variance: as_is; use keep, drop or refill")
        idle = {
            "unbiased_variance": not self.unbiased_variance and estimator != "batch_whitened",
            "reward_std_floor": self.reward_std_floor > 0.0 and estimator != "group_zscore",
            "reward_temperature": self.reward_temperature is not None and estimator != "soft_margin" and not calibrated,
            "reward_noise": self.reward_noise is not None and estimator != "probit",
        }
        for key, without_effect in idle.items():
            if without_effect:
                raise ValueError(f"{key} has no effect with advantage: {estimator}; leave it out")
        return self

    @model_validator(mode="after")
    def _overlong_fits(self) -> ObjectiveSettings:
        if (self.overlong_max_tokens is None) != (self.overlong_cache_tokens is None):
            raise ValueError("overlong_max_tokens and overlong_cache_tokens go together; set both or none")
        try:
            _ = self.overlong
        except ConfigError as failure:
            raise ValueError(str(failure)) from None
        return self

    @model_validator(mode="after")
    def _kl_fits(self) -> ObjectiveSettings:
        k1_in_loss = self.kl_where == "loss" and self.kl_estimator == "k1"
        if k1_in_loss and not self.k1_for_comparison:
            raise ValueError(
                "kl_estimator: k1 in the loss has zero expected gradient; use k2, k3 or k3_weighted, or put k1 in the "
                "reward (kl_where: reward). k1_for_comparison: true allows it in runs that compare with it"
            )
        if self.k1_for_comparison and not k1_in_loss:
            raise ValueError("k1_for_comparison has no effect without kl_estimator: k1 in the loss; leave it out")
        if self.kl_where == "reward" and self.kl_estimator != "k1" and "kl_estimator" not in self.model_fields_set:
            raise ValueError(
                f"kl_where: reward with the default kl_estimator {self.kl_estimator}, which is biased there: "
                "use kl_estimator: k1, or name the other one"
            )
        if "kl_coefficient" not in self.model_fields_set and self.kl_coefficient == 0.0:
            for key in ("kl_estimator", "kl_where"):
                if key in self.model_fields_set:
                    raise ValueError(f"{key} has no effect while kl_coefficient is 0; set kl_coefficient")
        return self

    @classmethod
    def recipe_defaults(cls, given: Mapping[str, Any], group_size: int, max_staleness: int) -> dict[str, Any]:
        """What a recipe adds to the options it gives: the correction that staleness asks for, whole pairs for G = 2."""
        added: dict[str, Any] = {}
        correction = given.get("correction")
        if correction is None:
            correction = added["correction"] = cls.stale_correction if max_staleness > 0 else "none"
        if group_size == 2 and "lone_responses" not in given and corrections.masks_sequences(correction):
            added["lone_responses"] = "drop"
        return added

    @property
    def has_kl_in_loss(self) -> bool:
        return self.kl_coefficient > 0.0 and self.kl_where == "loss"

    @property
    def has_kl_in_reward(self) -> bool:
        return self.kl_coefficient > 0.0 and self.kl_where == "reward"

    @property
    def reward_margin(self) -> float:
        """Smallest difference of rewards within a group that counts; 0: any."""
        if self.margin_confidence is None:
            return self.margin or 0.0
        assert self.reward_temperature is not None
        return confident_margin(self.margin_confidence, self.reward_temperature)

    @property
    def overlong(self) -> SoftOverlong | None:
        if self.overlong_max_tokens is None or self.overlong_cache_tokens is None:
            return None
        return SoftOverlong(self.overlong_max_tokens, self.overlong_cache_tokens)

    @property
    def advantage_options(self) -> dict[str, Any]:
        """Arguments of ``learner.advantages.step_advantages``."""
        return {
            "estimator": self.advantage,
            "scale": Scale(
                self.ddof, self.eps, self.reward_std_floor, self.reward_temperature or 1.0, self.reward_noise or 1.0
            ),
            "zero_variance": self.zero_variance,
            "margin": self.reward_margin,
            "unbiased_variance": self.unbiased_variance,
            "kl_coefficient": self.kl_coefficient if self.has_kl_in_reward else 0.0,
            "overlong": self.overlong,
        }


class TokenSettings(ObjectiveSettings):
    """Options of objectives that are a mean over tokens."""

    aggregation: Aggregation = "token_mean"
    """token_mean; or per completion: sequence_mean_token_mean, sequence_sum, sequence_sum_norm (sum / max_tokens)."""
    max_tokens: MaxTokens = None
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


def _choice(name: str, available: tuple[str, ...], what: str) -> str:
    if name not in available:
        raise ValueError(f"unknown {what} '{name}'{nearest(name, available)}")
    return name
