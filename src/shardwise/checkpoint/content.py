"""What a checkpoint holds, as pieces: for every tensor which of its elements lie on this rank, and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.optim import AdoptedOptimizer
from shardwise.placement import Axes, Span
from shardwise.storage import Flat

Tensor = torch.Tensor


@dataclass(frozen=True)
class Entry:
    """Elements `span` of the tensor `name` (flattened), in live memory.

    `kind` is `param`, `buffer` or `state.KEY`. `is_owner` says that this rank writes it; copies on other
    ranks are not written twice.
    """

    kind: str
    name: str
    span: Span
    tensor: Tensor
    is_owner: bool

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass
class Content:
    """Everything of one model and optimizer that a resume needs, as it lies on one rank."""

    entries: list[Entry] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)


def content_of(
    model: nn.Module, flats: Sequence[Flat], optimizer: AdoptedOptimizer | None, coordinate: Mapping[str, int]
) -> Content:
    """The content as it lies on the rank at `coordinate` of the mesh."""
    content = Content()
    for flat in flats:
        for index, slot in enumerate(flat.slots):
            content.shapes[slot.name] = slot.shape
            content.entries.append(_parameter(flat, index, coordinate))
    known = {param for flat in flats for param in flat.params}
    loose = [(name, param.detach()) for name, param in model.named_parameters() if param not in known]
    for name, tensor in (*loose, *_persistent_buffers(model)):
        content.shapes[name] = tuple(tensor.shape)
        content.entries.append(Entry("buffer", name, Span(0, tensor.numel()), tensor, _is_first_copy((), coordinate)))
    if optimizer is not None:
        content.entries += _states(optimizer, coordinate)
        content.groups = [
            {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
            for group in optimizer.optimizer.param_groups
        ]
    return content


def _is_first_copy(shard: Axes, coordinate: Mapping[str, int]) -> bool:
    """Whether of all ranks that hold the same elements of what is sharded over `shard` this is the first."""
    return all(place == 0 for axis, place in coordinate.items() if axis not in shard)


def _parameter(flat: Flat, index: int, coordinate: Mapping[str, int]) -> Entry:
    """Master weights where there are some; the resting bytes of a frozen parameter."""
    slot = flat.slots[index]
    kept = flat.optim_span if flat.spec.trainable else flat.param_span
    span, piece = slot.span.overlap(kept).within(slot.span), flat.param_piece(index)
    place = flat.spec.table.optim if flat.spec.trainable else flat.spec.table.param
    return Entry("param", slot.name, span, piece, _is_first_copy(place.shard, coordinate))


def _states(optimizer: AdoptedOptimizer, coordinate: Mapping[str, int]) -> Iterator[Entry]:
    """The optimizer's states of this rank's pieces. A state that is not of the piece's size is kept whole."""
    for piece in optimizer.pieces:
        is_first_copy = _is_first_copy(piece.flat.spec.table.optim.shard, coordinate)
        for key, value in optimizer.state_of(piece).items():
            tensor = value if isinstance(value, Tensor) else torch.tensor(value)
            span = piece.span if tensor.shape == piece.tensor.shape else Span(0, 0)
            yield Entry(f"state.{key}", piece.name, span, tensor, is_first_copy)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    saved = model.state_dict(keep_vars=True).keys()
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer


def _is_plain(value: object) -> bool:
    """Whether JSON can hold it: hyper-parameters are numbers, flags, and tuples of numbers."""
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)
