"""How the elements of one kind of tensor are sent from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardwise.errors import PlacementError
from shardwise.plan.placement.place import WIDTH, Axes, Dtype

CodeDtype = Literal["int8", "int4", "fp8"]
BITS: dict[str, int] = {"int8": 8, "int4": 4, "fp8": 8}
SCALE_BYTES = 2
"""A scale is bf16, which has the range of fp32: scales of small gradients would be zero in fp16."""


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


LOSS_DTYPE: Dtype = "bf16"
"""That of what codes have lost: two bytes, with the range of fp32."""


@dataclass(frozen=True)
class Feedback:
    """Error feedback: to what a message sends is added what earlier ones have lost (LoCo, arXiv:2407.04480).

    That is kept as a moving average, `beta` of which is the one before; with 0 it is what the last message has lost. It
    is forgotten after every `reset_steps` steps.
    """

    beta: float
    reset_steps: int

    def __str__(self) -> str:
        return f"{self.beta:g}, forgotten every {self.reset_steps} steps"


@dataclass(frozen=True)
class Codes:
    """A format of messages along some axes: signed integers, or E4M3 (fp8), and one scale in bf16 for each `block` of
    them in a row.

    Parts that are sent consist of whole blocks: see [Note: blocks of codes] in `table.py`.
    """

    dtype: CodeDtype
    block: int
    axes: Axes = ()
    """The axes along which elements are sent so; along others they are sent as the plain `Wire` says."""
    feedback: Feedback | None = None
    rest: Wire | None = None
    """In which parameters of the same row are sent that are not made codes; `None`: as without codes."""
    rests: bool = False
    """Whether elements also lie so between computations: see [Note: resting codes] in `memory/coded_rows.py`."""
    only_outermost: bool = False
    """Whether, of the axes along which there are several ranks, elements are sent so along the outermost only."""

    def num_bytes(self, numel: int) -> int:
        return numel * BITS[self.dtype] // 8 + numel // self.block * SCALE_BYTES

    @property
    def bytes_per_element(self) -> float:
        """With the part of a scale."""
        return self.num_bytes(self.block) / self.block

    def over(self, axes: Axes) -> Codes | None:
        """The same along those of its axes that are among `axes`; `None` if none are, and nothing rests so."""
        left = tuple(axis for axis in self.axes if axis in axes)
        return replace(self, axes=left) if left or self.rests else None

    def settled(self) -> Codes:
        """The same where each of its axes has several ranks."""
        return replace(self, axes=self.axes[:1], only_outermost=False) if self.only_outermost else self

    def __str__(self) -> str:
        return f"{self.dtype}/{self.block}"

    @classmethod
    def parse(cls, text: str) -> Codes:
        """The codes that a program calls `text`, such as `int4/128`. Raises `ValueError`."""
        dtype, _, block = text.partition("/")
        if dtype not in BITS or not block.isdecimal() or not int(block):
            raise ValueError(text)
        return cls(dtype, int(block))  # type: ignore[arg-type]  # checked above


FP32 = Wire("fp32")


def check_codes(codes: Codes, dtype: Dtype, kind: str) -> None:
    """Raise `PlacementError` for codes that elements of `dtype` cannot be sent as."""
    if dtype == "fp64":
        raise PlacementError(
            f"wire.{kind} is {codes}, whose scales are those of fp32 numbers, but the precision is fp64: that of the "
            f"plan, or without one that of some parameters. Set precision: fp32, or leave out wire.{kind}: elements "
            f"are then sent as they are."
        )


@dataclass(frozen=True)
class SumOfCodes:
    """How a reduce-scatter or all-reduce of codes is sent; as text, `int4/128`, or `int4/128+bf16` in halves.

    [Note: sums are not made codes] What a rank adds is rounded once, and a sum of codes is never made codes again,
    unless a plan names several axes. So gradients are codes along one axis, the outermost, and are summed along the
    inner ones before. And in an all-reduce every rank gets the codes of all others and sums them itself, n - 1 times
    the elements, unless a reduce-scatter of codes and a gather of the sums as `plain` take fewer bytes: with int4 and
    sums in bf16 from five ranks on, with sums in fp32 from nine.
    """

    verb: str
    codes: Codes
    plain: Wire | None = None
    """The format of sums that are sent to the other ranks."""

    @classmethod
    def cheapest(cls, verb: str, codes: Codes, plain: Wire, numel: int, num_ranks: int) -> SumOfCodes:
        """The way to sum `numel` elements for which a rank sends the fewest bytes."""
        whole, halves = cls(verb, codes), cls(verb, codes, plain)
        if verb == "reduce_scatter" or whole.sent_bytes(numel, num_ranks) <= halves.sent_bytes(numel, num_ranks):
            return whole
        return halves

    @property
    def gathers_codes(self) -> bool:
        """Whether every rank gets all codes."""
        return self.verb == "all_reduce" and self.plain is None

    def sent_bytes(self, numel: int, num_ranks: int) -> int:
        """Bytes that a rank sends for `numel` elements."""
        return (num_ranks - 1) * sum(self.bytes_to_each(numel, num_ranks))

    def bytes_to_each(self, numel: int, num_ranks: int) -> tuple[int, int]:
        """Bytes of codes and of sums that a rank sends to each other rank."""
        own = numel // num_ranks
        codes = self.codes.num_bytes(numel if self.gathers_codes else own)
        return codes, 0 if self.plain is None else self.plain.num_bytes(own)

    def memory_bytes(self, numel: int, num_ranks: int) -> int:
        """Bytes that it takes beside input and output: codes that are sent, codes that arrive, sums as they are
        sent."""
        if self.gathers_codes:
            return num_ranks * self.codes.num_bytes(numel)
        sums = 0 if self.plain is None else self.plain.num_bytes(numel)
        return (2 * num_ranks - 1) * self.codes.num_bytes(numel // num_ranks) + sums

    def __str__(self) -> str:
        return str(self.codes) if self.plain is None else f"{self.codes}+{self.plain}"

    @classmethod
    def parse(cls, verb: str, text: str) -> SumOfCodes:
        """Raises `ValueError`."""
        codes, plus, plain = text.partition("+")
        if plus and plain not in WIDTH:
            raise ValueError(text)
        return cls(verb, Codes.parse(codes), Wire(plain) if plus else None)  # type: ignore[arg-type]  # checked above
