"""Adapters of the peft library, saved from pipeline stages by peft's own code.

peft finds what it saves by walking over the model's modules, of which a rank has some only. So it is given a copy of
the whole model without values, made before ranks drop the stages of others. Nothing of peft is imported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.formats.merged_adapters import copied_with
from shardwise.errors import ModelError

_SAVE = "save_pretrained"


class AdaptersOfAllStages:
    """In place of a model's `save_pretrained`, which would leave out the adapters of layers that are elsewhere."""

    def __init__(self, model: nn.Module) -> None:
        """`model` still has all its modules."""
        self.whole = _without_values(model)

    def __deepcopy__(self, memo: object) -> AdaptersOfAllStages:
        """A copy of the model, which is made to be rehearsed, saves nothing."""
        return self

    def attach(self, model: nn.Module) -> None:
        """Answer `model.save_pretrained`, until `detach`."""
        model.__dict__[_SAVE] = self

    def detach(self, model: nn.Module) -> None:
        model.__dict__.pop(_SAVE, None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See peft. Not collective: what is saved comes in `state_dict`, and a rank with an empty one saves nothing."""
        state = kwargs.get("state_dict")
        if state is None:
            raise ModelError(
                "This rank has the adapters of its own pipeline stages only. Call model.save_pretrained(folder, "
                "state_dict=engine.state_dict(rank_0_only=True)) on all ranks. Or engine.save_pretrained(folder, "
                "merge_adapters=True), which writes the merged model."
            )
        return self.whole.save_pretrained(*args, **kwargs) if state else None  # type: ignore[operator]  # peft's method


def with_all_modules(model: nn.Module) -> nn.Module:
    """A model with adapters in pipeline stages as it was before: all modules and names, but no values. `model` itself
    if it is in no stages."""
    saves = model.__dict__.get(_SAVE)
    return saves.whole if isinstance(saves, AdaptersOfAllStages) else model


def _without_values(model: nn.Module) -> nn.Module:
    params = dict(model.named_parameters(remove_duplicate=False))
    copied = copied_with(model, {name: _meta(param) for name, param in params.items()})
    for module in copied.modules():
        buffers = {name: None if one is None else _meta(one) for name, one in module._buffers.items()}
        module.__dict__["_buffers"] = buffers
    return copied


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
