"""State dicts for `torch.distributed.checkpoint.state_dict`.

Its functions are called by all ranks, but with `full_state_dict` and `cpu_offload` rank 0 alone reads what
`model.state_dict()` gives it, and so does a `dcp.save` that divides the tensors among ranks. There the values of a
sharded model have to be plain tensors, which all ranks read while the state dict is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise.sharded.at_rest.handles import Whole
from shardwise.system.torch_functions import is_called_within

_MODULE = "torch.distributed.checkpoint.state_dict"


def give_values_to_torch(model: nn.Module) -> Callable[[], None]:
    """Let torch's functions find values in the state dict of `model`. Returns a function that undoes this."""
    return model.register_state_dict_post_hook(_read).remove  # type: ignore[no-any-return]


def _read(_: nn.Module, state: dict[str, Any], *__: object) -> None:
    """All ranks call, if torch does."""
    if is_called_within(_MODULE):  # torch calls `state_dict()` as anybody does
        for name, value in state.items():
            if isinstance(value, Whole):
                state[name] = value.clone()
