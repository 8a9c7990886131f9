"""Losses that modules keep as attributes, for a model or loop that adds them up over its layers.

Only the last stage has a loss, and it has only its own layers, so the others' would be left out without notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.runtime import tensors_in

Tensor = torch.Tensor


class LossesAside:
    """The losses that some modules keep during a forward. `modules` are named."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = {
            f"{path}.{name}" if name else path: inner
            for path, module in modules.items()
            for name, inner in module.named_modules()
        }
        self._before = [tensor for _, _, tensor in self._kept()]

    def require_none(self, output: object) -> None:
        """Raise `ModelError` if modules keep a new loss, of which `output` is not made."""
        known = {id(tensor) for tensor in self._before}
        fresh = [one for one in self._kept() if id(one[2]) not in known]
        if not fresh:
            return
        nodes = _nodes([tensor.grad_fn for tensor in tensors_in(output)])
        for path, name, tensor in fresh:
            if tensor.grad_fn not in nodes:
                raise ModelError(
                    f"{path} keeps {name}, a loss with gradients, in its forward, but a pipeline's loss is computed on "
                    f"the last stage, which cannot add those of other stages. detach() it if it is only recorded, let "
                    f"the module return it within its activation, or leave the axis 'pp' out of the mesh; experts can "
                    f"be balanced without a loss: bias_rate of shardwise.experts.MoE."
                )

    def _kept(self) -> Iterator[tuple[str, str, Tensor]]:
        for path, module in self._modules.items():
            kept = {name: value for name, value in vars(module).items() if name not in _OWN_OF_TORCH}
            for name, value in {**kept, **module._buffers}.items():
                for tensor in tensors_in(value):
                    if tensor.numel() == 1 and tensor.grad_fn is not None:
                        yield path, name, tensor


_OWN_OF_TORCH = frozenset(vars(nn.Module()))


def _nodes(roots: Sequence[Any]) -> set[Any]:
    """All nodes of autograd's graph under `roots`."""
    found: set[Any] = set()
    left = [node for node in roots if node is not None]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions if following is not None]
    return found
