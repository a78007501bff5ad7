"""TRL's side of ``peer_trl.py``: times the steps of its GRPOTrainer. Runs under an interpreter that has TRL.

Usage: python peer_trl_side.py MODEL PROMPTS.jsonl STEPS GROUPS_PER_STEP GROUP_SIZE MAX_TOKENS THREADS

Prints one JSON object per step: its seconds, the seconds of its parts, the tokens of its completions, the mean reward.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

LEARNING_RATE, KL_COEFFICIENT = 1e-5, 0.04
PARTS = {
    "_generate": "generate_s",
    "_calculate_rewards": "reward_s",
    "_generate_and_score_completions": "rollout_s",
}
"""Methods of the trainer whose time is taken; what a rollout takes beyond its other parts is the reference model."""


def main(model: str, prompts: Path, steps: int, groups: int, group_size: int, max_tokens: int, threads: int) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    spent: dict[str, float] = defaultdict(float)
    seen: dict[str, float] = {}

    def last_integer_is_label(completions: list[Any], label: list[str], completion_ids: list[Any], **_: Any) -> Any:
        rewards = []
        for completion, right in zip(completions, label, strict=True):
            numbers = re.findall(r"-?\d+", completion[0]["content"])
            rewards.append(float(bool(numbers) and int(numbers[-1]) == int(right)))
        seen["completion_tokens"] = sum(len(ids) for ids in completion_ids)
        seen["reward"] = sum(rewards) / len(rewards)
        return rewards

    class Stopwatch(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            spent.clear()
            self.began_s = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_s = time.perf_counter() - self.began_s
            rollout_s = spent.pop("rollout_s")
            spent["reference_s"] = rollout_s - sum(spent.values())
            print(json.dumps({"step_s": step_s, **spent, "learn_s": step_s - rollout_s, **seen}), flush=True)

    rows = [json.loads(line) for line in prompts.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=groups * group_size,
            gradient_accumulation_steps=1, num_generations=group_size, max_completion_length=max_tokens,
            temperature=1.0, learning_rate=LEARNING_RATE, lr_scheduler_type="constant", beta=KL_COEFFICIENT,
            use_cpu=not torch.cuda.is_available(), bf16=False, gradient_checkpointing=False, shuffle_dataset=False,
            report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
            model_init_kwargs={"dtype": "bfloat16"},
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, reward_funcs=last_integer_is_label, args=config, train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model), callbacks=[Stopwatch()],
        )  # fmt: skip
        for method, part in PARTS.items():
            setattr(trainer, method, timed(getattr(trainer, method), spent, part))
        trainer.train()


def timed(method: Any, spent: dict[str, float], part: str) -> Any:
    def timing(*arguments: Any, **options: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return method(*arguments, **options)
        finally:
            spent[part] += time.perf_counter() - began_s

    return timing


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *(int(argument) for argument in sys.argv[3:]))
