"""Is an optimizer elementwise? It is asked, not looked up in a list.

An optimizer that updates each element from that element's own gradient and state may be given any piece of a
parameter. One that looks at a whole matrix (LAMB, Muon, Adafactor) or at all parameters (LBFGS) may not: on
a shard it would compute something else without a word.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError

SHAPE = (4, 6)
NUM_STEPS = 3


def vet(optimizer: torch.optim.Optimizer, model: nn.Module) -> int:
    """Raise `ModelError` unless `optimizer` is elementwise and over parameters of `model`.

    Returns how many states of a parameter's size it keeps, such as 2 for Adam's moments. Changes nothing.
    """
    known = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if param not in known:
                raise ModelError(
                    f"Group {number} of the optimizer has a parameter of shape {tuple(param.shape)} that is not one "
                    f"of the model's. Make the optimizer from model.parameters(), of this same model."
                )
    return require_elementwise(optimizer)


def require_elementwise(optimizer: torch.optim.Optimizer) -> int:
    """Raise `ModelError` unless a whole matrix and its pieces are updated alike, with each group's settings.

    Returns how many states of a parameter's size the optimizer keeps, such as 2 for Adam's moments.
    """
    states = 0
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        start = torch.linspace(-1, 1, 24, dtype=torch.float32).reshape(SHAPE)
        whole = [nn.Parameter(start.clone())]
        pieces = [nn.Parameter(start.flatten()[:7].clone()), nn.Parameter(start.flatten()[7:].clone())]
        try:
            states = max(states, _run(optimizer, group, whole))
            _run(optimizer, group, pieces)
        except Exception as error:  # whatever a foreign optimizer raises, it is not one we can use
            raise ModelError(
                f"{name} cannot update a flat piece of a parameter ({type(error).__name__}: {error}), so its "
                f"state cannot be sharded. Use an elementwise optimizer such as AdamW, SGD or Adagrad."
            ) from error
        together = torch.cat([piece.detach() for piece in pieces]).reshape(SHAPE)
        if not torch.allclose(whole[0].detach(), together, rtol=1e-5, atol=1e-7):
            raise ModelError(
                f"{name} is not elementwise: it updates a matrix differently from its pieces, so sharding its "
                f"state would change the result. Use an elementwise optimizer such as AdamW, SGD or Adagrad."
            )
    return states


def _run(optimizer: torch.optim.Optimizer, group: dict[str, Any], params: list[nn.Parameter]) -> int:
    """A few steps of a twin of `optimizer` on `params`, with this group's settings and fixed gradients.

    Returns how many states of the first parameter's size the twin then keeps.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler may have wrapped the original's
    hooks = {key: type(value)() for key, value in optimizer.__dict__.items() if key.endswith("_hooks")}
    twin.__dict__.update(hooks)
    twin.state = defaultdict(dict)
    twin.param_groups = [{**group, "params": params}]
    numbers = torch.Generator().manual_seed(0)
    for _ in range(NUM_STEPS):
        grads = torch.randn(24, generator=numbers)
        start = 0
        for param in params:
            param.grad = grads[start : start + param.numel()].reshape(param.shape).clone()
            start += param.numel()
        type(twin).step(twin)
    kept = twin.state[params[0]].values()
    return sum(isinstance(value, torch.Tensor) and value.shape == params[0].shape for value in kept)
