"""Trackers, which receive the metrics of a run besides its record: a CSV file, TensorBoard, Weights & Biases, MLflow,
Comet, trackio.

Each library is imported on first use, by rank 0 alone. None of them sends anything unless its options say so: W&B and
Comet write offline, MLflow and trackio into the folder of the run.
"""

from __future__ import annotations

import csv
import errno
import importlib
import importlib.util
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TextIO

from shardwise.errors import CheckpointError, ConfigError
from shardwise.observe.record import warns_if_unwritable
from shardwise.observe.run_files import TABLE
from shardwise.system.safe_files import regular_descriptor

Options = Mapping[str, Any]
PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "comet": "comet_ml",
    "trackio": "trackio",
}
"""The package that each tracker imports."""
PROJECT = "shardwise"
_STEP = "step"
_MAX_LINE_CHARS = 2**20
"""Of a table: some hundred thousand numbers."""
_START_OPTIONS = ("api_key", "workspace", "project", "experiment_key", "mode", "online")
"""The options of `comet_ml.start` itself."""


class Tracker(Protocol):
    """Receives numbers by name, step by step. `close` may be called twice."""

    @property
    def name(self) -> str:
        """As plans have it."""
        return type(self).__name__.lower()

    def begin(self, step: int) -> None:
        """Announce that later logs come after `step`: 0 in a new run, else the step at which a run resumes."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


def check_trackers(trackers: Mapping[str, Options], folder: str | None) -> None:
    """Raise `ConfigError` for trackers that cannot be opened here. Imports nothing."""
    if trackers and folder is None:
        raise ConfigError(f"trackers {', '.join(trackers)} need a folder to write to; give it as run, such as runs/1.")
    require_packages(trackers, "trackers names")
    if "api_key" in trackers.get("comet", {}):
        raise ConfigError(
            "trackers: comet: an api_key in the plan would be stored with it in the record of the run. Set "
            "COMET_API_KEY in the environment instead."
        )


def require_packages(names: Iterable[str], asking: str) -> None:
    """Raise `ConfigError` for a tracker whose package is not installed; `asking` begins the error message."""
    for name in names:
        package = PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{asking} {name}, but the package {package} is not installed: pip install "
                f"shardwise[{name}], or leave it out."
            )


def open_tracker(name: str, folder: Path, config: Mapping[str, Any], options: Options) -> Tracker:
    """Open the tracker `name`. `config` describes the run: the plan, and the rest of the record's header.

    Raises `ConfigError` for options that the tracker does not take.
    """
    try:
        return _KINDS[name](folder, config, options)
    except TypeError as error:
        shown = {key: "..." if key == "api_key" else value for key, value in options.items()}
        raise ConfigError(f"trackers: {name} does not take these options ({shown}): {error}.") from error


def each_while_it_can(trackers: list[Tracker], tell: Callable[[Tracker], None]) -> None:
    """`tell` each of `trackers`. Those that cannot write, for a full disk or a server that is gone, are taken out: a
    run must not end because of them."""
    for tracker in list(trackers):
        trackers.remove(tracker)
        with warns_if_unwritable(f"The log of the tracker {tracker.name}", Exception):
            tell(tracker)
            trackers.append(tracker)


class CSV(Tracker):
    """One table in `metrics.csv` of the run: a row for each `log`, a column for each name. Options: `file`.

    As in the record, a resumed run continues the table without the rows of later steps, and a new run replaces it. A
    new name becomes the last column, empty in earlier rows. Others may write to the folder, so links are not followed.
    """

    def __init__(self, folder: Path, _config: Mapping[str, Any], options: Options) -> None:
        if not {"file"} >= set(options):
            raise TypeError("it has file")
        self._path = folder / str(options.get("file", TABLE))
        try:
            is_ours = self._columns()[:1] == [_STEP]
        except OSError:
            is_ours = False
        if not is_ours:
            raise ConfigError(
                f"{self._path} is not a table of this tracker, whose first column is {_STEP}. Move it away, or name "
                f"another: trackers: [{{csv: {{file: other.csv}}}}]."
            )
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def begin(self, step: int) -> None:
        if step > 0:
            self._rewrite(self._columns(), step)
        else:
            self._rewrite([_STEP], -math.inf)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        columns = self._columns()  # read again, because two engines of one process may write to one table
        new = [name for name in values if name not in columns]
        if new or not self._path.exists():
            columns = [*columns, *new]
            self._rewrite(columns)
        row = {**values, _STEP: step}
        with open(self._path, "a", encoding="utf-8", newline="", opener=_without_links) as file:
            csv.writer(file, lineterminator="\n").writerow([row.get(name, "") for name in columns])

    def close(self, *, failed: bool) -> None:
        """Nothing to do, because no file is open between rows."""

    def _columns(self) -> list[str]:
        with closing(self._rows()) as rows:
            return next(rows, [_STEP])

    def _rows(self) -> Generator[list[str]]:
        """The rows of the file; a last line without a line break is skipped, because its writer died. Raises `OSError`
        for what is no table."""
        if not os.path.lexists(self._path):
            return
        try:
            descriptor = regular_descriptor(self._path, follows_links=False)
            with open(descriptor, encoding="utf-8", errors="replace", newline="") as file:
                yield from csv.reader(line for line in _lines_of(file) if line.endswith("\n"))
        except (CheckpointError, csv.Error) as error:
            raise OSError(errno.EINVAL, f"it is no table: {error}") from error

    def _rewrite(self, columns: list[str], last_step: float = math.inf) -> None:
        """Atomically rewrite the table up to `last_step`, with more `columns` at the end."""
        fresh = self._path.with_name(self._path.name + ".new")
        fresh.unlink(missing_ok=True)
        with fresh.open("x", encoding="utf-8", newline="") as file, closing(self._rows()) as old:
            writer = csv.writer(file, lineterminator="\n")
            next(old, None)
            writer.writerow(columns)
            kept = (row for row in old if row and _step(row[0]) <= last_step)
            writer.writerows([*row, *[""] * (len(columns) - len(row))] for row in kept)
        os.replace(fresh, self._path)


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _lines_of(file: TextIO) -> Iterator[str]:
    while line := file.readline(_MAX_LINE_CHARS):
        if len(line) == _MAX_LINE_CHARS:
            raise csv.Error(f"a line has more than {_MAX_LINE_CHARS} characters")
        yield line


class TensorBoard(Tracker):
    """Event files in `tensorboard/` of the run. Options are those of `SummaryWriter`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], options: Options) -> None:
        module = importlib.import_module("torch.utils.tensorboard")
        self._writer = module.SummaryWriter(**{"log_dir": str(folder / "tensorboard"), **options})
        self._writer.add_text("plan", f"```\n{_lines(config)}\n```")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a crash loses nothing

    def close(self, *, failed: bool) -> None:  # noqa: ARG002
        self._writer.close()


