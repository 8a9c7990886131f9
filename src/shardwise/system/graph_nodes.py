"""Nodes of autograd's graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_OF_STAGES = "shardwise: a call of a model in pipeline stages"
"""The key in the metadata of such a node."""


def nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """All nodes from which `tensors` come, each once."""
    seen: set[Any] = set()
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [other for other, _ in node.next_functions]


def note_stages(node: Any) -> None:
    """`node` is a call of a model in pipeline stages: it has no parameters among its inputs, and its backward gives all
    stages their gradients."""
    node.metadata[_OF_STAGES] = True


def is_of_stages(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of `tensors` comes from such a call."""
    return any(_OF_STAGES in node.metadata for node in nodes_of(tensors))
