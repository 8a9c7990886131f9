"""DeepSpeed's learning rate schedules, with its names and arithmetic.

Each sets the learning rates of its optimizer's groups when it is created, and in every `step()`, which counts from 0.
Sources: DeepSpeed 0.19, `runtime/lr_schedules.py`; LR range test and 1Cycle: arXiv:1803.09820.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from shardwise.errors import ConfigError, nearest
from shardwise.integrations.deepspeed.names import refusal

Rates = float | Sequence[float]
_SECOND_BETA = 0.99
"""Adam's second beta under cyclic momentum."""


class Schedule:
    """Base class of the schedules. Subclasses implement `rates_at(step)`, with one rate per group."""

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._set(self.first_rates())

    def __getattr__(self, name: str) -> NoReturn:
        kind = type(self).__name__
        raise AttributeError(refusal(f"{kind}.{name}") or f"{kind!r} object has no attribute {name!r}")

    def first_rates(self) -> list[float]:
        """Rates before the first `step()`."""
        raise NotImplementedError

    def rates_at(self, step: int) -> list[float]:
        """Rates after `step + 1` calls of `step()`."""
        raise NotImplementedError

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates of the next optimizer step."""
        next_one = self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        self.last_batch_iteration = next_one
        self._set(self.rates_at(next_one))

    def get_lr(self) -> list[float]:
        """The rates at the current step."""
        return self.first_rates() if self.last_batch_iteration < 0 else self.rates_at(self.last_batch_iteration)

    def get_mom(self) -> list[Any] | None:
        """Each group's momentum: its betas, or else its momentum."""
        return [group.get("betas", group.get("momentum")) for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[float]:
        """The rates that were set last."""
        return list(self._last)

    def state_dict(self) -> dict[str, int]:
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.last_batch_iteration = int(state["last_batch_iteration"])
        self._last = [float(group["lr"]) for group in self.optimizer.param_groups]

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last = rates

    def _for_each_group(self, value: Rates, name: str) -> list[float]:
        count = len(self.optimizer.param_groups)
        if not isinstance(value, list | tuple):
            return [float(value)] * count  # type: ignore[arg-type]
        if len(value) != count:
            raise ConfigError(
                f"{name} has {len(value)} values, but the optimizer has {count} groups. Give one for each."
            )
        return [float(one) for one in value]


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr` in `warmup_num_steps`, logarithmically or linearly; then constant.

    `warmup_max_lr` defaults to the optimizer's own rates.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self._shape = _Warmup(warmup_num_steps, warmup_type)
        self.min_lrs = self._for_each_group(warmup_min_lr, "warmup_min_lr")
        if warmup_max_lr is None:
            self.max_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        else:
            self.max_lrs = self._for_each_group(warmup_max_lr, "warmup_max_lr")
        super().__init__(optimizer, last_batch_iteration)

    @property
    def delta_lrs(self) -> list[float]:
        """How far each group's rate rises."""
        return [high - low for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    @property
    def warmup_num_steps(self) -> int:
        return self._shape.num_steps

    @property
    def warmup_type(self) -> str:
        return self._shape.kind

    def first_rates(self) -> list[float]:
        return list(self.min_lrs)

    def rates_at(self, step: int) -> list[float]:
        share = self._shape.at(step) if step < self._shape.num_steps else self._after(step)
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after(self, step: int) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linear decay to `warmup_min_lr` at `total_num_steps`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self, step: int) -> float:
        return max(0.0, (self._total - step) / max(1.0, self._total - self._shape.num_steps))


class WarmupCosineLR(Schedule):
    """From `warmup_min_ratio` of the optimizer's own rates to the full rates, then cosine decay to `cos_min_ratio`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self._shape = _Warmup(warmup_num_steps, warmup_type)
        self._total = total_num_steps
        self._first, self._floor = warmup_min_ratio, cos_min_ratio
        self._whole = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, last_batch_iteration)

    @property
    def warmup_num_steps(self) -> int:
        return self._shape.num_steps

    @property
    def warmup_type(self) -> str:
        return self._shape.kind

    def get_lr_ratio(self) -> float:
        """The part of the optimizer's own rates at the current step."""
        return 0.0 if self.last_batch_iteration < 0 else self._ratio(self.last_batch_iteration)

    def first_rates(self) -> list[float]:
        return [0.0] * len(self._whole)

    def rates_at(self, step: int) -> list[float]:
        return [rate * self._ratio(step) for rate in self._whole]

    def _ratio(self, step: int) -> float:
        warmup = self._shape.num_steps
        if step < warmup:
            return self._first + self._shape.at(step) * (1.0 - self._first)
        progress = min(1.0, (step - warmup + 1) / max(1, self._total - warmup))
        return max(0.0, self._floor + (1.0 - self._floor) * (1 + math.cos(math.pi * progress)) / 2)


class LRRangeTest(Schedule):
    """Rates that grow from `lr_range_test_min_lr` without limit, linearly or in steps, to find the largest usable."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        self.optimizer = optimizer
        self._low = self._for_each_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self._size = _positive(lr_range_test_step_size, "lr_range_test_step_size")
        self._rate, self._has_stairs = lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def first_rates(self) -> list[float]:
        return list(self._low)

    def rates_at(self, step: int) -> list[float]:
        intervals = (step + 1) / self._size
        growth = 1 + self._rate * (math.floor(intervals) if self._has_stairs else intervals)
        return [low * growth for low in self._low]


class OneCycle(Schedule):
    """Rates go from `cycle_min_lr` to `cycle_max_lr` and back, and momentum the other way; then they decay.

    With `cycle_first_stair_count` or `cycle_second_stair_count`, that half of the cycle changes in so many steps.
    Momentum is the first of Adam's betas; it is ignored if the optimizer has none.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, cycle_min_lr: Rates, cycle_max_lr: Rates, **options: Any
    ) -> None:
        last_batch_iteration = int(options.pop("last_batch_iteration", -1))
        self.optimizer = optimizer
        self._cycle = _Cycle(options)
        self.min_lrs = self._for_each_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._for_each_group(cycle_max_lr, "cycle_max_lr")
        self._low_momentum = self._for_each_group(self._cycle.min_mom, "cycle_min_mom")
        self._high_momentum = self._for_each_group(self._cycle.max_mom, "cycle_max_mom")
        self._has_momentum = self._cycle.moves_momentum and "betas" in optimizer.defaults
        super().__init__(optimizer, last_batch_iteration)
        if self._has_momentum and last_batch_iteration == -1:
            self._set_momentum(self._low_momentum)

    def first_rates(self) -> list[float]:
        return list(self.min_lrs)

    def rates_at(self, step: int) -> list[float]:
        if step < self._cycle.length:
            share = self._cycle.share_at(step)
            return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / self._cycle.decay_at(step, self._cycle.decay_lr_rate) for low in self.min_lrs]

    def step(self, last_batch_iteration: int | None = None) -> None:
        super().step(last_batch_iteration)
        if self._has_momentum:
            self._set_momentum(self._momenta_at(self.last_batch_iteration))

    def get_mom(self) -> list[Any] | None:
        """Each group's betas at the current step; `None` without cyclic momentum. Before the first step those are at
        their highest, though the groups begin with the lowest, as in DeepSpeed."""
        if not self._has_momentum:
            return None
        return [(momentum, _SECOND_BETA) for momentum in self._momenta_at(self.last_batch_iteration)]

    def _momenta_at(self, step: int) -> list[float]:
        pairs = zip(self._low_momentum, self._high_momentum, strict=True)
        if step < self._cycle.length:
            share = self._cycle.share_at(step)
            return [high - (high - low) * share for low, high in pairs]
        return [high * self._cycle.decay_at(step, self._cycle.decay_mom_rate) for _, high in pairs]

    def _set_momentum(self, momenta: list[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, _SECOND_BETA)


class _Warmup:
    """The progress of a warmup, from 0 to 1."""

    def __init__(self, num_steps: int, kind: str) -> None:
        if kind not in ("log", "linear"):
            raise ConfigError(f"warmup_type is {kind!r}; it must be log or linear.")
        self.num_steps = max(2, _positive(num_steps, "warmup_num_steps"))
        self.kind = kind

    def at(self, step: int) -> float:
        return math.log(step + 1) / math.log(self.num_steps) if self.kind == "log" else step / self.num_steps


class _Cycle:
    """One cycle: up in the first half, down in the second, continuously or in steps."""

    def __init__(self, options: dict[str, Any]) -> None:
        known = {
            "cycle_first_step_size": 2000,
            "cycle_second_step_size": None,
            "cycle_first_stair_count": 0,
            "cycle_second_stair_count": None,
            "decay_step_size": 0,
            "decay_lr_rate": 0.0,
            "cycle_momentum": True,
            "cycle_min_mom": 0.8,
            "cycle_max_mom": 0.9,
            "decay_mom_rate": 0.0,
        }
        for name in options:
            if name not in known:
                raise ConfigError(f"OneCycle has no option {name!r}. {nearest(name, known)}")
        settings = {**known, **options}
        self._up = float(settings["cycle_first_step_size"])
        second = settings["cycle_second_step_size"]
        self._down = self._up if second is None else float(second)
        if self._up <= 0 or self._down < 0:
            raise ConfigError("cycle_first_step_size must be positive, and cycle_second_step_size not negative.")
        self.length = self._up + self._down
        self._stairs_up = int(settings["cycle_first_stair_count"])
        down = settings["cycle_second_stair_count"]
        self._stairs_down = self._stairs_up if down is None else int(down)
        self._decay_size = float(settings["decay_step_size"])
        self.decay_lr_rate = float(settings["decay_lr_rate"])
        self.decay_mom_rate = float(settings["decay_mom_rate"])
        self.moves_momentum = bool(settings["cycle_momentum"])
        self.min_mom, self.max_mom = settings["cycle_min_mom"], settings["cycle_max_mom"]

    def share_at(self, step: int) -> float:
        """How far the rate at `step` is above the lowest, from 0 to 1."""
        position = (step + 1) % self.length
        is_up = position <= self._up
        share = position / self._up if is_up else (self.length - position) / self._down
        stairs = self._stairs_up if is_up else self._stairs_down
        return math.floor(share * stairs + 1e-9) / stairs if stairs > 0 else share

    def decay_at(self, step: int, rate: float) -> float:
        """The divisor of rates `step - length + 1` steps after the cycle; 1 without decay."""
        if self._decay_size == 0 or rate == 0:
            return 1.0
        return 1 + rate * (step - self.length + 1) / self._decay_size


SCHEDULES: Mapping[str, type[Schedule]] = {
    "LRRangeTest": LRRangeTest,
    "OneCycle": OneCycle,
    "WarmupCosineLR": WarmupCosineLR,
    "WarmupDecayLR": WarmupDecayLR,
    "WarmupLR": WarmupLR,
}
_WARMUP_OPTIONS = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "warmup_min_ratio")
_CYCLE_OPTIONS = (
    *("cycle_first_step_size", "cycle_first_stair_count", "cycle_second_step_size", "cycle_second_stair_count"),
    *("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"),
    *("decay_step_size", "decay_lr_rate", "decay_mom_rate"),
)
_TEST_OPTIONS = (
    *("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate", "lr_range_test_staircase"),
)
NAMES_OF_OPTIONS = {
    **{name.upper(): name for name in (*_WARMUP_OPTIONS, *_CYCLE_OPTIONS, *_TEST_OPTIONS)},
    **{"COS_MIN_RATIO": "cos_min_ratio", "TOTAL_NUM_STEPS": "total_num_steps"},
    **{"LR_RANGE_TEST": "LRRangeTest", "ONE_CYCLE": "OneCycle", "WARMUP_LR": "WarmupLR"},
    **{"WARMUP_DECAY_LR": "WarmupDecayLR", "WARMUP_COSINE_LR": "WarmupCosineLR"},
    **{"WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear"},
}
"""Constants of DeepSpeed for the names of schedules and their options."""


def make_schedule(name: str, optimizer: torch.optim.Optimizer, params: Mapping[str, Any]) -> Any:
    """The schedule that a config names: DeepSpeed's own, or one of `torch.optim.lr_scheduler`.

    Raises `ConfigError` for an unknown name, and for parameters that the schedule does not have.
    """
    kind = SCHEDULES.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(kind, type):
        raise ConfigError(f"scheduler.type is {name!r}. {nearest(name, SCHEDULES)}")
    try:
        return kind(optimizer, **params)
    except TypeError as error:
        raise ConfigError(f"scheduler.params are not valid for {name}: {error}.") from error


def _positive(number: int, name: str) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(f"{name} is {number!r}; it must be an integer of at least 1.")
    return number
