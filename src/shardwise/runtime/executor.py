"""Programs bound to memory and collectives: each action becomes one call, looked up once.

Each action of a program on a flat buffer is carried out by a method of its `ParamMover` or `GradMover`, whose tables
`moves()` list them by verb and subject, with the effect given in `program/effects.py`. Methods that make or free the
whole buffer are idempotent: a buffer that is whole is not gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch

from shardwise.comm import Communicator, Group
from shardwise.errors import ProgramError
from shardwise.memory import Flat, Unit
from shardwise.program import Action, Block, Moment, Program, ends_of_messages
from shardwise.program.low_rank import Position
from shardwise.program.places import MOVES, place_before
from shardwise.runtime.agree import Agreement
from shardwise.runtime.grad_mover import GradMover
from shardwise.runtime.low_rank import FactorMessages
from shardwise.runtime.param_mover import ParamMover
from shardwise.system.telemetry import ON_THE_WAY, Timeline
from shardwise.system.torch_private import DisableTorchFunction

Call = Callable[[], None]
Step = tuple[Action, Call]


class BoundBlock:
    """A moment, and the calls to make at it."""

    def __init__(
        self,
        block: Block,
        calls: Sequence[Call],
        collectives: Communicator,
        timeline: Timeline,
        units: Mapping[str, str],
    ) -> None:
        """`units`: the name of the unit of each flat buffer."""
        self.moment = block.moment
        self.place = place_before(block.moment)
        """What is computed before it."""
        ends_backward = block.moment.edge == "after" and block.moment.phase in ("backward", "backward_input")
        self.closes = block.moment.unit if ends_backward else ""
        """The unit whose backward ends at this moment, or ""."""
        self._journal, self._together = collectives.journal, collectives.together
        self._steps: tuple[Step, ...] = tuple(zip(block.actions, calls, strict=True))
        self.acts = bool(self._steps)
        """Whether there are any."""
        self._unit_of_gather = {action: units.get(action.flat) for action in block.actions if action.verb == "gather"}
        self._gathers_several = not collectives.is_host and any(len(run) > 1 for run in self._runs(self._steps))
        self.frees = frozenset(action.flat for action in block.actions if action.verb == "free")
        """The flat buffers that this block frees."""
        self._keeping = tuple(step for step in self._steps if step[0].verb != "free")
        self._timeline = timeline

    def run(self) -> None:
        """Note that its moment has come, and make the calls. Of the blocks of a pass a `Script` notes that."""
        self._journal.moment = self.moment
        self._journal.clock.reach(self.place)
        if self.acts:
            self.act()

    def act(self, *, frees: bool = True) -> None:
        """Make the calls in order. Each is noted in the journal first, because faults are explained from it.

        `frees=False` leaves gathered buffers gathered. What modes of the user's look at is left out, as by `unwatched`,
        without a call of its own: see [Note: once for each event] in `script.py`.
        """
        journal = self._journal
        steps = self._steps if frees else self._keeping
        if journal.before is not None:
            steps = tuple((action, partial(_make_unless, journal.before, action, call)) for action, call in steps)
        if self._timeline.is_on:
            steps = tuple((action, partial(self._timed, action, call)) for action, call in steps)
        with DisableTorchFunction():
            try:
                if self._gathers_several:
                    self._run_in_runs(steps)
                else:
                    for action, call in steps:
                        journal.action = action
                        call()
            finally:
                journal.action = None
                journal.clock.reach(MOVES)

    def _make(self, steps: Sequence[Step]) -> None:
        journal = self._journal
        for action, call in steps:
            journal.action = action
            call()

    def _run_in_runs(self, steps: Sequence[Step]) -> None:
        for run in self._runs(steps):
            if len(run) == 1:
                self._make(run)
                continue
            with self._together():
                self._make(run)

    def _runs(self, steps: Sequence[Step]) -> Iterator[list[Step]]:
        """Consecutive gathers of one unit over one axis as one run; every other action is a run of its own."""
        for key, some in groupby(steps, lambda step: (self._unit_of_gather.get(step[0]), step[0].over)):
            run = list(some)
            yield from [run] if key[0] is not None else ([step] for step in run)

    def _timed(self, action: Action, call: Call) -> None:
        """Make the call within a span of the timeline and of torch's profiler, and record its transfer until it is
        waited for."""
        effect = action.effect
        if (effect.sends or action.copies) and action.stream != "compute":
            self._timeline.begin(ON_THE_WAY, action.transfer, action=str(action))
        with self._timeline.span(str(action), moment=str(self.moment)), torch.profiler.record_function(str(action)):
            call()
        if effect.waits is not None:
            self._timeline.end(ON_THE_WAY, action.transfer)


def _make_unless(is_left_out: Callable[[str], bool], action: Action, call: Call) -> None:
    if not is_left_out(str(action)):
        call()


class Mover:
    """The moves of one flat buffer on this rank."""

    def __init__(
        self, flat: Flat, collectives: Communicator, groups: Mapping[str, Group], messages: FactorMessages
    ) -> None:
        self.params = ParamMover(flat, collectives, groups)
        self.grads = GradMover(flat, collectives, groups, messages)

    def method(self, action: Action) -> Callable[[], None]:
        """The method that carries out `action`, by its verb and subject."""
        for moves in (self.params.moves(), self.grads.moves()):
            if (action.verb, action.subject) in moves:
                return partial(moves[action.verb, action.subject], action)
        raise ProgramError(f"The runtime has no method for '{action}'.")

    def abandon(self) -> None:
        """Wait for transfers under way and forget them."""
        self.params.abandon()
        self.grads.abandon()


class Executor:
    """Turns actions into calls on the flat buffers of one rank."""

    def __init__(self, units: Sequence[Unit], collectives: Communicator, groups: Mapping[str, Group]) -> None:
        flats = [flat for unit in units for flat in unit.flats]
        self._units = {flat.name: unit.name for unit in units for flat in unit.flats}
        self._collectives = collectives
        self.timeline = Timeline()
        self.agreement = Agreement(collectives, groups)
        self._messages = FactorMessages(collectives)
        self.movers = {flat.name: Mover(flat, collectives, groups, self._messages) for flat in flats}
        self.journal = collectives.journal
        self.rest, self.synchronize = collectives.rest, collectives.synchronize
        self._common: dict[str, Callable[[Action], None]] = {}
        self._by_verb: dict[str, Callable[[Action], None]] = {}

    def provide(self, subject: str, call: Callable[[Action], None]) -> None:
        """Let `call` carry out all actions with this subject: those that are not moves of one flat buffer."""
        self._common[subject] = call

    def provide_verb(self, verb: str, call: Callable[[Action], None]) -> None:
        """Let `call` carry out all actions with this verb, whatever their subject."""
        self._by_verb[verb] = call

    def bind(self, program: Program) -> tuple[BoundBlock, ...]:
        ends = ends_of_messages(program)
        return tuple(self._bind_block(block, number, ends) for number, block in enumerate(program))

    def run(self, moment: Moment, actions: Sequence[Action]) -> None:
        """Bind and run at once, for a step that has no program yet."""
        (block,) = self.bind((Block(moment, tuple(actions)),))
        block.run()

    def _bind_block(self, block: Block, number: int, ends: Container[Position]) -> BoundBlock:
        calls = [self._call(action) for action in block.actions]
        calls = [self._sending(call) if (number, place) in ends else call for place, call in enumerate(calls)]
        return BoundBlock(block, calls, self._collectives, self.timeline, self._units)

    def _sending(self, call: Call) -> Call:
        """`call`, which completes a message of factors."""

        def call_and_send() -> None:
            call()
            self._messages.send()

        return call_and_send

    def _call(self, action: Action) -> Call:
        if action.verb in self._by_verb:
            return partial(self._by_verb[action.verb], action)
        if action.subject in self._common:
            return partial(self._common[action.subject], action)
        if action.flat not in self.movers:
            raise ProgramError(f"'{action}' names no flat buffer of this model.")
        return self.movers[action.flat].method(action)
