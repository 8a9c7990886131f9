"""What a rank's parameters are of the model's, where pipeline stages or model axes leave it a part of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

_log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class OwnShare:
    """Says once what a loop may take for the whole model's."""

    trained: frozenset[str] = field(repr=False)
    """The rank's trained parameters by name."""
    numel: int
    """How many elements the rank has of all."""
    whole_numel: int
    """How many the model has."""
    _counted: set[str] = field(default_factory=set, repr=False)
    _taken: set[str] = field(default_factory=set, repr=False)

    def note_counted(self, name: str) -> None:
        """A loop has asked how many elements a parameter has. Says, once it has asked of all that are trained, that
        their sum is not the model's: loops print it, and have often no other use for it."""
        if self._completes(self._counted, name):
            _log.warning("A sum of numel() over model.parameters() is of what this rank has, %s.", self)

    def note_taken(self, names: Iterable[str]) -> None:
        """A loop has taken values out of what was computed of these parameters, as numbers, an array or a file, which
        carry no mark. Says, once it has of all that are trained, that what it makes of them together is not the
        model's: `numpy.array([p.norm().item() for p in model.parameters()])` asks nobody."""
        last = [name for name in names if self._completes(self._taken, name)]
        if last:
            _log.warning(
                "Values were taken of each of model.parameters(), which are those that this rank has, %s. So a mean or "
                "a norm of them, or a file that has them, is of these alone. engine.state_dict(), engine.get(name) and "
                "engine.gradient_norm, called by all ranks, are of the whole model.",
                self,
            )

    def __str__(self) -> str:
        return f"{self.numel:,} elements of the model's {self.whole_numel:,}"

    def _completes(self, found: set[str], name: str) -> bool:
        """Whether `name` is the last of those that are trained to be `found`, where it is put."""
        if name not in self.trained or name in found:
            return False
        found.add(name)
        return len(found) == len(self.trained)
