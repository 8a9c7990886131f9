"""Values that rank 0 has logged, and that are written with the next collective call.

[Note: logged alone] Many loops log on the main process only, but the run record of a step has entries of every rank. So
the values are kept until all ranks next communicate, and exchange there whether rank 0 has any. This happens only if
the plan has `run`.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import ShardwiseError

_EVALUATION = ("eval_", "eval/", "val_", "val/", "validation_", "validation/")
_RESERVED = ("step", "kind")
"""Fields that each line of the run record has."""


class DeferredLogging:
    """The logged values of one engine whose plan has `run`. See [Note: logged alone]."""

    def __init__(self, engine: sw.Engine) -> None:
        self.engine = engine
        self.exchanged_at = engine.num_steps
        """The number of steps at the last exchange."""
        self._values: dict[str, float] | None = None
        self._kept_at = engine.num_steps
        self._is_at_exit = False

    @property
    def is_waiting(self) -> bool:
        """Whether this rank has values that are not written yet."""
        return self._values is not None

    def add(self, values: dict[str, Any]) -> None:
        """Keep the first values after a step, and write any others at once. Called on rank 0 only."""
        numbers = _numbers(values)
        if numbers and all(name.startswith(_EVALUATION) for name in numbers):
            self.engine.log(
                {_without_prefix(name): one for name, one in numbers.items()}, kind="validation", mean=False
            )
        elif self._kept_at == self.engine.num_steps:
            self.engine.log(numbers, kind="log", mean=False)
        else:
            self._values, self._kept_at = numbers, self.engine.num_steps
            if not self._is_at_exit:
                self._is_at_exit = True
                atexit.register(_write_at_exit, weakref.ref(self))

    def exchange(self) -> None:
        """Exchange whether rank 0 has values, and write them. Collective."""
        flags = self.engine.world.exchange(bytes([self.is_waiting]), "logged")
        self.write(has_any=any(map(any, flags)))

    def write(self, *, has_any: bool) -> None:
        """Write the values, after all ranks have learnt whether rank 0 `has_any`. Collective."""
        self.exchanged_at = self.engine.num_steps
        if has_any:
            values, self._values = self._values, None
            self.engine.log(values or {}, mean=False)

    def write_alone(self) -> None:
        """Write on this rank only, at the exit of a script that has not called `end_training`."""
        if self._values:
            with contextlib.suppress(ShardwiseError):
                self.engine.log(self._values, kind="log", mean=False)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """The numbers and tensors of one element among `values`."""
    found = {}
    for name, value in values.items():
        one = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(one, int | float) and not isinstance(one, bool) and name not in _RESERVED:
            found[str(name)] = float(one)
    return found


def _without_prefix(name: str) -> str:
    return name.removeprefix(next(start for start in _EVALUATION if name.startswith(start)))


def _write_at_exit(known: weakref.ref[DeferredLogging]) -> None:
    logging = known()
    if logging is not None:
        logging.write_alone()
