"""`engine.monitor`: what DeepSpeed's sections `tensorboard`, `wandb`, `comet` and `csv_monitor` are told, by our
trackers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from shardwise.integrations.deepspeed.config import SAMPLES_LOG_INTERVAL
from shardwise.monitor.trackers import Options, Tracker, open_tracker, require_packages

Event = tuple[str, Any, int]
TRAIN_LOSS, EVAL_LOSS = "Train/Samples/train_loss", "Train/Samples/eval_loss"
RATE, LOSS_SCALE = "Train/Samples/lr", "Train/Samples/loss_scale"


def require_monitors(monitors: Mapping[str, Options]) -> None:
    """Raise `ConfigError` for a section whose package is not installed. Nothing is imported."""
    require_packages(monitors, "the DeepSpeed config enables")


class Monitor:
    """Events by name against samples, as DeepSpeed's `MonitorMaster` takes them. Rank 0 writes."""

    def __init__(
        self,
        monitors: Mapping[str, Options],
        rank: Callable[[], int],
        samples: Callable[[], int],
        config: Mapping[str, Any],
    ) -> None:
        """`rank()` is this rank, which an elastic job may change; `samples()` is how many have been trained on;
        `config` describes the run.

        Raises `ConfigError` for a file that is there and is no table of ours.
        """
        self.enabled = bool(monitors)
        self._monitors, self._config = monitors, config
        self._rank, self._samples = rank, samples
        self._has_begun = False
        self._trackers: list[_Spaced] = []
        self._open()

    def _open(self) -> None:
        if self._rank() != 0 or self._trackers:
            return
        for name, options in self._monitors.items():
            own = {key: value for key, value in options.items() if key != SAMPLES_LOG_INTERVAL}
            tracker = open_tracker(name, Path(), self._config, own)
            self._trackers.append(_Spaced(tracker, int(options.get(SAMPLES_LOG_INTERVAL) or 0)))

    def begin(self) -> None:
        """What is written next comes after the samples there are; the first `write_events` does so by itself."""
        self._open()
        if self._trackers and not self._has_begun:
            self._has_begun = True
            for spaced in self._trackers:
                spaced.begin(self._samples())

    def begin_anew(self) -> None:
        """A checkpoint was loaded, and training goes on from its samples."""
        self._has_begun = False

    def write_events(self, event_list: Iterable[Event]) -> None:
        """Write events `(name, value, samples)`, those of as many samples together. Any rank may call."""
        self.begin()
        if not self._trackers:
            return
        by_samples: dict[int, dict[str, float]] = {}
        for name, value, samples in event_list:
            by_samples.setdefault(int(samples), {})[name] = float(value)
        for samples, values in by_samples.items():
            for spaced in self._trackers:
                spaced.log(samples, values)

    def close(self) -> None:
        """May be called twice."""
        for spaced in self._trackers:
            spaced.tracker.close(failed=False)


class _Spaced:
    """A tracker that is told each event again after so many `samples`."""

    def __init__(self, tracker: Tracker, samples: int) -> None:
        self.tracker = tracker
        self._distance = samples
        self._told: dict[str, int] = {}

    def begin(self, samples: int) -> None:
        self._told.clear()
        self.tracker.begin(samples)

    def log(self, samples: int, values: Mapping[str, float]) -> None:
        due = {
            name: value
            for name, value in values.items()
            if name not in self._told or samples - self._told[name] >= self._distance
        }
        if due:
            self._told |= dict.fromkeys(due, samples)
            self.tracker.log(samples, due)
