"""A program is walked through before it is run: nothing is read that is not there, nothing is left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from shardwise.errors import ProgramError
from shardwise.program.action import END_OF_BACKWARD, Action, Block, Program
from shardwise.program.spec import FlatSpec, UnitSpec

FullState = Literal["absent", "flying", "ready"]


def check(program: Program, units: Sequence[UnitSpec]) -> None:
    """Raise `ProgramError`, naming block and action, if `program` could not run on `units`."""
    flats = {flat.name: flat for unit in units for flat in unit.flats}
    by_name = {unit.name: unit for unit in units}
    full: dict[str, FullState] = {name: "ready" if flat.resident else "absent" for name, flat in flats.items()}
    reducing: set[str] = set()
    for block in program:
        for action in block.actions:
            _step(block, action, full, reducing, flats)
        if block.moment.edge == "before" and block.moment.unit:
            for flat in by_name[block.moment.unit].flats:
                if full[flat.name] != "ready":
                    raise ProgramError(f"{block.moment}: {flat.name} computes, but its parameters are {full[flat.name]}.")
        if block.moment == END_OF_BACKWARD:
            _at_rest(full, reducing, flats)


def _step(
    block: Block, action: Action, full: dict[str, FullState], reducing: set[str], flats: Mapping[str, FlatSpec]
) -> None:
    name = action.flat

    def refuse(why: str) -> ProgramError:
        return ProgramError(f"{block.moment}: '{action}', but {why}.")

    if name not in flats:
        if action.verb in ("agree", "broadcast"):
            return
        raise refuse(f"there is no flat buffer {name!r}")
    match action.verb, action.subject:
        case "gather", _ if block.moment.phase != "step":
            if full[name] == "ready":
                raise refuse(f"{name} is whole already")
            full[name] = "flying"
        case "wait", "full":
            if full[name] != "flying":
                raise refuse(f"{name} is {full[name]}, not on its way")
            full[name] = "ready"
        case "free", "full":
            if full[name] != "ready":
                raise refuse(f"{name} is {full[name]}")
            if flats[name].resident:
                raise refuse(f"the parameters of {name} rest whole and are never freed")
            full[name] = "absent"
        case "slice", "held" if full[name] != "ready":
            raise refuse(f"{name} is {full[name]}")
        case ("reduce_scatter" | "all_reduce"), "grad" if block.moment.phase != "step":
            if name in reducing:
                raise refuse(f"a reduction of {name} is still on its way")
            reducing.add(name)
        case "wait", "grad":
            reducing.discard(name)


def _at_rest(full: Mapping[str, FullState], reducing: set[str], flats: Mapping[str, FlatSpec]) -> None:
    left = [name for name, flat in flats.items() if full[name] != ("ready" if flat.resident else "absent")]
    if left:
        raise ProgramError(f"after the backward {', '.join(left)} are not back at rest.")
    if reducing:
        raise ProgramError(f"after the backward the gradients of {', '.join(sorted(reducing))} are still on their way.")
