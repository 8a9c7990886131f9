"""`deepspeed.utils.timer`: named timers for scripts. `engine.shardwise.timeline` shows what a step does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from shardwise.integrations.deepspeed.accelerator import get_accelerator
from shardwise.integrations.deepspeed.logging import log_dist

Clock = Callable[[], float]


class Timer:
    """One timer, started and stopped any number of times. Times are in milliseconds."""

    def __init__(self, name: str, clock: Clock = time.perf_counter) -> None:
        self.name_ = name
        self.started_ = False
        self._clock = clock
        self._began = 0.0
        self._parts: list[float] = []
        self._recorded: list[float] = []

    def start(self) -> None:
        get_accelerator().synchronize()
        self.started_ = True
        self._began = self._clock()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End a part, which `reset` has replace those before. With `record` it counts in `mean`."""
        get_accelerator().synchronize()
        part = (self._clock() - self._began) * 1000
        self._parts = [part] if reset else [*self._parts, part]
        if record:
            self._recorded.append(part)
        self.started_ = False

    def reset(self) -> None:
        self.started_ = False
        self._parts.clear()

    def elapsed(self, reset: bool = True) -> float:
        """The sum of all parts; one that runs is ended and begun anew."""
        was_running = self.started_
        if was_running:
            self.stop()
        total = sum(self._parts)
        if reset:
            self.reset()
        if was_running:
            self.start()
        return total

    def mean(self) -> float:
        return trim_mean(self._recorded, 0.1)


class SynchronizedWallClockTimer:
    """Timers by name: `timers("forward").start()`. They wait for the device."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.timers: dict[str, Timer] = {}
        self._clock = clock

    def get_timers(self) -> Mapping[str, Timer]:
        return self.timers

    def __call__(self, name: str) -> Timer:
        if name not in self.timers:
            self.timers[name] = Timer(name, self._clock)
        return self.timers[name]

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: list[int] | None = None,
    ) -> None:
        """Log the times of `names`, divided by `normalizer`, on `ranks`, by default rank 0."""
        known = [name for name in names if name in self.timers]
        times = " | ".join(f"{name}: {self.timers[name].elapsed(reset=reset) / normalizer:.2f}" for name in known)
        log_dist(f"time (ms) | {times}", ranks=ranks or [0])

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The trimmed means of the recorded parts."""
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        for name in means if reset else ():
            self.timers[name].reset()
        return means


class NoopTimer:
    """Timers that measure nothing."""

    class Timer:
        def start(self) -> None: ...

        def reset(self) -> None: ...

        def stop(self, **options: object) -> None: ...

        def elapsed(self, **options: object) -> float:
            return 0.0

        def mean(self) -> float:
            return 0.0

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        return self.timer

    def get_timers(self) -> dict[str, object]:
        return {}

    def log(self, names: Iterable[str], **options: object) -> None: ...

    def get_mean(self, names: Iterable[str], **options: object) -> dict[str, float]:
        return {}


class ThroughputTimer:
    """Samples per second between `start` and `stop`, without the first steps."""

    def __init__(
        self,
        config: object = None,
        batch_size: int | None = None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], object] | None = None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.batch_size = 1 if batch_size is None else batch_size
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.epoch_count = 0
        self.global_step_count = 0
        self.total_elapsed_time = 0.0
        self.started = False
        self._log = logging_fn or (lambda words: log_dist(words, ranks=[0]))
        self._clock = clock
        self._began = 0.0
        self._num_timed = 0

    def update_epoch_count(self) -> None:
        self.epoch_count += 1

    def start(self) -> None:
        self.started = True
        self._began = self._clock()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro-batch, and with `global_step` a step."""
        if not self.started:
            return
        self.started = False
        get_accelerator().synchronize()
        if self.global_step_count >= self.start_step:
            self.total_elapsed_time += self._clock() - self._began
            self._num_timed += global_step
        self.global_step_count += global_step
        is_due = self.steps_per_output and self.global_step_count % self.steps_per_output == 0
        if global_step and report_speed and is_due and self._num_timed:
            self._log(f"step {self.global_step_count}: {self.avg_samples_per_sec():.2f} samples per second")

    def avg_samples_per_sec(self) -> float:
        """The mean over all steps that were timed; minus infinity before the first, as in DeepSpeed."""
        if not self._num_timed:
            return float("-inf")
        return self.batch_size * self._num_timed / self.total_elapsed_time


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean of `data` without this share of the smallest and of the largest values; 0 if there are none."""
    if not 0.0 <= trim_percent <= 1.0:
        raise ValueError(f"trim_percent is {trim_percent}; it must be between 0 and 1.")
    if not data:
        return 0.0
    cut = int(trim_percent * len(data))
    kept = sorted(data)[cut : len(data) - cut] or sorted(data)
    return sum(kept) / len(kept)
