"""`engine.monitor`: DeepSpeed's sections `tensorboard`, `wandb`, `comet` and `csv_monitor`, written by our trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardwise.integrations.deepspeed.config import SAMPLES_LOG_INTERVAL, read_config
from shardwise.integrations.deepspeed.fields import MONITORS
from shardwise.observe.trackers import Options, Tracker, open_tracker, require_packages

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
        self._has_begun = False
        self._trackers: list[_Thinned] = []
        self._open()

    def _open(self) -> None:
        if self._rank() != 0 or self._trackers:
            return
        for name, options in self._monitors.items():
            own = {key: value for key, value in options.items() if key != SAMPLES_LOG_INTERVAL}
            tracker = open_tracker(name, Path(), self._config, own)
            self._trackers.append(_Thinned(tracker, int(options.get(SAMPLES_LOG_INTERVAL) or 0)))

    def begin(self) -> None:
        """Start writing at the current number of samples. The first `write_events` calls this itself."""
        self._open()
        if self._trackers and not self._has_begun:
            self._has_begun = True
            for tracker in self._trackers:
                tracker.begin(self._samples())

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
            for tracker in self._trackers:
                tracker.log(samples, values)

    def close(self) -> None:
        """Close the trackers. May be called twice."""
        for thinned in self._trackers:
            thinned.tracker.close(failed=False)


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


class _Thinned:
    """A tracker that writes each event at most once per `samples` samples."""

    def __init__(self, tracker: Tracker, samples: int) -> None:
        self.tracker = tracker
        self._interval = samples
        self._logged: dict[str, int] = {}

    def begin(self, samples: int) -> None:
        self._logged.clear()
        self.tracker.begin(samples)

    def log(self, samples: int, values: Mapping[str, float]) -> None:
        due = {
            name: value
            for name, value in values.items()
            if name not in self._logged or samples - self._logged[name] >= self._interval
        }
        if due:
            self._logged |= dict.fromkeys(due, samples)
            self.tracker.log(samples, due)
