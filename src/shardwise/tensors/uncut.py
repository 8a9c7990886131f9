"""`model.state_dict()` and `model.load_state_dict()` of a model whose parameters a model axis cuts.

[Note: uncut states] A parameter itself is this rank's part, which its module's forward computes with. What leaves the
model, or comes into it, under the parameter's name is the tensor of the unsplit model: files of it are read by
anybody, and loaded into any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from shardwise.placement import Slot
from shardwise.storage import part_of
from shardwise.tensors.handles import Home, Whole
from shardwise.tensors.use import use

Tensor = torch.Tensor


class CutHome(Home, Protocol):
    """Where a parameter is of which other ranks have other parts."""

    @property
    def slot(self) -> Slot: ...

    def assembled(self, part: Tensor) -> Tensor:
        """The tensor of the unsplit model, of which this rank has `part`. All ranks call."""
        ...

    def uncut(self) -> Whole:
        """Stands for that tensor."""
        ...


@dataclass(frozen=True)
class UncutSource:
    """The tensor of the unsplit model of which this rank has a part: a `Source`. Ranks along the model axis, too, read
    and write it together."""

    home: CutHome

    @property
    def name(self) -> str:
        return self.home.name

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.home.require_open()
        return use(func, args, kwargs)

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        with self.home.opened() as part:
            whole = self.home.assembled(part)
        yield whole

    def take_over(self, values: Tensor) -> None:
        self.home.take_over(part_of(values, self.home.slot.box).contiguous())

    def scale(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:  # noqa: ARG002
        return False

    def norm(self, norm_type: float) -> float | None:  # noqa: ARG002
        return None

    def refuse(self, what: str) -> NoReturn:
        self.home.refuse(what)


def hang_uncut_states(model: nn.Module, home_of: Callable[[object], CutHome | None]) -> Callable[[], None]:
    """From now on states of `model` and of its modules are those of the unsplit model. `home_of` says of a parameter
    where it is, if it is cut. Returns what ends that."""
    hooks = []
    for module in model.modules():
        homes = {name: home for name, param in module._parameters.items() if (home := home_of(param))}
        if homes:
            hooks.append(module.register_state_dict_post_hook(_Give(homes)))  # type: ignore[no-untyped-call]
            hooks.append(module.register_load_state_dict_pre_hook(_Take(homes)))  # type: ignore[no-untyped-call]

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


class _OfModule:
    """A hook of a module some of whose parameters are cut. Copies of the model have whole parameters of their own."""

    def __init__(self, homes: Mapping[str, CutHome]) -> None:
        self._homes = homes

    def __deepcopy__(self, memo: object) -> _OfModule:
        return type(self)({})


class _Give(_OfModule):
    """Puts unsplit tensors into what a module says of its state. With `keep_vars` it stays the parameters."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, home in self._homes.items():
            given = state.get(prefix + name)
            if given is not None and given is not module._parameters[name]:
                state[prefix + name] = home.uncut()


class _Take(_OfModule):
    """Leaves this rank's parts of what a module is to load."""

    def __call__(self, _: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
        errors: list[str] = more[-1]  # torch raises them all at its end
        for name, home in self._homes.items():
            value = state.get(prefix + name)
            if not isinstance(value, Tensor):
                continue
            if tuple(value.shape) == home.slot.whole_shape:
                state[prefix + name] = part_of(value.clone() if isinstance(value, Whole) else value, home.slot.box)
                continue
            errors.append(
                f"size mismatch for {prefix}{name}: the state has {list(value.shape)}, and the unsplit model, whose "
                f"states are loaded on every rank, {list(home.slot.whole_shape)}."
            )
            del state[prefix + name]
