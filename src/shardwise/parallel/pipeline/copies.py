"""Of which parameter of the whole model a tensor is a copy.

[Note: pairs of copies] `zip(ema.parameters(), model.parameters())` pairs those of a whole model with those of this
rank's stages, which begin in the middle. No error would follow where shapes agree. A copy that was made of the model
before it was sharded, or that has loaded the same values, is known by them: a few numbers of each parameter, up to a
factor, because an average is scaled before it is added to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from shardwise.init.deferred import is_deferred
from shardwise.memory import is_dense

Tensor = torch.Tensor
Trace = tuple[float, ...]
_NUM_VALUES = 8
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Copies:
    """The first values of a whole model's parameters, by name, as far as they tell one from another."""

    traces: Mapping[str, Trace] = field(repr=False)
    shapes: Mapping[str, torch.Size] = field(repr=False)
    _compared: set[tuple[str, int]] = field(default_factory=set, repr=False)
    """Names with the addresses of what was taken for copies of them: each is looked at once."""

    @classmethod
    def of(cls, model: nn.Module) -> Copies:
        traces = {name: _trace(param) for name, param in model.named_parameters()}
        known = {name: trace for name, trace in traces.items() if trace is not None}
        return cls(known, {name: param.shape for name, param in model.named_parameters() if name in known})

    def other_than(self, name: str, tensor: Tensor) -> str | None:
        """The parameter of which `tensor`, which code takes for a copy of `name`, is one."""
        if (name, tensor.data_ptr()) in self._compared:
            return None
        self._compared.add((name, tensor.data_ptr()))
        found = _trace(tensor)
        shaped = (one for one, shape in self.shapes.items() if shape == tensor.shape)
        alike = [] if found is None else [one for one in shaped if _are_alike(self.traces[one], found)]
        return alike[0] if alike and name not in alike else None


def _trace(tensor: Tensor) -> Trace | None:
    """Some values of a tensor, the largest of them 1; `None` if it has none, or they are all alike."""
    if tensor.is_meta or not is_dense(tensor) or not tensor.is_floating_point() or tensor.numel() < _NUM_VALUES:
        return None
    if is_deferred(tensor) or not tensor.untyped_storage().nbytes():  # still to be made, or recorded as such
        return None
    picked = tensor.detach().flatten()[:: tensor.numel() // _NUM_VALUES][:_NUM_VALUES].tolist()
    largest = max(map(abs, picked))
    if not max(picked) - min(picked) > _ROUNDING * largest:
        return None
    return tuple(value / largest for value in picked)


def _are_alike(one: Trace, other: Trace) -> bool:
    return all(abs(left - right) < _ROUNDING for left, right in zip(one, other, strict=True))
