"""Which layers of a `PipelineModule` are on which stage: its `partition_method`."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import nn

from shardwise.errors import ConfigError

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


def stages_of(layers: nn.Sequential, method: str, num_stages: int) -> list[list[str]] | None:
    """The names of each stage's layers that have parameters; `None` if the engine is to choose.

    `uniform` gives stages equal numbers of layers; `type:REGEX` equal numbers of layers whose class, or function,
    matches, ignoring case. Where numbers cannot be equal, earlier stages have one more.
    """
    if method.lower() in _BY_ENGINE:
        return None
    numbers = list(range(len(layers)))
    counted = numbers
    if method.lower() != "uniform":
        pattern = re.compile(method[len(_BY_TYPE) :], re.IGNORECASE)
        counted = [number for number in numbers if pattern.search(_type_of(layers[number]))]
    if len(counted) < num_stages:
        raise ConfigError(
            f"partition_method {method!r} counts {len(counted)} layers, too few for {num_stages} stages. Use fewer "
            f"stages, or 'parameters'."
        )
    size, rest = divmod(len(counted), num_stages)
    firsts = [counted[stage * size + min(stage, rest)] for stage in range(1, num_stages)]
    has_params = [any(True for _ in layer.parameters()) for layer in layers]
    stages = [range(start, stop) for start, stop in pairwise([0, *firsts, len(layers)])]
    return [[str(number) for number in stage if has_params[number]] for stage in stages]


def _type_of(layer: nn.Module) -> str:
    """The name of a layer's class, or of the function that it calls."""
    function = layer.function if isinstance(layer, Function) else layer
    return getattr(function, "__name__", type(function).__name__)
