"""What a learner step costs with shared prefixes: against padded rows, and against a bare PyTorch loop.

One rank, ZeRO 0, bfloat16, SmolLM2-135M or a random model of its shape, GRPO with random rewards, all rows of a step
in one micro-batch. ``short`` is a step of the quick start: 6 groups, prompts of 58 tokens, 8 completions of 20 each;
``long``: 1 group, 512 and 8 of 128.

- ``speedup_vs_padded``: seconds of ``LearnerRank.step`` with padded rows over seconds with shared prefixes.
- ``overhead_vs_bare``: seconds of the step over those of a loop without DeepSpeed, objective and packing, which runs
  the same packed tokens through the same model, with float32 master weights, clipping and AdamW.
  ``overhead_by_zero`` has the same for ZeRO 0 to 3.
- ``memory_vs_padded``: largest resident memory of the process over its whole life, shared over padded.
- ``step_memory_vs_padded``: the same of what a step takes on top of what the process holds between steps.

Every variant is a process of its own; their steps are taken in turns, and seconds are medians. On one thread they are
those of the processor, which other programs do not use up.

    .venv/bin/python benchmarks/learner.py [--rounds 5] [--threads N] [--model models/smollm2] [--scenario short]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner.layout_choice import choose_layout
from learner.logprobs import LogprobModel
from learner.model import load_causal_lm
from learner.rank import LearnerPlan, LearnerRank
from learner.settings import LearnerSettings
from learner.token_batch import ScoredRow, token_batch
from system.core.model import ModelSettings
from system.core.records import Group, Row

VOCABULARY = 49152
"""Of the random model."""
STAGES = (0, 1, 2, 3)
DEFAULT_STAGE = 0


@dataclass(frozen=True)
class Scenario:
    groups: int
    prompt_tokens: int
    completions: int
    completion_tokens: int

    def rows(self, vocabulary: int) -> list[Group]:
        """Random tokens, mixed rewards."""
        generator = np.random.default_rng(0)

        def tokens(count: int) -> np.ndarray:
            return generator.integers(0, vocabulary, count)

        groups = []
        for group_id in range(self.groups):
            prompt, length = tokens(self.prompt_tokens), self.completion_tokens
            rows = [
                Row(
                    group_id=group_id, trajectory_id=index, prompt_id=str(group_id), source="benchmark",
                    prompt_tokens=prompt, completion_tokens=tokens(length), rollout_logprobs=-np.ones(length),
                    versions=[0] * length, finish_reason="stop", seed=0, worker="benchmark", completion_text="",
                    reward=float(index % 2),
                )
                for index in range(self.completions)
            ]  # fmt: skip
            groups.append(Group(tuple(rows)))
        return groups


SCENARIOS = {"short": Scenario(6, 58, 8, 20), "long": Scenario(1, 512, 8, 128)}


def save_random_model(folder: Path) -> Path:
    """SmolLM2-135M's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def rank_step(model: str, layout: str, zero: int, threads: int, scenario: Scenario) -> Callable[[], float]:
    """A step of a real learner rank; answers the gradient's norm."""
    settings = LearnerSettings(zero=zero, layout=layout, threads=threads, tokens_per_microbatch=1_000_000)
    rank = LearnerRank(LearnerPlan(ModelSettings(path=model, dtype="bfloat16"), settings, {"name": "grpo"}))
    rank.setup()
    groups = scenario.rows(vocabulary_of(rank.model.causal_lm))
    taken = 0

    def step() -> float:
        nonlocal taken
        taken += 1
        return rank.step(groups, taken, taken).grad_norm

    return step


