"""The learning rate of each update, and settings that cannot be."""

from __future__ import annotations

import pytest

from learner.schedule import learning_rate_at
from learner.settings import LearnerSettings, ReferenceSettings
from system.core.errors import ConfigError
from system.core.settings import parse_settings


def rates(total: int, **settings: object) -> list[float]:
    parsed = LearnerSettings(learning_rate=1.0, **settings)
    return [round(learning_rate_at(parsed, update, total), 6) for update in range(total)]


def test_warmup_rises_linearly_to_the_peak_and_stays():
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_linear_schedule_falls_to_zero_over_the_run():
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(6, schedule="linear", warmup_steps=2) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]


def test_a_cosine_schedule_is_halfway_at_half_time():
    assert rates(4, schedule="cosine") == [1.0, 0.853553, 0.5, 0.146447]


def test_updates_beyond_the_run_keep_a_positive_rate():
    settings = LearnerSettings(learning_rate=1.0, schedule="linear")
    assert learning_rate_at(settings, 100, 4) == 0.25


def test_a_falling_schedule_without_a_length_is_refused():
    with pytest.raises(ConfigError, match=r"run\.steps"):
        learning_rate_at(LearnerSettings(schedule="cosine"), 0, None)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"learning_rat": 1e-5}, "did you mean 'learning_rate'"),
        ({"zero": 4}, "learner.zero"),
        ({"learning_rate": 0.0}, "learner.learning_rate"),
        ({"schedule": "step"}, "learner.schedule"),
        ({"collective_timeout_s": 5.0}, "checkpoint_deadline_s"),
    ],
)
def test_impossible_settings_are_refused_by_name(wrong, named):
    with pytest.raises(ConfigError, match=named):
        parse_settings(LearnerSettings, wrong, "learner")


def test_the_defaults_are_valid():
    assert LearnerSettings().workers == ReferenceSettings().workers == 1
