"""`engine.monitor`: DeepSpeed's sections `tensorboard`, `wandb`, `comet` and `csv_monitor`, written by our trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.integrations.deepspeed.config import SAMPLES_LOG_INTERVAL, read_config
from shardwise.integrations.deepspeed.fields import MONITORS
from shardwise.observe.trackers import Options, Tracker, each_while_it_can, open_tracker, require_packages

Event = tuple[str, Any, int]
TRAIN_LOSS, EVAL_LOSS = "Train/Samples/train_loss", "Train/Samples/eval_loss"
RATE, LOSS_SCALE = "Train/Samples/lr", "Train/Samples/loss_scale"


def require_monitors(monitors: Mapping[str, Options]) -> None:
    """Raise `ConfigError` for a section whose package is not installed. Nothing is imported."""
    require_packages(monitors, "the DeepSpeed config enables")


class Monitor:
    """Writes events against the number of samples, like DeepSpeed's `MonitorMaster`. Only rank 0 writes."""

    def __init__(
        self,
        monitors: Mapping[str, Options],
        rank: Callable[[], int],
        samples: Callable[[], int],
        config: Mapping[str, Any],
    ) -> None:
        """`rank()` returns this rank, which may change in an elastic job, and `samples()` the number of samples trained
        on. `config` describes the run.

        Raises `ConfigError` if a CSV file exists already and is not a table written by shardwise.
        """
        self.enabled = bool(monitors)
        self._monitors, self._config = monitors, config
        self._rank, self._samples = rank, samples
        self._is_open = self._has_begun = False
        self._trackers: list[Tracker] = []
        self._open()

    def _open(self) -> None:
        if self._rank() != 0 or self._is_open:
            return
        self._is_open = True
        for name, options in self._monitors.items():
            own = {key: value for key, value in options.items() if key != SAMPLES_LOG_INTERVAL}
            tracker = open_tracker(name, Path(), self._config, own)
            self._trackers.append(_Thinned(tracker, int(options.get(SAMPLES_LOG_INTERVAL) or 0)))

    def begin(self) -> None:
        """Start writing at the current number of samples. The first `write_events` calls this itself."""
        self._open()
        if self._trackers and not self._has_begun:
            self._has_begun = True
            each_while_it_can(self._trackers, lambda tracker: tracker.begin(self._samples()))

    def restart(self) -> None:
        """Start again at the number of samples of a loaded checkpoint."""
        self._has_begun = False

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write events `(name, value, samples)`; those with the same `samples` are written together. Any rank may
        call."""
        self.begin()
        if not self._trackers:
            return
        by_samples: dict[int, dict[str, float]] = {}
        for name, value, samples in event_list:
            by_samples.setdefault(int(samples), {})[name] = float(value)
        for samples, values in by_samples.items():
            _log(self._trackers, samples, values)

    def close(self) -> None:
        """Close the trackers. May be called twice."""
        each_while_it_can(self._trackers, lambda tracker: tracker.close(failed=False))


def get_monitor_config(param_dict: Mapping[str, Any]) -> Mapping[str, Options]:
    """The monitors that a config enables, for a `MonitorMaster`."""
    sections = {name: section for name, section in param_dict.items() if name in MONITORS}
    return read_config(sections, world_size=1).monitors  # of the whole config, sizes may need more ranks


class MonitorMaster(Monitor):
    """The monitors of a config without an engine: `MonitorMaster(get_monitor_config(config))`.

    Raises `ConfigError` for a monitor whose package is not installed, or whose file is another's.
    """

    def __init__(self, monitor_config: Mapping[str, Options]) -> None:
        require_monitors(monitor_config)
        super().__init__(
            monitor_config, lambda: dist.get_rank() if dist.is_initialized() else 0, lambda: self._written, {}
        )

    _written = 0

    def write_events(self, event_list: Iterable[Event]) -> None:
        events = list(event_list)
        super().write_events(events)
        self._written = max((int(samples) for _, _, samples in events), default=self._written)


def _log(trackers: list[Tracker], samples: int, values: Mapping[str, float]) -> None:
    each_while_it_can(trackers, lambda tracker: tracker.log(samples, values))


class _Thinned(Tracker):
    """A tracker that writes each event at most once per `samples` samples."""

    def __init__(self, tracker: Tracker, samples: int) -> None:
        self._tracker = tracker
        self._interval = samples
        self._logged: dict[str, int] = {}

    @property
    def name(self) -> str:
        return self._tracker.name

    def begin(self, step: int) -> None:
        self._logged.clear()
        self._tracker.begin(step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        due = {
            name: value
            for name, value in values.items()
            if name not in self._logged or step - self._logged[name] >= self._interval
        }
        if due:
            self._logged |= dict.fromkeys(due, step)
            self._tracker.log(step, due)

    def close(self, *, failed: bool) -> None:
        self._tracker.close(failed=failed)
