"""Modules that read parameters of other modules: found while the first step is watched, and gathered for from then on.

A model may read `self.wte.weight` without calling `wte`, so no hook of `wte` fires. While a forward is recorded, every
operation is inspected: if it reads a unit that is not gathered, the unit is gathered on the spot, and the running
module becomes one of the unit's sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.memory import Flat, FullState, Unit
from shardwise.runtime.hooks import changed_inside
from shardwise.runtime.nested import argument_tensors
from shardwise.system.own_hooks import hook_around
from shardwise.system.torch_private import (
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    dispatch_modes,
    may_write,
    num_calls,
    storage_id,
    written_by,
)


class Reach(TorchDispatchMode):
    """Watches operations and calls `gather(unit)` before one reads a unit that is not gathered, and `hear_collective()`
    at each of torch.distributed's collectives."""

    def __init__(
        self,
        units: Sequence[Unit],
        gather: Callable[[Unit], None],
        hear_collective: Callable[[], None] | None = None,
        of: nn.Module | None = None,
    ) -> None:
        """`of` is the module of which it watches a call, if that may be asked later (`end_interrupted`)."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._units = {storage_id(flat.full.untyped_storage()): (unit, flat) for unit in units for flat in unit.flats}
        self._gather = gather
        self._of = of
        self._hear_collective = hear_collective
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, operations are not watched, because our own actions touch the buffers."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def end(self) -> None:
        """Stop watching, unless `end_interrupted` has ended it."""
        if self in dispatch_modes():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch's own

    @staticmethod
    def end_interrupted() -> None:
        """End what watches a call that Ctrl-C has ended, of which no hook was told: every operation would be inspected
        as long as a notebook lives."""
        modes = dispatch_modes()
        while modes and isinstance(last := modes.pop(), Reach) and last._of is not None and not num_calls(last._of):
            last.end()

    def __torch_dispatch__(
        self,
        func: Any,  # an operator, with its schema
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.look(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def look(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """At an operation that is about to run."""
        if self._hear_collective is not None and "c10d" in func.namespace and not self._is_paused:
            self._hear_collective()
        for unit in () if self._is_paused else self._missing((args, kwargs)):
            with self.paused():
                self._gather(unit)
        if not self._is_paused and may_write(func._schema):
            self._require_unchanged(func, args, kwargs)

    def _require_unchanged(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise if `func` writes to a parameter. This sees even writes to `param.data`."""
        for unit, _ in self._found(written_by(func._schema, args, kwargs)):
            raise changed_inside(unit.name)

    def _missing(self, values: object) -> list[Unit]:
        """The units that tensors among `values` belong to and that are not gathered."""
        states = (FullState.ABSENT, FullState.GATHERING)
        return [unit for unit, flat in self._found(values) if flat.state in states]

    def _found(self, values: object) -> list[tuple[Unit, Flat]]:
        """What the tensors among `values` belong to. Sparse ones have no storage, and are nobody's."""
        with DisableTorchFunctionSubclass():  # parameters at rest would hide their storage
            strided = [tensor for tensor in argument_tensors(values) if tensor.layout is torch.strided]
            found = [self._units.get(storage_id(tensor.untyped_storage())) for tensor in strided]
        return [one for one in found if one is not None]


class Writes(Reach):
    """Looks for writes to parameters alone."""

    def _missing(self, values: object) -> list[Unit]:  # noqa: ARG002
        return []


class Callers:
    """The modules of the model that are running, innermost last. Create it just after `model` itself was called."""

    def __init__(self, model: nn.Module) -> None:
        self._running: list[nn.Module] = [model]
        self._handles = hook_around(model.modules(), self._enter, self._leave)

    def innermost(self) -> nn.Module | None:
        return self._running[-1] if self._running else None

    def num_running(self, module: nn.Module) -> int:
        """How many nested calls of `module` are running."""
        return self._running.count(module)

    def forget(self) -> None:
        """None of the modules runs."""
        self._running.clear()

    def remove(self) -> None:
        """Remove the hooks. Call it only while none of the modules runs, for PyTorch may be iterating over its
        hooks."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: object) -> None:  # noqa: ARG002
        self._running.append(module)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:  # noqa: ARG002
        if module in self._running:
            del self._running[self._running.index(module) :]
