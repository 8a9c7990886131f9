"""What becomes of a model that is cut along the tensor-parallel axis, on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.placement import Box
from shardwise.tensor.forwards import Forward
from shardwise.tensor.regions import Regions
from shardwise.tensor.rules import Cut
from shardwise.tensor.shares import Shares

Make = Callable[[Line, Regions], Forward]


@dataclass
class Split:
    """What becomes of one model. Nothing has been changed for it yet.

    `boxes` are the parts of this rank of the parameters that are cut; `forwards` and `attributes` are set by
    `carry_out`.
    """

    place: int
    num_ranks: int
    boxes: dict[nn.Parameter, Box] = field(default_factory=dict)
    forwards: list[tuple[nn.Module, Make]] = field(default_factory=list)
    attributes: list[tuple[nn.Module, str, object]] = field(default_factory=list)
    names: dict[nn.Parameter, str] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    cut_by: dict[nn.Parameter, str] = field(default_factory=dict)
    """The module that cuts each parameter, for sentences."""

    outputs: dict[str, Shares] = field(default_factory=dict)
    """By module, how what it returns is dealt."""
    blocks: str = ""
    """With `tensor.sequence`, the list of the blocks between which a sequence is cut."""

    def is_on_sequence(self, cut: Cut) -> bool:
        """Whether around a module each rank has its part of the sequence."""
        if not self.blocks or not cut.path.startswith(f"{self.blocks}."):
            return False
        if cut.style in ("column_gathered", "vocabulary_cut", "row_scattered"):
            raise ModelError(
                f"{cut.path} has the style {cut.style}, which wants the whole sequence; with tensor.sequence use "
                f"column and row in blocks, or leave tensor.sequence out of the plan."
            )
        return True

    def receives_part(self, name: str) -> bool:
        """Whether a pipeline stage that begins with the module `name` receives this rank's part of the sequence: if
        that is a block behind the first one."""
        if not self.blocks or not name.startswith(f"{self.blocks}."):
            return False
        return self.modules[name] is not next(self.modules[self.blocks].children())

    def parent_enters(self, cut: Cut) -> bool:
        """Whether the module around a column module gets the whole sequence, and not just the column module: wherever
        that is not the block itself, since attention looks at the length of its input."""
        return cut.path.removeprefix(f"{self.blocks}.").count(".") > 1

    def carry_out(self, line: Line, regions: Regions) -> None:
        for module, name, value in self.attributes:
            setattr(module, name, value)
        for module, make in self.forwards:
            module.__dict__["forward"] = make(line, regions)
