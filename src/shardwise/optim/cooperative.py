"""Optimizers that are not elementwise, and the interface through which they reach the rest of a parameter.

[Note: pieces] A cooperative optimizer is an ordinary `torch.optim.Optimizer`. On a plain model it has whole parameters
and asks `Alone`, which answers everything locally. On a sharded one its groups hold flat pieces, perhaps empty, and the
same calls go to the other ranks (`rank_peers.py`). The arithmetic is the same code either way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.optim.quantize import Coded
from shardwise.program import Update

Tensor = torch.Tensor
Params = Any
"""Parameters, named parameters, or dicts of them, as for every torch optimizer."""

SquaresOf = Callable[[Sequence[Tensor]], Tensor]
"""From sums over whole parameters, one vector per parameter, to local sums of squares, one row per parameter."""
Make = Callable[[nn.Parameter], Tensor]
"""This rank's contribution to a parameter's matrix: its elements, flat, in the dtype of the iteration."""
Compute = Callable[[nn.Parameter, Tensor], Tensor]
"""From a whole matrix of the parameter to another of its shape. May overwrite the first."""
Apply = Callable[[nn.Parameter, Tensor], None]
"""Update this rank's elements of a parameter with the same elements of the result."""


class Peers(Protocol):
    """What an optimizer may ask about parameters of which it holds pieces."""

    def shape_of(self, param: nn.Parameter) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        ...

    def start_of(self, param: nn.Parameter) -> int:
        """The index of this rank's first element in the whole, flattened parameter."""
        ...

    def sum_squares(self, params: Sequence[nn.Parameter], squares: Tensor) -> Tensor:
        """`squares`, one row per parameter of sums over the local elements, summed over all ranks. All ranks call."""
        ...

    def sum_in_turn(self, params: Sequence[nn.Parameter], sums: Sequence[Tensor], squares_of: SquaresOf) -> Tensor:
        """The `sums` of each parameter, flat and in fp32, summed over all ranks, then the result of `squares_of` on
        them, as in `sum_squares`. Their sizes are the parameters' `Update.num_sums`. All ranks call."""
        ...

    def each_matrix(self, params: Sequence[nn.Parameter], make: Make, work: Compute, apply: Apply) -> None:
        """For each of `params` with a gradient: make pieces, compute on the whole matrix, apply to pieces. All ranks
        call."""
        ...

    def num_summands(self, param: nn.Parameter) -> int:
        """Of how many ranks' gradients, divided by their number, the gradient is the sum. With more than one, `grad` is
        this rank's summand."""
        ...

    def average(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Replace the values of parameters with summands by their average over the ranks, one bit of which is sent per
        element. All ranks call, with the same parameters."""
        ...

    def forget_residuals(self) -> None:
        """Forget what was not sent of values that have been averaged. All ranks call."""
        ...


class Alone:
    """`Peers` for parameters that are whole on this rank."""

    def shape_of(self, param: nn.Parameter) -> tuple[int, ...]:
        return tuple(param.shape)

    def start_of(self, param: nn.Parameter) -> int:  # noqa: ARG002
        return 0

    def sum_squares(self, params: Sequence[nn.Parameter], squares: Tensor) -> Tensor:  # noqa: ARG002
        return squares

    def sum_in_turn(self, params: Sequence[nn.Parameter], sums: Sequence[Tensor], squares_of: SquaresOf) -> Tensor:  # noqa: ARG002
        return squares_of(sums)

    def each_matrix(self, params: Sequence[nn.Parameter], make: Make, work: Compute, apply: Apply) -> None:
        for param in params:
            if param.grad is not None:
                apply(param, work(param, make(param).view(param.shape)).reshape(param.shape))

    def num_summands(self, param: nn.Parameter) -> int:  # noqa: ARG002
        return 1

    def average(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """There is nobody else."""

    def forget_residuals(self) -> None:
        """Everything was sent."""


class Cooperative(torch.optim.Optimizer):
    """Base of optimizers that declare what they need instead of being probed for elementwise updates."""

    peers: Peers = Alone()
    own_settings: frozenset[str] = frozenset()
    """Group settings that determine how this run stores its states, and are not restored from a checkpoint."""
    changes_update = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises what `check_group` does, and adds nothing then."""
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raise an error for settings or parameters that it cannot update; `group` has all settings."""

    def update_of(self, param: nn.Parameter, group: Mapping[str, Any]) -> Update:
        """What updating the whole `param` with the settings of `group` stores and requires.

        With `changes_update` it may answer otherwise after a step, or once states were loaded. Memory is planned again
        then, before the next forward.
        """
        raise NotImplementedError

    @property
    def num_steps(self) -> int:
        """Steps that its states have seen, if `update_of` depends on them."""
        return 0

    def begin_again(self, num_steps: int) -> None:  # noqa: ARG002
        """Drop all states: those that are accepted next have seen `num_steps` steps, fewer than the present ones if a
        step was undone."""
        self.state = defaultdict(dict)

    def dense_state(self, param: nn.Parameter) -> dict[str, Any]:
        """The state of `param` as the plain optimizer has it: tensors of its shape, and numbers."""
        return dict(self.state.get(param, {}))

    def kept_state(self, param: nn.Parameter) -> dict[str, Any]:
        """`dense_state` with `narrow_keys` in their storage dtype, so that nothing is widened just to be read."""
        return self.dense_state(param)

    def narrow_keys(self, param: nn.Parameter) -> frozenset[str]:  # noqa: ARG002
        """States of `param` that are stored narrower than in the plain optimizer, element by element."""
        return frozenset()

    def coded_keys(self, param: nn.Parameter) -> Mapping[str, Coded]:  # noqa: ARG002
        """States of `param` that are stored as codes, which mean nothing by themselves."""
        return {}

    def accept_state(self, param: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Load what `dense_state` returns."""
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


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`: pieces may be on the host, and messages on the device. Most of the time it is there."""
    return tensor if tensor.device == device else tensor.to(device)
