"""What a plan says in the place of a hook with which torch's DistributedDataParallel sends gradients otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OF_POWERSGD = {
    "matrix_approximation_rank": ("rank", 1),
    "start_powerSGD_iter": ("start_step", 1000),
    "min_compression_rate": ("min_rate", 2),
    "random_seed": ("seed", 0),
}
"""The settings of `PowerSGDState`: their names here, and their defaults."""


def name_of(hook: object) -> str:
    """What a hook is called: that of a function, or of its class."""
    return getattr(hook, "__name__", type(hook).__name__)


def settings_of(state: object) -> dict[str, Any]:
    """Those of a hook's state that `instead_of_hook` reads."""
    return {name: getattr(state, name) for name in _OF_POWERSGD if hasattr(state, name)}


def instead_of_hook(name: str, settings: Mapping[str, Any]) -> str:
    """What to do instead of registering the hook called `name`, as the end of a sentence. `settings` are those of its
    state, by torch's names."""
    words = name.lower().replace("_", "")
    if "powersgd" in words:
        return f"set preset: ddp and powersgd: {{{_powersgd(settings)}}} in the plan"
    if "localsgd" in words:
        return (
            "give the plan's mesh an axis island, such as mesh: {island: 2, dp: 4}, and set islands: {every: 100, "
            "optimizer: {lr: 1, momentum: 0}}, which averages models instead of gradients"
        )
    if "quantization" in words:
        return "set wire: {grad: int8} in the plan"
    if "fp16" in words or "bf16" in words:
        return "set wire: {grad: bf16} in the plan"
    if "withzero" in words or "thenzero" in words:
        return "take the preset zero1"
    if words == "allreducehook":
        return "set nothing: gradients are averaged"
    return (
        "see which of wire, powersgd and islands in the plan sends what it sends; what is no format of messages has "
        "its place between backward and step, where param.grad is the averaged gradient"
    )


def _powersgd(settings: Mapping[str, Any]) -> str:
    always = ("rank", "start_step")
    values = {ours: (settings.get(theirs, default), default) for theirs, (ours, default) in _OF_POWERSGD.items()}
    return ", ".join(f"{key}: {value}" for key, (value, default) in values.items() if key in always or value != default)
