"""Where metrics go beside ``metrics.jsonl``: TensorBoard, Weights & Biases, MLflow.

Each is imported only when the recipe names it. A backend may raise anything; ``MetricsWriter`` turns that into one
warning.
"""

from __future__ import annotations

import hashlib
import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from system.core.errors import ConfigError


class MetricsBackend(Protocol):
    """Takes one step's numbers at a time."""

    name: str

    def write(self, numbers: Mapping[str, float], step: int, incarnation: int) -> None: ...

    def close(self) -> None: ...


def open_backends(
    events: Path | None, recipe: Any | None, warn: Callable[[str, Exception], None]
) -> list[MetricsBackend]:
    """The backends of a run; one that cannot be opened is warned about and left out.

    Raises:
        ConfigError: the recipe names one whose package is not installed.
    """
    makers: dict[str, Callable[[], MetricsBackend]] = {}
    if events is not None:
        makers["tensorboard"] = lambda: TensorBoard(events)
    if recipe is not None and recipe.log.wandb is not None:
        wandb = _require("wandb")
        makers["wandb"] = lambda: WeightsAndBiases(wandb, recipe)
    if recipe is not None and recipe.log.mlflow is not None:
        unknown = sorted(set(recipe.log.mlflow) - {"tracking_uri", "experiment_name"})
        if unknown:
            raise ConfigError(f"log.mlflow.{unknown[0]}: unknown key; valid: experiment_name, tracking_uri")
        mlflow = _require("mlflow")
        makers["mlflow"] = lambda: MLflow(mlflow, recipe)
    opened = []
    for name, make in makers.items():
        try:
            opened.append(make())
        except Exception as failure:
            warn(name, failure)
    return opened


def _require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"log.{package}: package {package} is not installed; pip install 'triptych[{package}]' or remove the key"
        ) from None


class TensorBoard:
    """Scalars in an event file. After a return to a checkpoint, TensorBoard is told to hide the lost steps."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder), filename_suffix=".triptych")
        self._started = False

    def write(self, numbers: Mapping[str, float], step: int, incarnation: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        now = time.time()
        if not self._started and incarnation > 0:
            log = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=now, step=step, session_log=log))
        self._started = True
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items() if name != "step"]
        self._writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per run folder, gone on with after a restart. ``log.wandb`` holds arguments of ``wandb.init``."""

    name = "wandb"

    def __init__(self, wandb: Any, recipe: Any) -> None:
        folder = str(Path(recipe.run.folder).absolute())
        defaults = {
            "project": "triptych",
            "name": recipe.run.name,
            "id": hashlib.blake2b(folder.encode(), digest_size=6).hexdigest(),
            "resume": "allow",
            "config": recipe.model_dump(mode="json"),
        }
        self._run = wandb.init(**{**defaults, **recipe.log.wandb})
        self._run.define_metric("*", step_metric="step")

    def write(self, numbers: Mapping[str, float], step: int, incarnation: int) -> None:
        self._run.log(dict(numbers))

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """One MLflow run per process. ``log.mlflow`` holds ``tracking_uri`` and ``experiment_name``."""

    name = "mlflow"

    def __init__(self, mlflow: Any, recipe: Any) -> None:
        settings = dict(recipe.log.mlflow)
        self._mlflow = mlflow
        if "tracking_uri" in settings:
            mlflow.set_tracking_uri(settings["tracking_uri"])
        mlflow.set_experiment(settings.get("experiment_name", "triptych"))
        mlflow.start_run(run_name=recipe.run.name, tags={"triptych.folder": str(recipe.run.folder)})

    def write(self, numbers: Mapping[str, float], step: int, incarnation: int) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._mlflow.end_run()
