"""From one table to another without a disk: the ranks of a world give each other the elements that they will need.

Which elements lie where is `content`'s to say, as for a checkpoint. A rank keeps what it has already; of the rest, each
element comes from the one copy that would have written it. One flat buffer of the new layout at a time is filled, and
an old one goes as soon as nothing of it is left to move, so at the peak there is one unit more than before or after.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.checkpoint.codec import decode, dtype_name, dtype_of, encode
from shardwise.checkpoint.content import kept_span, written_span
from shardwise.comm import Collectives, World
from shardwise.optim import AdoptedOptimizer
from shardwise.placement import Slot, Span
from shardwise.program import FlatSpec
from shardwise.storage import Flat, torch_dtype

Tensor = torch.Tensor
PARAM = "param"
States = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class _Home:
    """Where a parameter lies in a layout.

    Elements are counted in the whole of what ranks with other coordinates along `ep` have parts of, and in this rank's
    part of what `tp` cuts, which all to whom it gives have too. `told` says of each rank what it keeps and what it
    gives, where ranks have parts of different sizes.
    """

    spec: FlatSpec
    slot: Slot
    told: tuple[tuple[Span, Span], ...] = ()

    def kept(self, rank: int) -> Span:
        if self.told:
            return self.told[rank][0]
        return kept_span(self.spec, self.slot, self.spec.mesh.coordinate(rank))

    def given(self, rank: int) -> Span:
        if self.told:
            return self.told[rank][1]
        return written_span(self.spec, self.slot, self.spec.mesh.coordinate(rank))

    @property
    def dtype(self) -> torch.dtype:
        table = self.spec.table
        return torch_dtype(table.optim.dtype if self.spec.trainable else table.param.dtype)


@dataclass(frozen=True)
class _Thing:
    """A parameter's values, or one of its states, that moves: `kind` is `param` or the state's key."""

    name: str
    kind: str
    dtype: torch.dtype


class TrainingState:
    """What a rank holds of parameters and states in the old layout, until it is moved. All ranks make one at once."""

    def __init__(
        self, flats: Sequence[Flat], optimizer: AdoptedOptimizer | None, world: World, dealt: Collection[str] = ()
    ) -> None:
        """`dealt` are the parameters of which ranks along `ep` have other parts, in the old layout or in the new."""
        self._world = world
        self._dealt = frozenset(dealt)
        self._homes = self._homes_in(flats)
        self._new_homes: dict[str, _Home] = {}
        self._tensors: dict[tuple[str, str], Tensor] = {
            (slot.name, PARAM): flat.param_piece(index) for flat in flats for index, slot in enumerate(flat.slots)
        }
        self._rows = {slot.name: flat.rows for flat in flats if flat.rows is not None for slot in flat.slots}
        """Where on a disk what `_tensors` says lies."""
        self._kinds: dict[str, dict[str, torch.dtype]] = {}
        self._values: States = {}
        if optimizer is not None:
            self._take_states(optimizer)

    def learn_new(self, flats: Sequence[Flat]) -> None:
        """The new layout, which has no memory yet. All ranks call."""
        self._new_homes = self._homes_in(flats)

    def move_into(self, flat: Flat, collectives: Collectives) -> States:
        """Lay out `flat` and fill it; returns its parameters' states, by name and key. All ranks call, in one order.

        What has been moved is let go of here.
        """
        homes = {slot.name: self._new_homes[slot.name] for slot in flat.slots}
        filled, states = self._make_room(flat, homes)
        things = [
            _Thing(name, kind, dtype)
            for name, home in homes.items()
            for kind, dtype in self._kinds_of(name, home.spec).items()
        ]
        for dtype in dict.fromkeys(thing.dtype for thing in things):
            same = [thing for thing in things if thing.dtype == dtype]
            self._keep_own(same, homes, filled, flat)
            self._exchange(same, dtype, homes, filled, (collectives, flat))
        for name in homes:
            for kind in (PARAM, *self._kinds.pop(name, ())):
                self._tensors.pop((name, kind), None)
        return states

    def _homes_in(self, flats: Sequence[Flat]) -> dict[str, _Home]:
        homes = {slot.name: _Home(flat.spec, slot) for flat in flats for slot in flat.slots}
        if not self._dealt:
            return homes
        me = self._world.rank
        own = {
            name: [
                (span.start, span.stop)
                for span in (_in_whole(home.slot, one) for one in (home.kept(me), home.given(me)))
            ]
            for name, home in homes.items()
            if name in self._dealt
        }
        told = [json.loads(message) for message in self._world.exchange(json.dumps(own).encode(), "layout")]
        for name in own:
            spans = tuple((Span(*said[name][0]), Span(*said[name][1])) for said in told)
            homes[name] = replace(homes[name], told=spans)
        return homes

    def _take_states(self, optimizer: AdoptedOptimizer) -> None:
        """This rank's states, and what kinds of them there are anywhere: a rank without elements has none to show."""
        told: States = {}
        for piece in optimizer.pieces:
            for key, value in optimizer.state_of(piece).items():
                is_piece = isinstance(value, Tensor) and value.shape == piece.tensor.shape and piece.span.numel > 0
                if is_piece:
                    self._tensors[piece.name, key] = value
                said = ["piece", dtype_name(value.dtype)] if is_piece else ["value", encode(value, key)]
                told.setdefault(piece.name, {})[key] = said
        for message in self._world.exchange(json.dumps(told).encode(), "layout"):
            for name, states in json.loads(message).items():
                for key, (what, said) in states.items():
                    if what == "piece":
                        self._kinds.setdefault(name, {})[key] = dtype_of(said)
                    else:
                        self._values.setdefault(name, {})[key] = decode(said)

    def _kinds_of(self, name: str, new: FlatSpec) -> dict[str, torch.dtype]:
        """What of a parameter moves, and in which dtype. A frozen one has no states."""
        states = self._kinds.get(name, {}) if new.trainable and self._homes[name].spec.trainable else {}
        return {PARAM: self._homes[name].dtype, **states}

    def _make_room(self, flat: Flat, homes: Mapping[str, _Home]) -> tuple[dict[tuple[str, str], Tensor], States]:
        """Memory for this rank's elements in the new layout."""
        flat.lay_out()
        filled: dict[tuple[str, str], Tensor] = {}
        states: States = {}
        for index, (name, home) in enumerate(homes.items()):
            filled[name, PARAM] = piece = flat.param_piece(index)
            if not piece.numel() or not home.spec.trainable:
                continue
            states[name] = dict(self._values.get(name, {}))
            for key, dtype in self._kinds_of(name, home.spec).items():
                if key != PARAM:
                    follows = dtype == self._homes[name].dtype
                    kept = piece.dtype if follows else dtype
                    if flat.rows is not None and flat.spec.updates_from_disk:
                        filled[name, key] = flat.rows.place(index, key, piece.numel(), kept)
                    else:
                        filled[name, key] = torch.empty_like(piece, dtype=kept)
                    states[name][key] = filled[name, key]
        return filled, states

    def _own(self, thing: _Thing, span: Span) -> Tensor:
        """Elements of what this rank has, in memory."""
        tensor, rows = _cut(self._tensors[thing.name, thing.kind], span), self._rows.get(thing.name)
        return rows.read(tensor) if rows is not None and rows.has(tensor) else tensor

    def _keep_own(
        self,
        things: Sequence[_Thing],
        homes: Mapping[str, _Home],
        filled: Mapping[tuple[str, str], Tensor],
        flat: Flat,
    ) -> None:
        me = self._world.rank
        for thing in things:
            had, needed = self._homes[thing.name].kept(me), homes[thing.name].kept(me)
            common = had.overlap(needed)
            if common.numel:
                target = _cut(filled[thing.name, thing.kind], common.within(needed))
                flat.put(target, self._own(thing, common.within(had)))

    def _exchange(
        self,
        things: Sequence[_Thing],
        dtype: torch.dtype,
        homes: Mapping[str, _Home],
        filled: Mapping[tuple[str, str], Tensor],
        by: tuple[Collectives, Flat],
    ) -> None:
        """One message to each rank that lacks what this one is to give, with all of it. `by` collectives of the device
        of what is filled, wherever on this rank it comes from and goes to."""
        world, (collectives, flat), device = self._world, by, by[1].device
        sent, arrived, targets = [], [], []
        for other in range(world.size):
            goes = [
                self._own(thing, span.within(self._homes[thing.name].kept(world.rank))).to(device)
                for thing, span in self._passing(things, homes, world.rank, other)
            ]
            comes = list(self._passing(things, homes, other, world.rank))
            num_comes = sum(span.numel for _, span in comes)
            sent.append(torch.cat(goes) if goes else torch.empty(0, dtype=dtype, device=device))
            arrived.append(torch.empty(num_comes, dtype=dtype, device=device))
            targets.append(comes)
        collectives.all_to_all(arrived, sent, world.everybody, "reshard").wait()
        for message, comes in zip(arrived, targets, strict=True):
            start = 0
            for thing, span in comes:
                target = _cut(filled[thing.name, thing.kind], span.within(homes[thing.name].kept(world.rank)))
                flat.put(target, message[start : start + span.numel])
                start += span.numel

    def _passing(
        self, things: Sequence[_Thing], homes: Mapping[str, _Home], giver: int, taker: int
    ) -> Iterator[tuple[_Thing, Span]]:
        """What one rank gives another, in an order that both know."""
        spec = next(iter(homes.values())).spec
        if giver == taker or _model_place(spec, giver) != _model_place(spec, taker):
            return  # ranks with other parts of every layer
        for thing in things:
            old = self._homes[thing.name]
            for lacking in _without(homes[thing.name].kept(taker), old.kept(taker)):
                span = lacking.overlap(old.given(giver))
                if span.numel:
                    yield thing, span


def _model_place(spec: FlatSpec, rank: int) -> tuple[int, ...]:
    """Where `rank` is along the axes that cut layers, which a change of plan leaves as they are."""
    coordinate = spec.mesh.coordinate(rank)
    return tuple(coordinate[axis] for axis in spec.mesh.model_axes)


def _in_whole(slot: Slot, span: Span) -> Span:
    """Elements of this rank's part of a parameter as those of the whole, of which the part is one range."""
    start = slot.box.runs[0][1] if slot.box is not None and span.numel else 0
    return Span(span.start + start, span.stop + start)


def _without(span: Span, other: Span) -> list[Span]:
    """The elements of `span` that are not in `other`."""
    common = span.overlap(other)
    if not common.numel:
        return [span]
    return [Span(span.start, common.start), Span(common.stop, span.stop)]


def _cut(tensor: Tensor, span: Span) -> Tensor:
    return tensor.detach()[span.start : span.stop]
