"""The messages that ranks exchange when they log, and their summaries over several steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.observe.unusual import UnitSquare
from shardwise.system.telemetry import Lap


@dataclass
class RankMessage:
    """The message of one rank in one `log`."""

    values: dict[str, float]
    tokens: int
    samples: int
    lap: Lap
    memory: dict[str, int]
    """Of the process: resident bytes, now and at the peak."""
    tiers: dict[str, dict[str, dict[str, int]]]
    """Bytes promised, measured and if replicated, by tier and kind; empty unless they were measured for this log."""
    weight: float = 1.0
    """The weight of its values."""
    unusual: str = ""
    """What is unusual about its loss, in words: see `unusual.py`."""
    unusual_norm: str = ""
    """What is unusual about the norm of all gradients, in words."""
    squares: tuple[UnitSquare, ...] = ()
    """This rank's part of such a norm."""

    def message(self) -> bytes:
        return json.dumps({**self.__dict__, "lap": self.lap.__dict__}).encode()

    @classmethod
    def of(cls, message: bytes | str) -> RankMessage:
        fields = json.loads(message)
        squares = tuple(UnitSquare(*one) for one in fields["squares"])
        return cls(**{**fields, "lap": Lap(**fields["lap"]), "squares": squares})


@dataclass(frozen=True)
class LogEntry:
    """The combined result of one `log` of all ranks."""

    kind: str
    step: int
    means: dict[str, float]
    line: dict[str, Any]
    """Other values in the record's line of a step."""
    tokens: int

    def is_in(self, line: Mapping[str, Any]) -> bool:
        """Whether a line of the record is this log."""
        is_same = line["kind"] == self.kind and line["step"] == self.step
        return is_same and (self.kind == "step" or self.means.keys() <= line.keys())


@dataclass
class RankTotals:
    """Messages of all ranks since the last line about ranks, and the number of steps."""

    num_steps: int = 0
    messages: list[list[RankMessage]] = field(default_factory=list)

    def add(self, messages: list[RankMessage], num_steps: int) -> None:
        self.messages.append(messages)
        self.num_steps += num_steps

    def of_ranks(self) -> list[dict[str, Any]]:
        """Seconds per step, and the latest bytes of the process, rank by rank."""
        return [
            {**self._mean([one[rank].lap for one in self.messages]), **last.memory}
            for rank, last in enumerate(self.messages[-1])
        ]

    def _mean(self, laps: list[Lap]) -> dict[str, Any]:
        steps = max(1, self.num_steps)
        waited: dict[str, float] = {}
        spent: dict[str, float] = {}
        for lap in laps:
            for total, parts in ((waited, lap.waited), (spent, lap.spent)):
                for name, seconds in parts.items():
                    total[name] = total.get(name, 0.0) + seconds / steps
        return {
            "seconds": sum(lap.seconds for lap in laps) / steps,
            "computing": sum(lap.computing for lap in laps) / steps,
            "idle": sum(lap.idle for lap in laps) / steps,
            "waiting": sum(lap.waiting for lap in laps) / steps,
            "waited": waited,
            "spent": spent,
            "disk": sum(lap.disk for lap in laps) / steps,
        }


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that a loop logs as floats. Raises `ConfigError` for values that are not numbers."""
    numbers = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"log(): {name} is {value!r:.60}; give a number, or a tensor of one element.")
        numbers[name] = float(value)
    return numbers


def check_names(messages: list[RankMessage]) -> None:
    """Raise `ConfigError` if ranks log different names."""
    for rank, one in enumerate(messages):
        if one.values.keys() != messages[0].values.keys():
            raise ConfigError(
                f"log(): rank {rank} logs {', '.join(one.values) or 'nothing'}, and rank 0 "
                f"{', '.join(messages[0].values) or 'nothing'}. All ranks log the same names."
            )