def bare_step(model: str, threads: int, scenario: Scenario) -> Callable[[], float]:
    """The loop that a step is held against."""
    torch.set_num_threads(threads)
    policy = LogprobModel(load_causal_lm(ModelSettings(path=model, dtype="bfloat16")), 1.0)
    policy.causal_lm.train()
    choose_layout(policy, "shared_prefix")
    rows = [row for group in scenario.rows(vocabulary_of(policy.causal_lm)) for row in group.rows]
    batch = token_batch([ScoredRow(row.prompt_tokens, row.completion_tokens) for row in rows], layout="shared_prefix")
    signs = torch.tensor([1.0 if row.reward else -1.0 for row in rows])
    coefficients = -signs[batch.line] / len(batch.line)
    weights = list(policy.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=1e-6, weight_decay=0.0, fused=True)

    def step() -> float:
        (policy(batch) * coefficients).sum().backward()
        for master, weight in zip(masters, weights, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters])
        torch.nn.utils.clip_grads_with_norm_(masters, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return float(norm)

    return step


def vocabulary_of(causal_lm: Any) -> int:
    return causal_lm.config.get_text_config().vocab_size


def memory_mb(field: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure_memory(step: Callable[[], Any]) -> dict[str, float]:
    """Peak of the process so far and of one more step, and what it holds before that step, in MB."""
    peak = memory_mb("VmHWM")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    resident = memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step()
    of_step = memory_mb("VmHWM")
    return {"peak": max(peak, of_step), "resident": resident, "step": of_step - resident}


def serve(variant: str, model: str, zero: int, threads: int, scenario: Scenario) -> None:
    """Takes orders from standard input, a line each, and answers with lines of JSON."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    if variant == "bare":
        step = bare_step(model, threads, scenario)
    else:
        step = rank_step(model, variant, zero, threads, scenario)
    now_s = time.process_time if threads == 1 else time.perf_counter
    for order in sys.stdin:
        began_s = now_s()
        answer: Any = measure_memory(step) if order.strip() == "memory" else {"grad_norm": step()}
        print(json.dumps({**answer, "seconds": now_s() - began_s}), file=answers, flush=True)


class Variant:
    """A process that takes steps when asked."""

    def __init__(self, name: str, scenario: str, model: str, zero: int, threads: int) -> None:
        self.name, self.seconds = name, []
        command = [sys.executable, __file__, "--serve", name, "--scenario", scenario, "--model", model]
        command += ["--zero", str(zero), "--threads", str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, order: str) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(order, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of variant {self.name} ended")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def take_turns(variants: Sequence[Variant], rounds: int) -> dict[str, float]:
    """Median seconds of a step per variant, after two of each that do not count; prints each."""
    for number in range(rounds + 2):
        for variant in variants:
            answer = variant.ask("step")
            if number >= 2:
                variant.seconds.append(answer["seconds"])
            print(f"  {variant.name:<14} {answer['seconds']:7.2f} s  |gradient| {answer['grad_norm']:.4g}", flush=True)
    return {variant.name: statistics.median(variant.seconds) for variant in variants}


def measure(scenario: str, model: str, rounds: int, threads: int) -> dict[str, Any]:
    """All figures of a scenario."""
    print(f"{scenario}: {SCENARIOS[scenario]}, ZeRO {DEFAULT_STAGE}", flush=True)
    names = ("shared_prefix", "padded", "bare")
    variants = [Variant(name, scenario, model, DEFAULT_STAGE, threads) for name in names]
    seconds = take_turns(variants, rounds)
    memory = {variant.name: variant.ask("memory") for variant in variants}
    for variant in variants:
        figures = {key: round(value) for key, value in memory[variant.name].items() if key != "seconds"}
        print(f"  {variant.name:<14} {seconds[variant.name]:7.2f} s  memory in MB: {figures}", flush=True)
        variant.close()
    overheads = {DEFAULT_STAGE: seconds["shared_prefix"] / seconds["bare"]}
    for stage in STAGES:
        if stage != DEFAULT_STAGE:
            print(f"{scenario}, ZeRO {stage}", flush=True)
            pair = [Variant(name, scenario, model, stage, threads) for name in ("shared_prefix", "bare")]
            taken = take_turns(pair, rounds)
            overheads[stage] = taken["shared_prefix"] / taken["bare"]
            for variant in pair:
                variant.close()

    def ratio(kind: str) -> float:
        return round(memory["shared_prefix"][kind] / memory["padded"][kind], 3)

    return {
        "speedup_vs_padded": round(seconds["padded"] / seconds["shared_prefix"], 2),
        "overhead_vs_bare": round(overheads[DEFAULT_STAGE], 3),
        "memory_vs_padded": ratio("peak"),
        "step_memory_vs_padded": ratio("step"),
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "memory_mb": {
            name: {key: round(found[key]) for key in ("peak", "resident", "step")} for name, found in memory.items()
        },
        "overhead_by_zero": {str(stage): round(overheads[stage], 3) for stage in STAGES},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--model", default="models/smollm2", help="folder; a random one of SmolLM2's shape if missing")
    parser.add_argument("--scenario", choices=list(SCENARIOS), help="default: both")
    parser.add_argument("--zero", type=int, default=DEFAULT_STAGE, help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        scenario = SCENARIOS[arguments.scenario]
        serve(arguments.serve, arguments.model, arguments.zero, arguments.threads, scenario)
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = arguments.model
        if not Path(model).is_dir():
            print("a random model of SmolLM2-135M's shape")
            model = str(save_random_model(Path(scratch) / "model"))
        chosen = [arguments.scenario] if arguments.scenario else list(SCENARIOS)
        figures = {name: measure(name, model, arguments.rounds, arguments.threads) for name in chosen}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
