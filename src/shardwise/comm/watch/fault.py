"""A fault between ranks, as every rank raises it: found by one of them, delivered to all."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from shardwise.errors import FaultError
from shardwise.system import plain_data

_SHAPE = {"kind": str, "ranks": [int], "text": str, "unit": str, "action": str, "origin": int, "goes_on": bool}


@dataclass(frozen=True)
class Fault:
    """Plain data; the fields are those of `FaultError`."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    unit: str = ""
    action: str = ""
    origin: int = -1
    goes_on: bool = False
    """Whether the surviving ranks form a new world, in the same processes."""

    def error(self) -> FaultError:
        """A new exception each time: one that is raised twice would accumulate two tracebacks."""
        next_one = (
            "the others go on in a new world (`membership.regroup`)."
            if self.goes_on
            else "start the job again (`shardwise launch --max-restarts` does so by itself)."
        )
        return FaultError(
            f"{self.text}\nNothing more can be sent between these ranks: {next_one}",
            kind=self.kind,
            ranks=self.ranks,
            unit=self.unit,
            action=self.action,
            origin=self.origin,
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Fault:
        """Raises `ValueError` for anything else."""
        plain = plain_data.read(text, _SHAPE)
        return cls(**{**plain, "ranks": tuple(plain["ranks"])})
