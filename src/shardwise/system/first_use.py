"""Names of a package that are imported from their modules when they are first used (PEP 562), because many jobs do
without them and all would wait for the import."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def imported_when_used(package: str, homes: Mapping[str, str]) -> Callable[[str], object]:
    """The `__getattr__` of `package`. `homes`: the module of each name, as `.module` if it is in the package; behind a
    colon, what the name is called there, if that is another."""

    def attribute(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, there = homes[name].partition(":")
        return getattr(importlib.import_module(module, package), there or name)

    return attribute
