"""What ranks tell each other when they log, and what it comes to over several steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.telemetry import Lap


@dataclass
class Told:
    """What one rank says in one `log`."""

    values: dict[str, float]
    tokens: int
    samples: int
    lap: Lap
    memory: dict[str, int]
    """Of the process: resident bytes, and the most there were."""
    tiers: dict[str, dict[str, dict[str, int]]]
    """Bytes promised, measured and if replicated, by tier and kind; empty unless they were asked for anew."""
    weight: float = 1.0
    """How much its values count."""

    def message(self) -> bytes:
        lap = {"seconds": self.lap.seconds, "idle": self.lap.idle, "waited": self.lap.waited}
        return json.dumps({**self.__dict__, "lap": lap}).encode()

    @classmethod
    def of(cls, message: bytes | str) -> Told:
        said = json.loads(message)
        return cls(**{**said, "lap": Lap(**said["lap"])})


@dataclass(frozen=True)
class Said:
    """What all ranks have said in one `log`."""

    kind: str
    step: int
    means: dict[str, float]
    line: dict[str, Any]
    """What else the record says of a step."""
    tokens: int

    def is_in(self, line: Mapping[str, Any]) -> bool:
        """Whether it is this that a line of the record says."""
        is_same = line["kind"] == self.kind and line["step"] == self.step
        return is_same and (self.kind == "step" or self.means.keys() <= line.keys())


@dataclass
class Since:
    """What has come together since the last line about ranks: what all have told, and over how many steps."""

    num_steps: int = 0
    told: list[list[Told]] = field(default_factory=list)

    def add(self, told: list[Told], num_steps: int) -> None:
        self.told.append(told)
        self.num_steps += num_steps

    def of_ranks(self) -> list[dict[str, Any]]:
        """Seconds a step, and the latest bytes of the process, rank by rank."""
        return [
            {**self._mean([one[rank].lap for one in self.told]), **last.memory}
            for rank, last in enumerate(self.told[-1])
        ]

    def _mean(self, laps: list[Lap]) -> dict[str, Any]:
        steps = max(1, self.num_steps)
        waited: dict[str, float] = {}
        for lap in laps:
            for axis, seconds in lap.waited.items():
                waited[axis] = waited.get(axis, 0.0) + seconds / steps
        return {
            "seconds": sum(lap.seconds for lap in laps) / steps,
            "computing": sum(lap.computing for lap in laps) / steps,
            "idle": sum(lap.idle for lap in laps) / steps,
            "waiting": sum(lap.waiting for lap in laps) / steps,
            "waited": waited,
        }


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """What a loop logs as plain numbers. Raises `ConfigError` for what is none."""
    numbers = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"log(): {name} is {value!r:.60}; give a number, or a tensor of one element.")
        numbers[name] = float(value)
    return numbers


def check_names(told: list[Told]) -> None:
    """Raise `ConfigError` if ranks log different names."""
    for rank, one in enumerate(told):
        if one.values.keys() != told[0].values.keys():
            raise ConfigError(
                f"log(): rank {rank} logs {', '.join(one.values) or 'nothing'}, and rank 0 "
                f"{', '.join(told[0].values) or 'nothing'}. All ranks log the same names."
            )
