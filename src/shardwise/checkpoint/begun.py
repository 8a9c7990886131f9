"""A checkpoint written in the background, until it is known whether it is whole although a rank was lost meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.checkpoint.keep import Keep
from shardwise.errors import CheckpointError


@dataclass
class Begun:
    """What `engine.save(wait=False)` was asked for last."""

    target: Path
    number: int
    """Its name's number."""
    num_steps: int
    """Steps taken when it was begun."""
    keep: Keep = field(default_factory=Keep)
    metrics: dict[str, float] = field(default_factory=dict)
    is_at_risk: bool = False
    """Whether ranks were lost since, perhaps with files that they had not finished."""

    def facts(self) -> dict[str, Any]:
        """For ranks that join; JSON."""
        return {"target": str(self.target), "number": self.number, "num_steps": self.num_steps}

    @classmethod
    def of(cls, facts: dict[str, Any]) -> Begun:
        return cls(Path(facts["target"]), facts["number"], facts["num_steps"], is_at_risk=True)

    def is_incomplete(self) -> bool:
        """Whether ranks were lost, and it is not in its folder. For the rank that would write it again."""
        return self.is_at_risk and not self.target.is_dir()

    def error(self, cure: str) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint {self.target} is not complete: a rank was lost while it was being written in the "
            f"background. Earlier checkpoints are unchanged. {cure}"
        )
