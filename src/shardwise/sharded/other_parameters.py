"""Parameters that a loss trains beside the engine's."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import nn

from shardwise.sharded.at_rest.handles import Resting
from shardwise.system.graph_nodes import nodes_of

_log = logging.getLogger("shardwise")


def tell_of_others(loss: torch.Tensor) -> None:
    """Warn if `loss` trains parameters that no engine has, such as a temperature, or class centres, of a module of
    their own with a plain optimizer: every rank has gradients of its own samples for them, and no error follows."""
    others = {param for param in _parameters_of(loss) if not isinstance(param, Resting)}
    if others:
        shapes = ", ".join(sorted(str(list(param.shape)) for param in others)[:3])
        _log.warning(
            "The loss also trains %d parameters that no engine has, of shapes %s: each rank has gradients of its own "
            "samples for them, so they will differ. Shard both modules as one, sw.shard(nn.ModuleList([model, other]), "
            "...), of which each is called as before; or average these gradients in the loop.",
            len(others),
            shapes,
        )


def _parameters_of(loss: torch.Tensor) -> Iterator[nn.Parameter]:
    """Those at the ends of its graph, each once or more."""
    for node in nodes_of([loss]):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            yield leaf
