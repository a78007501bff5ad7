"""The curves of f-divergences: published values, conjugacy, tangents, and what is refused at registration."""

from __future__ import annotations

import math
import sys
from textwrap import dedent

import pytest
import torch

from learner.divergences import LINEAR_BEYOND, Divergence, check_divergence, divergence_names, find_divergence, slope
from system.core.errors import ConfigError
from tests.learner.objective_cases import VECTORS

VECTOR_OF = {"pearson": "pearson_exact", "pearson_polynomial": "pearson", "hellinger_ratio_link": "hellinger_half"}
BUILT_IN = [
    "kl", "kl_ratio_link", "reverse_kl", "pearson", "pearson_polynomial", "hellinger", "hellinger_ratio_link", "js",
    "gan", "tv",
]  # fmt: skip

GENERATORS = {
    "kl": lambda u: u * math.log(u),
    "kl_ratio_link": lambda u: u * math.log(u),
    "reverse_kl": lambda u: -math.log(u),
    "pearson": lambda u: (u - 1) ** 2,
    "hellinger": lambda u: (math.sqrt(u) - 1) ** 2,
    "hellinger_ratio_link": lambda u: (math.sqrt(u) - 1) ** 2,
    "js": lambda u: u * math.log(u) - (u + 1) * math.log((u + 1) / 2),
    "gan": lambda u: u * math.log(u) - (u + 1) * math.log(u + 1),
    "tv": lambda u: abs(u - 1) / 2,
}
LIMITS_AT_ZERO = {"pearson": 1.0, "hellinger": 1.0, "hellinger_ratio_link": 1.0, "tv": 0.5}
"""f(0), where it is finite and the supremum may stand there."""


def at(*r: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(r, dtype=dtype)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", BUILT_IN)
def test_curves_and_slopes_are_the_published_ones(name, dtype, within):
    vector = VECTORS[f"FD-{VECTOR_OF.get(name, name)}"]
    r = at(*vector["inputs"]["r"], dtype=dtype)
    divergence, expected = find_divergence(name), vector["expected"]
    for curve, values, slopes in (
        (divergence.positive, expected["neg_g"], expected["d_neg_g"]),
        (divergence.negative, expected["fstar_g"], expected["d_fstar_g"]),
    ):
        assert curve(r).tolist() == pytest.approx(values, abs=within, rel=within)
        assert slope(curve, r).tolist() == pytest.approx(slopes, abs=within, rel=within)


def test_every_vector_of_divergences_is_tested():
    tested = {f"FD-{VECTOR_OF.get(name, name)}" for name in BUILT_IN}
    assert tested == {name for name in VECTORS if name.startswith("FD-")}
    assert divergence_names() == BUILT_IN


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("r", [-3.0, -1.9, -0.4, 0.0, 0.3, 1.1])
def test_the_negative_curve_is_the_conjugate_at_the_link(name, r):
    """f*(t) = sup over u >= 0 of u t - f(u), at t = g(r)."""
    divergence = find_divergence(name)
    t = -divergence.positive(at(r)).item()
    ratios = [math.exp(step / 2000) for step in range(-16000, 8001)]
    supremum = max(u * t - GENERATORS[name](u) for u in ratios)
    supremum = max(supremum, -LIMITS_AT_ZERO.get(name, math.inf))
    assert divergence.negative(at(r)).item() == pytest.approx(supremum, abs=2e-3)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("side", ["positive", "negative"])
def test_exponentials_go_on_as_their_tangent_and_stay_finite(name, side):
    divergence = find_divergence(name)
    curve = getattr(divergence, side)
    for dtype in (torch.float32, torch.float64):
        far = at(-1e4, -1000.0, 1000.0, 1e4, dtype=dtype)
        assert curve(far).isfinite().all()
        assert slope(curve, far).isfinite().all()
    if side not in divergence.tangent:
        assert not divergence.on_tangent(at(-11.0, 11.0), side).any()
        return
    ends = at(-LINEAR_BEYOND, LINEAR_BEYOND)
    beyond = ends * 1.5
    expected = curve(ends) + slope(curve, ends) * (beyond - ends)
    torch.testing.assert_close(curve(beyond), expected, rtol=1e-12, atol=1e-12)
    assert slope(curve, beyond).tolist() == slope(curve, ends).tolist()
    torch.testing.assert_close(curve(ends * (1 + 1e-12)), curve(ends), rtol=1e-9, atol=1e-9)
    assert divergence.on_tangent(at(-10.1, -10.0, 0.0, 10.0, 10.1), side).tolist() == [True, False, False, False, True]


def test_pearson_leaves_bad_completions_alone_where_its_polynomial_pushes_them_up():
    r = at(-3.0, -2.0, -1.9)
    assert slope(find_divergence("pearson").negative, r).tolist() == pytest.approx([0.0, 0.0, 0.05])
    assert slope(find_divergence("pearson_polynomial").negative, r).tolist() == pytest.approx([-0.5, 0.0, 0.05])


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "pearson_polynomial"])
def test_the_built_in_divergences_pass_their_own_registration(name):
    assert check_divergence(find_divergence(name)) is find_divergence(name)
    assert find_divergence(name).summary


