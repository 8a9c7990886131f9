"""What of a model is one of transformers, whose plans and config say how it is split."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

_MARK = "base_model_prefix"
"""An attribute of the classes of their models, and not of their layers."""


def library_model(model: nn.Module) -> nn.Module:
    """`model`, or the model of transformers that it wraps, as a `LightningModule` or a class of one's own does; of
    several beside each other none, because names of modules do not tell them apart."""
    found = list(_outermost(model))
    return found[0] if len(found) == 1 else model


def _outermost(module: nn.Module) -> Iterator[nn.Module]:
    if hasattr(module, _MARK):
        yield module
        return
    for child in module.children():
        yield from _outermost(child)
