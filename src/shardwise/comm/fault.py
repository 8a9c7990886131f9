"""A fault between ranks as every rank raises it: found by one of them, told to all."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from shardwise.errors import FaultError


@dataclass(frozen=True)
class Fault:
    """Plain data; the fields are those of `FaultError`."""

    kind: str
    ranks: tuple[int, ...]
    text: str
    unit: str = ""
    action: str = ""
    origin: int = -1

    def error(self) -> FaultError:
        """A new exception each time: one that is raised twice would grow two tracebacks."""
        return FaultError(
            f"{self.text}\nNothing more can be sent between these ranks: start the job again "
            f"(`shardwise launch --max-restarts` does so by itself).",
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
        plain = json.loads(text)
        return cls(**{**plain, "ranks": tuple(plain["ranks"])})
