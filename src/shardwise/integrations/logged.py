"""What rank 0 has logged of a step and not told yet.

[Note: logged alone] Many loops log on the main process alone, but the line of a step says something of every rank. So
what is logged is kept, and told where all ranks next do something together: they say there whether rank 0 has anything.
Without a `run` in the plan nobody asks.
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
_OF_THE_LINE = ("step", "kind")


class Logged:
    """See [Note: logged alone]. Of one engine, whose plan has a `run`."""

    def __init__(self, engine: sw.Engine) -> None:
        self.engine = engine
        self.asked_at = engine.num_steps
        """After how many steps ranks have last asked each other."""
        self._values: dict[str, float] | None = None
        self._kept_at = engine.num_steps
        self._is_at_exit = False

    @property
    def is_waiting(self) -> bool:
        """Whether this rank has anything to tell."""
        return self._values is not None

    def take(self, values: dict[str, Any]) -> None:
        """Keep what is the first of a step, and write the rest down at once. Rank 0 calls."""
        numbers = _numbers(values)
        if numbers and all(name.startswith(_EVALUATION) for name in numbers):
            self.engine.log({_bare(name): one for name, one in numbers.items()}, kind="validation", mean=False)
        elif self._kept_at == self.engine.num_steps:
            self.engine.log(numbers, kind="log", mean=False)
        else:
            self._values, self._kept_at = numbers, self.engine.num_steps
            if not self._is_at_exit:
                self._is_at_exit = True
                atexit.register(_write_at_exit, weakref.ref(self))

    def ask(self) -> None:
        """Tell each other whether rank 0 has anything, and write it. All ranks call."""
        said = self.engine.world.exchange(bytes([self.is_waiting]), "logged")
        self.hear(has_any=any(map(any, said)))

    def hear(self, *, has_any: bool) -> None:
        """All know whether rank 0 `has_any`, which is written then. All ranks call."""
        self.asked_at = self.engine.num_steps
        if has_any:
            values, self._values = self._values, None
            self.engine.log(values or {}, mean=False)

    def write_alone(self) -> None:
        """At the end of a script that has not said that it ends: others are asked nothing any more."""
        if self._values:
            with contextlib.suppress(ShardwiseError):
                self.engine.log(self._values, kind="log", mean=False)


def _numbers(values: dict[str, Any]) -> dict[str, float]:
    """What of `values` is a number, or a tensor of one element."""
    found = {}
    for name, value in values.items():
        one = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if isinstance(one, int | float) and not isinstance(one, bool) and name not in _OF_THE_LINE:
            found[str(name)] = float(one)
    return found


def _bare(name: str) -> str:
    return name.removeprefix(next(start for start in _EVALUATION if name.startswith(start)))


def _write_at_exit(known: weakref.ref[Logged]) -> None:
    logged = known()
    if logged is not None:
        logged.write_alone()
