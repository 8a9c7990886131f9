"""Which checkpoints of a folder are kept when a new one has been written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ConfigError
from shardwise.system.flags import require_flag


@dataclass(frozen=True)
class Keep:
    """The checkpoints to keep in a folder: the union of these rules, or all if none is given.

    - `last`: that many of the highest steps.
    - `every`: steps that are multiples of it, permanently.
    - `best`: the name of a metric given in `engine.save(..., metrics={...})`: the `num_best` checkpoints in which it is
      smallest, or with `largest` largest. A checkpoint without that metric, or with NaN, is never best.

    The checkpoint just written is always kept. Raises `ConfigError` for values that are not positive whole numbers.
    """

    last: int | None = None
    every: int | None = None
    best: str | None = None
    num_best: int = 1
    largest: bool = False

    def __post_init__(self) -> None:
        for name in ("last", "every", "num_best"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"Keep({name}={value!r}) is not valid; give a whole number of at least 1.")
        require_flag("Keep(largest=", self.largest)
        if self.best is not None and not isinstance(self.best, str):
            raise ConfigError(f"Keep(best={self.best!r}) is not valid; give the name of a metric, such as 'loss'.")

    def chosen(self, metrics: Mapping[int, Mapping[str, float]]) -> set[int]:
        """The steps to keep, among those in `metrics`."""
        steps = sorted(metrics)
        if self.last is None and self.every is None and self.best is None:
            return set(steps)
        kept = set(steps[-self.last :]) if self.last is not None else set()
        if self.every is not None:
            kept |= {step for step in steps if step % self.every == 0}
        if self.best is not None:
            kept |= set(self._ranked(self.best, metrics)[: self.num_best])
        return kept

    def _ranked(self, metric: str, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """Steps that have the metric, best first, and earlier ones first among equals."""
        values = {step: own[metric] for step, own in metrics.items() if metric in own}
        sign = -1 if self.largest else 1
        return sorted(_numbers(values), key=lambda step: (sign * values[step], step))


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers; tensors and arrays of one number are accepted. Raises `ConfigError` for others."""
    return {_text(name): _number(name, value) for name, value in metrics.items()}


def _text(name: object) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"metrics has the key {name!r}; keys must be text.")
    return name


def _number(name: str, value: Any) -> float:
    is_one = getattr(value, "shape", ()) in ((), (1,)) and not isinstance(value, str | bytes)
    try:
        return float(value.item() if hasattr(value, "item") else value) if is_one else float("")
    except (TypeError, ValueError, OverflowError) as error:
        text = f"of shape {list(value.shape)}" if hasattr(value, "shape") else repr(value)[:80]
        raise ConfigError(
            f"metrics[{name!r}] is a {type(value).__name__} {text}; give one number, such as loss.item()."
        ) from error


def _numbers(values: Mapping[int, float]) -> Iterable[int]:
    return (step for step, value in values.items() if value == value)  # NaN is not equal to itself
