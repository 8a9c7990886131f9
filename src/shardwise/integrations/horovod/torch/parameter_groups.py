"""Names of an optimizer's parameters, and the groups in which their gradients are reduced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from shardwise.system.even_parts import even_bounds

Parameter = torch.nn.Parameter


class ParameterNames:
    """The names by which ranks match the gradients of parameters."""

    def __init__(self, params: Sequence[Parameter], named_parameters: Iterable[tuple[str, Parameter]] | None) -> None:
        """`params` are the optimizer's trainable parameters.

        Raises `ValueError` if `named_parameters` has two parameters of one name, or does not have all of `params`.
        """
        self._names: dict[Parameter, str] = {}
        if named_parameters is not None:
            self._names = _given_names(named_parameters)
            missing = [tuple(param.shape) for param in params if param not in self._names]
            if missing:
                raise ValueError(
                    f"{len(missing)} parameters of the optimizer are not in named_parameters; the first has shape "
                    f"{missing[0]}."
                )
        self._num_unnamed = 0
        for param in params:
            self.name_of(param)  # numbers unnamed parameters in the order of the optimizer

    @property
    def by_parameter(self) -> dict[Parameter, str]:
        return dict(self._names)

    def name_of(self, param: Parameter) -> str:
        """The parameter's name; a number if it has none. Ranks must add unnamed parameters in the same order."""
        name = self._names.get(param)
        if name is None:
            name = self._names[param] = f"gradient.noname.{self._num_unnamed}"
            self._num_unnamed += 1
        return name


def _given_names(named_parameters: Iterable[tuple[str, Parameter]]) -> dict[Parameter, str]:
    pairs = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter).")
    by_name: dict[str, Parameter] = {}
    for name, param in pairs:
        if by_name.setdefault(name, param) is not param:
            raise ValueError(f"named_parameters has two parameters named '{name}'. Give each a different name.")
    return {param: f"gradient.{name}" for name, param in reversed(by_name.items())}


def gradient_groups(params: list[Parameter], groups: int | Sequence[Sequence[Parameter]]) -> list[list[Parameter]]:
    """`params` in `groups`: lists of parameters, or a number of lists; 0: each parameter is a group.

    Parameters that are not in the lists are groups of one.
    """
    if not groups or not params:
        return [[param] for param in params]
    if isinstance(groups, int):
        count = min(groups, len(params))
        return [params[start:stop] for start, stop in pairwise(even_bounds(len(params), count))]
    known = set(params)
    lists = [[param for param in group if param in known] for group in groups]
    grouped = [param for group in lists for param in group]
    if len(grouped) > len(set(grouped)):
        raise ValueError("A parameter is in two groups.")
    return [group for group in lists if group] + [[param] for param in params if param not in set(grouped)]
