"""Where the backward of a unit ends.

[Note: closings] A unit's backward is *closed* (its parameters freed, its gradients reduced) at the same point on every
rank. Ranks may see it end at different times, or never, if one of them has not used all of its parameters (an expert
that got no token). The program fixes that point: at the latest before the backward of the next unit opens. While there
is no program, the ranks agree before each opening on the units that have finished on any of them. Gradients that arrive
later are found by the verdict of the step.
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
    """Closes the backwards of units in the running pass."""

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
        """Units whose backward was found to end with parameters that have no gradient on some rank. The same on all
        ranks."""

    def unit(self, name: str) -> Unit:
        return self._by_name[name]

    def note_ended(self, unit: Unit) -> None:
        """The backward of `unit` has ended on this rank; close the units that the program closes now."""
        current = self._passes.current
        current.open.discard(unit.name)
        current.kept.discard(unit.name)
        current.ended[unit.name] = unit
        while (closing := self._expected()) in current.ended:
            self._close_as_planned(closing)

    def arrive_at(self, moment: Moment) -> BoundBlock | None:
        """Close every backward that is due before `moment`. Returns the program's block for `moment`, if the program is
        followed."""
        while closing := self._expected():
            self._close_as_planned(closing)
        script = self._passes.current.script
        if not script.expects(moment):
            self._gathering.finish_reductions()
            self._close_agreed(and_left=moment == self._passes.current.end_of_backward)
        return script.take(moment)

    def close_weights(self, compute: Callable[[Unit], None], timeline: Timeline) -> None:
        """The second half of a backward, unit by unit in the order of the first half. `compute` runs the backward that
        produces the weight gradients which the first half postponed."""
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

    def agree(self, ended: Iterable[str], left: Iterable[str]) -> dict[str, bool]:
        """The units that are `ended` or `left` on any rank, in an order shared by all, and whether any rank has each
        left. Collective."""
        mine = [self._numbers[name] for name in ended] + [-self._numbers[name] for name in left]
        messages = self._exchange(" ".join(map(str, mine)).encode())
        agreed: dict[str, bool] = {}
        for number in map(int, b" ".join(messages).split()):
            name = self._units[abs(number) - 1].name
            agreed[name] = agreed.get(name, False) or number < 0
        return agreed

    def _expected(self) -> str:
        """The unit whose backward the program closes next; "" if something else comes first."""
        expected = self._passes.current.script.expected()
        return expected.closes if expected is not None else ""

    def _close_as_planned(self, name: str) -> None:
        unit = self._by_name[name]
        current = self._passes.current
        block = current.script.take(current.moments(unit).after_backward)
        has_ended = self._end(unit)
        if block is not None:
            block.run(frees=has_ended)
            if not has_ended:
                self._gathering.owe_frees(unit, block)

    def _close_agreed(self, *, and_left: bool) -> None:
        """Close the units that have finished on any rank, in the same order everywhere. Collective.

        `and_left` includes units that no rank reports as finished but that have gradients. Some of their parameters
        will get no gradient next time either, so the end of their backward is detected by other means from then on.
        """
        current = self._passes.current
        left = [unit.name for unit in self._units if and_left and self._is_left(unit)]
        for name, is_left in self.agree(current.ended, left).items():
            unit = self._by_name[name]
            self._end(unit)
            if is_left and name not in self._known_left:
                self._known_left.add(name)
                current.must_record_again = True
            moment = current.moments(unit).after_backward
            self._gathering.run(current.script.take(moment), moment, unit, current)

    def _is_left(self, unit: Unit) -> bool:
        """Whether the unit has gradients here, fresh or waiting, although no event has reported the end of its
        backward."""
        current = self._passes.current
        if self._halves.is_first_of(unit):
            return unit.name in current.open
        is_of_this = current.op is None or any(flat.grads.have_come for flat in unit.flats)
        return current.reduces and unit.has_fresh() and is_of_this

    def _end(self, unit: Unit) -> bool:
        """Whether the unit that is being closed has finished on this rank too. If not it may still be read, and stays
        gathered."""
        current = self._passes.current
        self._halves.note_closed(unit)
        current.open.discard(unit.name)
        if current.ended.pop(unit.name, None) is not None:
            unit.rest()
            return True
        current.lasting.add(unit.name)
        self._hooks.watch_inputs(unit)
        return False
