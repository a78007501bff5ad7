"""Objectives by name, their options, and a user's own file."""

from __future__ import annotations

import math
import pickle
import sys
from textwrap import dedent

import pytest

from learner.objectives import build_objective, objective_class, objective_names
from system.core.errors import ConfigError
from tests.learner.objective_cases import VECTORS, fixture_batch, random_case, rows_of, slow_advantages


def test_names_are_found_because_their_modules_stand_in_the_folder():
    assert {"grpo", "two_grpo"} <= set(objective_names())
    assert objective_names() == sorted(objective_names())
    for name in objective_names():
        assert objective_class(name).__doc__


def test_defaults_are_those_of_the_contract():
    common = {
        "advantage": "group_zscore", "ddof": 1, "eps": 1e-6, "zero_variance": "keep", "kl_coefficient": 0.0,
        "kl_estimator": "k3", "kl_where": "loss", "correction": "none", "denominator": "kept_all",
        "unbiased_variance": True, "max_tokens": None, "correction_low": None, "correction_high": None,
        "reward_std_floor": 0.0, "reward_temperature": None, "reward_noise": None, "margin": None,
        "margin_confidence": None, "overlong_max_tokens": None, "overlong_cache_tokens": None,
        "k1_for_comparison": False, "lone_responses": "keep",
    }  # fmt: skip
    grpo = {"aggregation": "sequence_mean_token_mean", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    two_grpo = {"aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
    assert build_objective("grpo").settings.model_dump() == common | grpo
    assert build_objective("two_grpo").settings.model_dump() == common | two_grpo


def test_every_option_is_documented():
    for name in objective_names():
        for option, field in objective_class(name).Options.model_fields.items():
            assert field.description, f"{name}.{option}"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gropo", {}, r"unknown objective 'gropo'; did you mean 'grpo'\?"),
        ("grpo", {"clip_hihg": 0.3}, r"objective\.clip_hihg: unknown key; did you mean 'clip_high'\?"),
        ("grpo", {"beta": 0.04}, r"objective\.beta: .*kl_coefficient"),
        ("two_grpo", {"beta": 0.04}, r"objective\.beta: .*kl_coefficient"),
        ("grpo", {"advantage": "group_zscor"}, "did you mean 'group_zscore'"),
        ("grpo", {"advantage": "probit"}, "advantage: probit needs reward_noise"),
        ("grpo", {"advantage": "soft_margin"}, "advantage: soft_margin needs reward_temperature"),
        ("grpo", {"margin_confidence": 0.2}, "margin_confidence needs reward_temperature"),
        (
            "grpo",
            {"margin_confidence": 0.2, "reward_temperature": 1.0, "margin": 0.1},
            "margin and margin_confidence are two ways",
        ),
        ("grpo", {"margin": 0.1, "zero_variance": "as_is"}, "a margin has no effect with zero_variance: as_is"),
        ("grpo", {"reward_noise": 0.1}, "reward_noise has no effect with advantage: group_zscore"),
        ("grpo", {"reward_temperature": 0.1}, "reward_temperature has no effect"),
        ("grpo", {"advantage": "group_mean", "reward_std_floor": 0.1}, "reward_std_floor has no effect"),
        ("grpo", {"overlong_max_tokens": 10}, "overlong_max_tokens and overlong_cache_tokens go together"),
        (
            "grpo",
            {"overlong_max_tokens": 10, "overlong_cache_tokens": 11},
            r"overlong_cache_tokens: 11 must be in 1\.\.10",
        ),
        ("grpo", {"correction": "icepop", "correction_low": 6.0}, "correction_low 6 is above correction_high 5"),
        ("grpo", {"correction": "bypass", "correction_high": 2.0}, "correction_high has no effect"),
        ("grpo", {"lone_responses": "drop"}, "lone_responses: drop has no effect with correction: none"),
        ("grpo", {"lone_responses": "drop", "correction": "icepop"}, "lone_responses: drop has no effect"),
        ("grpo", {"k1_for_comparison": True}, "k1_for_comparison has no effect"),
        ("grpo", {"correction": "token_tiss"}, "did you mean 'token_tis'"),
        ("grpo", {"correction": None}, r"objective\.correction"),
        ("grpo", {"aggregation": "token-mean"}, "'token_mean'"),
        ("grpo", {"aggregation": "sequence_sum_norm"}, "max_tokens; set it"),
        ("grpo", {"max_tokens": 4}, "max_tokens has no effect"),
        ("grpo", {"kl_coefficient": 0.1, "kl_estimator": "k1"}, "k1 in the loss has zero expected gradient"),
        ("grpo", {"kl_coefficient": 0.1, "kl_where": "reward"}, "use kl_estimator: k1"),
        ("grpo", {"kl_estimator": "k2"}, "no effect while kl_coefficient is 0"),
        ("grpo", {"correction_high": 3.0}, "correction_high has no effect with correction: none"),
        ("grpo", {"correction": "token_tis", "correction_low": 0.5}, "correction_low has no effect"),
        ("grpo", {"unbiased_variance": False}, "unbiased_variance has no effect"),
        ("grpo", {"ddof": 2}, r"objective\.ddof"),
        ("grpo", {"eps": -1.0}, r"objective\.eps"),
        ("grpo", {"eps": float("nan")}, r"objective\.eps"),
        ("grpo", {"dual_clip": 1.0}, r"objective\.dual_clip"),
        ("two_grpo", {"dual_clip": 0.5}, r"objective\.dual_clip"),
        ("two_grpo", {"clip_high": -0.1}, r"objective\.clip_high"),
        ("grpo", {"clip_low": -0.1}, r"objective\.clip_low"),
        ("grpo", {"zero_variance": "skip"}, r"objective\.zero_variance"),
    ],
)
def test_what_cannot_be_is_refused_with_the_mend(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_objective(name, **options)


def test_the_correction_brings_its_bound_and_resolved_options_build_the_same_objective():
    options = {"correction": "token_tis", "kl_coefficient": 0.1, "kl_estimator": "k1", "kl_where": "reward"}
    settings = build_objective("two_grpo", **options).settings
    assert settings.correction_high == 2.0
    for resolved in (settings, build_objective("grpo").settings):
        name = "two_grpo" if resolved is settings else "grpo"
        assert build_objective(name, **resolved.model_dump()).settings == resolved


@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({}, {"old"}),
        ({"correction": "bypass"}, {"rollout"}),
        ({"kl_coefficient": 0.1}, {"old", "reference"}),
        ({"correction": "token_tis"}, {"old", "rollout"}),
        ({"kl_coefficient": 0.1, "kl_where": "reward", "kl_estimator": "k1"}, {"old", "reference"}),
    ],
)
def test_needs_name_only_the_logprobs_that_are_used(options, needs):
    objective = build_objective("grpo", **options)
    assert objective.needs == needs
    assert objective.coupling == "completion"
    assert objective.needs_logprobs_first == (options.get("kl_where") == "reward")


