"""What a forward decides by its values, such as which experts its tokens go to, and its recomputation must not decide
otherwise.

[Note: decided once] Sizes of tensors follow from such a decision, and autograd requires those of the forward. A
recomputation may see other values: after a fault between ranks, parameters that are not gathered and messages that have
not come; on devices, sums in another order. So it is not asked again. That also spares what ranks would send for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Decisions:
    """Those of one forward, in their order."""

    def __init__(self) -> None:
        self._made: list[Any] = []
        self._num_asked = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The forward runs inside, and so does each recomputation, on whichever thread."""
        self._num_asked = 0
        token = _of_forward.set(self)
        try:
            yield
        finally:
            _of_forward.reset(token)

    def next(self, decide: Callable[[], Result]) -> Result:
        if self._num_asked == len(self._made):
            self._made.append(decide())
        self._num_asked += 1
        made: Result = self._made[self._num_asked - 1]
        return made


_of_forward: ContextVar[Decisions | None] = ContextVar("decisions of the running forward", default=None)


@torch.no_grad()
def decided(decide: Callable[[], Result]) -> Result:
    """What `decide` returns, without gradients. If the plan recomputes this forward, the recomputation does not call
    it, and gets the same."""
    decisions = None if torch.compiler.is_compiling() else _of_forward.get()
    return decide() if decisions is None else decisions.next(decide)
