"""Faults put into a process that has imported everything already, so that each costs no more than its tests.

All functions of the module that has the fault get the code that they would have with it, whoever holds them. So only
faults inside of functions can be put in like this.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_IS_FUNCTION = 0x1  # CO_OPTIMIZED, which bodies of modules and classes do not have


class OutsideError(Exception):
    """The fault is not inside of a function."""


def put_in(path: Path, text: str, source: Path) -> None:
    """Give the functions of the imported module at `path`, relative to `source`, the code that they have in `text`."""
    module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    if not is_inside_functions((source / path).read_text(), text):
        raise OutsideError(f"{path}: the fault changes a module or a class itself")
    functions = dict(_functions_in(module))
    for code in _codes(compile(text, str(source / path), "exec")):
        for function in functions.get(code.co_qualname, ()):
            function.__code__ = code


def is_inside_functions(old: str, new: str) -> bool:
    """Whether two texts of a module differ in nothing but the bodies of its functions and methods."""
    return _without_bodies(old) == _without_bodies(new)


@functools.cache
def _without_bodies(text: str) -> str:
    return ast.dump(_WithoutBodies().visit(ast.parse(text)))


class _WithoutBodies(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = []
        return node


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The outermost functions in a module or class."""
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from [one] if one.co_flags & _IS_FUNCTION else _codes(one)


def _functions_in(module: ModuleType) -> Iterator[tuple[str, list[FunctionType]]]:
    found: dict[str, list[FunctionType]] = {}
    seen: set[int] = set()

    def search(value: object) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        for function in _unwrapped(value):
            if function.__module__ == module.__name__:
                found.setdefault(function.__code__.co_qualname, []).append(function)
        if isinstance(value, type) and value.__module__ == module.__name__:
            for inner in vars(value).values():
                search(inner)

    for value in list(vars(module).values()):
        search(value)
    yield from found.items()


def _unwrapped(value: Any) -> Iterator[FunctionType]:
    while value is not None:
        if isinstance(value, FunctionType):
            yield value
        if isinstance(value, property):
            for part in (value.fget, value.fset):
                yield from _unwrapped(part)
            return
        if isinstance(value, functools.cached_property):
            value = value.func
        else:
            value = getattr(value, "__func__", None) or getattr(value, "__wrapped__", None)
