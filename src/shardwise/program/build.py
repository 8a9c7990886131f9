"""From tables and a trace to a program without look-ahead: what is due at which moment."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from shardwise.errors import ProgramError
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import WIDTH, Axes, Codes, Dtype, Move, Place, SumOfCodes, Wire, moves
from shardwise.program.action import (
    AFTER_STEP,
    ALL_FLATS,
    BEFORE_STEP,
    DURING_STEP,
    END_OF_BACKWARD,
    Action,
    Block,
    Moment,
    Program,
    update_moment,
)
from shardwise.program.effects import EFFECTS, Buffer, Subject, Verb
from shardwise.program.low_rank import FACTORING, Factored
from shardwise.program.matrix_exchange import MatrixExchange, at, matrix_exchanges
from shardwise.program.sign_exchange import SignExchange, sign_exchanges
from shardwise.program.spec import FlatSpec, Trace, UnitSpec

Actions = tuple[Action, ...]
_IN_PLACE = ("all_reduce", "project", "restore")
"""Sums that leave as many elements as they read."""
_REDUCTION, _GATHERS = "reduction", "gathers"
"""The keys of `reduce_due` and `gathers` among the paths of a flat buffer."""


def build_pass(units: Sequence[UnitSpec], trace: Trace, *, training: bool = True, reduces: bool = True) -> Program:
    """One micro-batch: forward and backward, or only forward if not `training`.

    Without `reduces` gradients stay on the rank that made them (`no_sync`).

    A unit that is whole is not gathered again, and a unit is not freed if it is the next one to be needed.
    """
    by_name = {unit.name: unit for unit in units}
    gathered = Gathered(flat for unit in units for flat in unit.flats)
    needs = Needs(trace, (unit.name for unit in units if not gathered.is_whole(unit)))
    blocks = []
    for index, moment in enumerate(trace):
        unit = by_name[moment.unit]
        due: Actions = ()
        if moment.edge == "before":
            due = gathered.make_whole(unit)
        elif moment.phase == "backward" or not needs.is_next(index):
            due = gathered.drop(drop_due(unit, moment, training=training, reduces=reduces))
        if not gathered.is_whole(unit):
            needs.note_absent(index)
        blocks.append(Block(moment, due))
    if training:
        blocks.append(Block(END_OF_BACKWARD, gathered.drop_all(units)))
    return tuple(blocks)


class Gathered:
    """The flat buffers that are whole, and those of which a range is held, as the pass is built."""

    def __init__(self, flats: Iterable[FlatSpec]) -> None:
        flats = tuple(flats)
        self._whole = {flat.name for flat in flats if flat.resident}
        self._held: set[str] = set()
        self._updating = {flat.name for flat in flats if flat.gathers_behind_step}
        """Those whose gather after the previous step may still be in flight."""

    def is_whole(self, unit: UnitSpec) -> bool:
        return unit.flat_names <= self._whole

    def make_whole(self, unit: UnitSpec) -> Actions:
        """The gathers of its flat buffers that are not whole, and the waits for those that are being updated."""
        if not self._updating and self.is_whole(unit):
            return ()
        updating = self._updating & unit.flat_names
        self._updating -= updating
        awaited = tuple(Action("wait", flat.name, "param") for flat in unit.flats if flat.name in updating)
        missing = [flat for flat in unit.flats if flat.name not in self._whole]
        due = tuple(action for flat in missing for action in gathers(flat, from_held=flat.name in self._held))
        names = {flat.name for flat in missing}
        self._whole |= names
        self._held -= names
        return (*awaited, *due)

    def drop(self, due: Iterable[Action]) -> Actions:
        """Those of `due` that have something to act on: a gradient, or a whole buffer."""
        done = tuple(action for action in due if action.flat in self._whole or action.subject == "grad")
        for action in done:
            if action.verb == "free":
                self._whole.discard(action.flat)
            elif action.verb == "slice":
                self._held.add(action.flat)
        return done

    def drop_all(self, units: Iterable[UnitSpec]) -> Actions:
        """The frees of everything that is whole."""
        return self.drop(action for unit in units for action in free_due(unit))


def build_step(units: Sequence[UnitSpec], *, buffers_bytes: int) -> Program:
    """The optimizer step: gradients to where the states are, the verdict, new parameters to where they rest.

    In between come the updates that are done unit by unit off the device, each followed by the way back of its
    parameters, and then what the update of the other units needs of whole parameters, if anything.
    """
    flats = [flat for unit in units for flat in unit.flats if flat.trainable]
    before = [action for flat in flats for action in step_gradients(flat)]
    after = [action for flat in flats if not flat.updates_by_unit for action in step_parameters(flat)]
    axes: Axes = ()
    if units:
        mesh = units[0].flats[0].mesh
        axes = tuple(axis for axis in mesh.replica_axes if mesh.size(axis) > 1)
        before += _verdict(mesh, axes, flats)
    if axes and buffers_bytes:
        after.append(Action("broadcast", ALL_FLATS, "buffers", "world", "-", buffers_bytes))
    matrices, signs = matrix_exchanges(flats).values(), sign_exchanges(flats).values()
    during = (*_norms(flats), *_matrices(tuple(matrices)), *_signs(tuple(signs)))
    between = (Block(DURING_STEP, during),) if during else ()
    between = (*build_updates(units), *between)
    return (Block(BEFORE_STEP, tuple(before)), *between, Block(AFTER_STEP, tuple(after)))


def build_updates(units: Sequence[UnitSpec]) -> Program:
    """The units' updates off the device, in the order in which the next forward needs them."""
    blocks = []
    for unit in units:
        flats = [flat for flat in unit.flats if flat.updates_by_unit]
        due = [action for flat in flats for action in _update(flat)]
        if due:
            blocks.append(Block(update_moment(unit.name), tuple(due)))
    return tuple(blocks)


