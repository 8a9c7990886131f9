"""Memory for parameters that are unfrozen, or added to an optimizer, after the model was sharded.

[Note: unfrozen later] Memory for gradients and states is planned from `requires_grad` and from the optimizer's groups.
When either changes, the next call of the model, or of a module in it, plans again before its forward. A forward
pre-hook would be too late, because torch has listed the hooks of the old plan by then. So the calls themselves are
replaced until the first of them, and otherwise nothing is in the way. Gradients that the last step has used are dropped
then, because many loops drop them only between forward and backward; a loop that would add to them is stopped at its
next step. Those of parameters that no optimizer had move to the new memory.

As in plain PyTorch, a parameter that is frozen again keeps its states. Its memory stays planned, because nothing says
whether the pause is for good.
"""

from __future__ import annotations

import json
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.comm import DataGroup
from shardwise.errors import StateError, some
from shardwise.memory import Flat
from shardwise.optim import AdoptedOptimizer, Piece
from shardwise.runtime import Runner
from shardwise.sharded.at_rest import Owner
from shardwise.sharded.gradients import Gradients

_CALL = "_call_impl"
_COMPILED = "_compiled_call_impl"
"""What torch's `Module.__call__` looks up on the module: the second, if it is not `None`."""


class Unfreezing:
    """Calls `replan` before the next forward of `model` that has gradients, if parameters have come to train.

    `unread` are the names of parameters whose states were in a checkpoint, and not read because they were frozen.
    """

    def __init__(
        self,
        model: nn.Module,
        owner: Owner,
        optimizer: AdoptedOptimizer | None,
        gradients: Gradients,
        flats: Sequence[Flat],
        runner: Runner,
        unread: set[str],
        replan: Callable[[], object],
    ) -> None:
        self._model = model
        self._owner = owner
        self._optimizer = optimizer
        self._gradients = gradients
        self._flats = flats
        self._runner = runner
        self._unread = unread
        self._replan = replan
        self._is_loading = False
        self._intercepted: list[tuple[nn.Module, Callable[..., Any] | None]] = []
        """Modules whose calls are replaced, and what they had from `Module.compile`."""
        self._stale: set[nn.Parameter] = set()
        """Parameters whose gradients were dropped before the loop has asked for that."""
        self.begins_factors = False
        """Whether the plan is to go on with gradients that are sent as factors."""
        self._unloaded: set[str] = set()
        """Those of `unread` that have memory by now. A step needs their states."""
        known = weakref.ref(self)  # weak, so that an old plan's buffers are freed without a garbage collection
        owner.on_unfrozen = partial(_ask, known)
        if optimizer is not None:
            optimizer.on_added = owner.on_unfrozen
            optimizer.before_load = partial(_replan_now, known)
            optimizer.unread = unread
            if unread:
                self._unloaded = {piece.name for piece in optimizer.pieces if piece.flat.spec.trainable} & unread

    def close(self) -> None:
        intercepted, self._intercepted = self._intercepted, []
        for module, compiled in intercepted:
            module.__dict__.pop(_CALL, None)
            if compiled is not None:
                module.__dict__[_COMPILED] = compiled

    def _intercept(self) -> None:
        if self._intercepted:
            return
        for module in self._model.modules():
            compiled = module._compiled_call_impl
            if hasattr(compiled, "compiles_nothing"):  # of an elastic job, which plans again by itself
                compiled = None
            call: Callable[..., Any] = partial(self._call, module, compiled)
            if "torch._dynamo" in sys.modules:  # a compiler around the model must not trace this
                call = torch.compiler.disable(call)
            module.__dict__[_CALL if compiled is None else _COMPILED] = call
            self._intercepted.append((module, compiled))

    def _call(self, module: nn.Module, compiled: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Any:
        if not self._is_pending:
            self.close()
        elif torch.is_grad_enabled():
            if self.can_plan:
                self._replan()
            else:
                self._owner.require_trainable()
        if compiled is not None:
            return compiled(*args, **kwargs)
        return getattr(type(module), _CALL)(module, *args, **kwargs)

    @property
    def _is_pending(self) -> bool:
        """Whether parameters have come to train that have no memory, or are to be updated in another way."""
        optimizer = self._optimizer
        return (
            self.begins_factors
            or bool(self._owner.unfrozen)
            or (optimizer is not None and bool(optimizer.added or optimizer.changed))
        )

    @property
    def can_plan(self) -> bool:
        """Whether there are such parameters, and it is the time to plan again: nothing runs, and no gradient waits for
        a step."""
        return self._is_pending and not self._runner.is_computing and not self._gradients.wait()

    def begin_factors(self) -> None:
        """Plan again before the next forward, because gradients are to be sent as factors. The same on all ranks."""
        self.begins_factors = True
        self._intercept()

    def replan_now(self) -> bool:
        """Plan again now, if need be, for states that are to be loaded. Returns whether it was done."""
        if not self._is_pending:
            return False
        if not self.can_plan:
            raise StateError(
                "States cannot be loaded now: parameters were unfrozen or added while gradients wait for a step. Take "
                "the step, or call zero_grad(), before."
            )
        self._is_loading = True
        try:
            self._replan()
        finally:
            self._is_loading = False
        return True

    def check(self, peers: DataGroup) -> None:
        """Raise, before planning again, unless all `peers` have unfrozen and added the same, and if its states were in
        what was loaded and not read. All of them call."""
        added = self._optimizer.names_added if self._optimizer is not None else set()
        wanted = sorted(self._owner.unfrozen | added)
        told = [json.loads(message) for message in peers.exchange(json.dumps(wanted).encode(), "unfrozen")]
        odd = next((place for place, theirs in enumerate(told) if theirs != told[0]), None)
        if odd is not None:
            name = min(set(told[0]) ^ set(told[odd]))
            has, has_not = (0, odd) if name in told[0] else (odd, 0)
            raise StateError(
                f"{name} was unfrozen, or added to the optimizer, on rank {peers.rank_at(has)} and not on rank "
                f"{peers.rank_at(has_not)}. Do so on all ranks, before the same forward."
            )
        if not self._is_loading:
            _require_read(self._owner.unfrozen & self._unread)

    def used_gradients(self) -> tuple[set[nn.Parameter], set[str]]:
        """The parameters of optimizers that have gradients which a step has used; and the names of others that have
        gradients, among them those of groups that were added."""
        optimizer = self._optimizer
        had = set() if optimizer is None else {one.param for one in optimizer.pieces} - optimizer.added.keys()
        used, others = set(), set()
        for flat in self._flats:
            for index, (slot, param) in enumerate(zip(flat.slots, flat.params, strict=True)):
                if self._gradients.has(flat, index) and param in had:
                    used.add(param)
                elif self._gradients.has(flat, index):
                    others.add(slot.name)
        return used, others

    def note_dropped(self, params: set[nn.Parameter]) -> None:
        """The gradients of `params` were dropped by us."""
        self._stale = params

    def note_zeroed(self, pieces: Sequence[Piece] | None = None) -> None:
        """The loop has dropped the gradients of `pieces`, or all."""
        if self._stale:
            self._stale = set() if pieces is None else self._stale - {piece.param for piece in pieces}

    def require_memory(self, member: torch.optim.Optimizer) -> None:
        """Raise before a step of `member` that would leave out what the plain one does."""
        if self._optimizer is not None and self._optimizer.added and self._optimizer.awaits_memory:
            raise StateError(
                "A parameter group was added between a forward and its step. Add it before the forward, which makes "
                "memory for its states; now call zero_grad(), and go on."
            )
        if self._unloaded:
            _require_read(self._unloaded & self._unread)
        if self._stale and any(param in self._stale for group in member.param_groups for param in group["params"]):
            raise StateError(
                "Parameters were unfrozen while the gradients of the last step were still there. These have been "
                "dropped, and this loop adds to them: call zero_grad() before you unfreeze."
            )


def _ask(known: weakref.ref[Unfreezing]) -> None:
    mine = known()
    if mine is not None:
        mine._intercept()


def _replan_now(known: weakref.ref[Unfreezing]) -> bool:
    mine = known()
    return mine is not None and mine.replan_now()


def _require_read(lost: set[str]) -> None:
    if lost:
        raise StateError(
            f"The optimizer's states of {some(sorted(lost), 1)} were in what was loaded, but were not read because it "
            f"was frozen then. Unfreeze it before you load them."
        )
