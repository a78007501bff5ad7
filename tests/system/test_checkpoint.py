from pathlib import Path

import pytest

from system.checkpoint import CheckpointStore, RunProgress, read_progress
from system.core.errors import CheckpointDamaged


def write(store: CheckpointStore, step: int, content: bytes = b"weights") -> Path:
    folder = store.begin(step)
    (folder / "learner").mkdir()
    (folder / "learner" / "state.bin").write_bytes(content)
    return store.finish(folder, RunProgress(step=step, version=step + 3, ledger={"next": step * 4}))


def test_a_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "checkpoints", keep=2).newest() is None


def test_the_newest_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 5)
    final = write(store, 10)
    assert store.newest() == (final, RunProgress(step=10, version=13, ledger={"next": 40}))
    assert (tmp_path / "latest").read_text() == "step_000010"


def test_only_the_newest_keep_remain(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        write(store, step)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000003", "step_000004"]


def test_a_half_written_checkpoint_is_never_loaded_and_its_remains_are_cleared(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    half = store.begin(2)
    (half / "learner.bin").write_bytes(b"half")
    newest = store.newest()
    assert newest is not None
    assert newest[1].step == 1
    write(store, 3)
    assert not half.exists()


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 1)
    final = write(store, 2)
    (final / "learner" / "state.bin").write_bytes(b"WEIGHTS")
    newest = store.newest()
    assert newest is not None
    assert newest[1].step == 1


@pytest.mark.parametrize("damage", ["missing", "shorter", "changed", "no manifest"])
def test_when_none_is_whole_the_error_names_the_file(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    final = write(store, 1)
    victim = final / "learner" / "state.bin"
    if damage == "missing":
        victim.unlink()
    elif damage == "shorter":
        victim.write_bytes(b"w")
    elif damage == "changed":
        victim.write_bytes(b"WEIGHTS")
    else:
        (final / "manifest.json").unlink()
    with pytest.raises(CheckpointDamaged, match="manifest" if damage == "no manifest" else r"state\.bin"):
        store.newest()
    with pytest.raises(CheckpointDamaged):
        read_progress(final)


def test_writing_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    write(store, 4, b"first")
    final = write(store, 4, b"second")
    assert (final / "learner" / "state.bin").read_bytes() == b"second"
