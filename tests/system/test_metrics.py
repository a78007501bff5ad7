"""Figures of a step, the metrics file, and backends that fail."""

import json
import logging
import subprocess
import sys
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from system.core.errors import ConfigError, DataError
from system.metrics import MetricsWriter, StepTimes, read_metrics, rollout_figures, step_metrics
from tests.system.stream_parts import make_group, make_row

FIXED_KEYS = """
step version incarnation time_s step_s generate_s reward_s reference_s learn_s sync_s wait_s reward reward_std
completion_tokens completion_tokens_per_s length_mean truncated_share zero_signal_share loss grad_norm learning_rate
kl_reference ratio_mean ess clip_share staleness_min staleness_mean staleness_max issued leased ready taken trained
dropped null_rewards
"""
COUNTS = {
    "issued": 9,
    "leased": 1,
    "ready": 2,
    "taken": 0,
    "trained": 4,
    "dropped": {"zero_signal": 2},
    "late_twins": 0,
}


@dataclass(frozen=True)
class Report:
    loss: float | None = 0.25
    grad_norm: float | None = 1.5
    learning_rate: float | None = 1e-5
    metrics: dict[str, float] = field(default_factory=lambda: {"ratio_mean": 1.0, "entropy": 2.0})


TIMES = StepTimes(
    step_s=10.0,
    learner_wait_s=6.0,
    learn_s=3.0,
    sync_s=0.5,
    busy={"generate": 4.0, "reward": 1.0, "reference": 0.5, "idle": 4.5},
    busy_while_waiting={"generate": 3.5, "reward": 1.0, "reference": 0.5, "idle": 1.0},
)


def make_line(step=0, incarnation=0, rows=None, **changes):
    line = step_metrics(
        step=step,
        version=step,
        incarnation=incarnation,
        rows=make_group().rows if rows is None else rows,
        report=Report(),
        times=TIMES,
        counts=COUNTS,
        extra={"probe_gap_mean": 1e-6},
    )
    return replace(line, **changes)


def test_a_line_has_every_fixed_key_of_the_contract():
    line = make_line().as_dict()
    assert [key for key in FIXED_KEYS.split() if key not in line] == []
    assert line["objective/entropy"] == 2.0
    assert line["ratio_mean"] == 1.0
    assert line["kl_reference"] is None
    assert line["source/sums/reward"] == 0.5
    assert line["source/sums/part/answer"] == 0.5
    assert line["probe_gap_mean"] == 1e-6
    assert line["dropped"] == {"zero_signal": 2}


def test_waiting_is_split_into_waiting_for_work_and_waiting_for_nobody():
    line = make_line()
    assert line.learner_wait_s == 6.0
    assert line.wait_s == pytest.approx(1.0)
    assert (line.generate_s, line.reward_s, line.reference_s) == (4.0, 1.0, 0.5)


def test_a_trajectory_of_several_segments_counts_once():
    rows = (
        make_row(0, 0, reward=1.0, length=4, segment_index=0, finish_reason="length"),
        make_row(0, 0, reward=1.0, length=2, segment_index=1, finish_reason="stop"),
        make_row(0, 1, reward=0.0, length=6, finish_reason="length"),
    )
    figures = rollout_figures(rows, version=0)
    assert (figures.reward, figures.reward_std) == (0.5, 0.5)
    assert (figures.completion_tokens, figures.length_mean) == (12, 6.0)
    assert figures.truncated_share == 0.5


def test_lengths_count_generated_tokens_whatever_is_masked():
    rows = (make_row(0, 0, length=5, loss_mask=[False] * 5), make_row(0, 1, length=3))
    assert rollout_figures(rows, 0).length_mean == 4.0


def test_a_reward_that_is_null_is_counted_and_enters_no_mean():
    figures = rollout_figures(make_group(rewards=(1.0, None, 0.5, 0.0)).rows, 0)
    assert (figures.reward, figures.null_rewards) == (0.5, 1)
    nothing = rollout_figures(make_group(rewards=(None, None)).rows, 0)
    assert (nothing.reward, nothing.reward_std, nothing.null_rewards) == (None, None, 2)


