"""Optimizers that are not elementwise, and what they ask of whoever holds the rest of a parameter.

[Note: pieces] A cooperative optimizer is an ordinary `torch.optim.Optimizer`: on a plain model it sees whole
parameters and asks `Alone`, which has every answer itself. On a sharded one its groups hold flat pieces, perhaps empty,
and the same questions go to the other ranks (`peers.py`). The arithmetic is the same code either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.program import Update

Tensor = torch.Tensor
Params = Any
"""Parameters, named parameters, or dicts of them: what every torch optimizer takes."""

Make = Callable[[nn.Parameter], Tensor]
"""What this rank's elements of a parameter add to its matrix, flat, in the dtype of the iteration."""
Compute = Callable[[nn.Parameter, Tensor], Tensor]
"""From a whole matrix of the parameter to another of its shape. May overwrite the first."""
Apply = Callable[[nn.Parameter, Tensor], None]
"""Update this rank's elements of a parameter with the same elements of the result."""


class Peers(Protocol):
    """What an optimizer may ask about parameters of which it holds pieces."""

    def shape_of(self, param: nn.Parameter) -> tuple[int, ...]:
        """The whole parameter's."""
        ...

    def start_of(self, param: nn.Parameter) -> int:
        """The first element of the whole, flattened parameter that lies here."""
        ...

    def sum_squares(self, params: Sequence[nn.Parameter], squares: Tensor) -> Tensor:
        """`squares`, a row of sums over the local elements for each parameter, summed over all. All ranks call."""
        ...

    def each_matrix(self, params: Sequence[nn.Parameter], make: Make, work: Compute, apply: Apply) -> None:
        """For each of `params` with a gradient: make pieces, work on the whole, apply to pieces. All ranks call."""
        ...


class Alone:
    """Every parameter is whole and here."""

    def shape_of(self, param: nn.Parameter) -> tuple[int, ...]:
        return tuple(param.shape)

    def start_of(self, param: nn.Parameter) -> int:  # noqa: ARG002
        return 0

    def sum_squares(self, params: Sequence[nn.Parameter], squares: Tensor) -> Tensor:  # noqa: ARG002
        return squares

    def each_matrix(self, params: Sequence[nn.Parameter], make: Make, work: Compute, apply: Apply) -> None:
        for param in params:
            if param.grad is not None:
                apply(param, work(param, make(param).view(param.shape)).reshape(param.shape))


class Cooperative(torch.optim.Optimizer):
    """Base of optimizers that say what they need instead of being asked whether they are elementwise."""

    peers: Peers = Alone()
    own_settings: frozenset[str] = frozenset()
    """Settings of a group that say how this run keeps its states, and do not come back from a checkpoint."""

    def update_of(self, param: nn.Parameter, group: Mapping[str, Any]) -> Update:
        """What updating the whole `param` with the settings of `group` keeps and needs."""
        raise NotImplementedError

    def dense_state(self, param: nn.Parameter) -> dict[str, Any]:
        """The state of `param` as the plain optimizer has it: tensors of its shape, and numbers."""
        return dict(self.state.get(param, {}))

    def kept_state(self, param: nn.Parameter) -> dict[str, Any]:
        """What `dense_state` returns, but for `narrow_keys` as they are kept: nothing is widened to be looked at."""
        return self.dense_state(param)

    def narrow_keys(self, param: nn.Parameter) -> frozenset[str]:  # noqa: ARG002
        """States of `param` that are kept narrower than the plain optimizer has them, each element by itself."""
        return frozenset()

    def accept_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Take over what `dense_state` returns."""
        self.state[param] = dict(state)

    def members(self) -> Iterator[tuple[int, nn.Parameter, dict[str, Any]]]:
        """Every parameter with its number, which is the same on all ranks, and its group."""
        every = ((param, group) for group in self.param_groups for param in group["params"])
        for number, (param, group) in enumerate(every):
            yield number, param, group


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss that `step(closure)` returns."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
