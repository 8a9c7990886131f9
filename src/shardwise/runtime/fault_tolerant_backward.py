"""Backwards called by the user that must survive a fault between ranks.

[Note: a fault inside of autograd] `loss.backward()` is torch's, so an error that our hooks raise inside it comes out of
the user's own line. In a job that goes on when a rank is lost the hooks raise nothing there: from the fault to the end
of that backward every event is dropped and gradients are undefined. The caller that installed this has to make sure
that they are not used. Memory that has been freed reads as NaN, which does no harm.

[Note: a backward after a fault] A fault may also be met between a forward and its backward, in `engine.mean(loss)`. The
ranks have another world then, and the iteration is void. What was computed in the former one is sent back all the same,
and its gradients arrive at parameters of the present one: those events are dropped too.

[Note: recomputed after a fault] A router that is recomputed without its parameters would choose other experts, whose
tensors have other sizes than in the forward, and torch's checkpointing and autograd would raise. Where the plan
recomputes, it does not choose again (`decisions.py`). Where the model does, by torch's own checkpointing, or has
experts that decide for themselves, the error is dropped in a backward of the engine, as it follows from a fault that is
known. Out of `loss.backward()` it comes, and the job restarts.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from shardwise.errors import CommError
from shardwise.memory import Unit
from shardwise.runtime.hooks import Listener, in_backward


class Tolerant:
    """A `Listener` in front of another, which it references weakly."""

    def __init__(self, listener: Listener, on_fault: Callable[[CommError], None], is_void: Callable[[], bool]) -> None:
        """`is_void`: whether a backward changes nothing."""
        self._listener: Listener = weakref.proxy(listener)
        self._on_fault, self._is_void = on_fault, is_void
        self._is_broken = False

    def _report(self, event: Callable[[], None]) -> None:
        if self._is_broken:
            return
        try:
            if not (in_backward() and self._is_void()):
                event()
        except CommError as error:
            if not in_backward():
                raise
            self._is_broken = True
            self._on_fault(error)

    def enter_root(self) -> None:
        self._report(self._listener.enter_root)

    def leave_root(self, *, raised: bool) -> None:
        self._report(lambda: self._listener.leave_root(raised=raised))

    def before_forward(self, unit: Unit) -> None:
        self._report(lambda: self._listener.before_forward(unit))

    def after_forward(self, unit: Unit, *, opaque: bool) -> None:
        self._report(lambda: self._listener.after_forward(unit, opaque=opaque))

    def forward_raised(self, unit: Unit) -> None:
        self._report(lambda: self._listener.forward_raised(unit))

    def before_backward(self, unit: Unit) -> None:
        self._report(lambda: self._listener.before_backward(unit))

    def after_backward(self, unit: Unit) -> None:
        self._report(lambda: self._listener.after_backward(unit))

    def await_graph(self, unit: Unit) -> None:
        self._report(lambda: self._listener.await_graph(unit))

    def await_end(self, unit: Unit) -> None:
        self._report(lambda: self._listener.await_end(unit))

    def end_of_backward(self) -> None:
        self._report(self._listener.end_of_backward)
