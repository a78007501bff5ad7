import pytest

from system.control import ControlState


def test_status_and_stop_reach_the_driver() -> None:
    control = ControlState("secret")
    assert control.report("secret", {"step": 1}) is False
    assert control.read("secret") == {"step": 1}
    control.request_stop("secret")
    assert control.report("secret", {"step": 2}) is True


def test_nothing_is_told_or_done_without_the_runs_token() -> None:
    control = ControlState("secret")
    control.report("secret", {"step": 1})
    for call in (control.read, control.request_stop, lambda token: control.report(token, {})):
        with pytest.raises(PermissionError):
            call("guess")
    assert control.stop_requested is False
