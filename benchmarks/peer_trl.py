"""Seconds per step of Triptych and of TRL's GRPOTrainer: same machine, model, prompts and sizes, turn by turn.

Usage: .venv/bin/python benchmarks/peer_trl.py [--trl-python PATH] [--blocks N] [--steps N] [--warmup N] [--threads N]

Both train SmolLM2-135M in bfloat16 on one-digit sums: 4 prompts x 8 completions of at most 32 tokens, KL 0.04 to a
reference model, AdamW at 1e-5. Triptych runs synchronously (``max_staleness: 0``), weight sync and its checks
included; its optimiser keeps float32 weights, TRL's changes the bfloat16 ones. Each system's steps come in blocks that
alternate; a block is a process of its own that starts from the same model, and its first steps are not counted. The
last line is one JSON object: the median seconds of a step of each, and Triptych's divided by TRL's (``ratio``).

TRL is not among Triptych's dependencies and lives in an environment of its own. Without ``--trl-python`` the script
makes one in ``.venv-trl``, as these commands do:

    python -m venv .venv-trl
    .venv-trl/bin/pip install -r requirements/torch.lock
    .venv-trl/bin/pip install trl==1.16.0
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "models" / "smollm2"
TRL_ENVIRONMENT = ROOT / ".venv-trl"
TRL_VERSION = "1.16.0"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GROUPS_PER_STEP, GROUP_SIZE, MAX_TOKENS = 4, 8, 32
PARTS = ("generate_s", "reward_s", "reference_s", "learn_s", "sync_s", "wait_s")
FIGURES = ("step_s", *PARTS, "completion_tokens", "reward")
DEADLINE_S = 3600

RECIPE = """
run: {{folder: {folder}/run, steps: {steps}, checkpoint_every_steps: 1000000}}
model: {{path: {model}, dtype: bfloat16}}
data: [{{source: {prompts}, chat_template: {{}}, max_prompt_tokens: 128}}]
rollout: {{group_size: {group_size}, max_tokens: {max_tokens}, temperature: 1.0}}
rewards: [{{name: answer, use: exact_last_integer}}]
stream: {{groups_per_step: {groups}, max_staleness: 0}}
objective: {{name: grpo, kl_coefficient: 0.04}}
learner: {{learning_rate: 1.0e-5}}
placement: {{threads: {{engine: "{cores}", learner: {threads}, reference: {threads}}}}}
log: {{tensorboard: false}}
"""

Step = dict[str, float]


def write_prompts(file: Path, count: int) -> None:
    """Questions as chats with their answers, one JSON object a line."""
    import reasoning_gym

    task = reasoning_gym.create_dataset(
        "chain_sum", size=count, seed=7, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    with file.open("w", encoding="utf-8") as lines:
        for entry in task:
            chat = [{"role": "user", "content": f"{entry['question']} Answer with only the number."}]
            lines.write(json.dumps({"prompt": chat, "label": entry["answer"]}) + "\n")


def triptych_block(prompts: Path, steps: int, threads: int) -> list[Step]:
    """The steps of one run, from its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "peer.yaml"
        sizes = {"groups": GROUPS_PER_STEP, "group_size": GROUP_SIZE, "max_tokens": MAX_TOKENS, "threads": threads}
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
        recipe.write_text(RECIPE.format(folder=folder, model=MODEL, prompts=prompts, steps=steps, cores=cores, **sizes))
        run([sys.executable, "-m", "system.cli", "train", str(recipe)])
        return json_lines((Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8"))


def trl_block(python: Path, prompts: Path, steps: int, threads: int) -> list[Step]:
    """The steps of one TRL trainer, from what it prints."""
    sizes = [steps, GROUPS_PER_STEP, GROUP_SIZE, MAX_TOKENS, threads]
    side = str(ROOT / "benchmarks" / "peer_trl_side.py")
    return json_lines(run([str(python), side, str(MODEL), str(prompts), *map(str, sizes)]))


def run(command: list[str]) -> str:
    """What ``command`` prints; its errors are shown when it fails."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def json_lines(text: str) -> list[Step]:
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"')]


def trl_interpreter(given: Path | None) -> Path:
    """An interpreter with TRL: the given one, or that of an environment which is made when it is missing."""
    python = given or TRL_ENVIRONMENT / "bin" / "python"
    if given is None and not python.exists():
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        torch = [*pip, "-r", str(ROOT / "requirements" / "torch.lock")]
        run([sys.executable, "-m", "venv", str(TRL_ENVIRONMENT)])
        if subprocess.run(torch, capture_output=True, timeout=DEADLINE_S).returncode != 0:
            run([*torch, "--index-url", PYTORCH_CPU_INDEX])
        run([*pip, f"trl=={TRL_VERSION}"])
    version = run([str(python), "-c", "import importlib.metadata as m; print(m.version('trl'))"]).strip()
    print(f"TRL {version} of {python}")
    return python


def table(measured: dict[str, list[Step]]) -> None:
    """Medians by part, the systems side by side."""
    print(f"{'median of a step':18}" + "".join(f"{name:>12}" for name in measured))
    for figure in FIGURES:
        cells = "".join(f"{median(steps, figure):12.3f}" for steps in measured.values())
        print(f"{figure:18}{cells}")


def median(steps: list[Step], figure: str) -> float:
    return statistics.median(step.get(figure, 0.0) for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", type=Path, help="an interpreter that has TRL; default: that of .venv-trl")
    parser.add_argument("--blocks", type=int, default=3, help="of each system")
    parser.add_argument("--steps", type=int, default=6, help="counted steps of a block")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a block that are not counted")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each of their parts")
    arguments = parser.parse_args()
    if not MODEL.exists():
        run([sys.executable, "-m", "system.cli", "model", "import", "smollm2", str(MODEL)])
    python = trl_interpreter(arguments.trl_python)
    measured: dict[str, list[Step]] = {"triptych": [], "trl": []}
    steps = arguments.warmup + arguments.steps
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "sums.jsonl"
        write_prompts(prompts, steps * GROUPS_PER_STEP)
        for block in range(arguments.blocks):
            blocks = {
                "triptych": triptych_block(prompts, steps, arguments.threads),
                "trl": trl_block(python, prompts, steps, arguments.threads),
            }
            for name, done in blocks.items():
                counted = done[arguments.warmup :]
                measured[name] += counted
                print(f"block {block + 1}, {name}: " + ", ".join(f"{step['step_s']:.2f}" for step in counted) + " s")
    table(measured)
    seconds = {name: median(done, "step_s") for name, done in measured.items()}
    figures = {f"{name}_step_s": round(value, 4) for name, value in seconds.items()}
    print(json.dumps({**figures, "ratio": round(seconds["triptych"] / seconds["trl"], 4)}))


if __name__ == "__main__":
    main()
