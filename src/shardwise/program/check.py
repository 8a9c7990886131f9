"""Checks a program before it runs: nothing is read that is absent, nothing is left behind, and everything that runs
beside the computation is waited for before it is used.

Actions are judged by their entries in `effects.py` and by [Note: what orders what] there. A program must also do all
that the table demands, in order; `build.py` says what that is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.errors import ProgramError
from shardwise.program.action import AFTER_STEP, ALL_FLATS, END_OF_BACKWARD, Action, Block, Moment, Program
from shardwise.program.build import (
    backward_makes,
    build_step,
    gathers,
    outer_gradients,
    reduce_due,
    slices_to_hold,
    step_gradients,
    step_parameters,
)
from shardwise.program.effects import COMPUTES, Buffer, Effect
from shardwise.program.spec import FlatSpec, UnitSpec

_NAMES: dict[Buffer, str] = {
    "param": "resting range",
    "full": "whole buffer",
    "held": "held range",
    "master": "master weights",
    "fresh": "fresh gradient",
    "sum": "sum",
    "grad": "gradient",
    "due": "gradient for the update",
    "outgoing": "cast of what was updated",
    "given": "update",
    "outer": "outer gradient",
}


def _name(buffer: Buffer) -> str:
    return _NAMES.get(buffer, buffer)


def check(program: Program, units: Sequence[UnitSpec], *, reduces: bool = True) -> None:
    """Raise `ProgramError`, naming block and action, if `program` (a pass or a schedule) could not run on `units`, or
    if its result could depend on when the work beside the computation is done.

    With `reduces` every gradient that a backward leaves must be reduced.
    """
    states = {flat.name: _FlatState(flat) for unit in units for flat in unit.flats}
    for state in states.values():
        state.begin_pass()
    by_name = {unit.name: [states[flat.name] for flat in unit.flats] for unit in units}
    for block in program:
        moment = block.moment
        here = by_name[moment.unit] if moment.unit else states.values() if moment == END_OF_BACKWARD else ()
        for state in here if moment.edge == "after" else ():
            state.end_computing(moment, reduces=reduces)
        for action in block.actions:
            _act(block, action, states)
        for state in here if moment.edge == "before" else ():
            why = state.begin_computing(moment)
            if why:
                raise ProgramError(f"{moment}: {state.flat.name} computes, but {why}.")
        if moment == END_OF_BACKWARD:
            _check_rest(states.values())


def check_step(program: Program, units: Sequence[UnitSpec], *, buffers_bytes: int) -> None:
    """`check` for an optimizer step. Each block must do all that is demanded at its moment and leave nothing under way,
    except that what follows the update of a unit may come in a later block, and that gathers behind the step go on.
    `buffers_bytes` is that of `build_step`."""
    states = {flat.name: _FlatState(flat) for unit in units for flat in unit.flats}
    for state in states.values():
        state.begin_step()
    demanded = {block.moment: block for block in build_step(units, buffers_bytes=buffers_bytes)}
    left: _Wanted = defaultdict(deque)
    for block in program:
        for action in block.actions:
            _act(block, action, states)
        is_of_unit = block.moment.edge == "during" and bool(block.moment.unit)
        _add_wanted(left, demanded.pop(block.moment, Block(block.moment)))
        _check_done(block, left, is_all=block.moment.edge != "during")
        for state in states.values() if not is_of_unit else ():
            why = state.why_incomplete(block.moment)
            if why:
                raise ProgramError(f"{block.moment} ends, but {state.flat.name}'s {why}.")
    for block in demanded.values():
        _add_wanted(left, block)
        _check_done(Block(block.moment), left)


def check_outer(actions: Iterable[Action], units: Sequence[UnitSpec]) -> None:
    """`check` for the outer step of these units, whenever its parts run: each action finds what it needs, and when all
    are done nothing is under way, or left in part."""
    flats = [flat for unit in units for flat in unit.flats if flat.trainable]
    states = {flat.name: _FlatState(flat) for flat in flats}
    for state in states.values():
        state.begin_outer_step()
    for action in actions:
        _act(Block(AFTER_STEP), action, states)
    for state in states.values():
        why = state.why_incomplete(AFTER_STEP)
        if state.has_outer_gradient:
            why = why or "outer gradient is left"
        if why:
            raise ProgramError(f"An outer step ends, but {state.flat.name}'s {why}.")


def _act(block: Block, action: Action, states: Mapping[str, _FlatState]) -> None:
    if action.flat != ALL_FLATS and action.flat not in states:
        raise ProgramError(f"{block.moment}: '{action}', but there is no flat buffer {action.flat!r}.")
    touched = [states[action.flat]] if action.flat != ALL_FLATS else states.values()
    for state in touched:
        why = state.act(action)
        if why:
            of = f"of {state.flat.name} " if action.flat == ALL_FLATS else ""
            raise ProgramError(f"{block.moment}: '{action}', but {of}{why}.")


_Wanted = defaultdict[str, deque[Action]]
"""By flat buffer: the actions still to be done, in order."""


def _add_wanted(wanted: _Wanted, demanded: Block) -> None:
    for action in demanded.actions:
        if action.effect.waits is None:
            wanted[action.flat].append(action.on("compute"))


def _check_done(block: Block, wanted: _Wanted, *, is_all: bool = True) -> None:
    """Raise unless the actions of `block`, waits aside, are the next ones wanted of each flat buffer; with `is_all`,
    unless they are all of them."""
    for action in block.actions:
        if action.effect.waits is not None:
            continue
        if not wanted[action.flat]:
            raise ProgramError(f"{block.moment}: '{action}', but nothing of this flat buffer is left to do.")
        want = wanted[action.flat].popleft()
        if action.on("compute") != want:
            raise ProgramError(f"{block.moment}: '{action}', but the next action due is '{want}'.")
    for left in wanted.values() if is_all else ():
        if left:
            raise ProgramError(f"{block.moment}: '{left[0]}' is left out.")


def _check_rest(states: Iterable[_FlatState]) -> None:
    raised = [state.flat.name for state in states if not state.is_at_rest]
    if raised:
        raise ProgramError(f"After the backward {', '.join(raised)} are not back at rest.")
    reducing = [state.flat.name for state in states if state.is_reducing]
    if reducing:
        raise ProgramError(f"After the backward the gradients of {', '.join(reducing)} are still on their way.")
    owing = [state.flat.name for state in states if state.owes]
    if owing:
        raise ProgramError(f"After the backward the gradients of {', '.join(owing)} are not reduced.")


@dataclass
class _Content:
    """The state of one buffer at a point of the program."""

    is_there: bool = False
    """At least in part."""
    steps: deque[Action] = field(default_factory=deque)
    """Steps that have to begin before it is complete."""
    maker: Action | None = None
    """The action under way that makes it, or more of it."""
    readers: dict[Buffer, Action] = field(default_factory=dict)
    """Actions under way that read it, by what they make."""

    @property
    def is_whole(self) -> bool:
        return self.is_there and not self.steps and self.maker is None

    @property
    def in_words(self) -> str:
        if self.maker is not None:
            return "still on its way"
        if not self.is_there:
            return "not there"
        return f"there in part: '{self.steps[0]}' is still to come" if self.steps else "there already"

    def why_not_writable(self) -> str:
        if self.maker is not None:
            return f"still on its way by '{self.maker}'"
        reader = next(iter(self.readers.values()), None)
        return f"still read by '{reader}'" if reader is not None else ""


class _FlatState:
    """The state of one flat buffer at a point of the program. Methods return the reason why something is impossible, or
    ""."""

    def __init__(self, flat: FlatSpec) -> None:
        self.flat = flat
        self._contents: defaultdict[Buffer, _Content] = defaultdict(_Content)
        for buffer in ("param", "master", *(("full",) if flat.resident else ())):
            self._contents[buffer].is_there = True
        self._is_computing = False
        self._owed: deque[tuple[Action, ...]] = deque()
        """Reductions that have not begun, one for each backward that has left gradients."""

    @property
    def is_at_rest(self) -> bool:
        full = self._contents["full"]
        return full.is_there == self.flat.resident and full.maker is None

    @property
    def is_reducing(self) -> bool:
        return self._contents["sum"].maker is not None

    @property
    def has_outer_gradient(self) -> bool:
        return self._contents["outer"].is_there

    @property
    def owes(self) -> bool:
        return bool(self._owed or self._contents["sum"].is_there)

    # -- what is computed -------------------------------------------------------------------------------

    def begin_computing(self, moment: Moment) -> str:
        effect = COMPUTES[moment.phase]
        for buffer in (*effect.reads, *(("param",) if self.flat.resident else ())):
            if not self._contents[buffer].is_whole:
                return f"its {_name(buffer)} is {self._contents[buffer].in_words}"
        if moment.leaves_gradients and self.flat.trainable:
            left = backward_makes(self.flat)
            why = self._contents[left].why_not_writable()
            if why:
                return f"its {_name(left)} is {why}"
        self._is_computing = True
        return ""

    def end_computing(self, moment: Moment, *, reduces: bool) -> None:
        self._is_computing = False
        if moment.leaves_gradients and moment.unit and self.flat.trainable:
            left = backward_makes(self.flat)
            self._contents[left].is_there = True
            if moment.micro_batch is not None and not self.flat.reduces_each_time:
                self._owed.clear()  # gradients of another micro-batch are added to these, and reduced with them
            if reduces and left == "fresh":
                self._owed.append(reduce_due(self.flat))

    def begin_pass(self) -> None:
        """The gather after the previous step may still be in flight."""
        if self.flat.gathers_behind_step:
            *_, self._contents["param"].maker = step_parameters(self.flat)

    def begin_step(self) -> None:
        """Gradients wait, and parameters are about to be updated."""
        if self.flat.trainable:
            self._contents["grad" if step_gradients(self.flat) else "due"].is_there = True
            self._await_parameters()

    def begin_outer_step(self) -> None:
        """Parameters are about to be updated, without gradients."""
        self._contents["anchor"].is_there = True
        self._await_parameters()

    def _await_parameters(self) -> None:
        steps = (action for action in step_parameters(self.flat) if action.verb in ("fetch", "gather"))
        self._contents["param"].steps.extend(steps)

    def why_incomplete(self, moment: Moment) -> str:
        """What is missing for the computation after `moment` of a step, or ""."""
        param = self._contents["param"]
        may_arrive_later = self.flat.gathers_behind_step and moment.edge == "after" and not param.steps
        may_arrive_later |= self.flat.updates_by_unit and moment.edge == "during"
        for content in self._contents.values():
            if content.maker is not None and not (may_arrive_later and content is param):
                return f"'{content.maker}' is still on its way"
        if not self.flat.trainable:
            return ""
        needed: dict[str, tuple[Buffer, ...]] = {"before": COMPUTES["step"].reads, "after": ("param",)}
        for buffer in needed.get(moment.edge, ()):
            if not (self._contents[buffer].is_whole or may_arrive_later):
                return f"{_name(buffer)} is {self._contents[buffer].in_words}"
        return ""

    # -- what is done -----------------------------------------------------------------------------------

    def act(self, action: Action) -> str:
        """Apply `action`."""
        if action.flat == ALL_FLATS and not self.flat.trainable:
            return ""
        effect = action.effect
        if effect.waits is not None:
            return self._wait(action, effect, self._contents[effect.waits])
        sources = effect.reads
        if effect.makes is not None:
            made = self._contents[effect.makes]
            why = self._why_not_next(action, made, effect.makes)
            if why:
                return why
            goes_on = made.is_there and effect.makes != "param"
            sources = (effect.makes,) if goes_on else effect.reads
        why = self._why_not_now(effect, sources)
        if why:
            return why
        self._begin(action, effect, sources)
        return ""

    def _why_not_next(self, action: Action, made: _Content, buffer: Buffer) -> str:
        """Why `action` is not the next step towards what it makes, or ""."""
        if made.maker is not None or made.readers:
            return f"its {_name(buffer)} is {made.why_not_writable()}"
        if not made.is_there:
            made.steps = self._steps(action)
        if not made.steps:
            return f"its {_name(buffer)} is there already" if made.is_there else "nothing of it is left to reduce"
        due = made.steps[0]
        if (due.verb, due.over) != (action.verb, action.over):
            return f"its next step is '{due}'"
        return ""

    def _steps(self, action: Action) -> deque[Action]:
        """All steps towards what `action` makes, of which it is the first."""
        match action.verb, action.subject:
            case (("gather" | "fetch" | "decode"), ("param" | "held")):
                return deque(gathers(self.flat, from_held=action.subject == "held"))
            case "slice", "held":
                return deque(slices_to_hold(self.flat))
            case _, "grad":
                return deque(self._owed[0] if self._owed else ())
            case _, "due":
                return deque(step_gradients(self.flat))
            case _, "outer":
                return deque(outer_gradients(self.flat))
        return deque((action,))

    def _why_not_now(self, effect: Effect, sources: Iterable[Buffer]) -> str:
        for buffer in sources:
            content = self._contents[buffer]
            if not content.is_there or content.maker is not None or (content.steps and buffer != effect.makes):
                return f"its {_name(buffer)} is {content.in_words}"
        for buffer in (*effect.changes, *effect.frees):
            content = self._contents[buffer]
            why = content.why_not_writable()
            if why:
                return f"its {_name(buffer)} is {why}"
        for buffer in effect.frees:
            if buffer == "full" and self.flat.resident:
                return "it rests whole and is never freed"
            if not self._contents[buffer].is_whole:
                return f"its {_name(buffer)} is {self._contents[buffer].in_words}"
            if buffer == "full" and self._is_computing:
                return "it still computes"
        return ""

    def _begin(self, action: Action, effect: Effect, sources: Iterable[Buffer]) -> None:
        for buffer in effect.frees:
            self._contents[buffer].is_there = False
        if effect.makes is None:
            return
        made = self._contents[effect.makes]
        if action.subject == "grad" and not made.is_there:
            self._owed.popleft()
        made.steps.popleft()
        if effect.awaited is None:
            made.is_there = True
            return
        made.maker = action
        for buffer in set(sources) - {effect.makes, *effect.frees}:
            self._contents[buffer].readers[effect.makes] = action

    def _wait(self, action: Action, effect: Effect, awaited: _Content) -> str:
        maker = awaited.maker
        if maker is None or maker.effect.awaited is None:
            return f"nothing of it is on its way ({awaited.in_words})"
        right = maker.effect.awaited[not awaited.steps]
        if action.subject != right:
            rest = f"'{awaited.steps[0]}' is still to come" if awaited.steps else "that was the last step"
            return f"this is 'wait {action.flat} {right}': {rest}"
        if effect.keeps is not None:
            why = self._contents[effect.keeps].why_not_writable()
            if why:
                return f"its {_name(effect.keeps)} is {why}"
        awaited.is_there, awaited.maker = True, None
        for buffer, content in self._contents.items():
            has_read = content.readers.pop(effect.waits, None) if effect.waits is not None else None
            if has_read is not None and buffer in maker.effect.consumes:
                content.is_there = False
        for buffer in effect.frees:
            self._contents[buffer].is_there = False
        if effect.keeps is not None:
            awaited.is_there = False
            self._contents[effect.keeps].is_there = True
        return ""
