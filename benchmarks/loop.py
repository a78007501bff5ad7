"""Seconds and tokens per step of the quick start's shapes, and where the time goes.

Usage: .venv/bin/python benchmarks/loop.py [--steps N] [--warmup N] [--max-staleness N] [KEY=VALUE ...]

Runs ``recipes/quickstart.yaml`` (real Ray, vLLM and DeepSpeed) into a temporary folder and reads its metrics. At
``max_staleness: 0`` nothing overlaps, so the split must add up to the wall clock: ``unaccounted_share`` is what is
missing, as a share of the step. With a larger staleness generation overlaps learning and the split exceeds the step.
The last line is one JSON object: means over the measured steps, in seconds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "models" / "smollm2"
PARTS = ("generate_s", "reward_s", "reference_s", "learn_s", "sync_s", "wait_s")
TRIPTYCH = [sys.executable, "-m", "system.cli"]
DEADLINE_S = 1800


def measure(steps: int, warmup: int, max_staleness: int, overrides: list[str]) -> dict[str, float]:
    """Mean seconds per step by part, after ``warmup`` steps that are not counted."""
    if not MODEL.exists():
        subprocess.run([*TRIPTYCH, "model", "import", "smollm2", str(MODEL)], check=True, cwd=ROOT, timeout=DEADLINE_S)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *TRIPTYCH, "train", "recipes/quickstart.yaml", f"run.folder={folder}/run", f"run.steps={steps + warmup}",
            f"stream.max_staleness={max_staleness}", "run.checkpoint_every_steps=1000000", *overrides,
        ]  # fmt: skip
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=DEADLINE_S)
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = lines[warmup:]
    means = {key: sum(line[key] for line in counted) / len(counted) for key in ("step_s", *PARTS, "completion_tokens")}
    accounted = sum(means[part] for part in PARTS)
    means["unaccounted_share"] = (means["step_s"] - accounted) / means["step_s"]
    means["completion_tokens_per_s"] = means["completion_tokens"] / means["step_s"]
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    means = measure(arguments.steps, arguments.warmup, arguments.max_staleness, arguments.overrides)
    print(f"quick start's shapes, max_staleness {arguments.max_staleness}, mean of {arguments.steps} steps")
    for part in PARTS:
        print(f"  {part:12} {means[part]:7.3f} s  {means[part] / means['step_s']:6.1%}")
    print(f"  {'step_s':12} {means['step_s']:7.3f} s  (unaccounted {means['unaccounted_share']:.1%})")
    print(f"  {means['completion_tokens']:.0f} completion tokens, {means['completion_tokens_per_s']:.1f} a second")
    print(json.dumps({key: round(value, 4) for key, value in means.items()}))


if __name__ == "__main__":
    main()