def test_group_sizes_without_a_comparison_are_refused():
    build_objective("grpo").check(2)
    build_objective("two_grpo").check(2)
    with pytest.raises(ConfigError, match=r"rollout\.group_size: 1: objective grpo"):
        build_objective("grpo").check(1)
    for size in (1, 3, 8):
        with pytest.raises(ConfigError, match=f"rollout.group_size: {size}: objective two_grpo"):
            build_objective("two_grpo").check(size)


def test_an_objective_travels_between_processes():
    objective = build_objective("grpo", kl_coefficient=0.1)
    copy = pickle.loads(pickle.dumps(objective))
    assert copy.settings == objective.settings
    assert copy(fixture_batch("FIX_B")).loss == objective(fixture_batch("FIX_B")).loss


OWN = """
    import torch
    from torch import Tensor
    from learner.objectives import Objective, ObjectiveSettings, TokenObjective, TokenSettings

    class CispoSettings(TokenSettings):
        clip_high: float = 0.28

    class Cispo(TokenObjective):
        "Clipped ratio as a detached weight of the log-prob."
        name = "own_cispo"
        Options = CispoSettings

        def token_loss(self, inputs):
            weight = inputs.ratio.detach().clamp(max=1 + self.settings.clip_high)
            return -weight * inputs.advantages * inputs.logprobs

    class Gspo(Objective):
        name = "own_gspo"

        def loss(self, inputs):
            lengths = inputs.trajectory_sum(inputs.mask.to(inputs.logprobs.dtype))
            ratio = torch.exp(inputs.trajectory_sum(inputs.logprobs - inputs.old) / lengths)
            a = inputs.trajectories.advantages
            return -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / inputs.denominators.trajectories

    class PairSettings(ObjectiveSettings):
        beta: float = 0.1

    class Pairs(Objective):
        name = "own_dpo"
        Options = PairSettings
        coupling = "group"
        policy_needs = frozenset({"reference"})

        def loss(self, inputs):
            distance = inputs.trajectory_sum(inputs.reference_log_ratio())
            sign = inputs.trajectories.advantages.sign()
            margin = inputs.trajectories.group_sum(sign * distance)
            return -torch.nn.functional.logsigmoid(self.settings.beta * margin).sum() / inputs.denominators.groups
"""


