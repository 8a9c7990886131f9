"""What the operators of a model take on this machine: those that a rehearsal meets are run, one by one.

[Note: measured operators] A model that does not fit on one rank cannot be timed there as a whole, and a model that is
not sharded yet has no layers to time. A single operator needs memory for its own operands and results alone. Equal
ones, as those of equal blocks, are run once, so that a deep model takes no longer than a block, the embedding, and the
head with its loss. Operands have the layout of the rehearsed ones, and values that every operator takes: halves, and
zeros for integers, which are valid places and lengths everywhere. A look-up is then faster than with places from all
over its table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from shardwise.errors import ModelError
from shardwise.fit.counted_work import is_free
from shardwise.program import Moment
from shardwise.system.telemetry import Ledger
from shardwise.system.torch_private import OpOverload, UncompiledMode, asks_device, tree_flatten, tree_unflatten

NUM_TIMED = 5
"""Runs of an operator after the first, of which the median counts."""
QUEUED_SECONDS = 5e-4
"""Of a timed run, about: shorter operators are repeated, because a device is waited for at its end."""


@dataclass(frozen=True)
class Operand:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def made(self, device: torch.device) -> torch.Tensor:
        """One with this layout, which may have places in common as an expanded one has."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        value = 0.5 if self.dtype.is_floating_point or self.dtype.is_complex else 0
        memory = torch.full((max(0, extent),), value, dtype=self.dtype, device=device)
        return memory.as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Call:
    """An operator with its arguments, in the order in which torch flattens them."""

    operator: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: Any

    @classmethod
    def of(cls, operator: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        leaves, structure = tree_flatten((tuple(args), dict(kwargs)))
        return cls(operator, tuple(map(_without_values, leaves)), structure)

    def on(self, device: torch.device) -> Callable[[], object]:
        """The same there, each time with the same operands."""
        made = [
            leaf.made(device) if isinstance(leaf, Operand) else device if isinstance(leaf, torch.device) else leaf
            for leaf in self.leaves
        ]
        args, kwargs = tree_unflatten(made, self.structure)
        return lambda: self.operator(*args, **kwargs)


def _without_values(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return Operand(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype)


class CalledOperators:
    """A `Watch` of rehearsals: `called` has the operators of the last pass before each moment. What ranks would send
    each other is not among them."""

    def __init__(self) -> None:
        self.called: list[tuple[Moment, tuple[Call, ...]]] = []
        self.ledger = Ledger()
        self._since: list[Call] = []

    @contextmanager
    def during(self, resting: Sequence[torch.Tensor]) -> Iterator[None]:  # noqa: ARG002  # a watch's
        self.called, self._since = [], []
        with _Calls(self._since):
            yield

    def note_moment(self, moment: Moment) -> None:
        self.called.append((moment, tuple(self._since)))
        self._since.clear()

    def note_copy(self, verb: str, tier: str, num_bytes: int) -> None:
        """Copies beside the computation are no part of it."""


class _Calls(UncompiledMode):
    """Adds what is computed to `found`."""

    def __init__(self, found: list[Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if asks_device(func, args):
            return args[0].device
        if isinstance(func, OpOverload) and not is_free(func):
            self._found.append(Call.of(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class OperatorClock:
    """Times calls of operators on `device`, each once however often it is asked for."""

    def __init__(self, device: torch.device, now: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._now = device, now
        self._known: dict[Call, float] = {}

    @property
    def is_processor(self) -> bool:
        return self._device.type == "cpu"

    def seconds(self, call: Call) -> float:
        """Raises `ModelError` for an operator that cannot be run by itself."""
        if call not in self._known:
            try:
                self._known[call] = self._measured(call.on(self._device))
            except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError) as error:
                raise ModelError(f"{call.operator} cannot be timed by itself: {error}.") from error
        return self._known[call]

    def _measured(self, run: Callable[[], object]) -> float:
        devices = [] if self.is_processor else [self._device]
        with torch.no_grad(), torch.random.fork_rng(devices, device_type=self._device.type if devices else "cuda"):
            run()  # the first has more to do
            repeats = max(1, round(QUEUED_SECONDS / max(self._once(run, 1), 1e-9)))
            return median(self._once(run, min(repeats, 1000)) for _ in range(NUM_TIMED))

    def _once(self, run: Callable[[], object], repeats: int) -> float:
        begun = self._now()
        for _ in range(repeats):
            run()
        if not self.is_processor:
            torch.accelerator.synchronize(self._device)
        return (self._now() - begun) / repeats
