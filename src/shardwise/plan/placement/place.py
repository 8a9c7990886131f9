"""Where one kind of tensor lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Axes = tuple[str, ...]
Tier = Literal["device", "host", "disk"]
Dtype = Literal["fp64", "fp32", "bf16", "fp16", "uint8", "int8"]
"""Those of integers are for codes of frozen parameters, which are stored and gathered as they are."""
Kind = Literal["param", "held", "grad", "optim"]

KINDS: tuple[Kind, ...] = get_args(Kind)
DEPTH: dict[Tier, int] = {"device": 0, "host": 1, "disk": 2}
WIDTH: dict[Dtype, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "uint8": 1, "int8": 1}


@dataclass(frozen=True)
class Place:
    """Where one kind of tensor lives: split, partial, varying or copied per mesh axis; on which tier; in which dtype.

    On an axis that is in none of the tuples every rank has a full copy.
    """

    shard: Axes = ()
    partial: Axes = ()
    """Axes along which each rank holds a summand. Only gradients are ever partial."""
    tier: Tier = "device"
    dtype: Dtype = "fp32"
    varying: Axes = ()
    """Axes along which each rank has values of its own, neither copies nor summands: those of islands. The word is that
    of JAX's `shard_map`."""

    def __str__(self) -> str:
        parts = [f"shard({'+'.join(self.shard)})"] if self.shard else []
        parts += [f"partial({'+'.join(self.partial)})"] if self.partial else []
        parts += [f"varying({'+'.join(self.varying)})"] if self.varying else []
        return f"{' '.join(parts) or 'copy'} {self.dtype}" + (f" {self.tier}" if self.tier != "device" else "")


def wider(one: Dtype, other: Dtype) -> Dtype:
    """The wider of two dtypes."""
    return one if WIDTH[one] >= WIDTH[other] else other