def test_staleness_is_measured_on_the_oldest_token_of_each_group():
    rows = (
        *make_group(0, version=3).rows,
        make_row(1, 0, length=3, versions=[1, 2, 5]),
        make_row(1, 1, length=3, versions=[5, 5, 5]),
    )
    figures = rollout_figures(rows, version=5)
    assert (figures.staleness_min, figures.staleness_mean, figures.staleness_max) == (2, 3.0, 4)


def test_every_source_has_figures_of_its_own():
    rows = (*make_group(0, (1.0, 1.0)).rows, *make_group(1, (0.0, 1.0), source="algebra").rows)
    line = make_line(rows=rows).as_dict()
    assert (line["source/sums/zero_signal_share"], line["source/algebra/zero_signal_share"]) == (1.0, 0.0)
    assert line["zero_signal_share"] == 0.5


@given(
    st.lists(st.lists(st.one_of(st.none(), st.floats(-2, 2, width=32)), min_size=1, max_size=4), min_size=1, max_size=4)
)
def test_figures_agree_with_plain_arithmetic(groups):
    rows = [row for group_id, rewards in enumerate(groups) for row in make_group(group_id, rewards).rows]
    figures = rollout_figures(rows, 0)
    scored = [reward for rewards in groups for reward in rewards if reward is not None]
    if scored:
        assert figures.reward == pytest.approx(np.mean(scored), abs=1e-9)
        assert figures.reward_std == pytest.approx(np.std(scored), abs=1e-9)
    assert figures.null_rewards + len(scored) == sum(map(len, groups))


def test_lines_come_back_as_they_were_written(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    written = [make_line(step) for step in range(3)]
    for line in written:
        writer.write(line)
    writer.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == [line.as_dict() for line in written]


def test_a_run_without_metrics_reads_as_none(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_numbers_that_are_not_finite_are_null_in_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).write(make_line(loss=float("nan"), more={"objective/x": float("inf")}))
    text = path.read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    (line,) = read_metrics(path)
    assert (line["loss"], line["objective/x"]) == (None, None)


def test_lines_of_lost_steps_stay_and_readers_take_the_highest_incarnation(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsWriter(path)
    for step in range(4):
        first.write(make_line(step))
    second = MetricsWriter(path)
    for step in (2, 3):
        second.write(make_line(step, incarnation=1))
    assert len(path.read_text().splitlines()) == 6
    assert [(line["step"], line["incarnation"]) for line in read_metrics(path)] == [(0, 0), (1, 0), (2, 1), (3, 1)]


def test_half_a_line_of_a_killed_process_is_removed_and_never_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).write(make_line(0))
    with open(path, "a") as handle:
        handle.write('{"step": 1, "incarn')
    assert [line["step"] for line in read_metrics(path)] == [0]
    MetricsWriter(path).write(make_line(1, incarnation=1))
    assert [(line["step"], line["incarnation"]) for line in read_metrics(path)] == [(0, 0), (1, 1)]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "incarnation": 0}\nnonsense\n{"step": 1, "incarnation": 0}\n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(path)


