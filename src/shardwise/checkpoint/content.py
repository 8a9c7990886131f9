"""The content of a checkpoint in pieces: for every tensor, which of its elements lie on this rank, and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.index import FACTOR, ISLAND, LOST, UNSENT
from shardwise.checkpoint.json_codec import encode
from shardwise.errors import ConfigError
from shardwise.memory import ANCHOR, Flat, Rows
from shardwise.optim import AdoptedOptimizer
from shardwise.plan.placement import Box, Slot, Span
from shardwise.program import FlatSpec, kept_losses

Tensor = torch.Tensor
NOTHING = Span(0, 0)


@dataclass(frozen=True)
class Entry:
    """Elements `span` of the tensor `name`, or of its part `box` (flattened), in live memory.

    `kind` is `param`, `buffer` or `state.KEY`; `unsent.RANK` and `unsent` are what was not sent of whole parameters and
    of averages, `factor` is what gradients are multiplied with to be sent, and `lost.NUMBER.PLACE` what codes of one of
    so many summands have lost; `outer.KEY` is what islands have in common, and `island.2.state.KEY` an island's own.
    This rank writes the elements `written`: ranks that hold copies share the writing, and together write each element
    once. With `is_whole` the elements are those of a separate tensor, not of the parameter (a scalar state): every rank
    has all of them, and one writes them.

    `is_hidden`: the model has no view of this memory, so only an optimizer's step or a call to the engine changes it.
    """

    kind: str
    name: str
    span: Span
    tensor: Tensor
    written: Span
    is_whole: bool = False
    is_hidden: bool = False
    is_narrow: bool = False
    """Whether it is a state in fewer bits than in an ordinary optimizer, which has the parameter's dtype."""

    box: Box | None = None
    """If a model axis cuts the tensor, the part whose elements `span` counts."""
    rows: Rows | None = None
    """The rows through which the elements are read, if they lie on a disk."""
    num_ranks: int = 0
    """With how many ranks alone it can be read again, if not with any number. With others it is zero."""

    @property
    def key(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass
class Content:
    """Everything of one model and optimizer that a resume needs, as it lies on one rank.

    A parameter's entry has its master weights if there are any, and for a frozen parameter the resting bytes.
    """

    entries: list[Entry] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of whole tensors."""
    boxes: dict[str, Box | None] = field(default_factory=dict)
    """This rank's parts of tensors that a model axis cuts."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    optimizer: str = ""
    """The name of the optimizer's class."""
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    island: int | None = None
    """If there are islands, that of this rank."""


def of_island(content: Content, flats: Sequence[Flat], island: int, *, is_first: bool) -> Content:
    """The content of a rank of an island, `is_first` of whose ranks.

    `param` is the model that islands have in common, so that a reader without islands finds a whole one, and beside it
    each island's own. Optimizer states and buffers of the first island count as common ones too; a reader with other
    islands than wrote the checkpoint lets those that were not there begin with what is common. What an island's ranks
    have not sent yet is that island's alone.
    """
    entries: list[Entry] = []
    anchors = {
        slot.name: (flat, index) for flat in flats if flat.anchor is not None for index, slot in enumerate(flat.slots)
    }
    for entry in content.entries:
        if entry.kind == "param" and entry.name in anchors:
            flat, index = anchors[entry.name]
            entries.append(replace(entry, kind=f"{ISLAND}.{island}.param"))
            common = NOTHING if island else entry.written
            for kind, row in flat.outer_pieces(index).items():
                name = "param" if kind == ANCHOR else kind
                entries.append(replace(entry, kind=name, tensor=row, written=common, is_hidden=True, rows=None))
        elif entry.kind == "param":
            entries.append(replace(entry, written=NOTHING if island else entry.written))
        elif island and not entry.kind.startswith("buffer."):
            written = Span(0, entry.span.numel) if entry.kind == "buffer" and is_first else entry.written
            entries.append(replace(entry, kind=f"{ISLAND}.{island}.{entry.kind}", written=written))
        else:
            entries.append(entry)
    numbers = {} if island else content.numbers
    return replace(content, entries=entries, numbers=numbers, island=island)


def content_of(
    model: nn.Module,
    flats: Sequence[Flat],
    optimizer: AdoptedOptimizer | None,
    place: int,
    *,
    own_buffers: bool,
) -> Content:
    """The content of the rank at `place` of its data-parallel group.

    Buffers are those of the first rank, which all ranks share after each step; with `own_buffers` every rank has its
    own.
    """
    every = list(model.named_parameters(remove_duplicate=False))
    first: dict[Tensor, str] = {}
    for name, param in every:
        first.setdefault(param, name)
    content = Content(ties={name: first[param] for name, param in every if first[param] != name})
    sharded = {param for flat in flats for param in flat.params}
    loose = [(name, param.detach()) for param, name in first.items() if param not in sharded]
    visible = [flat.full for flat in flats] + [tensor for _, tensor in loose]
    written = _add_params(content, flats, visible={one.untyped_storage().data_ptr() for one in visible})
    kind = f"buffer.{place}" if own_buffers and place else "buffer"
    for name, tensor in (*loose, *_persistent_buffers(model)):
        content.shapes[name] = tuple(tensor.shape)
        span = Span(0, tensor.numel())
        content.entries.append(Entry(kind, name, span, tensor, span if own_buffers or place == 0 else NOTHING))
    _add_factors(content, flats)
    _add_losses(content, flats)
    if optimizer is not None:
        _add_states(content, optimizer, written)
        _add_residuals(content, optimizer)
        content.groups = _groups(optimizer)
        content.optimizer = optimizer.kind
    return content


def kept_span(spec: FlatSpec, slot: Slot, coordinate: Mapping[str, int]) -> Span:
    """The elements of a parameter that the rank at `coordinate` keeps between steps: of the master weights, or of a
    frozen parameter. The optimizer's states are of the same elements."""
    return slot.span.overlap(_kept(spec, coordinate)).within(slot.span)


def written_span(spec: FlatSpec, slot: Slot, coordinate: Mapping[str, int]) -> Span:
    """The part of `kept_span` that the rank at `coordinate` writes or sends: each element has exactly one such rank."""
    return slot.span.overlap(_given(spec, coordinate)).within(slot.span)


def _given(spec: FlatSpec, coordinate: Mapping[str, int]) -> Span:
    """The elements of a flat buffer that this rank writes or sends.

    Copies lie along the axes of the table over which the buffer is not sharded. The buffer divides evenly among the
    ranks along replica axes, and so does what one rank keeps among its copies.
    """
    place, num_copies = 0, 1
    for axis in spec.table.axes:
        if axis not in spec.kept.shard:
            place = place * spec.mesh.size(axis) + coordinate[axis]
            num_copies *= spec.mesh.size(axis)
    kept = _kept(spec, coordinate)
    part = kept.numel // num_copies
    return Span(kept.start + place * part, kept.start + (place + 1) * part)


def _kept(spec: FlatSpec, coordinate: Mapping[str, int]) -> Span:
    return spec.layout.span(spec.kept.shard, coordinate)


def _add_params(content: Content, flats: Sequence[Flat], visible: set[int]) -> dict[str, Span]:
    """Add the sharded parameters; returns what this rank writes of each. `visible` are the model's storages."""
    written: dict[str, Span] = {}
    for flat in flats:
        kept, given = _kept(flat.spec, flat.coordinate), _given(flat.spec, flat.coordinate)
        for index, slot in enumerate(flat.slots):
            content.shapes[slot.name] = slot.whole_shape
            content.boxes[slot.name] = slot.box if slot.is_split else None
            span, written[slot.name] = (slot.span.overlap(part).within(slot.span) for part in (kept, given))
            if slot.box is not None and slot.box.place:
                written[slot.name] = NOTHING  # another rank along the model axis has the same
            tensor = flat.param_piece(index)
            is_hidden = tensor.untyped_storage().data_ptr() not in visible
            content.entries.append(
                Entry(
                    "param",
                    slot.name,
                    span,
                    tensor,
                    written[slot.name],
                    is_hidden=is_hidden,
                    box=content.boxes[slot.name],
                    rows=flat.rows_of(tensor),
                )
            )
    return written


def _add_states(content: Content, optimizer: AdoptedOptimizer, written_of: Mapping[str, Span]) -> None:
    """Add the optimizer's states of this rank's pieces. A state that does not have the piece's size is the same on all
    ranks; the rank with the parameter's first element writes it."""
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
                        piece.flat_state(value),
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


def _add_residuals(content: Content, optimizer: AdoptedOptimizer) -> None:
    """Add what this rank has not sent: every rank has its own of whole parameters, and a range of those of averages."""
    for name, one in optimizer.residuals.items():
        whole = Span(0, one.own.numel())
        content.entries += [
            Entry(f"{UNSENT}.{one.place}", name, whole, one.own, whole, is_hidden=True, num_ranks=one.num_ranks),
            Entry(UNSENT, name, one.span, one.average, one.span, is_hidden=True, num_ranks=one.num_ranks),
        ]


def _add_factors(content: Content, flats: Sequence[Flat]) -> None:
    """Add what is kept of gradients that are sent as factors: every rank has its own of what was not sent, and all have
    the same factor. A backward changes both, so they are copied at once."""
    for flat in flats:
        for name, (unsent, factor) in flat.kept_factors().items():
            (axis,) = flat.spec.table.axes
            place, num_ranks = flat.coordinate[axis], flat.spec.mesh.size(axis)
            whole, of_factor = Span(0, unsent.numel()), Span(0, factor.numel())
            mine = of_factor if place == 0 else NOTHING
            content.entries += [
                Entry(f"{UNSENT}.{place}", name, whole, unsent, whole, num_ranks=num_ranks),
                Entry(FACTOR, name, of_factor, factor, mine, is_whole=True),
            ]


def _add_losses(content: Content, flats: Sequence[Flat]) -> None:
    """Add what codes of gradients have lost. A backward changes it, so it is copied at once."""
    for flat in flats:
        for one in kept_losses(flat.spec):
            kind = f"{LOST}.{one.num_places}.{one.place(flat.coordinate)}"
            here, losses = flat.spec.layout.span(one.shard, flat.coordinate), flat.losses[one.axis]
            for slot in flat.slots:
                mine, is_copy = slot.span.overlap(here), slot.box is not None and slot.box.place > 0
                span, part = mine.within(slot.span), mine.within(here)
                written = span if one.is_first(flat.coordinate) and not is_copy else NOTHING
                box = content.boxes[slot.name]
                content.entries.append(Entry(kind, slot.name, span, losses[part.as_slice], written, box=box))


def _groups(optimizer: AdoptedOptimizer) -> list[dict[str, Any]]:
    names: dict[Tensor, str] = {piece.param: piece.name for piece in optimizer.pieces}
    return [
        {"params": [names[param] for param in group["params"] if param in names], **_settings(group)}
        for group in optimizer.groups
    ]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The storable hyper-parameters: numbers, flags, text, tuples of them, and tensors of one number. Others are
    code."""
    settings = {}
    for key, value in group.items():
        if key == "params":
            continue
        try:
            settings[key] = encode(value, key)
        except ConfigError:  # such as a function; the resuming script builds the optimizer with it
            continue
    return settings


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    buffers = dict(model.named_buffers())
    saved = model.state_dict(keep_vars=True).keys() if buffers else ()
    for name, buffer in buffers.items():
        if name in saved:
            yield name, buffer