def _update(flat: FlatSpec) -> Actions:
    """The update of one flat buffer, and the way of its parameters back to where they rest."""
    update = Action("update", flat.name, "master")
    if not flat.updates_from_disk:
        return (update, *step_parameters(flat))
    fetch, evict = Action("fetch", flat.name, "states"), Action("evict", flat.name, "states")
    if flat.rests_on_disk:  # parameters lie beside their states, and are written with them
        return (fetch, update, *step_parameters(flat), evict)
    return (fetch, update, evict, *step_parameters(flat))


def build_restore(units: Sequence[UnitSpec]) -> Actions:
    """Copy all parameters again from the master weights, after these were written from outside."""
    return tuple(action for unit in units for flat in unit.flats if flat.trainable for action in step_parameters(flat))


def gather_due(unit: UnitSpec, moment: Moment, *, training: bool = True) -> Actions:
    """The gathers that make `unit` whole before it computes. None for gradients of weights, which need no
    parameters."""
    if not moment.needs_params:
        return ()
    in_backward = training and moment.phase != "forward"
    return tuple(
        action for flat in unit.flats for action in gathers(flat, from_held=in_backward and _has_held_buffer(flat))
    )


def gathers(flat: FlatSpec, *, from_held: bool) -> Actions:
    """The gathers that make a flat buffer whole, from where it rests or from its held range."""
    key = _GATHERS, from_held
    due = flat.paths.get(key)
    if due is None:
        due = flat.paths[key] = _gathers(flat, from_held=from_held)
    return due


def _gathers(flat: FlatSpec, *, from_held: bool) -> Actions:
    if from_held:
        return _actions_between(flat, "held", flat.table.held, flat.table.full)
    codes = flat.table.rests_as
    if codes is not None and not flat.table.param.shard:  # others are decoded as they arrive
        return (Action("decode", flat.name, "param", str(codes), flat.table.compute),)
    return _actions_between(flat, "param", flat.table.param, flat.table.full)


def slices_to_hold(flat: FlatSpec) -> Actions:
    """The slices that keep the held range of a whole flat buffer until its backward."""
    return _actions_between(flat, "held", flat.table.full, flat.table.held)


