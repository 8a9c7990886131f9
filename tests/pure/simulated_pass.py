"""A pass carried out on words instead of numbers, with what runs beside the computation done early or late.

Nothing here knows `program/effects.py`: it is what the check is held to. A buffer holds what it was made of; what runs
on a stream of its own reads its sources and writes its result either at once or in its wait, as `is_late` says of each
in turn, and until the wait the result is garbage for whoever looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shardwise.program import Action, Program, UnitSpec, reduce_due

GARBAGE = "garbage"


class Wrong(Exception):
    """Something was read or waited for that is not there."""


@dataclass
class _Flat:
    is_resident: bool
    has_chain: bool
    is_summed: bool
    """Whether gradients of several micro-batches are reduced together."""
    buffers: dict[str, str] = field(default_factory=dict)
    grads: list[str] = field(default_factory=list)
    on_the_way: dict[str, tuple[Action, Callable[[], str], str | None]] = field(default_factory=dict)
    """By what is made: by whom, how it is worked out, and what it is already if it was done at once."""
    reads_fresh: bool = False
    """Whether what is on its way to become a sum is made of fresh gradients."""


def simulate(program: Program, units: tuple[UnitSpec, ...], is_late: Iterator[bool]) -> tuple[object, ...]:
    """All that the pass has computed, and what is left in the end. Raises `Wrong`."""
    flats = {
        one.name: _Flat(
            one.resident,
            bool(one.trainable and reduce_due(one)),
            not one.table.grad.shard,
            {"param": f"param of {one.name}"},
        )
        for unit in units
        for one in unit.flats
    }
    trainable = {one.name for unit in units for one in unit.flats if one.trainable}
    by_unit = {unit.name: [one.name for one in unit.flats] for unit in units}
    computed: list[str] = []
    for flat in flats.values():
        if flat.is_resident:
            flat.buffers["full"] = flat.buffers["param"]
    for name in (one.name for unit in units for one in unit.flats if one.gathers_behind_step):
        updated = flats[name].buffers["full"]
        begun = Action("gather", name, "updated")
        _start(flats[name], "full", begun, lambda updated=updated: updated, late=next(is_late))  # type: ignore[misc]
    open_units: dict[str, dict[str, str]] = {}
    summed: dict[str, str] = {}
    for block in program:
        moment = block.moment
        if moment.edge == "after" and moment.unit:
            for name, seen in open_units.pop(moment.unit, {}).items():
                if moment.phase != "backward_weights" and _read(flats[name], "full") != seen:
                    raise Wrong(f"{name} has changed under its computation")
                computed.append(f"{moment} {name}: {seen}")
                if moment.phase in ("backward", "backward_weights") and name in trainable:
                    _leave(flats[name], f"{summed.pop(name, '')}gradient of {seen}")
        for action in block.actions:
            _do(flats[action.flat], action, late=next(is_late))
        if moment.edge == "before" and moment.unit:
            for name in by_unit[moment.unit]:
                if moment.phase in ("backward", "backward_weights") and "fresh" in flats[name].buffers:
                    if flats[name].is_summed and moment.micro_batch is not None:
                        summed[name] = f"{flats[name].buffers['fresh']} and "
                    flats[name].buffers["fresh"] = GARBAGE  # it is being written to
            open_units[moment.unit] = {
                name: "what was put aside" if moment.phase == "backward_weights" else _read(flats[name], "full")
                for name in by_unit[moment.unit]
            }
    left = [
        (name, flat.grads, sorted(set(flat.buffers) - {"held"}), list(flat.on_the_way)) for name, flat in flats.items()
    ]
    return (tuple(computed), left)


def _leave(flat: _Flat, gradient: str) -> None:
    if flat.has_chain:
        flat.buffers["fresh"] = gradient
    else:
        flat.grads.append(gradient)


def _read(flat: _Flat, buffer: str) -> str:
    value = flat.buffers.get(buffer, GARBAGE)
    if GARBAGE in value:
        raise Wrong(f"{buffer} is read and is not there")
    return value


def _do(flat: _Flat, action: Action, *, late: bool) -> None:
    what = f"{action.verb} over {action.over}"
    match action.verb, action.subject:
        case (("gather" | "fetch"), source):
            began = flat.buffers.get("full")
            of = source if began is None else "full"
            flat.buffers.setdefault("full", GARBAGE)
            _start(flat, "full", action, lambda: f"({_stored(flat, of, began)} {what})", late=late)
        case "wait", "param":
            if flat.on_the_way.get("full", (action,))[0].subject != "updated":
                raise Wrong("it is not its update that is on its way")
            _finish(flat, "full")
        case ("wait", ("full" | "range")):
            source = _finish(flat, "full").subject
            if source == "held":
                flat.buffers.pop("held", None)
        case "free", _:
            if flat.is_resident or flat.buffers.pop("full", None) is None:
                raise Wrong("freed what is not there")
        case "slice", _:
            flat.buffers["held"] = f"({flat.buffers.get('held') or _read(flat, 'full')} {what})"
        case (("reduce_scatter" | "all_reduce" | "cast" | "evict"), "grad"):
            began = flat.buffers.get("sum")
            of = "fresh" if began is None else "sum"
            flat.buffers.setdefault("sum", GARBAGE)
            flat.reads_fresh = of == "fresh"
            _start(flat, "sum", action, lambda: f"({_stored(flat, of, began)} {what})", late=late)
        case "wait", "sum":
            _finish(flat, "sum")
            _let_go(flat)
        case "wait", "grad":
            _finish(flat, "sum")
            _let_go(flat)
            flat.grads.append(_read(flat, "sum"))
            del flat.buffers["sum"]
        case _:
            raise AssertionError(action)


def _let_go(flat: _Flat) -> None:
    """What has been read of fresh gradients is needed no more. Others may have come while a sum of it went on."""
    if flat.reads_fresh:
        flat.buffers.pop("fresh", None)
    flat.reads_fresh = False


def _stored(flat: _Flat, buffer: str, began: str | None) -> str:
    """A source when it is read. What goes on with its own result has kept that."""
    if began is not None:
        if GARBAGE in began:
            raise Wrong(f"{buffer} is read and is not there")
        return began
    return _read(flat, buffer)


def _start(flat: _Flat, made: str, action: Action, work: Callable[[], str], *, late: bool) -> None:
    if made in flat.on_the_way:
        raise Wrong(f"two things make {made} at once")
    flat.on_the_way[made] = action, work, None if late else work()
    flat.buffers[made] = GARBAGE


def _finish(flat: _Flat, made: str) -> Action:
    if made not in flat.on_the_way:
        raise Wrong(f"nothing makes {made}")
    action, work, done = flat.on_the_way.pop(made)
    if made not in flat.buffers:
        raise Wrong(f"{made} was freed while it was made")
    flat.buffers[made] = work() if done is None else done
    return action