@pytest.fixture
def own_file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(dedent(OWN))
    yield path
    for name in [name for name in sys.modules if name.startswith("triptych_plugin_own_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "vector", "fixture"),
    [("own_cispo", "CI-B", "FIX_B"), ("own_gspo", "GS-B", "FIX_B"), ("own_dpo", "DP-A", "FIX_A")],
)
def test_a_page_of_mathematics_in_a_users_file_is_an_objective(own_file, name, vector, fixture):
    result = build_objective(name, file=own_file)(fixture_batch(fixture))
    expected = VECTORS[vector]["expected"]
    assert result.loss == pytest.approx(expected["loss"], abs=1e-11)
    rows = rows_of(result.coefficients, VECTORS[fixture]["inputs"]["new"])
    for row, values in zip(rows, expected["grad_logp"], strict=True):
        assert row == pytest.approx(values, abs=1e-11)


@pytest.mark.parametrize("seed", range(4))
def test_a_sequence_objective_sees_trajectories_and_not_rows(own_file, seed):
    case = random_case(seed)
    options = {"advantage": "group_zscore", "ddof": 1, "eps": 1e-6, "zero_variance": "keep"}
    advantages = slow_advantages(case, options)
    distances, lengths = {}, {}
    for row, advantage in enumerate(advantages):
        if advantage is None or not any(case.mask[row]):
            continue
        key = case.group_ids[row], case.trajectory_ids[row], advantage
        moved = zip(case.logprobs[row], case.old[row], case.mask[row], strict=True)
        distances[key] = distances.get(key, 0.0) + sum(new - old for new, old, trained in moved if trained)
        lengths[key] = lengths.get(key, 0) + sum(case.mask[row])
    losses = []
    for key, distance in distances.items():
        ratio, advantage = math.exp(distance / lengths[key]), key[2]
        losses.append(-min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage))
    result = build_objective("own_gspo", file=own_file)(case.batch())
    assert result.loss == pytest.approx(sum(losses) / len(losses))


def test_a_users_objective_has_checked_options_and_says_what_it_needs(own_file):
    objective = build_objective("own_dpo", file=str(own_file), beta=0.5)
    assert objective.settings.beta == 0.5
    assert (objective.coupling, objective.needs) == ("group", {"reference"})
    with pytest.raises(ConfigError, match="did you mean 'beta'"):
        build_objective("own_dpo", file=own_file, betta=0.5)


def test_a_users_own_kl_and_correction_compose_with_its_formula(own_file):
    plain = build_objective("own_cispo", file=own_file)(fixture_batch("FIX_A"))
    corrected = build_objective("own_cispo", file=own_file, correction="token_tis")(fixture_batch("FIX_A"))
    given = VECTORS["FIX_A"]["inputs"]
    weight = 2.718281828459045 ** (given["old"][0][0] - given["mu"][0][0])
    assert corrected.coefficients[0, 0] == pytest.approx(plain.coefficients[0, 0].item() * weight)
    with_kl = build_objective("own_cispo", file=own_file, kl_coefficient=0.5, kl_estimator="k2")
    delta = given["new"][0][0] - given["ref"][0][0]
    added = with_kl(fixture_batch("FIX_A")).coefficients[0, 0] - plain.coefficients[0, 0]
    assert added.item() == pytest.approx(0.5 * delta / 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("x = 1\n", "defines no objective; write a subclass"),
        ("def broken(:\n", "does not load: SyntaxError"),
        ("raise RuntimeError('no licence')\n", "does not load: RuntimeError: no licence"),
        ("from learner.objectives.grpo import Grpo\n", "defines no objective"),
        ("from learner.objectives.grpo import Grpo\nclass Mine(Grpo):\n    name = 'mine_too'\n", "did you mean"),
    ],
)
def test_a_file_without_the_objective_says_so(tmp_path, text, message):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        build_objective("mine", file=path)


def test_an_installed_package_adds_objectives_by_entry_point(tmp_path, monkeypatch):
    (tmp_path / "plugged_objective.py").write_text(
        "from learner.objectives.grpo import Grpo\nclass Plugged(Grpo):\n    name = 'plugged'\n"
    )
    metadata = tmp_path / "plugged_objective-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged-objective\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[triptych.objectives]\nplugged = plugged_objective:Plugged\nabsent = plugged_objective:Absent\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "plugged" in objective_names()
    assert build_objective("plugged", clip_high=0.5).settings.clip_high == 0.5
    with pytest.raises(ConfigError, match=r"'absent' is installed as plugged_objective:Absent, which does not load"):
        build_objective("absent")
    sys.modules.pop("plugged_objective", None)
