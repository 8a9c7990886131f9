"""Programs bound to memory and collectives: each action becomes one call, looked up once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from shardwise.comm import Communicator, Group, Journal
from shardwise.errors import ProgramError
from shardwise.program import Action, Block, Moment, Program
from shardwise.runtime.mover import Mover
from shardwise.storage import Flat
from shardwise.telemetry import ON_THE_WAY, Timeline

Call = Callable[[], None]


class BoundBlock:
    """A moment, and the calls that are due at it."""

    def __init__(self, block: Block, calls: Sequence[Call], journal: Journal, timeline: Timeline) -> None:
        self.moment = block.moment
        ends_backward = (block.moment.edge, block.moment.phase) == ("after", "backward")
        self.closes = block.moment.unit if ends_backward else ""
        """The unit whose backward ends at this moment, if one does."""
        self._journal = journal
        self._steps = tuple(zip(block.actions, calls, strict=True))
        self._timeline = timeline

    def run(self, *, frees: bool = True) -> None:
        """Make the calls in order, and say in the journal which: it is what a fault is explained by.

        Without `frees` what is whole stays so.
        """
        journal = self._journal
        journal.moment = self.moment
        try:
            for action, call in self._steps:
                if not frees and action.verb == "free":
                    continue
                journal.action = action
                if self._timeline.is_on:
                    self._timed(action, call)
                else:
                    call()
        finally:
            journal.action = None

    def _timed(self, action: Action, call: Call) -> None:
        """Make the call as a span of the host, known to the profiler of torch too; follow what it sends on its way."""
        travelling = f"{action.flat} {action.subject if action.subject in ('grad', 'update') else 'param'}"
        if action.communicates and action.stream != "compute":
            self._timeline.begin(ON_THE_WAY, travelling, action=str(action))
        with self._timeline.span(str(action), moment=str(self.moment)), torch.profiler.record_function(str(action)):
            call()
        if action.verb == "wait":
            self._timeline.end(ON_THE_WAY, travelling)


class Executor:
    """Turns actions into calls on the flat buffers of one rank."""

    def __init__(self, flats: Sequence[Flat], collectives: Communicator, groups: Mapping[str, Group]) -> None:
        self.timeline = Timeline()
        self.movers = {flat.name: Mover(flat, collectives, groups) for flat in flats}
        self.journal = collectives.journal
        self.rest = collectives.rest
        self._common: dict[str, Callable[[Action], None]] = {}

    def provide(self, subject: str, call: Callable[[Action], None]) -> None:
        """Who does what is not a move of one flat buffer: everything with `verdict`, `buffers`, `norms`, `update`."""
        self._common[subject] = call

    def bind(self, program: Program) -> tuple[BoundBlock, ...]:
        return tuple(self._bind_block(block) for block in program)

    def run(self, moment: Moment, actions: Sequence[Action]) -> None:
        """Bind and run at once: for a step that has no program yet."""
        self._bind_block(Block(moment, tuple(actions))).run()

    def _bind_block(self, block: Block) -> BoundBlock:
        in_step = block.moment.phase == "step"
        last_wait = {
            action.flat: index
            for index, action in enumerate(block.actions)
            if (action.verb, action.subject) == ("wait", "grad")
        }
        calls = [
            self._call(action, in_step=in_step, is_last=self._is_last(block, index, last_wait))
            for index, action in enumerate(block.actions)
        ]
        return BoundBlock(block, calls, self.journal, self.timeline)

    def _is_last(self, block: Block, index: int, last_wait: Mapping[str, int]) -> bool:
        """Whether the wait at `index` ends its reduction: no further step of it starts in this block."""
        action = block.actions[index]
        if last_wait.get(action.flat) != index:
            return False
        later = block.actions[index + 1 :]
        return not any(other.flat == action.flat and other.subject == "grad" for other in later)

    def _call(self, action: Action, *, in_step: bool, is_last: bool) -> Call:
        if action.subject in self._common:
            return partial(self._common[action.subject], action)
        mover = self.movers[action.flat]
        match action.verb, action.subject:
            case "gather", _:
                return (
                    partial(mover.gather_param, action.over)
                    if in_step
                    else partial(mover.gather, action.over, action.subject)
                )
            case "wait", "full":
                return mover.wait_full
            case "wait", "param":
                return mover.wait_param
            case "wait", "grad":
                return partial(mover.wait_grad, in_step=in_step, is_last=is_last)
            case "free", "full":
                return mover.flat.free_full
            case "slice", "held":
                return mover.flat.hold
            case "cast", "param":
                return mover.flat.accept_master
            case (("reduce_scatter" | "all_reduce" | "slice" | "cast"), "grad"):
                return partial(mover.reduce, action, in_step=in_step)
        raise ProgramError(f"'{action}' is not something a runtime can do.")
