import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from system.core.errors import ConfigError
from system.run_folder import RunFolder, find_run, is_alive


def test_a_new_run_has_an_identity_a_token_for_its_owner_only_and_versions(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    record = folder.begin(steps=3)
    assert record.run_id.startswith("run-")
    assert record.ray_namespace == f"triptych-{record.run_id}"
    assert (record.incarnation, record.highest_version, record.pid) == (0, -1, os.getpid())
    assert stat.S_IMODE(folder.token_file.stat().st_mode) == 0o600
    assert len(folder.token()) >= 32
    assert "torch" in record.versions


def test_going_on_raises_the_incarnation_and_keeps_identity_token_and_versions_used(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first, token = folder.begin(3), folder.token()
    folder.update(highest_version=5, step=2, error="it broke", state="failed")
    second = folder.begin(3)
    assert (second.run_id, second.incarnation, second.highest_version) == (first.run_id, 1, 5)
    assert second.error is None
    assert folder.token() == token


def test_unknown_keys_of_another_version_are_passed_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.begin(3)
    values = json.loads(folder.record_file.read_text())
    folder.record_file.write_text(json.dumps({**values, "from_the_future": 1}))
    assert folder.read().steps == 3


def test_a_broken_record_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ConfigError, match=r"run\.json: not valid JSON"):
        RunFolder(tmp_path).read()


def test_a_run_is_found_by_folder_or_by_name_and_a_wrong_name_names_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder("runs/quickstart").begin(1)
    assert find_run("quickstart").path == find_run("runs/quickstart").path
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        find_run("quickstrat")


def test_a_run_whose_process_is_gone_is_not_alive(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert is_alive(folder.begin(1))
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(timeout=30)
    assert not is_alive(folder.update(pid=gone.pid, state="running"))
    assert not is_alive(folder.update(pid=os.getpid(), state="finished"))
