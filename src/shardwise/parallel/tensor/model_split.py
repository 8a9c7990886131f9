"""The changes that split a model along the tensor-parallel axis, for one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.parallel.tensor.forwards import Forward
from shardwise.parallel.tensor.partition import Partition
from shardwise.parallel.tensor.regions import Regions
from shardwise.parallel.tensor.rules import SplitModule
from shardwise.parallel.tensor.weights_used import Weight, WeightsUsed
from shardwise.plan.placement import Box

Make = Callable[[Line, Regions], Forward]


@dataclass
class ModelSplit:
    """The planned changes to one model.

    `boxes` are this rank's parts of the split parameters. `carry_out` sets the `forwards` and `attributes`.
    """

    index: int
    num_ranks: int
    boxes: dict[nn.Parameter, Box] = field(default_factory=dict)
    forwards: list[tuple[nn.Module, Make]] = field(default_factory=list)
    attributes: list[tuple[nn.Module, str, object]] = field(default_factory=list)
    names: dict[nn.Parameter, str] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    split_by: dict[nn.Parameter, str] = field(default_factory=dict)
    """The path of the module that splits each parameter, for error messages."""

    outputs: dict[str, Partition] = field(default_factory=dict)
    """By module path, how its output is partitioned."""
    blocks: str = ""
    """With `tensor.sequence`, the path of the list of blocks in which the sequence is split."""

    line: Line | None = field(default=None, init=False, repr=False)
    """What the ranks communicate through, while it is carried out."""
    weights: WeightsUsed | None = field(default=None, init=False, repr=False)
    """Watches what else forwards compute of split weights, from then on."""
    _undoing: list[Callable[[], object]] = field(default_factory=list, init=False, repr=False)

    def is_on_sequence(self, target: SplitModule) -> bool:
        """Whether each rank has its part of the sequence before and after the module."""
        if not self.blocks or not target.path.startswith(f"{self.blocks}."):
            return False
        if target.style in ("column_gathered", "vocabulary_cut", "row_scattered"):
            raise ModelError(
                f"{target.path} has the style {target.style}, which needs the whole sequence. With tensor.sequence use "
                f"column and row in blocks, or leave tensor.sequence out of the plan."
            )
        return True

    def receives_part(self, name: str) -> bool:
        """Whether a pipeline stage that begins with the module `name` receives this rank's part of the sequence: true
        for every block but the first."""
        if not self.blocks or not name.startswith(f"{self.blocks}."):
            return False
        return self.modules[name] is not next(self.modules[self.blocks].children())

    def parent_enters(self, target: SplitModule) -> bool:
        """Whether the sequence is gathered for the parent of a column module, instead of for the column module alone.
        This is so unless the parent is the block itself, because attention uses the length of its input."""
        return target.path.removeprefix(f"{self.blocks}.").count(".") > 1

    def carry_out(self, line: Line, regions: Regions) -> None:
        """Change the model in place. After `undo` it can be carried out again, for other ranks."""
        self.line = line
        for module, name, value in self.attributes:
            self.on_undo(partial(setattr, module, name, getattr(module, name)))
            setattr(module, name, value)
        for module, make in self.forwards:
            own = vars(module).get("forward")
            self.on_undo(
                partial(vars(module).pop, "forward") if own is None else partial(setattr, module, "forward", own)
            )
            module.__dict__["forward"] = make(line, regions)
        wholes = {one: Weight(self.names[one], box.shape) for one, box in self.boxes.items() if box.is_split}
        self.weights = WeightsUsed(self.modules[""], wholes)
        self.on_undo(self.weights.watch())

    def on_undo(self, action: Callable[[], object]) -> None:
        """Let `undo` call `action`."""
        self._undoing.append(action)

    def undo(self) -> None:
        """Restore the modules; the caller restores their parameters."""
        self.line = None
        while self._undoing:
            self._undoing.pop()()
