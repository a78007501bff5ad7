"""Our own log lines, wherever vLLM, Ray and DeepSpeed put theirs.

All loggers of Triptych hang below ``triptych``, with handlers of their own that do not propagate to the root: libraries
that configure the root logger afterwards cannot silence or duplicate them. Each role also writes ``logs/ROLE.log``.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

QUIET_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "1",
    "DS_LOG_LEVEL": "error",
    "OMP_WAIT_POLICY": "PASSIVE",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Set unless the user set them: what these libraries say at start is theirs, not news of the run.

Threads that wait for work sleep instead of spinning (OMP_WAIT_POLICY): roles share cores where there is no GPU.
"""

LOG_FOLDER_VARIABLE, ROLE_VARIABLE = "TRIPTYCH_LOG_FOLDER", "TRIPTYCH_ROLE"
"""How an actor's process learns where its log lines go."""


def quiet_libraries() -> None:
    """Turns the start-up chatter of the libraries down; call it before they are imported."""
    for name, value in QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("deepspeed").setLevel(logging.ERROR)


def configure_logging(role: str, folder: Path | None, to_stderr: bool) -> logging.Logger:
    """The ``triptych`` logger of this process: to ``folder/ROLE.log`` and, for the driver, to stderr."""
    logger = logging.getLogger("triptych")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    layout = logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        to_file = logging.FileHandler(folder / f"{role}.log", encoding="utf-8")
        to_file.setFormatter(layout)
        logger.addHandler(to_file)
    if to_stderr:
        to_terminal = logging.StreamHandler(sys.stderr)
        to_terminal.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(to_terminal)
    return logger


def configure_role() -> None:
    """Ray calls this in an actor's process before the actor is made: our lines of this role go to its own file."""
    if ROLE_VARIABLE not in os.environ:
        return
    quiet_libraries()
    configure_logging(os.environ[ROLE_VARIABLE], Path(os.environ[LOG_FOLDER_VARIABLE]), to_stderr=False)
