"""How the elements of one kind of tensor are sent from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.plan.placement.place import WIDTH, Dtype


@dataclass(frozen=True)
class Wire:
    """A format of messages: elements are sent as `dtype`.

    What a program counts of a format is here: `num_bytes` prices its messages and the memory they take. What the
    runtime does with elements, the codec of the same name, is in `runtime/codec.py`.
    """

    dtype: Dtype

    def num_bytes(self, numel: int) -> int:
        """Bytes that `numel` elements take on the wire."""
        return numel * WIDTH[self.dtype]

    def __str__(self) -> str:
        return self.dtype


FP32 = Wire("fp32")
