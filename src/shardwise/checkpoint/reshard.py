"""From one table to another without a disk: the ranks send each other the elements that they will need.

`content` determines which elements lie where, as for a checkpoint. A rank keeps what it already has; every other
element comes from the one copy that would have written it to a checkpoint. The new layout is filled one flat buffer at
a time, and an old buffer is freed as soon as nothing of it is left to move, so the peak is one unit above the larger of
the two layouts.

[Note: former ranks] The old layout may belong to other ranks: a rank of this world *stands for* those former ranks
whose elements it can read, including itself if it was among them. A newcomer stands for none and receives everything;
for a rank that is gone, a rank with its image stands in. Without a change of ranks every rank stands for itself.

[Note: islands that join] Between islands parameters and states vary, so an island goes on with its own, and one of
newcomers with those of the first island; what islands have in common comes with them.

[Note: other parts] Where the mesh changes along `tp` or `ep`, or a rank gets another place there, ranks had other parts
of split parameters, or other experts, than they will have. Boxes say which elements of the whole parameter a part has,
and `common_runs` which of them two parts share, as when a checkpoint is read on another mesh. Where it changes along
`pp`, ranks had other parameters. Then the ranks of one stage after the other are filled, and all others take part in
that.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch

from shardwise.checkpoint.content import NOTHING, kept_span, written_span
from shardwise.checkpoint.json_codec import decode, dtype_name, dtype_of, encode
from shardwise.comm import Collectives, DataGroup, World
from shardwise.errors import TierError
from shardwise.memory import ANCHOR, Flat, Rows, torch_dtype
from shardwise.optim import AdoptedOptimizer
from shardwise.plan.mesh import STAGE_AXIS, Mesh, place_along
from shardwise.plan.placement import Box, Run, Slot, Span, common_runs
from shardwise.program import FlatSpec

Tensor = torch.Tensor
PARAM = "param"
States = dict[str, dict[str, Any]]
Place = tuple[int, ...]
"""Along the axes that split layers, or deal out experts."""
Parts = Mapping[Place, Sequence[tuple[FlatSpec, Sequence[Slot]]]]
"""The flat buffers of a layout at each place."""


@dataclass(frozen=True)
class _Home:
    """Where a parameter lies in a layout.

    Elements are counted in the whole parameter where ranks with other coordinates along `ep` have different parts, and
    in this rank's part where `tp` cuts it, which all its receivers have too. `spans` has what each rank of the layout
    keeps and gives, where ranks have parts of different sizes; of former ranks, those that some rank stands for.
    With `parts`, see [Note: other parts], elements are counted in the part of the rank in question; `parts` has that of
    each place along the axes that part the model where ranks have the parameter.
    """

    spec: FlatSpec
    slot: Slot
    spans: Mapping[int, tuple[Span, Span]] = field(default_factory=dict)
    givers: frozenset[int] | None = None
    """The ranks that can give elements, if not all can."""
    parts: Mapping[Place, tuple[FlatSpec, Slot]] = field(default_factory=dict)

    def kept(self, rank: int) -> Span:
        if self.spans:
            return self.spans[rank][0]
        if not self._has(rank):
            return NOTHING
        spec, slot = self._at(rank)
        return kept_span(spec, slot, spec.mesh.coordinate(rank))

    def given(self, rank: int) -> Span:
        if not self._has(rank):
            return NOTHING
        spec, slot = self._at(rank)
        if self.parts and slot.box is not None and slot.box.place:
            return NOTHING  # another rank along the model axis has the same
        if self.givers is not None:
            return self._given_by_some(self.givers, rank)
        if self.spans:
            return self.spans[rank][1]
        return written_span(spec, slot, spec.mesh.coordinate(rank))

    def box(self, rank: int) -> Box:
        """The part of the whole parameter that `rank` has."""
        slot = self._at(rank)[1]
        return slot.box or Box.whole(slot.shape)

    def within(self, stage: int) -> _Home:
        """Where it lies at one place along `pp`, as far as it does."""
        mesh = self.spec.mesh
        return replace(self, parts={place: part for place, part in self.parts.items() if _stage(mesh, place) == stage})

    def _has(self, rank: int) -> bool:
        return not self.parts or _parted_place(self.spec.mesh, rank) in self.parts

    def _at(self, rank: int) -> tuple[FlatSpec, Slot]:
        return self.parts[_parted_place(self.spec.mesh, rank)] if self.parts else (self.spec, self.slot)

    def _given_by_some(self, givers: frozenset[int], rank: int) -> Span:
        """Ranks that keep the same elements share in giving them."""
        kept, part = self.kept(rank), self._part(rank)
        same = [one for one in sorted(givers) if self._part(one) == part and self.kept(one) == kept]
        if rank not in same:
            return NOTHING
        number = same.index(rank)
        first, last = (kept.start + kept.numel * at // len(same) for at in (number, number + 1))
        return Span(first, last)

    def _part(self, rank: int) -> Place:
        return self.spec.part_of(self.spec.mesh.coordinate(rank))

    @property
    def dtype(self) -> torch.dtype:
        table = self.spec.table
        return torch_dtype(table.optim.dtype if self.spec.trainable else table.param.dtype)


@dataclass(frozen=True)
class _Thing:
    """A parameter's values, or one of its states, to be moved: `kind` is `param` or the state's key."""

    name: str
    kind: str
    dtype: torch.dtype


@dataclass
class Held:
    """What this rank can read of a layout, its own or of former ranks: see [Note: former ranks]."""

    flats: Sequence[tuple[FlatSpec, Sequence[Slot]]]
    """All of the layout: those of this rank."""
    stands_for: tuple[tuple[int, ...], ...]
    """By rank of this world: the ranks of the layout that it reads for all. They had the same parts of parameters, as
    far as `tp` and `pp` split them, as the one that it was itself, unless `parts` says what other ranks had."""
    tensors: dict[tuple[int, str, str], Tensor] = field(default_factory=dict)
    """By the rank of the layout, the parameter's name, and `param` or the state's key: the elements that it kept."""
    values: States = field(default_factory=dict)
    """States that do not have the parameter's size, as far as they are known here."""
    rows: dict[tuple[int, str], Rows] = field(default_factory=dict)
    """By the rank of the layout and the parameter's name: the rows, if `tensors` lie on a disk, or as codes."""
    buffers: dict[str, Flat] = field(default_factory=dict)
    """The flat buffer of each parameter that can be let go when all of it has been moved."""
    parts: tuple[Parts, Parts] | None = None
    """This layout and the next one, if ranks get other parts of parameters: see [Note: other parts]."""
    trained: set[str] = field(default_factory=set)
    """Of the parameters in `tensors`, those that have memory for gradients and states."""

    def changes_parts(self, mesh: Mesh) -> bool:
        """Whether ranks get other parts of parameters on `mesh` than the former ranks had for which they stand, or
        other experts. The same on all."""
        before = self.flats[0][0].mesh

        def place(of: Mesh, rank: int) -> dict[str, int]:
            return {axis: of.coordinate(rank)[axis] for axis in of.parted_axes}

        sizes = [{axis: of.size(axis) for axis in of.parted_axes} for of in (before, mesh)]
        return sizes[0] != sizes[1] or any(
            place(before, former) != place(mesh, rank) for rank, ranks in enumerate(self.stands_for) for former in ranks
        )

    @classmethod
    def live(cls, flats: Sequence[Flat], optimizer: AdoptedOptimizer | None, world: World) -> Held:
        """The live layout of this world."""
        me = world.rank
        held = cls([(flat.spec, flat.slots) for flat in flats], tuple((rank,) for rank in range(world.size)))
        for flat in flats:
            for index, slot in enumerate(flat.slots):
                is_trained = flat.params[index].requires_grad  # what is frozen from now on is the same on all islands
                held.tensors[me, slot.name, PARAM] = (flat.param_piece if is_trained else flat.common_piece)(index)
                held.buffers[slot.name] = flat
                if (rows := flat.coded or flat.rows) is not None:
                    held.rows[me, slot.name] = rows
                for key, row in flat.outer_pieces(index).items() if flat.param_piece(index).numel() else ():
                    held.tensors[me, slot.name, key] = row
        if optimizer is None:
            return held
        for piece in optimizer.pieces:
            for key, value in optimizer.state_of(piece).items():
                if isinstance(value, Tensor) and value.shape == piece.tensor.shape and piece.span.numel > 0:
                    held.tensors[me, piece.name, key] = piece.flat_state(value)
                else:
                    held.values.setdefault(piece.name, {})[key] = value
        return held


