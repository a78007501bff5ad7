"""The learning rate of each update, and settings that cannot be."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


SCHEDULES = st.sampled_from(["constant", "linear", "cosine"])


@given(schedule=SCHEDULES, warmup=st.integers(0, 50), total=st.integers(1, 200), peak=st.floats(1e-8, 1.0))
def test_a_run_warms_up_to_its_peak_once_and_never_rises_again(schedule, warmup, total, peak):
    settings = LearnerSettings(schedule=schedule, warmup_steps=warmup, learning_rate=peak)
    rates = [learning_rate_at(settings, update, total) for update in range(total)]
    rising, after = rates[: min(warmup, total)], rates[warmup:]
    assert all(0.0 < rate <= peak * (1 + 1e-12) for rate in rates)
    steps = [after - before for before, after in pairwise([0.0, *rising])]
    assert steps == pytest.approx([peak / warmup] * len(steps) if warmup else [])
    assert not after or after[0] == peak
    assert all(later <= earlier for earlier, later in pairwise(after))
    assert schedule != "constant" or set(after) <= {peak}


@given(schedule=st.sampled_from(["linear", "cosine"]), warmup=st.integers(0, 20), falling=st.integers(2, 400))
def test_a_falling_schedule_loses_as_much_before_half_time_as_after_it(schedule, warmup, falling):
    settings = LearnerSettings(schedule=schedule, warmup_steps=warmup, learning_rate=1.0)
    total = warmup + falling
    for done in range(1, falling):
        mirrored = learning_rate_at(settings, warmup + falling - done, total)
        assert learning_rate_at(settings, warmup + done, total) + mirrored == pytest.approx(1.0)


@given(schedule=st.sampled_from(["linear", "cosine"]), total=st.integers(1, 300), beyond=st.integers(0, 100))
def test_a_run_that_is_longer_than_planned_keeps_the_last_rate(schedule, total, beyond):
    settings = LearnerSettings(schedule=schedule, learning_rate=1.0)
    last = learning_rate_at(settings, total - 1, total)
    assert learning_rate_at(settings, total + beyond, total) == last > 0.0


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