def drop_due(unit: UnitSpec, moment: Moment, *, training: bool, reduces: bool, is_last: bool = True) -> Actions:
    """The actions due once `unit` has computed: free its parameters, reduce its gradients. For `is_last` see
    `reductions_due`."""
    if moment.phase != "forward":
        reductions = reductions_due(unit, is_last=is_last) if reduces and moment.leaves_gradients else ()
        return (*(freed_behind_backward(unit) if moment.needs_params else ()), *reductions)
    if not training:
        return free_due(unit)
    return drop_to_held(unit)


def drop_to_held(unit: UnitSpec) -> Actions:
    """Free a unit except for what is held of it until it is needed again."""
    due: list[Action] = []
    for flat in unit.flats:
        if flat.resident or (flat.table.held == flat.table.full and not _is_held_as_it_rests(flat)):
            continue
        if _has_held_buffer(flat):
            due += slices_to_hold(flat)
        due.append(Action("free", flat.name, "full"))
    return tuple(due)


def reductions_due(unit: UnitSpec, *, is_last: bool) -> Actions:
    """The reductions behind a backward of `unit`. In a pipeline that of the last micro-batch, if it `is_last`."""
    reduced = (flat for flat in unit.flats if flat.trainable and flat.reduces_in(is_last=is_last))
    return tuple(action for flat in reduced for action in reduce_due(flat))


def reduce_due(flat: FlatSpec) -> Actions:
    """From what a backward leaves to where gradients wait. Nothing, if they wait as they come."""
    due = flat.paths.get(_REDUCTION)
    if due is None:
        due = flat.paths[_REDUCTION] = _reduction(flat)
    return due


def _reduction(flat: FlatSpec) -> Actions:
    if flat.factored and flat.table.low_rank is not None and flat.table.low_rank.has_begun:
        return _as_factors(flat)
    path = _actions_between(flat, "grad", flat.fresh, flat.table.grad)
    return path if any(action.communicates or action.copies for action in path) else ()


def _as_factors(flat: FlatSpec) -> Actions:
    """A sum of gradients of which matrices are sent as factors: see [Note: factors] in `low_rank.py`."""
    by, dtype = Factored(flat), flat.table.grad.dtype
    return tuple(Action(verb, flat.name, "grad", by.axis, dtype, by.sent_bytes(verb)) for verb in FACTORING)


def fills_grad(flat: FlatSpec) -> bool:
    """Whether a backward can leave gradients in the memory where they wait for the step: nothing cuts or widens
    them."""
    due, waits_as_it_comes = reduce_due(flat), flat.fresh.dtype == flat.table.grad.dtype
    return not due or (all(action.verb in _IN_PLACE for action in due) and waits_as_it_comes)


def step_gradients(flat: FlatSpec) -> Actions:
    """From where gradients wait to what the update reads. Nothing, if that is the same.

    In the step, also in a pipeline, whose last backwards could hide it: else `due` would exist before the step for some
    flat buffers, and a second `forward_backward` would add to it.
    """
    return _actions_between(flat, "due", flat.table.grad, flat.table.due)


def step_parameters(flat: FlatSpec) -> Actions:
    """From what was updated to where parameters rest."""
    updated = replace(flat.table.due, partial=())  # updates that read summands give the same on all ranks
    acted = _actions_between(flat, "param", updated, flat.table.param)
    if flat.rests_on_disk:  # `evict states` writes it to the disk
        return tuple(action for action in acted if action.verb == "cast")
    is_elsewhere = flat.updates_from_disk or flat.is_rounded_at_rest
    if is_elsewhere and not any(action.verb in ("cast", "fetch") for action in acted):
        dtype = flat.table.param.dtype  # nothing is cast or fetched, but what was updated is not where parameters rest
        acted = (Action("cast", flat.name, "param", dtype, dtype), *acted)
    is_fetched = any(action.verb == "fetch" for action in acted)
    is_cast = any(action.verb == "cast" for action in acted)

    def subject(action: Action) -> Subject:
        if action.verb == "gather":
            return "updated"
        if is_fetched:
            return "outgoing" if is_cast else "updated"
        return "param"

    return tuple(action._replace(subject=subject(action)) for action in acted)


