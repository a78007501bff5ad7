"""The line per step, on a terminal and off it, whatever libraries do to logging."""

import asyncio
import io
import logging
import logging.config
import re
import sys

import pytest
from rich.console import Console

from system.logs import configure_logging
from system.progress import Progress, step_line
from tests.system.test_metrics import make_line


@pytest.fixture
def plain_logger():
    """The ``triptych`` logger as it was before."""
    logger = logging.getLogger("triptych")
    before = (list(logger.handlers), logger.propagate, logger.level)
    yield logger
    for handler in list(logger.handlers):
        if handler not in before[0]:
            handler.close()
    logger.handlers[:], logger.propagate = before[0], before[1]
    logger.setLevel(before[2])


def test_a_line_tells_reward_speed_staleness_and_who_waited_for_whom():
    text = step_line(make_line(11), steps=25)
    for part in ("step 12/25", "reward 0.500", "tokens/s", "staleness 11/11.0/11", "dropped zero_signal 2"):
        assert part in text
    assert "learner waited 6.0 s for rollouts, rollouts 4.5 s for the learner" in text
    assert "\n" not in text


def test_what_was_not_measured_is_shown_as_a_dash():
    assert "reward - ±-" in step_line(make_line(reward=None, reward_std=None), steps=2)


def test_without_a_terminal_each_step_is_one_plain_line_on_stderr_and_in_the_log(tmp_path, plain_logger, capsys):
    configure_logging("driver", tmp_path, to_stderr=True)

    async def run():
        async with Progress(25) as progress:
            for step in range(2):
                progress.step(make_line(step))

    asyncio.run(run())
    shown = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in shown] == ["step 1/25", "step 2/25"]
    assert "step 2/25" in (tmp_path / "driver.log").read_text()


def test_the_line_still_appears_after_a_library_configured_logging(tmp_path, plain_logger, capsys):
    configure_logging("driver", tmp_path, to_stderr=True)
    progress = Progress(25)
    logging.config.dictConfig(
        {"version": 1, "disable_existing_loggers": True, "root": {"level": "ERROR", "handlers": []}}
    )
    progress.step(make_line(4))
    assert "step 5/25" in capsys.readouterr().err
    assert "step 5/25" in (tmp_path / "driver.log").read_text()


def test_a_process_that_configured_no_logging_still_shows_the_line(plain_logger):
    plain_logger.handlers[:], plain_logger.propagate = [], False
    screen = io.StringIO()
    Progress(25, Console(file=screen, width=300)).step(make_line(0))
    assert screen.getvalue().startswith("step 1/25")


def test_on_a_terminal_lines_go_above_the_bar_and_logging_is_given_back(tmp_path, plain_logger):
    configure_logging("driver", tmp_path, to_stderr=True)
    handler = plain_logger.handlers[-1]
    screen = io.StringIO()

    async def run():
        async with Progress(25, Console(file=screen, force_terminal=True, width=300)) as progress:
            progress.note("waiting for groups")
            progress.step(make_line(0))
            assert progress.status()["step"] == 1

    asyncio.run(run())
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert "step 1/25  reward" in text
    assert "1/25" in text.split("step 1/25  reward")[1]
    assert handler.stream is sys.stderr


def test_the_status_before_the_first_step_names_the_goal():
    assert Progress(25).status() == {"step": 0, "steps": 25}