class TrainingState:
    """A rank's parameters and states in the old layout, until they are moved. All ranks create one at the same time.

    [Note: a disk that fails in a move] The other ranks wait for this one's messages. So it goes on to the end with
    zeros, and reads and writes nothing more; `fault` says why, and nobody may use the result.
    """

    def __init__(self, held: Held, world: World, dealt: Collection[str] | None) -> None:
        """`dealt` are the parameters of which ranks along `ep` have different parts, in the old layout or in the new;
        `None`, on all ranks, if no experts are dealt out."""
        self._world = world
        self._dealt = None if dealt is None else frozenset(dealt)
        self._stands_for = held.stands_for
        self._parts = held.parts
        if held.parts is None:
            self._homes = self._homes_in(held.flats, held.stands_for[world.rank])
        else:
            self._homes = _homes_of(held.parts[0])
        former = {rank for ranks in held.stands_for for rank in ranks}
        self._before = next(iter(self._homes.values())).spec.mesh
        if former != set(range(self._before.world_size)) and not self._before.island_axes:  # else whole islands do
            self._homes = {name: replace(home, givers=frozenset(former)) for name, home in self._homes.items()}
        self._new_homes: dict[str, _Home] = {}
        self._group = world.everybody
        """The ranks of the new layout with the same list of parameters as this one."""
        self._islands: Sequence[int] = ()
        """By rank of the new layout: the former island whose values it gets. See [Note: islands that join]."""
        self._tensors = held.tensors
        self._rows = held.rows
        self._buffers = held.buffers
        self._num_left = Counter(held.buffers.values())
        """How many parameters of each buffer have not been moved yet."""
        self._kinds: dict[str, dict[str, torch.dtype]] = {}
        self._values: dict[int, States] = {}
        """By island: states that do not have the parameter's size."""
        self.fault = ""
        """The first error of this rank's disk."""
        self._exchange_states(held)

    def learn_new(self, flats: Sequence[Flat]) -> None:
        """Set the new layout, which has no memory yet. All ranks call."""
        mesh = flats[0].spec.mesh
        self._islands = _islands_of(self._stands_for, self._before, mesh)
        if self._parts is None:
            joins = mesh.island_axes if not all(self._stands_for) else ()
            self._group = DataGroup(self._world, mesh, (*joins, *mesh.params_axes)).group
            self._new_homes = self._homes_in([(flat.spec, flat.slots) for flat in flats], [self._world.rank])
        else:
            self._new_homes = _homes_of(self._parts[1])

    def move_into(self, flats: Sequence[Flat], collectives: Collectives) -> States:
        """Lay out all `flats` of this rank, and fill them; returns the states of their parameters, by name and key. All
        ranks call.

        What has been moved is dropped here.
        """
        states: States = {}
        if self._parts is None:
            for flat in flats:
                homes = {slot.name: self._new_homes[slot.name] for slot in flat.slots}
                states |= self._fill(flat, homes, collectives)
                for name in homes:
                    self._drop(name)
            return states
        mesh = flats[0].spec.mesh
        own = _stage(mesh, _parted_place(mesh, self._world.rank))
        of_stages = {_stage(mesh, place): laid for place, laid in self._parts[1].items()}
        for stage, laid in sorted(of_stages.items()):  # see [Note: other parts]
            here = {name: home.within(stage) for name, home in self._new_homes.items()}
            if stage == own:
                for flat in flats:
                    states |= self._fill(flat, {slot.name: here[slot.name] for slot in flat.slots}, collectives)
            else:
                for _, slots in laid:
                    self._give({slot.name: here[slot.name] for slot in slots}, collectives, flats[0].device)
        return states

    def _fill(self, flat: Flat, homes: Mapping[str, _Home], collectives: Collectives) -> States:
        filled, states = self._make_room(flat, homes)
        for dtype, same in self._things_in(homes):
            self._keep_own(same, homes, filled, flat)
            arrived = self._exchange(same, dtype, homes, collectives, flat.device)
            for (thing, to), message in arrived:
                self._put(flat, _slice_of(filled[thing.name, thing.kind], Span(to, to + len(message))), message)
        for index, name in enumerate(homes):
            if flat.anchor is not None and ANCHOR not in self._kinds_of(name, flat.spec):
                flat.common_piece(index).copy_(flat.param_piece(index))  # it was frozen, and so the same on all islands
        return states

    def _give(self, homes: Mapping[str, _Home], collectives: Collectives, device: torch.device) -> None:
        """Take part where the ranks of another stage fill a flat buffer."""
        for dtype, same in self._things_in(homes):
            assert not self._exchange(same, dtype, homes, collectives, device), "what comes is another stage's"

    def _things_in(self, homes: Mapping[str, _Home]) -> Iterator[tuple[torch.dtype, list[_Thing]]]:
        """What moves, by dtype."""
        things = [
            _Thing(name, kind, dtype)
            for name, home in homes.items()
            for kind, dtype in self._kinds_of(name, home.spec).items()
        ]
        for dtype in dict.fromkeys(thing.dtype for thing in things):
            yield dtype, [thing for thing in things if thing.dtype == dtype]

    def _drop(self, name: str) -> None:
        """A parameter has been moved: forget it, and let its old flat buffer go if nothing else is left in it."""
        for kind in (PARAM, *self._kinds.pop(name, ())):
            for rank in self._stands_for[self._world.rank]:
                self._tensors.pop((rank, name, kind), None)
        old = self._buffers.pop(name, None)
        if old is not None:
            self._num_left[old] -= 1
            if not self._num_left[old]:
                old.let_go()

    def _homes_in(self, flats: Sequence[tuple[FlatSpec, Sequence[Slot]]], ranks: Sequence[int]) -> dict[str, _Home]:
        """Where parameters lie in the layout of `flats`, of which this rank knows the parts of `ranks`: they had the
        same experts. All ranks call."""
        homes = {slot.name: _Home(spec, slot) for spec, slots in flats for slot in slots}
        if self._dealt is None:
            return homes
        own = {
            name: {
                rank: [astuple(_in_whole(home.slot, span)) for span in (home.kept(rank), home.given(rank))]
                for rank in ranks
            }
            for name, home in homes.items()
            if name in self._dealt
        }
        layouts = [json.loads(message) for message in self._world.exchange(json.dumps(own).encode(), "layout")]
        for name in own:
            known = [item for message in layouts for item in message.get(name, {}).items()]  # others' stages have none
            spans = {int(rank): (Span(*kept), Span(*given)) for rank, (kept, given) in known}
            homes[name] = replace(homes[name], spans=spans)
        return homes

    def _exchange_states(self, held: Held) -> None:
        """Exchange which states exist anywhere: a rank without elements of a parameter has none itself."""
        own: States = {}
        for (_, name, key), tensor in held.tensors.items():
            if key != PARAM:
                own.setdefault(name, {})[key] = ["piece", dtype_name(tensor.dtype)]
        for name, values in held.values.items():
            for key, value in values.items():
                own.setdefault(name, {}).setdefault(key, ["value", encode(value, key)])
        messages = self._world.exchange(json.dumps(own).encode(), "layout")
        for message, formers in zip(messages, self._stands_for, strict=True):
            values = self._values.setdefault(self._before.island_of(formers[0]), {}) if formers else {}
            for name, states in json.loads(message).items():
                for key, (what, value) in states.items():
                    if what == "piece":
                        self._kinds.setdefault(name, {})[key] = dtype_of(value)
                    else:
                        values.setdefault(name, {})[key] = decode(value)

    def _kinds_of(self, name: str, new: FlatSpec) -> dict[str, torch.dtype]:
        """What moves of a parameter, and in which dtype. A frozen one has no states."""
        states = self._kinds.get(name, {}) if new.trainable and self._homes[name].spec.trainable else {}
        return {PARAM: self._homes[name].dtype, **states}

    def _make_room(self, flat: Flat, homes: Mapping[str, _Home]) -> tuple[dict[tuple[str, str], Tensor], States]:
        """Memory for this rank's elements in the new layout."""
        flat.lay_out()
        filled: dict[tuple[str, str], Tensor] = {}
        states: States = {}
        values = self._values.get(self._islands[self._world.rank], {})
        for index, (slot, (name, home)) in enumerate(zip(flat.slots, homes.items(), strict=True)):
            filled[name, PARAM] = piece = flat.param_piece(index)
            if not piece.numel() or not home.spec.trainable:
                continue
            states[name] = dict(values.get(name, {}))
            shape = slot.shape if flat.spec.updates_whole(slot.span) else piece.shape
            outer = flat.outer_pieces(index)
            for key, dtype in self._kinds_of(name, home.spec).items():
                if key in outer:
                    filled[name, key] = outer[key]
                elif key != PARAM:
                    follows = dtype == self._homes[name].dtype
                    kept = piece.dtype if follows else dtype
                    if flat.rows is not None and flat.spec.updates_from_disk:
                        filled[name, key] = flat.rows.view(index, key, piece.numel(), kept)
                    else:
                        filled[name, key] = torch.empty_like(piece, dtype=kept)
                    states[name][key] = filled[name, key].view(shape)
        return filled, states

    def _own(self, thing: _Thing, former: int, span: Span) -> Tensor:
        """Elements that this rank has of a former one, in memory."""
        tensor = _slice_of(self._tensors[former, thing.name, thing.kind], span)
        rows = self._rows.get((former, thing.name))
        if rows is None or not rows.has(tensor):
            return tensor
        try:
            if not self.fault:
                return rows.read(tensor)
        except TierError as error:
            self.fault = str(error)
        return torch.zeros_like(tensor, device="cpu")  # see [Note: a disk that fails in a move]

    def _put(self, flat: Flat, target: Tensor, values: Tensor) -> None:
        try:
            if not self.fault:
                flat.put(target, values)
        except TierError as error:
            self.fault = str(error)

    def _keep_own(
        self,
        things: Sequence[_Thing],
        homes: Mapping[str, _Home],
        filled: Mapping[tuple[str, str], Tensor],
        flat: Flat,
    ) -> None:
        me = self._world.rank
        for thing in things:
            old, new = self._homes[thing.name], homes[thing.name]
            for former in self._stands_for[me]:
                for at, to, numel in _common(old, former, old.kept(former), new, me, new.kept(me)):
                    target = _slice_of(filled[thing.name, thing.kind], Span(to, to + numel))
                    self._put(flat, target, self._own(thing, former, Span(at, at + numel)))

    def _exchange(
        self,
        things: Sequence[_Thing],
        dtype: torch.dtype,
        homes: Mapping[str, _Home],
        collectives: Collectives,
        device: torch.device,
    ) -> list[tuple[tuple[_Thing, int], Tensor]]:
        """Send one message to each rank that needs elements from this one, with all of them. Returns what has come, and
        of which elements, from which one on."""
        world = self._world
        sent, arrived, targets = [], [], []
        for other in self._group.ranks:
            goes = [
                self._own(thing, former, Span(at, at + numel)).to(device)
                for thing, former, (at, _, numel) in self._passing(things, homes, world.rank, other)
            ]
            comes = list(self._passing(things, homes, other, world.rank))
            num_comes = sum(numel for _, _, (_, _, numel) in comes)
            sent.append(torch.cat(goes) if goes else torch.empty(0, dtype=dtype, device=device))
            arrived.append(torch.empty(num_comes, dtype=dtype, device=device))
            targets.append(comes)
        collectives.all_to_all(arrived, sent, self._group, "reshard").wait()
        return [
            ((thing, to), part)
            for message, comes in zip(arrived, targets, strict=True)
            for (thing, _, (_, to, _)), part in zip(
                comes, message.split_with_sizes([numel for _, _, (_, _, numel) in comes]), strict=True
            )
        ]

    def _passing(
        self, things: Sequence[_Thing], homes: Mapping[str, _Home], giver: int, taker: int
    ) -> Iterator[tuple[_Thing, int, Run]]:
        """What one rank gives another, and of which former rank, in an order that both know. Runs as in `_common`."""
        if giver == taker:
            return
        for thing in things:
            old, new = self._homes[thing.name], homes[thing.name]
            lacking = [new.kept(taker)]
            for former in () if old.parts else self._stands_for[taker]:
                lacking = [left for span in lacking for left in _without(span, old.kept(former))]
            for former in self._stands_for[giver]:
                if not old.parts and _model_place(old.spec.mesh, former) != _model_place(new.spec.mesh, taker):
                    continue  # ranks with other parts of every layer
                if self._before.island_of(former) != self._islands[taker]:
                    continue  # see [Note: islands that join]
                given = old.given(former)
                for span in lacking:
                    yield from ((thing, former, run) for run in _common(old, former, given, new, taker, span))


