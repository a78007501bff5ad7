"""What a finished run says to whoever started it: how the reward moved, samples, and where everything lies."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console

from system.core.records import Row
from system.metrics import read_metrics
from system.rollout_files import read_rollouts
from system.run_folder import RunFolder

SAMPLES = 3
BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """One block character per value, from the lowest to the highest."""
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((value - low) / span * len(BARS)))] for value in values)


def print_summary(folder: RunFolder, console: Console) -> None:
    lines = read_metrics(folder.metrics)
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    if not rewards:
        return
    first, last = rewards[:2], rewards[-10:]
    console.print()
    console.print(
        f"Mean reward: {sum(first) / len(first):.3f} in the first {len(first)} steps, "
        f"{sum(last) / len(last):.3f} in the last {len(last)}.  {sparkline(rewards)}",
        highlight=False,
        soft_wrap=True,
    )
    seconds = sum(line["step_s"] for line in lines)
    tokens = sum(line["completion_tokens"] for line in lines)
    console.print(
        f"{len(lines)} steps, {tokens:,.0f} completion tokens, {seconds:,.0f} s of training.", highlight=False
    )
    steps = [line["step"] for line in lines]
    _print_samples(console, f"Before (step {steps[0]})", read_rollouts(folder.rollouts, steps=[steps[0]]))
    _print_samples(console, f"After (step {steps[-1]})", read_rollouts(folder.rollouts, steps=[steps[-1]]))
    console.print("\nWhere everything lies:", highlight=False)
    for label, path in (
        ("metrics, one line per step", folder.metrics),
        ("TensorBoard", folder.events),
        ("every completion (Parquet)", folder.rollouts),
        ("checkpoints, each with a plain model folder hf/", folder.checkpoints),
    ):
        if path.exists():
            console.print(f"  {label}: {path}", highlight=False, markup=False, soft_wrap=True)


def _print_samples(console: Console, title: str, rows: tuple[Row, ...]) -> None:
    console.print(f"\n{title}:", highlight=False)
    seen: set[int] = set()
    for row in rows:
        if row.group_id in seen or len(seen) == SAMPLES:
            continue
        seen.add(row.group_id)
        reward = "not scored" if row.reward is None else f"reward {row.reward:g}"
        answer = " ".join(row.completion_text.split())
        console.print(
            f"  {_question(row)} -> {answer[:160]!r}  ({reward})", highlight=False, markup=False, soft_wrap=True
        )


def _question(row: Row) -> str:
    metadata: dict[str, Any] = json.loads(row.metadata)
    question = metadata.get("question") or row.prompt_id
    return " ".join(str(question).split())[:100]
