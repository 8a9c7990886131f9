"""One rank's path through the model: by the program, beside it, or in rounds, and what ranks learn from their paths.

[Note: different paths] Ranks may call different modules. A program that is recorded in a pass has what any rank called,
and a rank that calls less does the rest as the program says (see [Note: left out, or added] in `post_backward.py`); so
one program serves all. That cannot be known in advance of parameters that are gathered, because a rank that calls more
than the program has would gather alone. So if ranks took different paths to such parameters in a pass that was
recorded, or the plan says that they will, no program is made and passes go on in rounds. So it is while the model skips
layers at random ([Note: each rank drops its own] in `dropped_layers.py`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence

from shardwise.memory import Unit
from shardwise.program import Moment, Trace, extended, merged
from shardwise.runtime.executor import BoundBlock
from shardwise.runtime.passes import Evaluation, Pass, Passes
from shardwise.runtime.post_backward import PostBackward
from shardwise.runtime.programs import Programs
from shardwise.runtime.rounds import NoGradients
from shardwise.runtime.script import Script

_log = logging.getLogger("shardwise")


class Paths:
    """Takes the moments of forwards, and makes parameters whole in passes that follow no program."""

    def __init__(
        self,
        passes: Passes,
        evaluation: Evaluation,
        post_backward: PostBackward,
        programs: Programs,
        exchange: Callable[[bytes], list[bytes]],
        drops_layers: Callable[[], bool],
    ) -> None:
        """`drops_layers`: whether a forward of the model would skip layers at random now."""
        self._passes = passes
        self._evaluation = evaluation
        self._gathering = post_backward.gathering
        self._post_backward = post_backward
        self._programs = programs
        self._exchange = exchange
        self._drops_layers = drops_layers
        self._units = {unit.name: unit for unit in self._gathering.units}
        self._gathers = any(not unit.comes_alone for unit in self._gathering.units)
        self.may_differ = False
        """Whether ranks take different paths, so that no program is made where parameters are gathered."""

    def come_to(self, moment: Moment, unit: Unit, *, training: bool) -> BoundBlock | None:
        """The program's block for a moment of a forward, after what this rank has left out before it; `None` without a
        program. Then `unit` is whole."""
        script = self._passes.current.script if training else self._evaluation.script
        block = script.advance(moment)
        if block is not None:
            return block
        for left_out in script.left_out(moment):
            self._pass_by(left_out, training=training)
        if script.is_followed and not script.expects(moment) and self._post_backward.adds(unit):
            return None
        block = script.take(moment)
        if block is None and moment.edge == "before":
            self.need(unit, training=training)
        return block

    def need(self, unit: Unit, *, training: bool, is_backward: bool = False) -> None:
        """In a pass that follows no program, return when `unit` is whole; in others the program has it so."""
        script = self._script(training=training)
        if unit.comes_alone or script.is_followed:
            return
        side = self._post_backward if training else NoGradients()
        self._post_backward.rounds.need(unit, side, is_backward=is_backward)

    def end_forward(self, *, training: bool) -> None:
        """The model has returned: take part in what other ranks still gather for it."""
        script = self._script(training=training)
        for block in script.returned():
            self._pass_by(block, training=training)
        if self._gathers and not script.is_followed and self._passes.current.op is None:
            self._post_backward.rounds.finish(self._post_backward if training else NoGradients(), "forward")

    def learn(self, ended: Pass, *, reduces: bool) -> bool:
        """Make a program of a training pass that was recorded to its end, unless something new was found in it.

        All ranks call. Returns whether there is one.
        """
        script = ended.script
        if script.is_finished():
            return False
        if ended.op is not None:
            return not ended.must_record_again and self._programs.learn_training(script, reduces=reduces)
        trace = self._agreed(script, script.recorded(), ended, training=True)
        return trace is not None and self._programs.learn_training(script, trace, reduces=reduces)

    def learn_evaluation(self) -> bool:
        """The same of an evaluation. All ranks call, unless it gathers nothing."""
        script = self._evaluation.script
        if script.is_finished():
            return False
        trace = self._agreed(script, tuple(script.trace), self._passes.current, training=False)
        return trace is not None and self._programs.learn_evaluation(script, trace)

    def _agreed(self, script: Script, trace: Trace, ended: Pass, *, training: bool) -> Trace | None:
        """The path of all ranks together, from what `script` has recorded on each in the pass that has `ended`. `None`
        if no program can be made of it."""
        is_complete = not ended.must_record_again
        if not training and not self._gathers:
            return trace if is_complete else None
        trace = extended(trace, script.unlearned)
        # Those are gathered at other moments from now on, so that what was recorded of them says nothing.
        script.unlearned = tuple(moment for moment in trace if moment.unit not in ended.unforeseen)
        gathered = [moment for moment in trace if not self._units[moment.unit].comes_alone]
        is_lasting = not (self._gathers and self._drops_layers())
        mine = [is_complete and is_lasting and not script.is_too_long, _digest(trace), _digest(gathered)]
        told = [json.loads(message) for message in self._exchange(json.dumps(mine).encode())]
        if not all(can_learn for can_learn, *_ in told):
            return None
        if self._gathers and (self.may_differ or len({digest for *_, digest in told}) > 1):
            self._note_difference()
            return None
        if len({digest for _, digest, _ in told}) == 1:
            return trace
        texts = [json.loads(one) for one in self._exchange(json.dumps(list(map(str, trace))).encode())]
        return merged([tuple(map(Moment.parse, text)) for text in texts])

    def _note_difference(self) -> None:
        if self.may_differ:
            return
        self.may_differ = True
        self._passes.forget_programs()
        self._evaluation.forget_programs()
        _log.info(
            "Ranks called different modules, so from here on a gather waits until all ranks have come to it or to the "
            "end of their pass. Say paths: by_rank in the plan if that is so from the start."
        )

    def _pass_by(self, block: BoundBlock, *, training: bool) -> None:
        if training:
            self._post_backward.pass_by(block)
        else:
            unit = self._units[block.moment.unit]
            taken = self._evaluation.script.take(block.moment)
            self._gathering.run(taken, block.moment, unit, self._passes.current, training=False)

    def _script(self, *, training: bool) -> Script:
        return self._passes.current.script if training else self._evaluation.script


def _digest(trace: Sequence[Moment]) -> str:
    return hashlib.sha256("\n".join(map(str, trace)).encode()).hexdigest()
