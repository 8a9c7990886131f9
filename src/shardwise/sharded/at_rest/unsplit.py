"""`model.state_dict()` and `model.load_state_dict()` of a model whose parameters are split along a model axis.

[Note: unsplit states] The parameter itself is this rank's part, which its module's forward computes with. State dicts
have the tensor of the unsplit model under the parameter's name, both when saved and when loaded: anybody can read files
of it, and load them into any mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from shardwise.errors import CommError
from shardwise.memory import part_of
from shardwise.plan.placement import Slot
from shardwise.sharded.at_rest.handles import Home, Whole
from shardwise.sharded.at_rest.stage_names import InStage
from shardwise.sharded.at_rest.use import use

Tensor = torch.Tensor


class SplitHome(Home, Protocol):
    """The `Home` of a parameter of which other ranks have other parts."""

    @property
    def slot(self) -> Slot: ...

    def assembled(self, part: Tensor) -> Tensor:
        """The tensor of the unsplit model, of which this rank has `part`. All ranks call it."""
        ...

    def unsplit(self) -> Whole:
        """A tensor that stands for it."""
        ...


@dataclass(frozen=True)
class UnsplitSource:
    """The tensor of the unsplit model of which this rank has a part: a `Source`. Ranks along the model axis read and
    write it together as well."""

    home: SplitHome

    @property
    def name(self) -> str:
        return self.home.name

    def use(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.home.require_open()
        return use(func, args, kwargs)

    def recover(self, error: CommError) -> bool:
        return self.home.recover(error)

    @property
    def gathers_again(self) -> None:
        return None

    @property
    def unsplit_shape(self) -> None:
        return None

    @property
    def in_stage(self) -> InStage | None:
        return self.home.in_stage

    def note_counted(self) -> None:
        """It has all elements."""

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


def use_unsplit_states(model: nn.Module, home_of: Callable[[object], SplitHome | None]) -> Callable[[], None]:
    """Make state dicts of `model` and of its modules those of the unsplit model. `home_of` gives the home of a
    parameter, if it is split. Returns a function that undoes this."""
    hooks = []
    for module in model.modules():
        homes = {name: home for name, param in module._parameters.items() if (home := home_of(param))}
        if homes:
            hooks.append(module.register_state_dict_post_hook(_WholeOnSave(homes)))
            hooks.append(module.register_load_state_dict_pre_hook(_PartOnLoad(homes)))

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return remove


class _StateHook:
    """A hook of a module that has split parameters. Copies of the model have whole parameters of their own."""

    def __init__(self, homes: Mapping[str, SplitHome]) -> None:
        self._homes = homes

    def __deepcopy__(self, memo: object) -> _StateHook:
        return type(self)({})


class _WholeOnSave(_StateHook):
    """Puts unsplit tensors into a module's state dict. With `keep_vars` the parameters stay."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, home in self._homes.items():
            given = state.get(prefix + name)
            if given is not None and given is not module._parameters[name]:
                state[prefix + name] = home.unsplit()


class _PartOnLoad(_StateHook):
    """Replaces unsplit tensors by this rank's parts before a module loads them."""

    def __call__(self, _: nn.Module, state: dict[str, Any], prefix: str, *more: Any) -> None:
        errors: list[str] = more[-1]  # torch raises them all at the end
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
