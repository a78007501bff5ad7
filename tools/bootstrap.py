"""Builds .venv from the lock when it is missing or stale. Standard library only, and readable by any Python 3.

Usage: python tools/bootstrap.py            (the Makefile calls it before every target)

The stamp inside .venv holds a hash of everything the environment depends on; when it matches, this returns at once.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, ".triptych-stamp")
TORCH = os.path.join("requirements", "torch.lock")
LOCK = os.path.join("requirements", "cpu.lock")
ALONE = os.path.join("requirements", "cpu-alone.lock")
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def refusal():
    """One sentence saying why this machine cannot run Triptych, or None."""
    version = "%d.%d" % sys.version_info[:2]
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        return "Triptych needs Python 3.11 to 3.14, but %s is %s: run make PYTHON=python3.11 (or another of these)." % (
            sys.executable,
            version,
        )
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return "Triptych needs Linux on x86_64 or aarch64 (vLLM has no build for %s on %s)." % (
            platform.system(),
            platform.machine(),
        )
    return None


def wanted():
    digest = hashlib.sha256(sys.version.encode())
    for name in (TORCH, LOCK, ALONE, "pyproject.toml", os.path.join("tools", "bootstrap.py")):
        with open(os.path.join(ROOT, name), "rb") as handle:
            digest.update(handle.read())
    digest.update(ROOT.encode())
    return digest.hexdigest()


def is_current():
    if not os.path.exists(PYTHON) or not os.path.exists(STAMP):
        return False
    with open(STAMP) as handle:
        return handle.read().strip() == wanted()


def pip(*arguments):
    """Runs pip quietly; what it and the build back ends print is shown only when it fails."""
    done = subprocess.run(
        [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"] + list(arguments),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode != 0:
        sys.stdout.write(done.stdout.decode(errors="replace"))
    return done.returncode


def install():
    if os.path.isdir(VENV):
        shutil.rmtree(VENV)
    print("Installing Triptych's environment into .venv (about 4.5 GB, a few minutes) ...", flush=True)
    steps = [
        ("creating .venv", lambda: subprocess.call([sys.executable, "-m", "venv", VENV])),
        ("upgrading pip", lambda: pip("--upgrade", "pip")),
        ("torch", lambda: pip("-r", TORCH) and pip("-r", TORCH, "--index-url", PYTORCH_CPU_INDEX)),
        ("the locked packages", lambda: pip("-r", LOCK, "-r", TORCH)),
        ("vLLM and the demo model", lambda: pip("--no-deps", "-r", ALONE)),
        ("triptych", lambda: pip("--no-deps", "--no-build-isolation", "-e", ".")),
    ]
    for title, step in steps:
        print("  " + title, flush=True)
        if step() != 0:
            sys.exit("Installation stopped at: %s. The lines above say why; run the same command again." % title)
    with open(STAMP, "w") as handle:
        handle.write(wanted())


def main():
    problem = refusal()
    if problem:
        sys.exit(problem)
    if not is_current():
        install()


if __name__ == "__main__":
    main()