OWN = """
    import torch
    from learner.divergences import Divergence

    neyman = Divergence(
        "neyman",
        positive_loss=lambda r: torch.exp(-r) - 1,
        negative_loss=lambda r: 2 - 2 * torch.exp(-r / 2),
    )
"""


def test_a_users_divergence_is_two_curves_in_a_file(tmp_path):
    path = tmp_path / "own_curves.py"
    path.write_text(dedent(OWN))
    divergence = find_divergence(f"{path}:neyman")
    assert divergence.slopes_at_zero == (-1.0, 1.0)
    assert divergence.negative(at(1.0)).item() == pytest.approx(2 - 2 * math.exp(-0.5))
    with pytest.raises(ConfigError, match=r"objective\.divergence: .* defines neyman, not 'neymann'; did you mean"):
        find_divergence(f"{path}:neymann")
    with pytest.raises(ConfigError, match="no such file"):
        find_divergence(f"{tmp_path / 'absent.py'}:neyman")
    path.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="defines no divergence; write neyman = Divergence"):
        find_divergence(f"{path}:neyman")


def test_an_installed_package_adds_divergences_by_entry_point(tmp_path, monkeypatch):
    (tmp_path / "plugged_curves.py").write_text(dedent(OWN) + "    \nnumber = 3\n")
    metadata = tmp_path / "plugged_curves-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-curves\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[triptych.divergences]\nneyman = plugged_curves:neyman\nwrong = plugged_curves:number\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert divergence_names() == [*BUILT_IN, "neyman", "wrong"]
    assert find_divergence("neyman").name == "neyman"
    with pytest.raises(ConfigError, match="installed as plugged_curves:number, which is no Divergence"):
        find_divergence("wrong")
    sys.modules.pop("plugged_curves", None)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match=r"objective\.divergence: unknown .*'pearsn'; did you mean 'pearson'"):
        find_divergence("pearsn")


@pytest.mark.parametrize(
    ("positive", "negative", "message"),
    [
        (lambda r: r, lambda r: r, r"positive_loss, -g\(r\), has slope 1 at r = -10; it may only fall with r"),
        (lambda r: -r, lambda r: r + r**2 / 4, "negative_loss, .*may only rise with r, or bad completions"),
        (lambda r: -r, lambda r: -torch.log(-r), "negative_loss, .* is (nan|inf) at r = .*; it must be finite"),
        (lambda r: -r, lambda r: r.clamp(min=1.0), "negative_loss is flat at r = 0"),
        (lambda r: -r, lambda r: 0.0 * r.detach(), "negative_loss, .*no differentiable function"),
        (lambda r: -r, lambda r: [float(value) for value in r.detach()], "negative_loss, .*no differentiable function"),
        (lambda r: -r.sum(), lambda r: r, r"positive_loss, .*gives \(\) for \(401,\); it must be elementwise"),
        (lambda r: -torch.sign(r) * r.abs().sqrt(), lambda r: r, "positive_loss, .*has slope (-?inf|nan) at r = 0"),
    ],
)
def test_curves_that_cannot_be_those_of_a_divergence_are_refused(positive, negative, message):
    with pytest.raises(ConfigError, match=message):
        check_divergence(Divergence("own", positive_loss=positive, negative_loss=negative))


def test_a_curve_that_overflows_must_go_on_linearly():
    overflowing = {"positive_loss": lambda r: -r, "negative_loss": torch.exp}
    with pytest.raises(ConfigError, match="inf at r = 1000"):
        check_divergence(Divergence("own", **overflowing, tangent=()))
    check_divergence(Divergence("own", **overflowing))
