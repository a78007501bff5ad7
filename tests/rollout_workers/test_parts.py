"""The worker's pure parts: settings, activity, and the thread that steps an engine."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_workers.activity import ACTIVITIES, ActivityMeter
from rollout_workers.settings import RolloutSettings
from rollout_workers.step_thread import StepThread
from system.core.errors import ConfigError
from system.core.settings import parse_settings


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temperature": 0}, r"rollout\.temperature: must be at least 0\.01"),
        ({"top_p": 0.9}, r"rollout\.top_p: must be 1\.0 in training"),
        ({"top_k": 50}, r"rollout\.top_k: must be -1 in training"),
        ({"group_size": 0}, r"rollout\.group_size"),
        ({"max_tokens": -1}, r"rollout\.max_tokens"),
        ({"deadline_s": 0}, r"rollout\.deadline_s"),
        ({"sync_mode": "abort"}, r"rollout\.sync_mode: 'abort' is not available yet; use 'keep'"),
        ({"sync_mode": "sometimes"}, r"rollout\.sync_mode"),
        ({"kv_cache": "fresh"}, r"rollout\.kv_cache"),
        ({"temprature": 1.0}, r"rollout\.temprature: unknown key; did you mean 'temperature'\?"),
        ({"engine": {"dtype": "float16"}}, r"rollout\.engine: 'dtype' is set by model\.dtype"),
        ({"group_size": 128}, r"rollout: max_running_requests 64 is smaller than group_size 128"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_with_its_reason(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_settings(RolloutSettings, values, "rollout")


def test_the_defaults_of_the_design_are_accepted() -> None:
    settings = parse_settings(
        RolloutSettings,
        {
            "workers": 1,
            "group_size": 8,
            "max_tokens": 32,
            "temperature": 1.0,
            "deadline_s": 120,
            "attempts": 3,
            "sync_mode": "keep",
            "kv_cache": "exact",
            "tensor_parallel": 1,
            "engine": {},
        },
        "rollout",
    )
    assert settings.group_size == 8


events = st.lists(st.tuples(st.sampled_from(ACTIVITIES[:-1]), st.booleans(), st.floats(0, 100)), max_size=40)


@given(events)
def test_every_second_is_counted_once_for_the_first_of_what_runs(happenings: list[tuple[str, bool, float]]) -> None:
    meter, now_s = ActivityMeter(5.0), 5.0
    running = dict.fromkeys(ACTIVITIES, 0)
    expected = dict.fromkeys(ACTIVITIES, 0.0)
    for activity, entering, passed_s in happenings:
        current = next((name for name in ACTIVITIES if running[name]), "idle")
        expected[current] += passed_s
        now_s += passed_s
        if entering:
            meter.enter(activity, now_s)
            running[activity] += 1
        elif running[activity]:
            meter.leave(activity, now_s)
            running[activity] -= 1
    assert meter.seconds(now_s) == pytest.approx(expected, abs=1e-6)


def test_leaving_what_was_not_entered_is_a_defect() -> None:
    with pytest.raises(ValueError, match="reward"):
        ActivityMeter(0.0).leave("reward", 1.0)


def test_commands_run_between_steps_on_one_thread() -> None:
    seen: list[str] = []
    thread = StepThread("steps", lambda: bool(seen.append(threading.current_thread().name)), lambda failure: None)
    assert thread.do(lambda: threading.current_thread().name).result(5) == "steps"
    with pytest.raises(KeyError):
        thread.do(lambda: {}["absent"]).result(5)
    assert thread.do(lambda: 3).result(5) == 3
    assert thread.end(5)
    assert set(seen) <= {"steps"}


def test_a_step_that_raises_ends_the_thread_and_every_later_command_gets_the_cause() -> None:
    causes: list[Exception] = []

    def step() -> bool:
        raise OSError("out of memory")

    thread = StepThread("steps", step, causes.append)
    thread.do(lambda: None).result(5)
    end_s = time.monotonic() + 5
    while not causes and time.monotonic() < end_s:
        time.sleep(0.01)
    assert str(causes[0]) == "out of memory"
    with pytest.raises(OSError, match="out of memory"):
        thread.do(lambda: 1).result(5)
    assert thread.end(5)
