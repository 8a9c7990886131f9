"""Communication beside the computation, and the waits that this makes necessary."""

from __future__ import annotations

from collections import deque

from shardwise.program.action import ALL_FLATS, END_OF_BACKWARD, Action, Block, Program, Stream, Subject


def overlap(program: Program) -> Program:
    """Put gathers and reductions on streams of their own.

    The computation waits for a gather in the block of the unit's own moment. A reduction is waited for
    when the next one is about to start, so that at most two gradient buffers live; one over several
    axes takes a step at each such point. By the end of the backward all are done.
    """
    return _overlap_reductions(_overlap_gathers(program))


def serial(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Every communication waited for at once: how a step runs that has no program yet."""
    return tuple(step for action in actions for step in _with_wait(action, gathered="full"))


def pipelined(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """Each communication is waited for once the next one, of another flat buffer, is on its way."""
    due: list[Action] = []
    waiting: Action | None = None
    for action in actions:
        started, *wait = _with_wait(action, gathered="param")
        if waiting and (waiting.flat == action.flat or action.flat == ALL_FLATS):
            due.append(waiting)
            waiting = None
        due.append(started)
        if wait:
            due += [waiting] if waiting else []
            waiting = wait[0]
    return (*due, *([waiting] if waiting else []))


def _with_wait(action: Action, gathered: Subject) -> tuple[Action, ...]:
    """`gathered` is what a gather makes: the whole buffer before a unit computes, the resting one after a step."""
    if action.verb == "gather":
        return (action.on("gather"), Action("wait", action.flat, gathered))
    if action.subject == "grad" and action.verb != "wait":
        stream: Stream = "reduce" if action.communicates else "compute"
        return (action.on(stream), Action("wait", action.flat, "grad"))
    return (action,)


def _overlap_gathers(program: Program) -> Program:
    """Mark gathers; the last of a bundle is waited for where its unit computes."""
    flying: dict[str, None] = {}
    blocks = []
    for index, block in enumerate(program):
        actions: list[Action] = []
        arrived = [flat for flat in flying if _is_home(program, index, flat)]
        for flat in arrived:
            actions.append(Action("wait", flat, "full"))
            del flying[flat]
        for action in block.actions:
            if action.verb != "gather":
                actions.append(action)
                continue
            if action.flat in flying:  # the next axis of the same bundle
                actions.append(Action("wait", action.flat, "full"))
            actions.append(action.on("gather"))
            flying[action.flat] = None
        home = [flat for flat in flying if _is_home(program, index, flat)]
        waits = [Action("wait", flat, "full") for flat in home]
        for flat in home:
            del flying[flat]
        blocks.append(Block(block.moment, _waits_before_gathers_of_others(actions, waits)))
    return tuple(blocks)


def _is_home(program: Program, index: int, flat: str) -> bool:
    """Whether the unit that owns `flat` computes right after block `index`."""
    moment = program[index].moment
    return moment.edge == "before" and _is_of(flat, moment.unit)


def _is_of(flat: str, unit: str) -> bool:
    """A unit's flat buffers bear its name, and a label behind a colon. A module's own name may hold colons too."""
    return flat == unit or flat.startswith(f"{unit}:")


def _waits_before_gathers_of_others(actions: list[Action], waits: list[Action]) -> tuple[Action, ...]:
    """What this block's unit gathers itself is issued first and waited for last."""
    own = {wait.flat for wait in waits}
    first = [action for action in actions if action.flat in own]
    rest = [action for action in actions if action.flat not in own]
    return (*first, *rest, *waits)


def _overlap_reductions(program: Program) -> Program:
    """Start a reduction where its gradients are complete, go on with it where the next one starts.

    A unit whose backward opens again, as in reentrant checkpointing, has its earlier reduction ended first.
    """
    pending: deque[deque[Action]] = deque()
    blocks = []
    for block in program:
        chains = _chains(block.actions)
        actions = [action for action in block.actions if action.subject != "grad"]
        if block.moment.edge == "before":
            reopened = deque(chain for chain in pending if _is_of(chain[0].flat, block.moment.unit))
            pending = deque(chain for chain in pending if chain not in reopened)
            actions += _advance(reopened, drain=True)
        elif chains or block.moment == END_OF_BACKWARD:
            actions += _advance(pending, drain=block.moment == END_OF_BACKWARD)
        for chain in chains.values():
            actions.append(chain.popleft().on("reduce"))
            pending.append(chain)
            chain.appendleft(Action("wait", actions[-1].flat, "grad"))
        blocks.append(Block(block.moment, tuple(actions)))
    return tuple(blocks)


def _chains(actions: tuple[Action, ...]) -> dict[str, deque[Action]]:
    chains: dict[str, deque[Action]] = {}
    for action in actions:
        if action.subject == "grad":
            chains.setdefault(action.flat, deque()).append(action)
    return chains


def _advance(pending: deque[deque[Action]], *, drain: bool) -> list[Action]:
    """Each pending reduction takes its wait and its next step; with `drain`, all of its steps."""
    taken: list[Action] = []
    for _ in range(len(pending)):
        chain = pending.popleft()
        flat = chain[0].flat
        while chain:
            taken.append(chain.popleft())  # the wait
            if not chain:
                break
            taken.append(chain.popleft().on("reduce"))
            chain.appendleft(Action("wait", flat, "grad"))
            if not drain:
                pending.append(chain)
                break
    return taken
