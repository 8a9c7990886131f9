"""Arguments that are true or false, and come from a user's script."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shardwise.errors import ConfigError

_KINDS = ("bool", "bool | None")
_YES = frozenset({"1", "t", "true", "y", "yes", "on"})
Given = ParamSpec("Given")
Made = TypeVar("Made")


def takes_flags(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Decorates a function that has keyword arguments annotated as `bool`, in a module that does not evaluate its
    annotations: text raises `ConfigError`. What an environment variable or a command line says, such as "no" or "0", is
    text, which Python takes for true whatever it says."""
    names = [name for name, kind in function.__annotations__.items() if kind in _KINDS and name != "return"]
    owner, _, own_name = function.__qualname__.rpartition(".")
    called = owner if own_name == "__init__" else own_name

    def call(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        if kwargs:
            for name in names:
                require_flag(f"{called}({name}=", kwargs.get(name))
        return function(*args, **kwargs)

    # Frames are named by their code: what a rank waits in is said by the outermost one of this library.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return functools.wraps(function)(call)


def says_yes(value: object) -> bool:
    """Whether an environment variable or a setting of Accelerate's, which is text or already a boolean, says yes, in
    any word that Accelerate's own `str_to_bool` takes for it."""
    return str(value).strip().lower() in _YES


def require_flag(given_as: str, value: object) -> None:
    """Raise `ConfigError` if `value`, which a user has written after `given_as`, is text."""
    if isinstance(value, str):
        raise ConfigError(
            f"{given_as}{value!r:.60}) is text, which Python takes for true whatever it says. Give True or False."
        )
