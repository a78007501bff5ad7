"""What an objective costs: loss, coefficients and metrics of 512 completions of 1,024 tokens, on the CPU in float32.

It is called as a step of the learner calls it: with the log-probs that it needs, and with the advantages and counts
that a step computes once for all its micro-batches. The bound is one ``exp`` over a tensor of the same size, measured
in the same run: an objective may take twenty of them, and 0.3 seconds. Both are medians of runs taken in turns; on one
thread, seconds are those of the processor, which other programs do not use up.

    .venv/bin/python benchmarks/objectives.py [--threads 1] [--rounds 60] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from learner.objectives import ObjectiveBatch, build_objective, objective_names
from learner.objectives.base import AnyObjective

COMPLETIONS, TOKENS, GROUP_SIZE = 512, 1024, 8
REQUIRED = {"dr_grpo": {"max_tokens": TOKENS}}
PAIRED = {"two_grpo": 2, "online_dpo": 2, "ipo": 2}
"""Group sizes other than ``GROUP_SIZE``."""


def batch_of(group_size: int) -> ObjectiveBatch:
    """Random log-probs of completions of 512 to 1,024 tokens, with a sampler and a reference near the policy."""
    generator = torch.Generator().manual_seed(0)
    shape = (COMPLETIONS, TOKENS)
    logprobs = -3.0 * torch.rand(shape, generator=generator)
    lengths = torch.randint(TOKENS // 2, TOKENS + 1, (COMPLETIONS,), generator=generator)
    lengths[0] = TOKENS

    def near(width: float) -> torch.Tensor:
        return logprobs + width * torch.randn(shape, generator=generator)

    return ObjectiveBatch(
        logprobs=logprobs,
        mask=torch.arange(TOKENS)[None] < lengths[:, None],
        group_ids=torch.arange(COMPLETIONS) // group_size,
        trajectory_ids=torch.arange(COMPLETIONS) % group_size,
        old_logprobs=near(0.05),
        reference_logprobs=near(0.1),
        rollout_logprobs=near(0.05),
        rewards=torch.rand(COMPLETIONS, generator=generator),
    )


def as_in_a_step(objective: AnyObjective, batch: ObjectiveBatch) -> ObjectiveBatch:
    """The batch with what the objective needs and nothing else, its step prepared."""
    unneeded = {f"{kind}_logprobs": None for kind in ("old", "reference", "rollout") if kind not in objective.needs}
    plan = objective.prepare(batch.step_rows())
    return replace(
        batch, **unneeded, advantages=torch.tensor(plan.advantages, dtype=torch.float64), denominators=plan.denominators
    )


def warm_allocator() -> None:
    """Frees a large tensor, as a learner does all the time: from then on memory of this size is kept for the next one.

    Until then glibc hands freed memory back to the system, and getting it again, page by page, costs what is measured.
    """
    torch.ones(30 * 2**20 // 4)


def seconds_of(work: Callable[[], Any]) -> float:
    now_s = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    began_s = now_s()
    work()
    return now_s() - began_s


def measure(name: str, rounds: int) -> dict[str, float]:
    """Median seconds of an objective, and how many exps that is."""
    objective = build_objective(name, **REQUIRED.get(name, {}))
    batch = as_in_a_step(objective, batch_of(PAIRED.get(name, GROUP_SIZE)))
    objective(batch)
    exps, costs = [], []
    for _ in range(rounds):
        exps.append(seconds_of(lambda: torch.exp(batch.logprobs)))
        costs.append(seconds_of(lambda: objective(batch)))
    one_exp_s, seconds = statistics.median(exps), statistics.median(costs)
    return {"times_exp": seconds / one_exp_s, "seconds": seconds, "exp_seconds": one_exp_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="objectives; default: all")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warm_allocator()
    figures = {}
    print(f"{COMPLETIONS} completions of up to {TOKENS} tokens, float32, {arguments.threads} threads")
    print(f"{'objective':<14} {'x exp':>8} {'seconds':>9} {'one exp':>9}")
    for name in arguments.names or objective_names():
        figures[name] = measure(name, arguments.rounds)
        row = figures[name]
        print(f"{name:<14} {row['times_exp']:>8.1f} {row['seconds']:>9.4f} {row['exp_seconds']:>9.5f}", flush=True)
    print(
        json.dumps(
            {
                "times_exp": {name: round(row["times_exp"], 2) for name, row in figures.items()},
                "seconds": {name: round(row["seconds"], 5) for name, row in figures.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