def test_a_disk_that_refuses_is_warned_about_once_and_the_run_goes_on(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    path.mkdir()
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            writer.write(make_line(step))
    assert len([record for record in caplog.records if "training goes on" in record.message]) == 1
    path.rmdir()
    writer.write(make_line(3))
    assert [line["step"] for line in read_metrics(path)] == [3]


def test_a_disk_that_fills_in_the_middle_of_a_line_leaves_whole_lines_only(tmp_path):
    """A file-size limit stands in for the disk: the kernel takes a part of the line and refuses the rest."""
    program = f"""
import resource, signal, pathlib
from tests.system.test_metrics import MetricsWriter, make_line
path = pathlib.Path({str(tmp_path)!r}) / "metrics.jsonl"
writer = MetricsWriter(path)
writer.write(make_line(0))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = path.stat().st_size + 100
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
writer.write(make_line(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write(make_line(2))
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [0, 2]


def test_a_backend_that_fails_is_warned_about_once_and_the_others_go_on(tmp_path, caplog):
    blocked = tmp_path / "events"
    blocked.write_text("a file where the folder belongs")
    with caplog.at_level(logging.WARNING):
        writer = MetricsWriter(tmp_path / "metrics.jsonl", events=blocked)
        for step in range(3):
            writer.write(make_line(step))
        writer.close()
    assert len([record for record in caplog.records if "tensorboard fails" in record.message]) == 1
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


def read_events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_shows_each_number_and_hides_the_lost_steps_after_a_return(tmp_path):
    first = MetricsWriter(tmp_path / "metrics.jsonl", events=tmp_path / "events")
    for step in range(4):
        first.write(make_line(step, reward=0.1 * step))
    first.close()
    second = MetricsWriter(tmp_path / "metrics.jsonl", events=tmp_path / "events")
    second.write(make_line(2, incarnation=1, reward=0.7))
    second.close()
    events = read_events(tmp_path / "events")
    shown = [(scalar.step, pytest.approx(scalar.value)) for scalar in events.Scalars("reward")]
    assert shown == [(0, 0.0), (1, 0.1), (2, 0.7)]
    assert {"loss", "dropped/zero_signal", "source/sums/reward", "objective/entropy"} <= set(events.Tags()["scalars"])


def recipe_with(**log_settings):
    settings = {"tensorboard": False, "wandb": None, "mlflow": None, **log_settings}
    return SimpleNamespace(
        log=SimpleNamespace(**settings),
        run=SimpleNamespace(name="quickstart", folder="runs/quickstart"),
        model_dump=lambda mode: {"run": {"name": "quickstart"}},
    )


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_named_backend_that_is_not_installed_is_refused_at_start(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"log.{package}: .*triptych\[{package}\]"):
        MetricsWriter(tmp_path / "metrics.jsonl", recipe=recipe_with(**{package: {}}))


def test_wandb_gets_every_number_and_goes_on_in_the_same_run(tmp_path, monkeypatch):
    starts, logged = [], []
    run = SimpleNamespace(log=logged.append, define_metric=lambda *a, **k: None, finish=lambda: logged.append("end"))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **given: starts.append(given) or run))
    for incarnation in range(2):
        writer = MetricsWriter(tmp_path / "m.jsonl", recipe=recipe_with(wandb={"project": "mine"}))
        writer.write(make_line(3, incarnation=incarnation))
        writer.close()
    assert starts[0] == starts[1]
    assert (starts[0]["project"], starts[0]["resume"], starts[0]["name"]) == ("mine", "allow", "quickstart")
    assert (logged[0]["step"], logged[0]["dropped/zero_signal"], logged[1]) == (3.0, 2.0, "end")


def test_mlflow_gets_every_number_and_its_settings_are_checked(tmp_path, monkeypatch):
    calls = []

    def record(name):
        return lambda *arguments, **given: calls.append((name, arguments, given))

    names = ("set_tracking_uri", "set_experiment", "start_run", "log_metrics", "end_run")
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(**{name: record(name) for name in names}))
    writer = MetricsWriter(
        tmp_path / "m.jsonl", recipe=recipe_with(mlflow={"tracking_uri": "http://m", "experiment_name": "e"})
    )
    writer.write(make_line(3))
    writer.close()
    assert [name for name, _, _ in calls] == list(names)
    assert calls[3][2] == {"step": 3}
    with pytest.raises(ConfigError, match=r"log.mlflow.uri: unknown key"):
        MetricsWriter(tmp_path / "m.jsonl", recipe=recipe_with(mlflow={"uri": "x"}))


def test_reading_metrics_imports_no_backend():
    program = (
        "import system.metrics, sys; print([m for m in ('torch', 'ray', 'tensorboard', 'wandb') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_file_is_one_json_object_per_line(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", fsync=True)
    for step in range(2):
        writer.write(make_line(step))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
