"""Programs bound to memory and collectives: each action becomes one call, looked up once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from shardwise.comm import Communicator, Group, Journal
from shardwise.errors import ProgramError
from shardwise.program import Action, Block, Buffer, Moment, Program
from shardwise.runtime.agree import Agreement
from shardwise.runtime.mover import Mover
from shardwise.storage import Flat
from shardwise.telemetry import ON_THE_WAY, Timeline

Call = Callable[[], None]
_TRAVELS_AS: dict[Buffer, str] = {"full": "param", "sum": "grad", "matrix": "update", "given": "update"}
"""What a timeline calls that of which a buffer is made."""


class BoundBlock:
    """A moment, and the calls that are due at it."""

    def __init__(self, block: Block, calls: Sequence[Call], journal: Journal, timeline: Timeline) -> None:
        self.moment = block.moment
        ends_backward = block.moment.edge == "after" and block.moment.phase in ("backward", "backward_input")
        self.closes = block.moment.unit if ends_backward else ""
        """The unit whose backward ends at this moment, if one does."""
        self._journal = journal
        self._steps = tuple(zip(block.actions, calls, strict=True))
        self.frees = frozenset(action.flat for action in block.actions if action.verb == "free")
        """The flat buffers that are freed at it."""
        self._keeping = tuple(step for step in self._steps if step[0].verb != "free")
        self._timeline = timeline

    def run(self, *, frees: bool = True) -> None:
        """Make the calls in order, and say in the journal which: it is what a fault is explained by.

        Without `frees` what is whole stays so.
        """
        journal = self._journal
        journal.moment = self.moment
        steps = self._steps if frees else self._keeping
        if self._timeline.is_on:
            steps = tuple((action, partial(self._timed, action, call)) for action, call in steps)
        try:
            for action, call in steps:
                journal.action = action
                call()
        finally:
            journal.action = None

    def _timed(self, action: Action, call: Call) -> None:
        """Make the call as a span of the host, known to the profiler of torch too; follow what it sends on its way."""
        effect = action.effect
        made = effect.makes or effect.waits
        travelling = f"{action.flat} {_TRAVELS_AS.get(made, made) if made is not None else ''}"
        if (effect.sends or action.copies) and action.stream != "compute":
            self._timeline.begin(ON_THE_WAY, travelling, action=str(action))
        with self._timeline.span(str(action), moment=str(self.moment)), torch.profiler.record_function(str(action)):
            call()
        if effect.waits is not None:
            self._timeline.end(ON_THE_WAY, travelling)


class Executor:
    """Turns actions into calls on the flat buffers of one rank."""

    def __init__(self, flats: Sequence[Flat], collectives: Communicator, groups: Mapping[str, Group]) -> None:
        self.timeline = Timeline()
        self.agreement = Agreement(collectives, groups)
        self.movers = {flat.name: Mover(flat, collectives, groups) for flat in flats}
        self.journal = collectives.journal
        self.rest = collectives.rest
        self._common: dict[str, Callable[[Action], None]] = {}

    def provide(self, subject: str, call: Callable[[Action], None]) -> None:
        """Who does all that has this subject: what is not a move of one flat buffer."""
        self._common[subject] = call

    def bind(self, program: Program) -> tuple[BoundBlock, ...]:
        return tuple(self._bind_block(block) for block in program)

    def run(self, moment: Moment, actions: Sequence[Action]) -> None:
        """Bind and run at once: for a step that has no program yet."""
        self._bind_block(Block(moment, tuple(actions))).run()

    def _bind_block(self, block: Block) -> BoundBlock:
        return BoundBlock(block, [self._call(action) for action in block.actions], self.journal, self.timeline)

    def _call(self, action: Action) -> Call:
        if action.subject in self._common:
            return partial(self._common[action.subject], action)
        if action.flat not in self.movers:
            raise ProgramError(f"'{action}' is of no flat buffer of this model.")
        return self.movers[action.flat].method(action)
