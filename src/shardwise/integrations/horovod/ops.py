"""Reduction ops, and the options that all frameworks' reductions have in common."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from shardwise.integrations.horovod.pending import Handle
from shardwise.integrations.horovod.process_sets import ProcessSet


class Op(IntEnum):
    """Reduction ops, with Horovod's numbers."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = Op


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> Op:
    """The op, from `op` or from its predecessor `average`. Raises `ValueError` if both are given."""
    if op is not None and average is not None:
        raise ValueError("Pass op or average, not both: average=True is op=hvd.Average, average=False is op=hvd.Sum.")
    return Op(op) if op is not None else (Average if average in (None, True) else Sum)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How to reduce, and over which ranks."""

    op: Op
    prescale: float
    postscale: float
    process_set: ProcessSet

    @classmethod
    def of(
        cls, op: int | None, average: bool | None, prescale: float, postscale: float, process_set: ProcessSet
    ) -> Reduction:
        chosen = handle_average_backwards_compatibility(op, average)
        return cls(chosen, float(prescale), float(postscale), process_set)

    def fields(self) -> dict[str, Any]:
        """The fields of a `Request`."""
        return {
            "op": self.op.name,
            "prescale": self.prescale,
            "postscale": self.postscale,
            "process_set": self.process_set.number(),
        }

    def require_gradient(self, call: str) -> None:
        """Raise `ValueError` if the op has no gradient."""
        if self.op not in (Average, Sum):
            raise no_gradient(call, self.op.name)

    def sparse_scaling(self) -> tuple[float, int]:
        """Factor and divisor of sparse values, which are summed. Raises `ValueError` for other ops."""
        if self.op not in (Average, Sum):
            raise ValueError(f"Sparse tensors can be averaged or summed, but not reduced by {self.op.name}.")
        return self.prescale * self.postscale, (self.process_set.size() or 1) if self.op is Average else 1


def no_gradient(call: str, op: str) -> ValueError:
    return ValueError(f"{call} has no gradient for op={op}. Use Average or Sum, or detach the tensor.")


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.is_done


def synchronize(handle: Handle) -> Any:
    """Wait for the collective and return its result."""
    return handle.wait()
