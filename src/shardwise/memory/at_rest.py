"""The class of parameters while nothing computes with them.

[Note: parameters at rest] Between the computations that use it, a parameter has another class, made by
`sharded/at_rest`: a subclass of its own class that defines what an access means. So a freed parameter cannot be read by
mistake, and while a module computes nothing intercepts accesses. PyTorch's lazy parameters change their class in the
same way.

Alternatives: a permanent subclass of tensors, as in FSDP2, costs Python in every operation of a forward. Pointing
`param.data` elsewhere takes 0.9 us where changing the class takes 0.19, and on another device removes autograd's hooks.
A guard on the storage, which torch has privately, is missing in CPU builds. Protected pages end in a signal, not in an
error. Changing the classes of a block of 16 parameters and back takes 6 us.

[Note: what asks no tensor] `torch.tensor(p)`, `torch.Tensor(p)`, `other.new_tensor(p)`,
`torch.as_tensor(p, dtype=...)`, `torch.nested.nested_tensor([p])`, functions compiled by torch.jit, and
`torch.vmap(f)(p)`, `torch.func.grad(f)(p)` and `vjp(f, p)`, which wrap what they are given, look at `p` in C++, below
`__torch_function__`, and nothing can refuse them there (torch 2.13):
- the operator that they call (`detach`, `_to_copy`) asks Python only if the tensor has the dispatch key for it, which
  is set when a tensor is made, and never by giving it another class;
- a mode that would see them sees every operation of the loop, also between modules, at about 1 us for each;
- wrapping these names in torch's namespace makes `torch.jit.script` fail for any function that uses one
  ("Compiled functions can't take variable number of arguments"), and misses `from torch import tensor`.
So what they find is decided by the memory. A freed buffer has NaN ([Note: a freed buffer can be read]). Where ranks of
a host share it ([Note: resting in common]), it has the parameters, of which another rank may still be writing its part
between a step and the next forward. NaN there, too, would take two more mappings for each gather: 12 us of processor
time where mapping, reading and forgetting 16 KiB took 6. `torch.tensor` and `new_tensor` warn that
`sourceTensor.detach().clone()` is better, and here that is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn


class AtRest:
    """Base of the classes that parameters have at rest."""

    __slots__ = ()


def is_at_rest(param: object) -> bool:
    """Whether `param` belongs to an engine and no computation is using it."""
    return isinstance(param, AtRest)


class ParamGuard:
    """Switches the parameters of one flat buffer between their own class and the one that intercepts accesses at
    rest."""

    def __init__(self) -> None:
        self._plain_types: tuple[tuple[nn.Parameter, type], ...] = ()
        self._resting_types: tuple[tuple[nn.Parameter, type], ...] = ()
        self.is_resting = False
        """Whether they have the class for parameters at rest now."""

    def begin(self, params: Sequence[nn.Parameter], resting_type: Callable[[type], type]) -> None:
        """From now on `params` at rest have the class that `resting_type` makes of their own."""
        self._plain_types = tuple((param, type(param)) for param in params)
        self._resting_types = tuple((param, resting_type(plain)) for param, plain in self._plain_types)
        self.rest()

    def end(self) -> None:
        """Give parameters their own class for good."""
        self.wake()
        self._resting_types = ()

    def wake(self) -> None:
        """A computation is about to use the parameters, which are whole."""
        if self.is_resting:
            self.is_resting = False
            for param, plain in self._plain_types:
                param.__class__ = plain

    def rest(self) -> None:
        """The computation is over."""
        if self._resting_types and not self.is_resting:
            self.is_resting = True
            for param, resting in self._resting_types:
                param.__class__ = resting
