"""Communication and copies beside the computation, and the waits that this requires."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwise.errors import ProgramError
from shardwise.program.action import AFTER_STEP, ALL_FLATS, END_OF_BACKWARD, Action, Block, Moment, Program, by_flat
from shardwise.program.effects import Buffer
from shardwise.program.low_rank import FACTORING, MESSAGE_OF_GRADIENTS
from shardwise.program.spec import UnitSpec

_GATHERING = ("gather", "fetch")


def overlap(program: Program, grad_bytes: Mapping[str, int] | None = None) -> Program:
    """Put gathers and reductions on their own streams. `grad_bytes` are those of gradients, by flat buffer.

    The computation waits for a gather in the block of the unit's own moment. A reduction is waited for when the next
    one is about to start, or, of codes, when it has, so that at most two gradient buffers are live; a reduction over
    several axes advances by one axis at each such point. Factors of gradients wait for those of others, whose message
    they share: see [Note: messages of factors] in `low_rank.py`. All are done by the end of the backward.
    """
    return _overlap_reductions(_overlap_gathers(program), grad_bytes or {})


def serial(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Wait for every communication at once: how a step runs that has no program yet."""
    return tuple(step for action, wait in _with_waits(actions) for step in ((action, wait) if wait else (action,)))


def pipelined(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Wait for each communication once the next one, of another flat buffer, has started.

    Actions that are already on a stream have their waits.
    """
    due: list[Action] = []
    waiting: Action | None = None
    for action, wait in _with_waits(actions):
        if waiting and action.flat in (waiting.flat, ALL_FLATS):
            due.append(waiting)
            waiting = None
        due.append(action)
        if wait:
            due += [waiting] if waiting else []
            waiting = wait
    return (*due, *([waiting] if waiting else []))


def pipelined_step(step: Program) -> Program:
    """A step whose communication runs beside it: within each moment, and from one unit's update to the next.

    What was updated on the host is copied to the device while the next unit is updated, and gathered among ranks while
    the one after that is.
    """
    pending: list[_Chain] = []
    blocks = []
    for block in step:
        if not (block.moment.edge == "during" and block.moment.unit):
            drained = _drained(pending) if block.moment.edge == "after" else []
            pending = [] if drained else pending
            blocks.append(Block(block.moment, (*drained, *pipelined(block.actions))))
            continue
        actions = [action for action in block.actions if action.effect.awaited is None]
        moving = by_flat(action for action in block.actions if action.effect.awaited is not None)
        begun = [_Chain.of(steps) for steps in moving.values()]
        for chain in (*begun, *pending):
            actions += chain.advance()
        pending = [chain for chain in (*pending, *begun) if chain.started is not None]
        blocks.append(Block(block.moment, tuple(actions)))
    return tuple(blocks)


def awaited_later(step: Program, units: Iterable[UnitSpec]) -> Program:
    """`step` without the waits that are part of the next pass: see `gathers_behind_step` in `spec.py`."""
    behind = {flat.name for unit in units for flat in unit.flats if flat.gathers_behind_step}

    def stays(block: Block, action: Action) -> bool:
        is_last_wait = (action.verb, action.subject) == ("wait", "param")
        return not (block.moment == AFTER_STEP and is_last_wait and action.flat in behind)

    return tuple(Block(block.moment, tuple(one for one in block.actions if stays(block, one))) for block in step)


def _with_waits(actions: tuple[Action, ...]) -> list[tuple[Action, Action | None]]:
    """Each action on its own stream, with the wait that it needs."""
    goes_on: set[tuple[str, Buffer | None]] = set()
    placed: list[tuple[Action, Action | None]] = []
    for action in reversed(actions):
        effect = action.effect
        if effect.awaited is None or action.stream != "compute":
            placed.append((action, None))
            continue
        key = (action.flat, effect.makes)
        placed.append((_begun(action), _wait(action, is_last=key not in goes_on)))
        goes_on.add(key)
    return placed[::-1]


@lru_cache(maxsize=4096)
def _begun(action: Action) -> Action:
    """It, on the stream on which it goes on beside the computation."""
    return action.on(action.effect.stream)


@lru_cache(maxsize=4096)
def _wait(action: Action, *, is_last: bool) -> Action:
    """The wait for what `action` makes. `is_last`: no further axis follows."""
    awaited = action.effect.awaited
    if awaited is None:
        raise ProgramError(f"'{action}' makes nothing that could be waited for.")
    return Action("wait", action.flat, awaited[is_last])


def _overlap_gathers(program: Program) -> Program:
    """Put gathers on streams; the last of a bundle is waited for where its unit computes."""
    flying: dict[str, dict[str, Action]] = {}
    """By possible unit names: the flat buffers being gathered, and the last gather of each."""
    blocks = []
    for block in program:
        actions = [_wait(last, is_last=True) for last in _arriving(flying, block.moment)]
        if not actions and not any(action.verb in _GATHERING for action in block.actions):
            blocks.append(block)  # most blocks, of which nothing changes
            continue
        for action in block.actions:
            if action.verb not in _GATHERING:
                actions.append(action)
                continue
            for unit in _possible_units(action.flat):
                of_unit = flying.setdefault(unit, {})
                before = of_unit.pop(action.flat, None)
                of_unit[action.flat] = action
            if before is not None:  # `before` gathers the previous axis of the same bundle
                actions.append(_wait(before, is_last=False))
            actions.append(_begun(action))
        waits = [_wait(last, is_last=True) for last in _arriving(flying, block.moment)]
        blocks.append(Block(block.moment, _waits_before_gathers_of_others(actions, waits)))
    return tuple(blocks)


def _arriving(flying: dict[str, dict[str, Action]], moment: Moment) -> list[Action]:
    """The gathers of the unit that computes at `moment`, removed from `flying`."""
    of_unit = flying.get(moment.unit) if moment.edge == "before" else None
    if not of_unit:
        return []
    gathers = list(of_unit.values())
    for gather in gathers:
        for unit in _possible_units(gather.flat):
            flying[unit].pop(gather.flat, None)
    return gathers


@lru_cache(maxsize=4096)
def _possible_units(flat: str) -> tuple[str, ...]:
    """The units that a flat buffer's name may belong to: it is the unit's, perhaps with a label behind a colon, and a
    module's own name may contain colons too."""
    return (*(flat[:end] for end, letter in enumerate(flat) if letter == ":"), flat)


def _waits_before_gathers_of_others(actions: list[Action], waits: list[Action]) -> tuple[Action, ...]:
    """What this block's unit gathers itself is issued first and waited for last."""
    own = {wait.flat for wait in waits}
    first = [action for action in actions if action.flat in own]
    rest = [action for action in actions if action.flat not in own]
    return (*first, *rest, *waits)


@dataclass(eq=False)
class _Chain:
    """The reduction of one flat buffer: the step under way, if there is one, and those to come."""

    steps: deque[Action]
    is_factored: bool = False
    """Whether it sends factors of gradients."""
    started: Action | None = None

    @classmethod
    def of(cls, steps: Sequence[Action]) -> _Chain:
        return cls(deque(steps), any(step.verb in FACTORING for step in steps))

    @property
    def sends_codes(self) -> bool:
        """Whether the step under way does."""
        return self.started is not None and bool(self.started.codes)

    def finish(self) -> tuple[Action, ...]:
        """Finish the step under way, if there is one."""
        if self.started is None:
            return ()
        wait, self.started = _wait(self.started, is_last=not self.steps), None
        return (wait,)

    def start(self) -> tuple[Action, ...]:
        """Start the next step, if there is one."""
        if not self.steps:
            return ()
        self.started = _begun(self.steps.popleft())
        return (self.started,)

    def advance(self) -> tuple[Action, ...]:
        """Finish the step under way, and start the next."""
        return (*self.finish(), *self.start())


def _advanced(chains: Iterable[_Chain]) -> list[Action]:
    """One step of each. Those that send factors take it together, so that these are one message."""
    factored, taken = list[_Chain](), list[Action]()
    for chain in chains:
        if chain.is_factored:
            factored.append(chain)
        else:
            taken += chain.advance()
    for chain in factored:
        taken += chain.finish()
    for chain in factored:
        taken += chain.start()
    return taken


def _overlap_reductions(program: Program, grad_bytes: Mapping[str, int]) -> Program:
    """Start a reduction where its gradients are complete; advance it where the next one starts, or where something else
    has been computed meanwhile, such as the forward of another micro-batch.

    A unit whose backward opens again, as in reentrant checkpointing and in the next micro-batch, has its earlier
    reduction finished first.
    """
    pending: dict[str, _Chain] = {}
    gathering: dict[str, _Chain] = {}
    """Those of `pending` whose factors wait for others."""
    blocks = []
    for block in program:
        chains = _chains(block.actions)
        if not chains and not _goes_on(block.moment, pending):  # most blocks, of which nothing changes
            blocks.append(block)
            continue
        actions = [action for action in block.actions if action.subject != "grad"]
        going_on: list[str] = []
        if block.moment.edge == "before":
            opens = block.moment.unit if block.moment.leaves_gradients else None
            ending = [flat for flat in pending if opens in _possible_units(flat)]
            if not gathering.keys().isdisjoint(ending):
                ending, gathering = [flat for flat in pending if flat in gathering or flat in ending], {}
            actions += _drained([pending.pop(flat) for flat in ending])
        elif chains or block.moment == END_OF_BACKWARD or not block.moment.leaves_gradients:
            if block.moment == END_OF_BACKWARD or not gathering.keys().isdisjoint(chains):
                gathering = {}
            ending = [flat for flat in pending if flat in chains or block.moment == END_OF_BACKWARD]
            actions += _drained([pending.pop(flat) for flat in ending])
            going_on = [flat for flat in pending if flat not in gathering]
        # Codes are made before they are sent, and summed when they have come. So that the link has something to carry
        # meanwhile, the next codes are made before these are waited for, which keeps the memory of these for longer.
        late = _beside_codes(pending)
        actions += _advanced(pending[flat] for flat in going_on if flat not in late)
        actions += _advanced(chains.values())
        actions += _advanced(pending[flat] for flat in going_on if flat in late)
        pending = {flat: chain for flat, chain in (pending | chains).items() if chain.started is not None}
        gathering |= {flat: chain for flat, chain in chains.items() if chain.is_factored}
        if gathering and sum(grad_bytes.get(flat, MESSAGE_OF_GRADIENTS) for flat in gathering) >= MESSAGE_OF_GRADIENTS:
            gathering = {}
        blocks.append(Block(block.moment, tuple(actions)))
    return tuple(blocks)


def _goes_on(moment: Moment, pending: Mapping[str, _Chain]) -> bool:
    """Whether any of the reductions under way is to be advanced at a moment at which none starts."""
    if not pending:
        return False
    if moment.edge != "before":
        return moment == END_OF_BACKWARD or not moment.leaves_gradients
    return moment.leaves_gradients and any(moment.unit in _possible_units(flat) for flat in pending)


def _beside_codes(pending: Mapping[str, _Chain]) -> set[str]:
    """The flat buffers that are being reduced as codes, and the others of their units, whose messages come later."""
    coded = {unit for flat, chain in pending.items() if chain.sends_codes for unit in _possible_units(flat)}
    if not coded:
        return set()
    return {flat for flat in pending if not coded.isdisjoint(_possible_units(flat))}


def _chains(actions: tuple[Action, ...]) -> dict[str, _Chain]:
    if not any(action.subject == "grad" for action in actions):
        return {}
    return {flat: _Chain.of(steps) for flat, steps in by_flat(a for a in actions if a.subject == "grad").items()}


def _drained(chains: Sequence[_Chain]) -> list[Action]:
    """All remaining steps of reductions, each waited for before the next of the same."""
    plain = [chain for chain in chains if not chain.is_factored]
    together = [chain for chain in chains if chain.is_factored]
    taken: list[Action] = []
    for some in (*([chain] for chain in plain), together):
        while any(chain.started is not None or chain.steps for chain in some):
            taken += _advanced(some)
    return taken