def outer_gradients(flat: FlatSpec) -> Actions:
    """From master weights and their anchor to the sum over islands of what these have changed."""
    table = flat.table
    if table.outer is None:
        raise ProgramError(f"{flat.name} has no anchor, so it has no outer step.")
    numel, wire, codes = flat.num_elements(table.optim.shard), table.outer.wire, table.outer.codes
    due = [Action("subtract", flat.name, "outer")]
    for move in moves(table.outer_gradient, table.outer.place, table.order):
        if move.verb != "all_reduce":  # `update anchor` brings it to the anchor's tier
            continue
        size = flat.mesh.size(move.over)
        sent, text = 2 * (size - 1) * wire.num_bytes(numel // size), ""
        if codes is not None:
            way = SumOfCodes.cheapest(move.verb, codes, wire, numel, size)
            sent, text = way.sent_bytes(numel, size), str(way)
        due.append(Action("all_reduce", flat.name, "outer", move.over, wire.dtype, sent, codes=text))
    return tuple(due)


def backward_makes(flat: FlatSpec) -> Buffer:
    """What a backward leaves of a trainable flat buffer: gradients to be reduced, or gradients that already wait."""
    return "fresh" if reduce_due(flat) else "grad"


def stay_as_made(flat: FlatSpec) -> bool:
    """Whether nothing moves or casts gradients between a backward and the update, so that on a processor each may stay
    in the tensor that autograd has made: [Note: gradients that stay] in `memory/fresh.py`."""
    are_moved = bool(flat.table.axes) or bool(reduce_due(flat)) or bool(step_gradients(flat))
    return not are_moved and flat.table.grad.dtype == flat.table.compute


LEAST_APART_BYTES = 1 << 20
"""Of a rank's chunk of a flat buffer's gradients, below which its calls cost more than a pass over it."""


def sums_own_chunk_apart(flat: FlatSpec, least_bytes: int = LEAST_APART_BYTES) -> bool:
    """Whether a rank that reads the others' gradients where they lie makes its own chunk where the sum is made: [Note:
    own chunks] in `memory/fresh.py`."""
    first = next(iter(reduce_due(flat)), None)
    if first is None or first.verb != "reduce_scatter" or first.codes or flat.grad_bytes < least_bytes:
        return False
    return flat.fresh.dtype == flat.table.grad_wire.dtype == first.dtype


def _has_held_buffer(flat: FlatSpec) -> bool:
    """Whether what is held between forward and backward is neither the resting shard nor the whole."""
    return flat.table.held not in (flat.table.param, flat.table.full)


def _is_held_as_it_rests(flat: FlatSpec) -> bool:
    """Whether what is held between forward and backward are the resting codes, decoded anew for each."""
    return flat.table.rests_as is not None and flat.table.held == flat.table.param


def freed_behind_backward(unit: UnitSpec) -> Actions:
    """The frees behind a backward of `unit`, after which others may follow before the backward of the model ends."""
    return tuple(action for action in free_due(unit) if action.flat not in lasting(unit))


def lasting(unit: UnitSpec) -> frozenset[str]:
    """The flat buffers of `unit` that a backward may read until it ends."""
    return frozenset(flat.name for flat in unit.flats if unit.spans_model and not flat.trainable)


def free_due(unit: UnitSpec) -> Actions:
    return tuple(Action("free", flat.name, "full") for flat in unit.flats if not flat.resident)


class Needs:
    """When units are next needed whole, and which of the absent ones is needed first.

    A unit becomes whole only at its own moment, so a note about an absent unit holds until then.
    """

    def __init__(self, trace: Trace, absent: Iterable[str]) -> None:
        self._next: list[int | None] = [None] * len(trace)
        """For each moment, the index of the later moment at which its unit is needed next."""
        needed: dict[str, int] = {}
        for index in range(len(trace) - 1, -1, -1):
            moment = trace[index]
            self._next[index] = needed.get(moment.unit)
            if moment.edge == "before" and moment.needs_params:
                needed[moment.unit] = index
        self._absent = [needed[name] for name in absent if name in needed]
        """A heap of the moments at which absent units are needed; it may contain past ones."""
        heapify(self._absent)

    def note_absent(self, index: int) -> None:
        """The unit of this moment is no longer whole."""
        needed = self._next[index]
        if needed is not None:
            heappush(self._absent, needed)

    def is_over(self, index: int) -> bool:
        """Whether the unit of the moment at `index` is not needed whole after it."""
        return self._next[index] is None

    def is_next(self, index: int) -> bool:
        """Whether the unit of the moment at `index` is the first, among units that are not whole, to be needed
        again."""
        needed = self._next[index]
        while self._absent and self._absent[0] <= index:
            heappop(self._absent)
        return needed is not None and (not self._absent or needed <= self._absent[0])


def _actions_between(flat: FlatSpec, subject: Subject, source: Place, target: Place) -> Actions:
    """The moves from `source` to `target` as actions on `flat`, with the bytes they send."""
    key = subject, source, target
    if key not in flat.paths:
        acted, shard = [], set(source.shard)
        for move in moves(source, target, flat.table.order):
            acted.append(_action(flat, subject, move, shard))
            if move.verb in ("slice", "reduce_scatter"):
                shard.add(move.over)
            elif move.verb == "gather":
                shard.remove(move.over)
        flat.paths[key] = tuple(acted)
    return flat.paths[key]


def _action(flat: FlatSpec, subject: Subject, move: Move, shard: Iterable[str]) -> Action:
    action = Action(move.verb, flat.name, subject, move.over, move.dtype)
    if not action.copies and not action.communicates:
        return action
    numel = flat.num_elements(tuple(shard))
    if action.copies:
        return action._replace(sent_bytes=numel * WIDTH[move.dtype])
    axis = flat.mesh.size(move.over)
    table = flat.table
    if move.verb == "gather":
        wire = table.param_wire_over(move.over) or Wire(move.dtype)
        if isinstance(wire, Codes) and subject == "held":  # see [Note: held ranges are sent as they are]
            wire = Wire(move.dtype)
        sent_bytes = (axis - 1) * wire.num_bytes(numel)
        if isinstance(wire, Codes):
            return action._replace(sent_bytes=sent_bytes, codes=str(wire))
        return action._replace(sent_bytes=sent_bytes, dtype=wire.dtype)
    wire = table.grad_wire_over(move.over)
    if isinstance(wire, Codes):
        way = SumOfCodes.cheapest(move.verb, wire, table.grad_wire, numel, axis)
        return action._replace(sent_bytes=way.sent_bytes(numel, axis), codes=str(way))
    rounds = 2 if move.verb == "all_reduce" else 1
    return action._replace(sent_bytes=rounds * (axis - 1) * wire.num_bytes(numel // axis))


def verdict_numel(num_params: int) -> int:
    """Elements of the verdict: the squared gradient norm, what is left to reduce, and a flag per parameter with a
    gradient."""
    return num_params + 2


def verdict_dtype(flats: Sequence[FlatSpec]) -> Dtype:
    """The dtype in which the norm is summed: at least fp32, and as wide as the widest gradients, of which a stage that
    trains nothing knows nothing: it has the norm of the others."""
    is_wide = not flats or any("fp64" in (flat.table.grad.dtype, flat.table.optim.dtype) for flat in flats)
    return "fp64" if is_wide else "fp32"


def _verdict(mesh: Mesh, axes: Axes, flats: Sequence[FlatSpec]) -> list[Action]:
    """Over the data axes among the ranks with something to train, and over the model axes among all. There the sums are
    the norm of the whole model and, where ranks list the same parameters, the flags of parameters with gradients. Where
    they list different ones, the width of the other ranks' gradients is unknown, and sums are fp64."""
    dtype = verdict_dtype(flats)
    numel = verdict_numel(sum(flat.num_params for flat in flats))
    agreed = _agree(mesh, axes if flats else (), "verdict", numel, dtype)
    for axis in mesh.model_axes:
        shares = axis in mesh.same_params_axes
        agreed += _agree(mesh, (axis,), "verdict", *((numel, dtype) if shares else (verdict_numel(0), "fp64")))
    return agreed


def norms_axes(flats: Sequence[FlatSpec]) -> Axes:
    """The axes over which the states of a flat buffer are sharded, or its parameters split: norms of parameters have to
    be summed there."""
    sharded = {axis for flat in flats if flat.trainable for axis in (*flat.table.optim.shard, *flat.split_axes)}
    sharded |= set(flats[0].mesh.same_params_axes) if flats else set()
    return tuple(axis for axis in flats[0].mesh.axes if axis in sharded) if flats else ()


def norms_numel(flats: Sequence[FlatSpec]) -> int:
    """Elements of the norms: two squares for every parameter that needs them."""
    return 2 * sum(placed.update.needs_norm for flat in flats for placed in flat.updates)


def sums_numel(flats: Sequence[FlatSpec]) -> int:
    """Elements of the sums over parts of parameters that updates need before the norms."""
    return sum(placed.update.num_sums for flat in flats for placed in flat.updates)


def _norms(flats: Sequence[FlatSpec]) -> list[Action]:
    """What updates need to know of whole parameters: sums over their parts, then norms, which may depend on these."""
    needed: tuple[tuple[Subject, int], ...] = (("sums", sums_numel(flats)), ("norms", norms_numel(flats)))
    return [
        action
        for subject, numel in needed
        if numel
        for action in _agree(flats[0].mesh, norms_axes(flats), subject, numel)
    ]


def _matrices(over: Sequence[MatrixExchange]) -> list[Action]:
    """Each flat buffer's matrices are collected while those of the previous one are computed.

    Results are waited for after the work on the next buffer, so that no rank idles for them.
    """

    def send(verb: Verb, one: MatrixExchange, by_range: Counter[int]) -> list[Action]:
        if not one.moves:
            return []
        axes, stream = "+".join(one.flat.table.optim.shard), EFFECTS[verb, "update"].stream
        return [Action(verb, one.flat.name, "update", axes, one.dtype, at(by_range, None), stream)]

    def wait(subject: Subject, one: MatrixExchange) -> list[Action]:
        return [Action("wait", one.flat.name, subject)] if one.moves else []

    if not over:
        return []
    due, *later = [send("collect", one, one.given_bytes) for one in over]
    returning: list[Action] = []
    for one, following in zip(over, [*later, []], strict=True):
        due += [*following, *wait("matrix", one), Action("orthogonalize", one.flat.name, "update")]
        due += [*send("hand_back", one, one.taken_bytes), *returning]
        returning = wait("update", one)
    return due + returning


def _signs(over: Sequence[SignExchange]) -> list[Action]:
    """Each flat buffer's averages are handed back once the signs of the next one are on their way."""

    def send(verb: Verb, one: SignExchange) -> Action:
        return Action(verb, one.flat.name, "momentum", one.axis, "uint8", one.sent_bytes)

    due = [send("collect", one) for one in over[:1]]
    for index, one in enumerate(over):
        due += [send("collect", following) for following in over[index + 1 : index + 2]]
        due.append(send("hand_back", one))
    return due


def _agree(mesh: Mesh, axes: Sequence[str], subject: Subject, numel: int, dtype: Dtype = "fp32") -> list[Action]:
    """A small sum over `axes`, of `numel` elements, that carries what ranks must agree on."""
    agreed = []
    for axis in axes:
        size = mesh.size(axis)
        sent = 2 * (size - 1) * math.ceil(numel / size) * WIDTH[dtype]
        agreed.append(Action("agree", ALL_FLATS, subject, axis, dtype, sent))
    return agreed
