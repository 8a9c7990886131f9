"""Names and shapes of the whole model, recorded before ranks drop the stages of others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.pipeline.stage_layout import AXIS, StageLayout

Tensor = torch.Tensor


@dataclass(frozen=True)
class WholeNames:
    """Shapes of the whole model's parameters and persistent buffers, and the other names of tied parameters."""

    shapes: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    state_names: tuple[str, ...]
    """All keys of its `state_dict()`, in order."""

    @classmethod
    def of(cls, model: nn.Module) -> WholeNames:
        first: dict[Tensor, str] = {}
        every = list(model.named_parameters(remove_duplicate=False))
        for name, param in every:
            first.setdefault(param, name)
        kept = model.state_dict(keep_vars=True).keys()
        for name, module in model.named_modules():
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                raise ModelError(
                    f"{name or type(model).__name__} has an extra state (get_extra_state), which this version cannot "
                    f"gather from pipeline stages. Leave the axis {AXIS!r} out of the mesh."
                )
        shapes = {name: tuple(param.shape) for param, name in first.items()}
        shapes |= {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in kept}
        return cls(shapes, {name: first[param] for name, param in every if first[param] != name}, tuple(kept))


def holders_of(model: nn.Module, layout: StageLayout) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks that have each parameter of a whole `model`, by its first name."""
    pp_ranks: dict[Tensor, set[int]] = {}
    for stage, params in enumerate(layout.params_by_stage(model)):
        for param in params:
            pp_ranks.setdefault(param, set()).add(layout.pp_rank_of(stage))
    return {name: tuple(sorted(pp_ranks[param])) for name, param in model.named_parameters()}
