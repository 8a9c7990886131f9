"""The conversion of linear layers and experts under the plan's `fp8`; see [Note: conversions] in
`parallel/conversions.py`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

from shardwise.comm import Line
from shardwise.errors import some
from shardwise.parallel.experts import Experts
from shardwise.parallel.fp8.experts import Fp8Experts, Fp8StackedExperts
from shardwise.parallel.fp8.kernels import require_kernels
from shardwise.parallel.fp8.left_out import sorted_out
from shardwise.parallel.fp8.linear import Fp8Linear
from shardwise.parallel.fp8.recipes import RECIPES
from shardwise.plan import Plan
from shardwise.plan.mesh import SAME_PARAMS_AXES

_CONVERTED = (Fp8Linear, Fp8Experts, Fp8StackedExperts)


@functools.cache
def _in_8_bits(kind: type) -> type:
    """A class like `kind` that multiplies in 8 bits; it keeps the name that users, rules and units know."""
    base = Fp8Experts if issubclass(kind, Experts) else Fp8Linear if issubclass(kind, nn.Linear) else Fp8StackedExperts
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__, "__qualname__": kind.__qualname__})


class Fp8Layers:
    """The conversion of the linear layers of `model`, and of its experts, that gain from 8 bits."""

    communicates = False

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        """Raises `ConfigError` for a pattern of `fp8.skip` that no layer matches."""
        assert plan.fp8.recipe is not None
        self._recipe = RECIPES[plan.fp8.recipe]
        splits_experts = any((plan.mesh or {}).get(axis, 1) != 1 for axis in SAME_PARAMS_AXES)
        self._reasons = sorted_out(model, plan.fp8, splits_experts=splits_experts)
        self._is_compiled = plan.compile is not None
        self._device: torch.device | None = None
        self.what = f"linear layers that multiply in fp8, {self._recipe.name}"

    def takes(self, path: str, module: nn.Module) -> bool:
        return self._reasons.get(path) == "" and not isinstance(module, _CONVERTED)

    def convert(self, module: nn.Module) -> Callable[[], object]:
        kind: type = type(module)
        module.__class__ = _in_8_bits(kind)
        module.__dict__["recipe"] = self._recipe

        def undo() -> None:
            module.__class__ = kind
            module.__dict__.pop("recipe", None)

        return undo

    def check_device(self, device: torch.device) -> None:
        require_kernels(self._recipe.name, device)
        self._device = device

    def connect(self, module: nn.Module, lines: tuple[Line, ...]) -> None:
        """Nothing is sent along replica axes."""

    def note_update(self, module: nn.Module) -> None:
        """Nothing of it is kept."""

    def notes(self) -> tuple[str, ...]:
        """Which layers are left as they are, and why, and what else keeps fp8 from being faster."""
        left: dict[str, list[str]] = {}
        for path, reason in self._reasons.items():
            if reason:
                left.setdefault(reason, []).append(path)
        lines = [f"not in fp8, {reason}: {some(paths, 1)}" for reason, paths in left.items()]
        if len(self._reasons) == sum(map(len, left.values())):
            lines.append("no layer multiplies in fp8: the step is that of a plan without it")
        elif self._device is not None and self._device.type == "cpu":
            lines.append("on CPUs the codes are multiplied in fp32: the same numbers, slower than without fp8")
        elif not self._is_compiled:
            lines.append("compile is not set: rounding then takes several passes, and fp8 may be slower than bf16")
        return tuple(lines)
