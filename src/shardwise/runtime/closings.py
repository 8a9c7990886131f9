"""Where the backward of a unit ends.

[Note: closings] A unit's backward is *closed* (its parameters dropped, its gradients reduced) at the same point
on every rank, though ranks may see it end at different times, or not at all where one of them has not used all
of its parameters (an expert that got no token). That point is where the program says, at the latest before the
next unit's backward opens. While there is no program, the ranks agree before each opening on the units that are
through on any of them. What still arrives afterwards is found by the verdict of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwise.program import Moment
from shardwise.runtime.executor import BoundBlock
from shardwise.runtime.gathering import Gathering
from shardwise.runtime.halves import Halves
from shardwise.runtime.hooks import Hooks
from shardwise.runtime.passes import Passes
from shardwise.storage import Unit
from shardwise.telemetry import UNITS, Timeline


class Closings:
    """Closes the backwards of units, in the pass that is under way."""

    def __init__(
        self,
        passes: Passes,
        gathering: Gathering,
        hooks: Hooks,
        halves: Halves,
        exchange: Callable[[bytes], list[bytes]],
    ) -> None:
        self._passes = passes
        self._gathering = gathering
        self._hooks = hooks
        self._halves = halves
        self._exchange = exchange
        self._units = gathering.units
        self._by_name = {unit.name: unit for unit in self._units}
        self._numbers = {unit.name: number for number, unit in enumerate(self._units, start=1)}
        self._known_left: set[str] = set()
        """Units found to end a backward with parameters that have no gradient on some rank. The same on all ranks."""

    def unit(self, name: str) -> Unit:
        return self._by_name[name]

    def note_through(self, unit: Unit) -> None:
        """The backward of `unit` has ended on this rank. Close what the program closes now."""
        current = self._passes.current
        current.open.discard(unit.name)
        current.kept.discard(unit.name)
        current.through[unit.name] = unit
        while (closing := self._expected()) in current.through:
            self._close_as_planned(closing)

    def arrive_at(self, moment: Moment) -> BoundBlock | None:
        """Close what has to be closed before `moment` of a backward; what the program has for it, if it is followed."""
        while closing := self._expected():
            self._close_as_planned(closing)
        script = self._passes.current.script
        if not script.expects(moment):
            self._gathering.finish_reductions()
            self._close_agreed(and_left=moment == self._passes.current.end_of_backward)
        return script.take(moment)

    def close_weights(self, compute: Callable[[Unit], None], timeline: Timeline) -> None:
        """The second half of a backward: unit by unit, in the order in which the first half went through them.
        `compute` does the backward that brings those gradients of a unit's weights that have been put aside."""
        current = self._passes.current
        assert current.op is not None
        for unit, arrived in self._halves.take(current.op.micro_batch):
            before, after = current.moments(unit).before_backward, current.moments(unit).after_backward
            self._gathering.run(self.arrive_at(before), before, unit, current)
            with timeline.during(UNITS, f"weights {unit.name}"), self._halves.second():
                arrived()
                compute(unit)
            for flat in unit.flats:
                flat.grads.expect_all()
            self._gathering.run(current.script.take(after), after, unit, current)

    def agree(self, through: Iterable[str], left: Iterable[str]) -> dict[str, bool]:
        """Every unit that is through or left on any rank, in an order that all share; and whether any has it left."""
        mine = [self._numbers[name] for name in through] + [-self._numbers[name] for name in left]
        said = self._exchange(" ".join(map(str, mine)).encode())
        agreed: dict[str, bool] = {}
        for number in map(int, b" ".join(said).split()):
            name = self._units[abs(number) - 1].name
            agreed[name] = agreed.get(name, False) or number < 0
        return agreed

    def _expected(self) -> str:
        """The unit whose backward the program ends next, before anything else; "" if something else comes next."""
        expected = self._passes.current.script.expected()
        return expected.closes if expected is not None else ""

    def _close_as_planned(self, name: str) -> None:
        unit = self._by_name[name]
        current = self._passes.current
        block = current.script.take(current.moments(unit).after_backward)
        is_through = self._end(unit)
        if block is not None:
            block.run(frees=is_through)
            if not is_through:
                self._gathering.owe_frees(unit, block)

    def _close_agreed(self, *, and_left: bool) -> None:
        """Close, in one order, the units that are through on any rank. All ranks call.

        With `and_left` also those that nobody calls through but that have gradients. All of their parameters
        will not have one next time either, so that then the end of their backward is looked for elsewhere.
        """
        current = self._passes.current
        left = [unit.name for unit in self._units if and_left and self._is_left(unit)]
        for name, is_left in self.agree(current.through, left).items():
            unit = self._by_name[name]
            self._end(unit)
            if is_left and name not in self._known_left:
                self._known_left.add(name)
                current.is_wiser = True
            moment = current.moments(unit).after_backward
            self._gathering.run(current.script.take(moment), moment, unit, current)

    def _is_left(self, unit: Unit) -> bool:
        """Whether nothing has told that it is through, though it has gradients here, or some that wait."""
        current = self._passes.current
        if self._halves.is_first_of(unit):
            return unit.name in current.open
        is_of_this = current.op is None or any(flat.grads.have_come for flat in unit.flats)
        return current.reduces and unit.has_fresh() and is_of_this

    def _end(self, unit: Unit) -> bool:
        """Whether the unit to be closed is through here too; if not it may still be needed, and stays whole."""
        current = self._passes.current
        self._halves.note_closed(unit)
        current.open.discard(unit.name)
        if current.through.pop(unit.name, None) is not None:
            unit.rest()
            return True
        current.lasting.add(unit.name)
        self._hooks.watch_inputs(unit)
        return False
