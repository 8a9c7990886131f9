"""The mark of hooks that this library registers with modules of the user's, by which it tells them from others'."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import StateError


class _NoName(str):
    """The name of our hooks. `torch.jit.script` looks hooks up by name, and would then compile their source."""

    def __hash__(self) -> NoReturn:
        raise StateError(
            "A sharded model was given to torch.jit.script, which compiles no gathering of parameters. Script a plain "
            "model that has loaded engine.state_dict()."
        )


_NO_NAME = _NoName("hook of shardwise")  # made here: Dynamo of torch 2.11 warns where it traces a text that is made


def hook(function: Callable[..., Any], *args: object) -> partial[Any]:
    """`function` with its first arguments, to be registered with a module of the user's."""
    bound = partial(function, *args)
    bound.__name__ = _NO_NAME  # type: ignore[attr-defined]  # a partial has a dict
    return bound


def hook_around(
    modules: Iterable[nn.Module],
    enter: Callable[..., None],
    leave: Callable[..., None],
    *,
    first: bool = False,
) -> list[RemovableHandle]:
    """Call `enter(module, args)` before each call of one of `modules`, with `first` before other hooks, and
    `leave(module, args, output)` after it, also if it raises. Not to be removed while one of them runs: torch may be
    iterating over its hooks."""
    handles: list[RemovableHandle] = []
    for module in modules:
        handles.append(module.register_forward_pre_hook(hook(enter), prepend=first))
        handles.append(module.register_forward_hook(hook(leave), always_call=True))
    return handles


def is_own(one: object) -> bool:
    """Whether it was made by `hook`: of an engine, so no part of the model that it is registered with."""
    return getattr(one, "__name__", None) is _NO_NAME
