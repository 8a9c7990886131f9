"""Memory for parameters that are unfrozen, or added to an optimizer, after the model was sharded.

[Note: unfrozen later] Memory for gradients and states is planned from `requires_grad` and from the optimizer's groups.
When either changes, the next call of the model plans again, before its forward. A forward pre-hook would be too late,
because torch has listed the hooks of the old plan by then. So the call itself is replaced, once, and otherwise nothing
is in the way. Gradients that the last step has used are dropped then, because many loops drop them only between forward
and backward; a loop that would add to them is stopped at its next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import StateError
from shardwise.gradients import Gradients
from shardwise.optim import AdoptedOptimizer, Piece
from shardwise.tensors import Owner

_CALL = "_call_impl"
"""What torch's `Module.__call__` looks up on the module."""


class Unfreezing:
    """Calls `replan` before the next forward of `model` that has gradients, if parameters have come to train."""

    def __init__(
        self,
        model: nn.Module,
        owner: Owner,
        optimizer: AdoptedOptimizer | None,
        gradients: Gradients,
        replan: Callable[[], object],
    ) -> None:
        self._model = model
        self._owner = owner
        self._optimizer = optimizer
        self._gradients = gradients
        self._replan = replan
        self._stale: set[nn.Parameter] = set()
        """Parameters whose gradients were dropped before the loop has asked for that."""
        owner.on_unfrozen = self._ask
        if optimizer is not None:
            optimizer.on_added = self._ask

    def close(self) -> None:
        self._model.__dict__.pop(_CALL, None)

    def _ask(self) -> None:
        model = self._model

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._has_more:
                self.close()
            elif torch.is_grad_enabled() and self.must_replan:
                self.close()
                self._replan()
            return getattr(type(model), _CALL)(model, *args, **kwargs)

        model.__dict__[_CALL] = call

    @property
    def _has_more(self) -> bool:
        """Whether parameters have come to train that have no memory."""
        return bool(self._owner.unfrozen) or (self._optimizer is not None and bool(self._optimizer.added))

    @property
    def must_replan(self) -> bool:
        """Whether there are such parameters, and no gradient waits for a step."""
        return self._has_more and not self._gradients.wait()

    def used_gradients(self) -> set[nn.Parameter]:
        """The parameters that have gradients which a step has used."""
        if self._optimizer is None or not self._gradients.exist():
            return set()
        return {piece.param for piece in self._optimizer.pieces}

    def note_dropped(self, params: set[nn.Parameter]) -> None:
        """The gradients of `params` were dropped by us."""
        self._stale = params

    def note_zeroed(self, pieces: Sequence[Piece] | None = None) -> None:
        """The loop has dropped the gradients of `pieces`, or all."""
        if self._stale:
            self._stale = set() if pieces is None else self._stale - {piece.param for piece in pieces}

    def require_memory(self, member: torch.optim.Optimizer) -> None:
        """Raise before a step of `member` that would leave out what the plain one does."""
        if self._optimizer is not None and self._optimizer.awaits_memory:
            raise StateError(
                "A parameter group was added between a forward and its step. Add it before the forward, which makes "
                "memory for its states; now call zero_grad(), and go on."
            )
        if any(param in self._stale for group in member.param_groups for param in group["params"]):
            raise StateError(
                "Parameters were unfrozen while the gradients of the last step were still there. These have been "
                "dropped, and this loop adds to them: call zero_grad() before you unfreeze."
            )
