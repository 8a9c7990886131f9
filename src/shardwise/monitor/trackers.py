"""Who is told what a run logs, besides its record: TensorBoard, Weights & Biases, MLflow, trackio.

Each is imported where it is used, by rank 0 alone. None of them sends anything unless its options say so: W&B writes
offline, MLflow and trackio into the folder of the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from shardwise.errors import ConfigError

Options = Mapping[str, Any]
PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""What each needs to be installed, as it is imported."""
PROJECT = "shardwise"


class Tracker(Protocol):
    """Is told numbers by name, step by step. `close` may be called twice."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


def check_trackers(trackers: Mapping[str, Options], folder: str | None) -> None:
    """Raise `ConfigError` for trackers that cannot be opened here. Nothing is imported."""
    if trackers and folder is None:
        raise ConfigError(f"trackers {', '.join(trackers)} need a folder to write to; give it as run, such as runs/1.")
    for name in trackers:
        package = PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"trackers names {name}, but the package {package} is not installed: pip install "
                f"shardwise[{name}], or leave it out."
            )


def open_tracker(name: str, folder: Path, config: Mapping[str, Any], options: Options) -> Tracker:
    """`config` is what the run is described by there: the plan, and what else the header of the record says.

    Raises `ConfigError` for options that the tracker does not take.
    """
    try:
        return _KINDS[name](folder, config, options)
    except TypeError as error:
        raise ConfigError(f"trackers: {name} does not take these options ({dict(options)}): {error}.") from error


class TensorBoard:
    """Event files in `tensorboard/` of the run. Options are those of `SummaryWriter`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], options: Options) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(**{"log_dir": str(folder / "tensorboard"), **options})
        self._writer.add_text("plan", f"```\n{_lines(config)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a crash takes nothing along

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        self._writer.close()


class WandB:
    """A run of Weights & Biases, offline in `wandb/` of the run. Options are those of `wandb.init`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], options: Options) -> None:
        module = importlib.import_module("wandb")
        chosen = {"project": PROJECT, "name": folder.name, "mode": "offline", "dir": str(folder), **options}
        self._run = module.init(config=dict(config), **chosen)
        self._is_open = True

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        if self._is_open:
            self._is_open = False
            self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow, in `mlruns/` of the run. Options: `tracking_uri`, `experiment`, `run_name`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], options: Options) -> None:
        known = {"tracking_uri", "experiment", "run_name"}
        if not known >= set(options):
            raise TypeError(f"it has {', '.join(sorted(known))}")
        uri = str(options.get("tracking_uri", (folder / "mlruns").absolute().as_uri()))
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer ones refuse folders else
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        experiment = str(options.get("experiment", PROJECT))
        known_one = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if known_one is None else known_one.experiment_id
        run = self._client.create_run(number, run_name=str(options.get("run_name", folder.name)))
        self._id: str = run.info.run_id
        self._entities = importlib.import_module("mlflow.entities")
        self._is_open = True
        for name, value in config.items():
            self._client.log_param(self._id, name, str(value)[:500])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        metric, now = self._entities.Metric, _milliseconds()
        self._client.log_batch(self._id, metrics=[metric(name, value, now, step) for name, value in values.items()])

    def close(self, *, failed: bool) -> None:
        if self._is_open:
            self._is_open = False
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class Trackio:
    """A run of trackio, in `trackio/` of the run. Options are those of `trackio.init`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], options: Options) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((folder / "trackio").absolute()))
        self._module = importlib.import_module("trackio")
        self._module.init(config=_flat(config), **{"project": PROJECT, "name": folder.name, **options})
        self._is_open = True

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._module.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        if self._is_open:
            self._is_open = False
            self._module.finish()


_KINDS: dict[str, Callable[[Path, Mapping[str, Any], Options], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in config.items()}


def _lines(config: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in config.items())


def _milliseconds() -> int:
    return int(time.time() * 1000)
