"""Which layers of a `PipelineModule` are on which stage: its `partition_method`."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import nn

from shardwise.errors import ConfigError
from shardwise.parallel.pipeline.stage_layout import balanced
from shardwise.system.even_parts import even_bounds

_BY_ENGINE = ("parameters", "best")
_BY_TYPE = "type:"


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Any) -> Any:
        return self.function(value)


def check_method(method: str) -> None:
    """Raise `ConfigError` for a method that is not supported."""
    if method.lower() in (*_BY_ENGINE, "uniform"):
        return
    if method.lower().startswith(_BY_TYPE):
        try:
            re.compile(method[len(_BY_TYPE) :])
        except re.error as error:
            raise ConfigError(f"partition_method is {method!r}, which is no regular expression: {error}.") from error
        return
    raise ConfigError(
        f"partition_method is {method!r}; it must be 'parameters', 'best', 'uniform' or 'type:REGEX'. List other "
        f"stages in a shardwise plan: pipeline: {{stages: [[...], [...]]}}."
    )


def stages_of(layers: nn.Sequential, method: str, num_stages: int, loss_fn: object = None) -> list[list[str]] | None:
    """The names of each stage's layers that have parameters; `None` if the engine is to choose.

    `uniform` gives stages equal numbers of layers; `type:REGEX` equal numbers of layers whose class, or function,
    matches, ignoring case. Where numbers cannot be equal, earlier stages have one more. A `loss_fn` with parameters is
    on the last stage, which has a layer too: a stage begins with a module that the model's forward calls.
    """
    sizes = [_numel(layer) for layer in layers]
    of_loss = _numel(loss_fn) if isinstance(loss_fn, nn.Module) else 0
    numbers = list(range(len(layers)))
    if method.lower() in _BY_ENGINE:
        counted = [number for number in numbers if sizes[number]]
        if not of_loss or num_stages == 1 or len(counted) < num_stages:
            return None
        costs = [sizes[number] for number in counted]
        costs[-1] += of_loss
        firsts = [counted[cut] for cut in balanced(costs, num_stages)]
    else:
        counted = numbers
        if method.lower() != "uniform":
            pattern = re.compile(method[len(_BY_TYPE) :], re.IGNORECASE)
            counted = [number for number in numbers if pattern.search(_type_of(layers[number]))]
        if len(counted) < num_stages:
            raise ConfigError(
                f"partition_method {method!r} counts {len(counted)} layers, too few for {num_stages} stages. Use fewer "
                f"stages, or 'parameters'."
            )
        firsts = [counted[start] for start in even_bounds(len(counted), num_stages)[1:-1]]
    stages = [range(start, stop) for start, stop in pairwise([0, *firsts, len(layers)])]
    names = [[str(number) for number in stage if sizes[number]] for stage in stages]
    names[-1] += ["loss_fn"] if of_loss else []
    return names


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _type_of(layer: nn.Module) -> str:
    """The name of a layer's class, or of the function that it calls."""
    function = layer.function if isinstance(layer, Function) else layer
    return getattr(function, "__name__", type(function).__name__)
