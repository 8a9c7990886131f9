"""How values of ranks become one, and the handles of what is under way."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from shardwise.integrations.horovod.pending import Handle


class Op(IntEnum):
    """How values of ranks become one."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = Op


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> Op:
    """`average=` is what `op=` was called before. Raises `ValueError` for both."""
    if op is not None and average is not None:
        raise ValueError("Give op or average, not both: average=True is op=hvd.Average, average=False op=hvd.Sum.")
    return Op(op) if op is not None else (Average if average in (None, True) else Sum)


def scaling_of(op: int | None, average: bool | None, prescale: float, postscale: float) -> dict[str, Any]:
    chosen = handle_average_backwards_compatibility(op, average)
    return {"op": chosen.name, "prescale": float(prescale), "postscale": float(postscale)}


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.is_done


def synchronize(handle: Handle) -> Any:
    """What the collective gives, once it is done."""
    return handle.wait()
