"""The moves of one flat buffer: memory on one side, collectives on the other.

For every action of a program that concerns one flat buffer there is the method `verb_subject` of its `ParamMover` or
`GradMover`, which does what `program/effects.py` says of it. Those that make or drop the whole buffer may be asked
twice: a buffer that is whole already is not gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from shardwise.comm import Communicator, Group
from shardwise.errors import ProgramError
from shardwise.program import Action
from shardwise.runtime.grad_mover import GradMover
from shardwise.runtime.param_mover import ParamMover
from shardwise.storage import Flat


class Mover:
    """What is on its way for one flat buffer on this rank."""

    def __init__(self, flat: Flat, collectives: Communicator, groups: Mapping[str, Group]) -> None:
        self.params = ParamMover(flat, collectives, groups)
        self.grads = GradMover(flat, collectives, groups)

    def method(self, action: Action) -> Callable[[], None]:
        """What does `action`: its verb and subject say which method it is."""
        for part in (self.params, self.grads):
            method: Callable[[Action], None] | None = getattr(part, f"{action.verb}_{action.subject}", None)
            if method is not None:
                return partial(method, action)
        raise ProgramError(f"'{action}' is not something a runtime can do.")

    def abandon(self) -> None:
        """Wait for whatever is on its way and forget it."""
        self.params.abandon()
        self.grads.abandon()
