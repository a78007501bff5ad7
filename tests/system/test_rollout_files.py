"""Rollouts on disk: whole files, exact content, the highest incarnation."""

import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from system.core.errors import DataError
from system.core.records import SCHEMA, Group
from system.rollout_files import read_rollout_table, read_rollouts, rollout_files, write_step
from system.stream import TakenStep
from tests.system.stream_parts import make_group, make_row


def taken(*groups: Group) -> TakenStep:
    return TakenStep(
        groups=tuple(group.to_bytes() for group in groups),
        group_ids=tuple(group.group_id for group in groups),
        version=0,
        staleness=(0,) * len(groups),
        wait_s=0.0,
        idle_s=0.0,
    )


def test_rows_come_back_exactly_with_step_and_advantage(tmp_path):
    rich = make_row(
        4,
        1,
        reward=0.25,
        metadata='{"label":  3}',
        reference_logprobs=[-1.0, -2.0, -3.0],
        loss_mask=[True, False, True],
    )
    group = Group((make_row(4, 0, reward=None), rich))
    advantages = {(4, 1): 0.5, (4, 0): None}
    written = write_step(tmp_path, taken(group), advantages, step=12, incarnation=0)
    assert (tmp_path / "step_000012.parquet").exists()
    rows = read_rollouts(tmp_path, steps=[12])
    assert [(row.step, row.advantage, row.reward) for row in rows] == [(12, None, None), (12, 0.5, 0.25)]
    back = Group(tuple(row.as_trained(None, None) for row in rows))
    assert back.to_batch().equals(group.to_batch())
    assert Group(written).to_batch().equals(Group(rows).to_batch())


def test_every_segment_of_a_trajectory_has_its_advantage(tmp_path):
    group = Group((make_row(0, 0, segment_index=0), make_row(0, 0, segment_index=1), make_row(0, 1, reward=0.0)))
    rows = write_step(tmp_path, taken(group), {(0, 0): 1.5, (0, 1): -1.5}, 0, 0)
    assert [row.advantage for row in rows] == [1.5, 1.5, -1.5]


def test_the_file_is_plain_parquet_in_the_schema(tmp_path):
    write_step(tmp_path, taken(make_group(0), make_group(1)), {}, 3, 0)
    assert read_rollout_table(tmp_path).schema.equals(SCHEMA, check_metadata=True)
    table = pq.read_table(tmp_path / "step_000003.parquet")
    assert table.schema.names == SCHEMA.names
    assert table.schema.metadata == SCHEMA.metadata
    assert table.column("group_id").to_pylist() == [0, 0, 1, 1]


def test_readers_take_the_highest_incarnation_of_each_step(tmp_path):
    for incarnation, steps, reward in ((0, (0, 1, 2), 0.0), (2, (1, 2), 0.5), (10, (2,), 1.0)):
        for step in steps:
            group = make_group(step, rewards=(reward, reward), incarnation=incarnation)
            write_step(tmp_path, taken(group), {}, step, incarnation)
    assert rollout_files(tmp_path) == {
        0: "step_000000.parquet",
        1: "step_000001-i2.parquet",
        2: "step_000002-i10.parquet",
    }
    rows = read_rollouts(tmp_path)
    assert [(row.step, row.incarnation) for row in rows] == [(0, 0), (0, 0), (1, 2), (1, 2), (2, 10), (2, 10)]
    assert len(list(tmp_path.iterdir())) == 6


def test_a_step_that_is_not_there_is_named(tmp_path):
    write_step(tmp_path, taken(make_group(0)), {}, 0, 0)
    with pytest.raises(DataError, match="no rollouts of step 7; steps 0 to 0 are there"):
        read_rollouts(tmp_path, steps=[0, 7])
    with pytest.raises(DataError, match="nothing is there"):
        read_rollouts(tmp_path / "empty", steps=[0])
    assert read_rollout_table(tmp_path / "empty").num_rows == 0


def test_a_file_that_is_not_whole_is_named(tmp_path):
    write_step(tmp_path, taken(make_group(0)), {}, 0, 0)
    path = tmp_path / "step_000000.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"step_000000.parquet is not a whole Parquet file"):
        read_rollouts(tmp_path)


def test_a_full_disk_leaves_nothing_that_looks_like_a_step(tmp_path):
    """A file-size limit stands in for the disk: the kernel refuses the write in the middle of the file."""
    program = f"""
import resource, signal
from tests.system.test_rollout_files import taken
from tests.system.stream_parts import make_group
from system.rollout_files import write_step
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    write_step({str(tmp_path)!r}, taken(make_group(0)), {{}}, 0, 0)
except OSError as failure:
    print("refused", failure.errno)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("refused"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_folder_may_be_a_url():
    write_step("memory://rollouts-of-a-test", taken(make_group(5)), {}, 1, 0)
    assert [row.group_id for row in read_rollouts("memory://rollouts-of-a-test", steps=[1])] == [5, 5]
