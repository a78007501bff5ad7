"""f-divergences as f-GRPO and f-HAL use them: two curves over the implicit reward r.

A completion with positive advantage minimises ``-g(r)``, one with negative advantage ``f*(g(r))``, where f generates
the divergence, f* is its convex conjugate and g an increasing link into the conjugate's domain (f-GAN, 1606.00709;
f-GRPO, 2602.05946). Both are written here composed, never step by step. Invariants, checked for curves from outside
when they are registered: both are finite, the first never rises, the second never falls, and neither is flat at r = 0.
A curve that contains an exponential goes on as its tangent beyond |r| = ``LINEAR_BEYOND``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from learner.plugins import installed, load_entry_point, load_file
from system.core.errors import ConfigError, nearest

Side = Literal["positive", "negative"]
"""Of the advantage."""

Curve = Callable[[Tensor], Tensor]
"""Elementwise and differentiable."""

LINEAR_BEYOND = 10.0
"""exp(10) is 22,026: larger slopes would only say that a completion is lost."""

FAR = 1000.0
"""An implicit reward that no run should meet, but after which it must go on."""

ROUNDING = 1e-9
"""A slope of the wrong sign up to this is none."""

ENTRY_POINT_GROUP = "triptych.divergences"
"""name -> a Divergence, in the metadata of an installed package."""

KEY = "objective.divergence"


@dataclass(frozen=True)
class Divergence:
    """A divergence by its two curves; the texts are for people."""

    name: str
    positive_loss: Curve
    """-g(r)."""
    negative_loss: Curve
    """f*(g(r))."""
    tangent: tuple[Side, ...] = ("positive", "negative")
    """Curves that go on linearly beyond |r| = ``LINEAR_BEYOND``: those with an exponential."""
    summary: str = ""
    generator: str = ""
    """f(u)."""
    link: str = ""
    """g(r)."""
    conjugate: str = ""
    """f*(t) with its domain."""
    formulas: tuple[str, str] = ("", "")
    """-g(r) and f*(g(r))."""
    hazard: str = ""

    def positive(self, r: Tensor) -> Tensor:
        """-g(r), of any shape; what completions with positive advantage minimise."""
        return self._tangents["positive"](r) if "positive" in self.tangent else self.positive_loss(r)

    def negative(self, r: Tensor) -> Tensor:
        """f*(g(r)), of any shape; what completions with negative advantage minimise."""
        return self._tangents["negative"](r) if "negative" in self.tangent else self.negative_loss(r)

    def on_tangent(self, r: Tensor, side: Side) -> Tensor:
        """Where ``r`` lies on the linear continuation of that side's curve; bool, of r's shape."""
        return (r.abs() > LINEAR_BEYOND) & (side in self.tangent)

    @property
    def slopes_at_zero(self) -> tuple[float, float]:
        """Of both curves: how hard a policy that equals its reference is pushed."""
        zero = torch.zeros(1, dtype=torch.float64)
        return float(slope(self.positive, zero)), float(slope(self.negative, zero))

    @cached_property
    def _tangents(self) -> dict[Side, Curve]:
        return {"positive": _with_tangents(self.positive_loss), "negative": _with_tangents(self.negative_loss)}


def slope(curve: Curve, r: Tensor) -> Tensor:
    """The derivative of an elementwise curve at ``r``."""
    with torch.enable_grad():
        at = r.detach().clone().requires_grad_()
        return torch.autograd.grad(curve(at).sum(), at)[0]


def _with_tangents(curve: Curve) -> Curve:
    ends = torch.tensor([-LINEAR_BEYOND, LINEAR_BEYOND], dtype=torch.float64)
    low, high = curve(ends).tolist()
    low_slope, high_slope = slope(curve, ends).tolist()

    def continued(r: Tensor) -> Tensor:
        inside = curve(r.clamp(-LINEAR_BEYOND, LINEAR_BEYOND))
        below = torch.where(r < -LINEAR_BEYOND, low + low_slope * (r + LINEAR_BEYOND), inside)
        return torch.where(r > LINEAR_BEYOND, high + high_slope * (r - LINEAR_BEYOND), below)

    return continued


def divergence_names() -> list[str]:
    """Names that ``find_divergence`` knows without a file: the built-in ones, then those of installed packages."""
    return [*BUILT_IN, *sorted(installed(ENTRY_POINT_GROUP).keys() - BUILT_IN.keys())]


def find_divergence(name: str) -> Divergence:
    """A divergence by its name, or by ``FILE.py:NAME``.

    Raises:
        ConfigError: nothing has this name, or its curves cannot be those of a divergence.
    """
    file, _, wanted = name.rpartition(":")
    if file:
        return check_divergence(_from_file(Path(file), wanted))
    if name in BUILT_IN:
        return BUILT_IN[name]
    points = installed(ENTRY_POINT_GROUP)
    if name in points:
        return check_divergence(load_entry_point(points[name], Divergence, KEY))
    raise ConfigError(f"{KEY}: unknown divergence '{name}'{nearest(name, divergence_names())}")


def check_divergence(divergence: Divergence) -> Divergence:
    """Holds the curves against what a divergence promises, over [-10, 10] and far outside.

    Raises:
        ConfigError: a curve is not finite, has the wrong slope, or is no differentiable function of r.
    """
    inside = torch.arange(-200, 201, dtype=torch.float64) * (LINEAR_BEYOND / 200)
    far = torch.tensor([-FAR, FAR], dtype=torch.float64)
    what = f"{KEY}: {divergence.name}:"
    for positive, negative, points in (
        (divergence.positive_loss, divergence.negative_loss, inside),
        (divergence.positive, divergence.negative, far),
    ):
        _check_curve(positive, points, f"{what} positive_loss, -g(r),", direction=-1.0)
        _check_curve(negative, points, f"{what} negative_loss, f*(g(r)),", direction=1.0)
    for name, at_zero in zip(("positive", "negative"), divergence.slopes_at_zero, strict=True):
        if at_zero == 0.0:
            raise ConfigError(f"{what} {name}_loss is flat at r = 0, where training starts; it must have a slope there")
    return divergence


def _check_curve(curve: Curve, points: Tensor, what: str, direction: float) -> None:
    try:
        values = curve(points)
        slopes = slope(curve, points)
    except Exception as failure:
        raise ConfigError(
            f"{what} is no differentiable function of a tensor: {type(failure).__name__}: {failure}"
        ) from failure
    if values.shape != points.shape:
        raise ConfigError(f"{what} gives {tuple(values.shape)} for {tuple(points.shape)}; it must be elementwise")
    for number, verb in ((values, "is"), (slopes, "has slope")):
        wrong = ~number.isfinite()
        if wrong.any():
            r = points[wrong][0].item()
            raise ConfigError(f"{what} {verb} {number[wrong][0].item()} at r = {r:g}; it must be finite")
    against = slopes * direction < -ROUNDING
    if against.any():
        r, found = points[against][0].item(), slopes[against][0].item()
        allowed, whom = ("fall", "good") if direction < 0 else ("rise", "bad")
        raise ConfigError(
            f"{what} has slope {found:.4g} at r = {r:g}; it may only {allowed} with r, "
            f"or {whom} completions are pushed the wrong way"
        )


def _from_file(path: Path, name: str) -> Divergence:
    found = {value.name: value for value in vars(load_file(path, KEY)).values() if isinstance(value, Divergence)}
    if name in found:
        return found[name]
    if found:
        raise ConfigError(f"{KEY}: {path} defines {', '.join(sorted(found))}, not '{name}'{nearest(name, found)}")
    raise ConfigError(
        f"{KEY}: {path} defines no divergence; write {name} = Divergence('{name}', positive_loss=..., "
        "negative_loss=...) there (learner.divergences)"
    )


def _by_name(divergences: Sequence[Divergence]) -> dict[str, Divergence]:
    return {divergence.name: divergence for divergence in divergences}


BUILT_IN: dict[str, Divergence] = _by_name(
    [
        Divergence(
            "kl",
            positive_loss=lambda r: -r,
            negative_loss=lambda r: torch.exp(r - 1.0),
            tangent=("negative",),
            summary="Kullback-Leibler with f-GAN's link: at r = 0 good completions push 2.7 times harder.",
            generator="u ln u",
            link="r",
            conjugate="exp(t - 1)",
            formulas=("-r", "exp(r - 1)"),
            hazard="exponential on bad completions that became likelier",
        ),
        Divergence(
            "kl_ratio_link",
            positive_loss=lambda r: -1.0 - r,
            negative_loss=torch.exp,
            tangent=("negative",),
            summary="Kullback-Leibler with the density-ratio link: balanced at r = 0.",
            generator="u ln u",
            link="1 + r",
            conjugate="exp(t - 1)",
            formulas=("-1 - r", "exp(r)"),
            hazard="exponential on bad completions that became likelier",
        ),
        Divergence(
            "reverse_kl",
            positive_loss=lambda r: torch.exp(-r),
            negative_loss=lambda r: r - 1.0,
            tangent=("positive",),
            summary="Reverse Kullback-Leibler: bad completions are pushed down without end.",
            generator="-ln u",
            link="-exp(-r)",
            conjugate="-1 - ln(-t) for t < 0",
            formulas=("exp(-r)", "r - 1"),
            hazard="exponential on good completions that became less likely; bad ones never saturate",
        ),
        Divergence(
            "pearson",
            positive_loss=lambda r: -r,
            negative_loss=lambda r: _pearson(r.clamp(min=-2.0)),
            tangent=(),
            summary="Pearson chi-squared with its exact conjugate: bad completions are left alone below r = -2.",
            generator="(u - 1)^2",
            link="r",
            conjugate="t + t^2 / 4 for t >= -2, else -1",
            formulas=("-r", "r + r^2 / 4 for r >= -2, else -1"),
        ),
        Divergence(
            "pearson_polynomial",
            positive_loss=lambda r: -r,
            negative_loss=lambda r: _pearson(r),
            tangent=(),
            summary="Pearson chi-squared with the conjugate's polynomial everywhere, for comparison only.",
            generator="(u - 1)^2",
            link="r",
            conjugate="t + t^2 / 4, which holds for t >= -2 alone",
            formulas=("-r", "r + r^2 / 4"),
            hazard="below r = -2 the slope is negative: bad completions are pushed back up",
        ),
        Divergence(
            "hellinger",
            positive_loss=lambda r: torch.expm1(-r),
            negative_loss=torch.expm1,
            summary="Squared Hellinger with f-GAN's link.",
            generator="(sqrt(u) - 1)^2",
            link="1 - exp(-r)",
            conjugate="t / (1 - t) for t < 1",
            formulas=("exp(-r) - 1", "exp(r) - 1"),
            hazard="exponential on both sides",
        ),
        Divergence(
            "hellinger_ratio_link",
            positive_loss=lambda r: torch.expm1(-0.5 * r),
            negative_loss=lambda r: torch.expm1(0.5 * r),
            summary="Squared Hellinger with the density-ratio link: the same at half the implicit reward.",
            generator="(sqrt(u) - 1)^2",
            link="1 - exp(-r / 2)",
            conjugate="t / (1 - t) for t < 1",
            formulas=("exp(-r / 2) - 1", "exp(r / 2) - 1"),
            hazard="exponential on both sides, at half the rate",
        ),
        Divergence(
            "js",
            positive_loss=lambda r: -logsigmoid(r) - log(2.0),
            negative_loss=lambda r: -logsigmoid(-r) - log(2.0),
            tangent=(),
            summary="Jensen-Shannon: binary logistic loss, slopes bounded by 1.",
            generator="u ln u - (u + 1) ln((u + 1) / 2)",
            link="ln 2 - softplus(-r)",
            conjugate="-ln(2 - exp(t)) for t < ln 2",
            formulas=("softplus(-r) - ln 2", "softplus(r) - ln 2"),
        ),
        Divergence(
            "gan",
            positive_loss=lambda r: -logsigmoid(r),
            negative_loss=lambda r: -logsigmoid(-r),
            tangent=(),
            summary="The GAN's divergence: Jensen-Shannon up to a constant, with the same gradient.",
            generator="u ln u - (u + 1) ln(u + 1)",
            link="-softplus(-r)",
            conjugate="-ln(1 - exp(t)) for t < 0",
            formulas=("softplus(-r)", "softplus(r)"),
        ),
        Divergence(
            "tv",
            positive_loss=lambda r: -0.5 * torch.tanh(r),
            negative_loss=lambda r: 0.5 * torch.tanh(r),
            tangent=(),
            summary="Total variation: bounded.",
            generator="|u - 1| / 2",
            link="tanh(r) / 2",
            conjugate="t for |t| <= 1/2",
            formulas=("-tanh(r) / 2", "tanh(r) / 2"),
            hazard="the slope vanishes beyond |r| of about 4, also for completions on the wrong side",
        ),
    ]
)


def _pearson(t: Tensor) -> Tensor:
    return t + 0.25 * t.square()
