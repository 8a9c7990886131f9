"""The moves of one flat buffer, between memory and collectives.

Each action of a program on a flat buffer is carried out by the method `verb_subject` of its `ParamMover` or
`GradMover`, with the effect given in `program/effects.py`. Methods that make or free the whole buffer are idempotent: a
buffer that is whole is not gathered again.
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
    """The moves of one flat buffer on this rank."""

    def __init__(self, flat: Flat, collectives: Communicator, groups: Mapping[str, Group]) -> None:
        self.params = ParamMover(flat, collectives, groups)
        self.grads = GradMover(flat, collectives, groups)

    def method(self, action: Action) -> Callable[[], None]:
        """The method that carries out `action`, found by its verb and subject."""
        for part in (self.params, self.grads):
            method: Callable[[Action], None] | None = getattr(part, f"{action.verb}_{action.subject}", None)
            if method is not None:
                return partial(method, action)
        raise ProgramError(f"The runtime has no method for '{action}'.")

    def abandon(self) -> None:
        """Wait for transfers under way and forget them."""
        self.params.abandon()
        self.grads.abandon()