def _homes_of(parts: Parts) -> dict[str, _Home]:
    places: dict[str, dict[Place, tuple[FlatSpec, Slot]]] = {}
    for place, flats in parts.items():
        for spec, slots in flats:
            for slot in slots:
                places.setdefault(slot.name, {})[place] = spec, slot
    return {name: _Home(*next(iter(every.values())), parts=every) for name, every in places.items()}


def _common(old: _Home, former: int, had: Span, new: _Home, taker: int, needed: Span) -> list[Run]:
    """The elements in both `had`, of a former rank, and `needed`, of `taker`: starts among all that either keeps, and
    their number."""
    if not had.numel or not needed.numel:
        return []
    if old.parts:
        runs = common_runs(old.box(former), had, new.box(taker), needed)
    else:
        common = had.overlap(needed)
        runs = [(common.start, common.start, common.numel)] if common.numel else []
    first, start = old.kept(former).start, new.kept(taker).start
    return [(at - first, to - start, numel) for at, to, numel in runs]


def _model_place(mesh: Mesh, rank: int) -> Place:
    """The place of `rank` along the axes that split layers, which a change of plan does not affect."""
    return place_along(mesh, mesh.model_axes, rank)


def _islands_of(stands_for: Sequence[Sequence[int]], before: Mesh, mesh: Mesh) -> list[int]:
    """By rank of `mesh`: the island of `before` that its own island was, or the first that is left."""
    every = [(mesh.island_of(rank), before.island_of(one)) for rank, ranks in enumerate(stands_for) for one in ranks]
    was, first = dict(every), min(island for _, island in every)
    return [was.get(mesh.island_of(rank), first) for rank in range(mesh.world_size)]


def _parted_place(mesh: Mesh, rank: int) -> Place:
    """The place of `rank` along all axes along which ranks have different parts of the model."""
    return place_along(mesh, mesh.parted_axes, rank)


def _stage(mesh: Mesh, place: Place) -> int:
    """The place along `pp` of such a place."""
    axes = mesh.parted_axes
    return place[axes.index(STAGE_AXIS)] if STAGE_AXIS in axes else 0


def _in_whole(slot: Slot, span: Span) -> Span:
    """Elements of this rank's part of a parameter as elements of the whole, in which the part is one range."""
    start = slot.box.runs[0][1] if slot.box is not None and span.numel else 0
    return Span(span.start + start, span.stop + start)


def _without(span: Span, other: Span) -> list[Span]:
    """The elements of `span` that are not in `other`."""
    common = span.overlap(other)
    if not common.numel:
        return [span]
    return [Span(span.start, common.start), Span(common.stop, span.stop)]


def _slice_of(tensor: Tensor, span: Span) -> Tensor:
    return tensor.detach()[span.as_slice]
