"""Where the backward of a unit ends.

[Note: closings] A unit's backward is *closed* (its parameters freed, its gradients reduced) at the same point on every
rank. Ranks may see it end at different times, or never, if one of them has not used all of its parameters (an expert
that got no token), or has not called it at all. The program fixes that point: at the latest before the backward of the
next unit opens. While there is no program, the ranks agree in rounds, before each opening, on the units that have
finished on any of them and that none is still to come to. Gradients that arrive later are found by the verdict of the
step.

[Note: left out, or added] Where a rank leaves out modules that the program has, it does for them what the program says
at the next moment that it comes to: it takes part in their gathers, and adds zeros to their gradients. Where it calls
one that the program has not, which needs no other rank as long as parameters are copies, the program goes on as if it
had not. The gradients are found by the verdict, and the next pass is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardwise.memory import Unit
from shardwise.program import Moment
from shardwise.runtime.executor import BoundBlock
from shardwise.runtime.gathering import Gathering
from shardwise.runtime.hooks import Hooks
from shardwise.runtime.passes import Passes
from shardwise.runtime.rounds import End, Report, Rounds
from shardwise.runtime.split_backward import Halves
from shardwise.system.telemetry import UNITS, Timeline


class PostBackward:
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
        self.gathering = gathering
        self._hooks = hooks
        self._halves = halves
        self._exchange = exchange
        self.rounds = Rounds(gathering, exchange)
        self._units = gathering.units
        self._by_name = {unit.name: unit for unit in self._units}
        self.probe: Callable[[Unit], None] | None = None
        """Called with each unit whose backward is closed, in a pass that does not reduce; takes its gradients."""
        self._known_left: set[str] = set()
        """Units whose backward was found to end with parameters that have no gradient on some rank. The same on all
        ranks."""

    def note_ended(self, unit: Unit) -> None:
        """The backward of `unit` has ended on this rank; close the units that the program closes now."""
        current, name = self._passes.current, unit.name
        current.open.discard(name)
        current.kept.discard(name)
        current.ended[name] = unit
        while current.ended and (block := current.script.advance_to_end(current.ended)) is not None:
            self._end(self._by_name[block.closes])  # it has finished here, and is freed
            if block.acts:
                block.act()

    def arrive_at(self, moment: Moment, unit: Unit | None = None) -> BoundBlock | None:
        """Close every backward that is due before `moment`, which is one of `unit`, if given. Returns the program's
        block for `moment`, if the program is followed."""
        script = self._passes.current.script
        block = script.advance(moment)
        if block is not None:
            return block
        while closing := script.closing():
            self._close_as_planned(closing)
        for left_out in script.left_out(moment):
            self.pass_by(left_out)
        if script.expects(moment):
            return script.take(moment)
        if script.is_followed and unit is not None and self.adds(unit):
            return None
        self.gathering.finish_reductions()
        script.leave()
        if unit is None:
            self.rounds.finish(self, "backward")
        elif moment.needs_params:
            self.rounds.need(unit, self, is_backward=True, meets=True)
        else:
            self.rounds.meet(self)
        return script.take(moment)

    def adds(self, unit: Unit) -> bool:
        """Whether `unit` may be computed beside a program that has it not; see [Note: left out, or added]."""
        return unit.comes_alone and self._passes.current.op is None

    def pass_by(self, block: BoundBlock) -> None:
        """Do what the program says for a moment that this rank leaves out."""
        current = self._passes.current
        if block.closes:
            self._close_as_planned(block.closes)
        else:
            unit = self._by_name[block.moment.unit]
            self.gathering.run(current.script.take(block.moment), block.moment, unit, current)

    def close_weights(self, compute: Callable[[Unit], None], timeline: Timeline) -> None:
        """The second half of a backward, unit by unit in the order of the first half. `compute` runs the backward that
        produces the weight gradients which the first half postponed."""
        current = self._passes.current
        assert current.op is not None
        for unit, arrived in self._halves.take(current.op.micro_batch):
            before, after = current.moments[unit.name].before_backward, current.moments[unit.name].after_backward
            self.gathering.run(self.arrive_at(before, unit), before, unit, current)
            with timeline.during(UNITS, f"weights {unit.name}"), self._halves.second():
                arrived()
                compute(unit)
            for flat in unit.flats:
                flat.grads.expect_all()
            self.gathering.run(current.script.take(after), after, unit, current)

    def left_anywhere(self) -> list[Unit]:
        """The units with gradients on any rank that no program has reduced, in an order shared by all. Collective."""
        mine = [self.rounds.number(unit.name) for unit in self._units if unit.has_fresh()]
        messages = self._exchange(" ".join(map(str, mine)).encode())
        return [self._units[int(number)] for number in dict.fromkeys(b" ".join(messages).split())]

    def _close_as_planned(self, name: str) -> None:
        unit = self._by_name[name]
        current = self._passes.current
        moment = current.moments[unit.name].after_backward
        block = current.script.advance(moment) or current.script.take(moment)
        has_ended = self._end(unit)
        if block is not None:
            block.act(frees=has_ended)
            if not has_ended:
                self.gathering.owe_frees(unit, block)

    def report(self, end: End) -> Report:
        """What this rank tells the others in a round of the running pass."""
        current = self._passes.current
        ended = [self.rounds.number(name) for name in current.ended]
        left = [self.rounds.number(unit.name) for unit in self._units if end == "backward" and self._is_left(unit)]
        awaited = current.called - current.opened if current.op is None and end != "backward" else ()
        return Report(end=end, ended=ended, left=left, awaited=sorted(map(self.rounds.number, awaited)))

    def act(self, reports: Sequence[Report]) -> None:
        """Close the units that have finished on any rank, and that none has still to come to, in the same order
        everywhere. Collective.

        When all ranks are at the end of the backward, units are included that no rank reports as finished but that have
        gradients. Some of their parameters will get no gradient next time either, so the end of their backward is
        detected by other means from then on.
        """
        current = self._passes.current
        is_last = all(one.end == "backward" for one in reports)
        awaited = {number for one in reports for number in one.awaited}
        is_left: dict[int, bool] = {}
        for one in reports:
            is_left.update({number: is_left.get(number, False) for number in one.ended})
            is_left.update(dict.fromkeys(one.left, True))
        for number in is_left if is_last else [number for number in is_left if number not in awaited]:
            unit = self._units[number]
            self._end(unit)
            if is_left[number] and unit.name not in self._known_left:
                self._known_left.add(unit.name)
                current.must_record_again = True
            moment = current.moments[unit.name].after_backward
            self.gathering.run(current.script.take(moment), moment, unit, current)

    def _is_left(self, unit: Unit) -> bool:
        """Whether the unit has gradients here, fresh or waiting, although no event has reported the end of its
        backward."""
        current = self._passes.current
        if self._halves.is_first_of(unit):
            return unit.name in current.open
        is_of_this = current.op is None or any(flat.grads.have_come for flat in unit.flats)
        return is_of_this and any(flat.grads.has_fresh() and current.reduces_flat(flat.spec) for flat in unit.flats)

    def _end(self, unit: Unit) -> bool:
        """Whether the unit that is being closed has finished on this rank too, or was not used. If not it may still be
        read, and stays gathered."""
        current = self._passes.current
        if self.probe is not None:
            self.probe(unit)
        if self._halves.units:
            self._halves.note_closed(unit)
        current.open.discard(unit.name)
        if current.ended.pop(unit.name, None) is not None:
            for flat in () if unit.name in current.awake else unit.flats:
                flat.guard.rest()
            return True
        if not current.has_used(unit):
            return True
        current.lasting.add(unit.name)
        self._hooks.watch_inputs(unit)
        return False
