"""A program is walked through before it is run: nothing is read that is not there, nothing is left behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

from shardwise.errors import ProgramError
from shardwise.program.action import ALL_FLATS, END_OF_BACKWARD, Action, Program
from shardwise.program.build import reduce_due
from shardwise.program.spec import FlatSpec, UnitSpec

State = Literal["absent", "flying", "partly whole", "whole"]


def check(program: Program, units: Sequence[UnitSpec], *, reduces: bool = True) -> None:
    """Raise `ProgramError`, naming block and action, if `program` could not run on `units`.

    With `reduces` every gradient that a backward leaves must be reduced.
    """
    states = {flat.name: _FlatState(flat) for unit in units for flat in unit.flats}
    by_name = {unit.name: unit for unit in units}
    for block in program:
        if reduces and block.moment.unit and (block.moment.edge, block.moment.phase) == ("after", "backward"):
            for flat in by_name[block.moment.unit].flats:
                states[flat.name].owe()
        for action in block.actions:
            if action.flat == ALL_FLATS:
                continue
            if action.flat not in states:
                raise ProgramError(f"{block.moment}: '{action}', but there is no flat buffer {action.flat!r}.")
            why = states[action.flat].act(action)
            if why:
                raise ProgramError(f"{block.moment}: '{action}', but {why}.")
        if block.moment.edge == "before" and block.moment.unit:
            for flat in by_name[block.moment.unit].flats:
                if states[flat.name].full != "whole":
                    raise ProgramError(f"{block.moment}: {flat.name} computes, but is {states[flat.name].full}.")
        if block.moment == END_OF_BACKWARD:
            _check_rest(states)


class _FlatState:
    """What one flat buffer is, as far as the program has run."""

    def __init__(self, flat: FlatSpec) -> None:
        self.flat = flat
        self.full: State = "whole" if flat.resident else "absent"
        self.is_reducing = False
        self.owed: deque[Action] = deque()
        """What is still to be done to the gradients that a backward has left."""
        self._spread: set[str] = set()

    @property
    def is_at_rest(self) -> bool:
        return self.full == ("whole" if self.flat.resident else "absent")

    def owe(self) -> None:
        """A backward is through: its gradients are to be reduced."""
        self.owed += reduce_due(self.flat) if self.flat.trainable else ()

    def act(self, action: Action) -> str:
        """Do `action`; why it cannot be done, or nothing."""
        if action.subject == "grad":
            return self._wait_grad() if action.verb == "wait" else self._reduce(action)
        match action.verb, action.subject:
            case "gather", _:
                return self._gather(action)
            case "wait", "full" if self.full != "flying":
                return f"it is {self.full}, not on its way"
            case "wait", "full":
                self.full = "partly whole" if self._spread else "whole"
            case ("free", "full") | ("slice", "held") if self.full != "whole":
                return f"it is {self.full}"
            case "free", "full" if self.flat.resident:
                return "it rests whole and is never freed"
            case "free", "full":
                self.full = "absent"
        return ""

    def _reduce(self, action: Action) -> str:
        if self.is_reducing:
            return "its last reduction is still on its way"
        if not self.owed:
            return "nothing of it is left to reduce"
        due = self.owed.popleft()
        if (due.verb, due.over) != (action.verb, action.over):
            return f"its next step is '{due}'"
        self.is_reducing = True
        return ""

    def _wait_grad(self) -> str:
        if not self.is_reducing:
            return "no reduction of it is on its way"
        self.is_reducing = False
        return ""

    def _gather(self, action: Action) -> str:
        if self.full == "absent":
            self._spread = set(self.flat.table.place("held" if action.subject == "held" else "param").shard)
        elif self.full != "partly whole":
            return f"it is {self.full} already"
        if action.over not in self._spread:
            return f"it is not sharded over {action.over}"
        self._spread.remove(action.over)
        self.full = "flying"
        return ""


def _check_rest(states: Mapping[str, _FlatState]) -> None:
    left = [name for name, state in states.items() if not state.is_at_rest]
    if left:
        raise ProgramError(f"After the backward {', '.join(left)} are not back at rest.")
    reducing = [name for name, state in states.items() if state.is_reducing]
    if reducing:
        raise ProgramError(f"After the backward the gradients of {', '.join(reducing)} are still on their way.")
    owing = [name for name, state in states.items() if state.owed]
    if owing:
        raise ProgramError(f"After the backward the gradients of {', '.join(owing)} are not reduced.")
