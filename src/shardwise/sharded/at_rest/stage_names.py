"""The parameters of a rank's pipeline stages by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardwise.sharded.at_rest.own_share import OwnShare

Tensor = torch.Tensor


@dataclass(frozen=True)
class StageNames:
    """The parameters of a rank's stages: the module of the stages in which each is, by name."""

    pieces: Mapping[str, str] = field(repr=False)
    copied: Callable[[str, Tensor], str | None] = field(repr=False)
    """The other parameter of the model, if any, of which a tensor has the values that is taken for one of this name:
    [Note: pairs of copies] in `parallel/pipeline/copies.py`."""
    share: OwnShare = field(repr=False)

    def are_of_several(self, names: Iterable[str]) -> bool:
        """Whether they are of several modules, or all that the rank has."""
        names = set(names)
        return len(names) > 1 and (len({self.pieces[name] for name in names}) > 1 or names >= self.pieces.keys())


class InStage(NamedTuple):
    """A parameter among those of a rank's stages."""

    stage: StageNames
    name: str
