"""What a checkpoint holds, as pieces: for every tensor which of its elements lie on this rank, and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.codec import encode
from shardwise.errors import ConfigError
from shardwise.optim import AdoptedOptimizer
from shardwise.placement import Axes, Box, Slot, Span
from shardwise.program import FlatSpec
from shardwise.storage import DiskRows, Flat

Tensor = torch.Tensor
NOTHING = Span(0, 0)


@dataclass(frozen=True)
class Entry:
    """Elements `span` of the tensor `name`, or of its part `box` (flattened), in live memory.

    `kind` is `param`, `buffer` or `state.KEY`. This rank writes the elements `written` of them: ranks that hold copies
    share the writing, and together write each element once. With `is_whole` the elements are the tensor's own, not the
    parameter's (a state that is a scalar): every rank has all of them, and one writes them.

    `is_hidden` says that the model has no view of this memory: nothing but an optimizer's step, or the engine when it
    is told to, changes it.
    """

    kind: str
    name: str
    span: Span
    tensor: Tensor
    written: Span
    is_whole: bool = False
    is_hidden: bool = False
    is_narrow: bool = False
    """A state in fewer bits than an optimizer that knows nothing of it would have: the parameter's own."""

    box: Box | None = None
    """Where a model axis cuts the tensor, the part that `span` counts the elements of."""
    rows: DiskRows | None = None
    """That have to be asked for the elements, where they lie on a disk."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass
class Content:
    """Everything of one model and optimizer that a resume needs, as it lies on one rank.

    A parameter's entry is its master weights where there are some; the resting bytes of a frozen one.
    """

    entries: list[Entry] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of whole tensors."""
    boxes: dict[str, Box | None] = field(default_factory=dict)
    """The parts that this rank has of those that a model axis cuts."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    optimizer: str = ""
    """The name of the optimizer's class."""
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)


def content_of(
    model: nn.Module,
    flats: Sequence[Flat],
    optimizer: AdoptedOptimizer | None,
    place: int,
    *,
    own_buffers: bool = False,
) -> Content:
    """The content as it lies on the rank at `place` of its data-parallel group.

    Buffers are the first one's, which after each step all ranks share; with `own_buffers` every rank has its own.
    """
    every = list(model.named_parameters(remove_duplicate=False))
    first: dict[Tensor, str] = {}
    for name, param in every:
        first.setdefault(param, name)
    content = Content(ties={name: first[param] for name, param in every if first[param] != name})
    sharded = {param for flat in flats for param in flat.params}
    loose = [(name, param.detach()) for param, name in first.items() if param not in sharded]
    in_sight = [flat.full for flat in flats] + [tensor for _, tensor in loose]
    written = _add_params(content, flats, in_sight={one.untyped_storage().data_ptr() for one in in_sight})
    kind = f"buffer.{place}" if own_buffers and place else "buffer"
    for name, tensor in (*loose, *_persistent_buffers(model)):
        content.shapes[name] = tuple(tensor.shape)
        span = Span(0, tensor.numel())
        content.entries.append(Entry(kind, name, span, tensor, span if own_buffers or place == 0 else NOTHING))
    if optimizer is not None:
        _add_states(content, optimizer, written)
        content.groups = _groups(optimizer)
        content.optimizer = optimizer.kind
    return content


def kept_span(spec: FlatSpec, slot: Slot, coordinate: Mapping[str, int]) -> Span:
    """Which elements of a parameter the rank at `coordinate` keeps between steps: master weights, or a frozen one's
    bytes. The optimizer's states are of the same elements."""
    return slot.span.overlap(_kept(spec, coordinate)).within(slot.span)


def written_span(spec: FlatSpec, slot: Slot, coordinate: Mapping[str, int]) -> Span:
    """Those of them that the rank at `coordinate` gives away: of all copies of an element exactly one."""
    return slot.span.overlap(_given(spec, coordinate)).within(slot.span)