class WandB(Tracker):
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


class MLflow(Tracker):
    """A run of MLflow, in `mlruns/` of the run. Options: `tracking_uri`, `experiment`, `run_name`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], options: Options) -> None:
        known = {"tracking_uri", "experiment", "run_name"}
        if not known >= set(options):
            raise TypeError(f"it has {', '.join(sorted(known))}")
        uri = str(options.get("tracking_uri", (folder / "mlruns").absolute().as_uri()))
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise newer versions refuse folders
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


class Comet(Tracker):
    """An experiment of Comet, offline in `comet/` of the run. Options are those of `comet_ml.start`, and of its
    `ExperimentConfig`."""

    def __init__(self, folder: Path, config: Mapping[str, Any], options: Options) -> None:
        module = importlib.import_module("comet_ml")
        chosen = {"project": PROJECT, "online": False, **options}
        started = {name: chosen.pop(name) for name in _START_OPTIONS if name in chosen}
        known = {"name": folder.name, "offline_directory": str(folder / "comet"), "display_summary_level": 0}
        self._experiment = module.start(**started, experiment_config=module.ExperimentConfig(**{**known, **chosen}))
        self._experiment.log_parameters(_flat(config))
        self._is_open = True

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._experiment.log_metrics(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        if self._is_open:
            self._is_open = False
            self._experiment.log_other("failed", failed)
            self._experiment.end()


class Trackio(Tracker):
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
    "csv": CSV,
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "comet": Comet,
    "trackio": Trackio,
}


def _step(cell: str) -> float:
    """The step in a first cell; text that is not a number sorts after all steps."""
    try:
        return float(cell)
    except ValueError:
        return math.inf


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in config.items()}


def _lines(config: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in config.items())


def _milliseconds() -> int:
    return int(time.time() * 1000)
