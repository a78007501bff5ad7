"""What a person sees while a run goes on: one line per step, and below it a bar when there is a terminal.

The lines go through the ``triptych`` logger, so they also stand in ``logs/driver.log``, and they still appear after a
library has configured logging for itself. ``step_line`` is pure.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from system.metrics import BUSY_KINDS, StepMetrics

log = logging.getLogger("triptych.progress")


def step_line(line: StepMetrics, steps: int) -> str:
    """Reward, speed, staleness (min/mean/max), loss, where the time went, and who waited for whom."""
    rollouts_idle_s = max(0.0, line.step_s - sum(getattr(line, f"{kind}_s") for kind in BUSY_KINDS))
    parts = [
        f"step {line.step + 1}/{steps}",
        f"reward {_number(line.reward, '.3f')} ±{_number(line.reward_std, '.2f')}",
        f"{_number(line.completion_tokens_per_s, ',.0f')} tokens/s",
        f"staleness {line.staleness_min}/{line.staleness_mean:.1f}/{line.staleness_max}",
        f"length {line.length_mean:.0f}",
        f"loss {_number(line.loss, '.4f')}",
        f"{line.step_s:.1f} s (generate {line.generate_s:.1f}, learn {line.learn_s:.1f}, sync {line.sync_s:.1f})",
        f"learner waited {line.learner_wait_s:.1f} s for rollouts, rollouts {rollouts_idle_s:.1f} s for the learner",
    ]
    if line.null_rewards:
        parts.append(f"not scored {line.null_rewards}")
    if line.dropped:
        parts.append("dropped " + ", ".join(f"{reason} {number}" for reason, number in line.dropped.items()))
    return "  ".join(parts)


def _number(value: float | None, layout: str) -> str:
    return "-" if value is None else format(value, layout)


class Progress:
    """``async with Progress(steps) as progress``: shows the steps of a run, from the driver only."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or Console(stderr=True)
        self._bar: Bar | None = None
        self._task: Any = None
        self._last: StepMetrics | None = None
        self._redirected: list[tuple[logging.StreamHandler[Any], Any]] = []

    async def __aenter__(self) -> Progress:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, TextColumn("{task.fields[note]}"), console=self._console, transient=True)
            self._task = self._bar.add_task("training", total=self._steps, note="starting")
            self._redirect_logging()
            self._bar.start()
        return self

    async def __aexit__(self, *failure: object) -> None:
        for handler, stream in self._redirected:
            handler.setStream(stream)
        self._redirected = []
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def step(self, line: StepMetrics) -> None:
        """A step is done."""
        self._last = line
        text = step_line(line, self._steps)
        log.disabled = False
        if log.hasHandlers() and log.isEnabledFor(logging.INFO):
            log.info("%s", text)
        else:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        if self._bar is not None:
            self._bar.update(self._task, completed=line.step + 1, note="")

    def note(self, text: str) -> None:
        """What the run does or waits for right now; shown beside the bar."""
        if self._bar is not None:
            self._bar.update(self._task, note=text)

    def status(self) -> dict[str, Any]:
        """The last step, for whoever asks from outside."""
        if self._last is None:
            return {"step": 0, "steps": self._steps}
        last = self._last
        return {
            "step": last.step + 1,
            "steps": self._steps,
            "reward": last.reward,
            "completion_tokens_per_s": last.completion_tokens_per_s,
            "staleness": [last.staleness_min, last.staleness_mean, last.staleness_max],
            "line": step_line(last, self._steps),
        }

    def _redirect_logging(self) -> None:
        """Our own log lines go above the bar instead of through it."""
        for handler in logging.getLogger("triptych").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.__stderr__):
                self._redirected.append((handler, handler.stream))
                handler.setStream(_AboveTheBar(self._console))


class _AboveTheBar:
    """A text stream that prints through the console which draws the bar."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        if text.strip():
            self._console.print(text.rstrip("\n"), highlight=False, markup=False, soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        pass