def _given(spec: FlatSpec, coordinate: Mapping[str, int]) -> Span:
    """Of a flat buffer, the elements that this rank gives away.

    Copies lie along the axes of its table over which the buffer is not sharded. It divides evenly among the ranks along
    replica axes, and so does what one rank keeps among its copies.
    """
    shard = _kept_shard(spec)
    place, num_copies = 0, 1
    for axis in spec.table.axes:
        if axis not in shard:
            place = place * spec.mesh.size(axis) + coordinate[axis]
            num_copies *= spec.mesh.size(axis)
    kept = _kept(spec, coordinate)
    part = kept.numel // num_copies
    return Span(kept.start + place * part, kept.start + (place + 1) * part)


def _kept(spec: FlatSpec, coordinate: Mapping[str, int]) -> Span:
    return spec.layout.span(_kept_shard(spec), coordinate)


def _kept_shard(spec: FlatSpec) -> Axes:
    return (spec.table.optim if spec.trainable else spec.table.param).shard


def _add_params(content: Content, flats: Sequence[Flat], in_sight: set[int]) -> dict[str, Span]:
    """The sharded parameters; returns what of each this rank writes. `in_sight` are the model's storages."""
    written: dict[str, Span] = {}
    for flat in flats:
        kept, given = _kept(flat.spec, flat.coordinate), _given(flat.spec, flat.coordinate)
        for index, slot in enumerate(flat.slots):
            content.shapes[slot.name] = slot.whole_shape
            content.boxes[slot.name] = slot.box if slot.is_cut else None
            span, written[slot.name] = (slot.span.overlap(part).within(slot.span) for part in (kept, given))
            if slot.box is not None and slot.box.place:
                written[slot.name] = NOTHING  # another rank along the model axis has the same
            tensor = flat.param_piece(index)
            is_hidden = tensor.untyped_storage().data_ptr() not in in_sight
            content.entries.append(
                Entry(
                    "param",
                    slot.name,
                    span,
                    tensor,
                    written[slot.name],
                    is_hidden=is_hidden,
                    box=content.boxes[slot.name],
                    rows=flat.on_disk(tensor),
                )
            )
    return written


def _add_states(content: Content, optimizer: AdoptedOptimizer, written_of: Mapping[str, Span]) -> None:
    """The optimizer's states of this rank's pieces. Of what is not of the piece's size the first element's rank
    writes what it has; all have the same."""
    for piece in optimizer.pieces:
        state = optimizer.kept_state_of(piece)
        if not state:
            continue
        narrow = optimizer.narrow_keys_of(piece)
        written = written_of[piece.name]
        box = content.boxes[piece.name]
        is_first = written.start == 0 and written.numel > 0 and (box is None or box.has_first)
        for key, value in state.items():
            kind = f"state.{key}"
            if not isinstance(value, Tensor):
                if is_first:
                    content.numbers.setdefault(piece.name, {})[key] = encode(value, f"state {key} of {piece.name}")
            elif value.shape == piece.tensor.shape:
                content.entries.append(
                    Entry(
                        kind,
                        piece.name,
                        piece.span,
                        value,
                        written,
                        is_hidden=True,
                        is_narrow=key in narrow,
                        box=content.boxes[piece.name],
                        rows=piece.flat.on_disk(value),
                    )
                )
            else:
                whole = Span(0, value.numel())
                mine = whole if is_first else NOTHING
                content.entries.append(Entry(kind, piece.name, whole, value, mine, is_whole=True, is_hidden=True))


def _groups(optimizer: AdoptedOptimizer) -> list[dict[str, Any]]:
    names: dict[Tensor, str] = {piece.param: piece.name for piece in optimizer.pieces}
    return [
        {"params": [names[param] for param in group["params"] if param in names], **_settings(group)}
        for group in optimizer.groups
    ]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters: numbers, flags, text, tuples of them, and tensors of one number. Others are code."""
    settings = {}
    for key, value in group.items():
        if key == "params":
            continue
        try:
            settings[key] = encode(value, key)
        except ConfigError:  # a function, say: whoever resumes has built the optimizer with it
            continue
    return settings


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    buffers = dict(model.named_buffers())
    saved = model.state_dict(keep_vars=True).keys() if buffers else ()
    for name, buffer in buffers.items():
        if name in saved:
            yield name, buffer
