"""The parameters of a rank's pipeline stages by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

Tensor = torch.Tensor
_log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class StageNames:
    """The parameters of a rank's stages: the module of the stages in which each is, by name."""

    pieces: Mapping[str, str] = field(repr=False)
    copied: Callable[[str, Tensor], str | None] = field(repr=False)
    """The other parameter of the model, if any, of which a tensor has the values that is taken for one of this name:
    [Note: pairs of copies] in `parallel/pipeline/copies.py`."""
    trained: frozenset[str] = field(repr=False)
    numel: int
    """How many elements they have."""
    whole_numel: int
    """How many the model has."""
    _counted: set[str] = field(default_factory=set, repr=False)

    def note_counted(self, name: str) -> None:
        """A loop has asked how many elements a parameter has. Says, once it has asked of all that are trained, that
        their sum is not the model's: loops print it, and have often no other use for it."""
        if name in self.trained and name not in self._counted:
            self._counted.add(name)
            if len(self._counted) == len(self.trained):
                _log.warning(
                    "A sum of numel() over model.parameters() is of this rank's pipeline stages, which have %s "
                    "elements of the model's %s.",
                    f"{self.numel:,}",
                    f"{self.whole_numel:,}",
                )

    def are_of_several(self, names: Iterable[str]) -> bool:
        """Whether they are of several modules, or all that the rank has."""
        names = set(names)
        return len(names) > 1 and (len({self.pieces[name] for name in names}) > 1 or names >= self.pieces.keys())


class InStage(NamedTuple):
    """A parameter among those of a rank's stages."""

    stage: StageNames
    name: str
