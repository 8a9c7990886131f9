"""What is sent in place of elements, between a mover and the collectives: a codec encodes and decodes one `Wire`.

[Note: rounded once] The rank that has a part encodes it, and every rank decodes what was sent, that rank too: so all
compute with the same values, whatever the format loses. What rests is not touched unless it is a copy of what others
have updated. Sums are of decoded summands, each rank's own decoded too, in the order of the group, so that they depend
neither on which rank sums them nor on how.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Protocol

import torch

from shardwise.comm import Communicator, Group, Work, add_to
from shardwise.memory import torch_dtype
from shardwise.plan.placement import Codes, SumOfCodes, Wire
from shardwise.plan.placement.wire import BITS
from shardwise.system.telemetry import ByteMeter

Tensor = torch.Tensor
_CPU = torch.device("cpu")
_BF16_BITS, _FP16_EXPONENT = 8, -24
"""Digits of a number in bf16, and the exponent of the smallest one in fp16."""
_SLICE, _SLICE_ON_DEVICE = 2**17, 2**22
"""Elements that are encoded or decoded at a time. On CPUs the intermediate results of a slice, half a MiB, stay in the
cache, and calls of operators take little beside them: slices of half the size take a sixth longer. On devices they take
16 or 32 MiB, which is not counted."""


class Codec(Protocol):
    """Encodes elements, and decodes them. All may be called on any part that a rank owns, and any number of parts.

    A codec belongs to one flat buffer on one rank and one kind of message, so it may keep something for each element,
    such as what its last message has lost.
    """

    dtype: torch.dtype
    """That of the codes, which are what is sent."""

    def num_codes(self, numel: int) -> int:
        """How many codes `numel` elements make; `Wire.num_bytes` is their size."""
        ...

    def encode(self, elements: Tensor, codes: Tensor, start: int = 0) -> None:
        """Fill `codes`. `start` is the place of the first element in all that this rank encodes for one collective."""
        ...

    def decode(self, codes: Tensor, elements: Tensor) -> None:
        """Fill `elements`."""
        ...

    def add(self, codes: Tensor, elements: Tensor) -> None:
        """Add to `elements`."""
        ...


class Cast:
    """Elements rounded to a narrower dtype. Non-finite values stay so."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def num_codes(self, numel: int) -> int:
        return numel

    def encode(self, elements: Tensor, codes: Tensor, start: int = 0) -> None:  # noqa: ARG002  # keeps nothing
        codes.copy_(elements)

    def decode(self, codes: Tensor, elements: Tensor) -> None:
        elements.copy_(codes)

    def add(self, codes: Tensor, elements: Tensor) -> None:
        add_to(elements, codes)


class Blocks:
    """Blocks of elements as signed integers with one scale each, the largest magnitude of the block divided by the
    largest integer; symmetric, rounded to the nearest (ZeRO++, arXiv:2306.10209, section 3.1).

    One message has the integers of all blocks, then their scales in bf16. Of two 4-bit integers in a byte, the low one
    is of the first half of the block and the high one of the second, so that halves are contiguous.

    [Note: what is not finite] A block with an infinity or a nan has a scale that is infinite or nan. Whatever its
    integers are then, all of the block is decoded to infinities and nans: an overflow is seen by every rank, and only
    its block is lost.
    """

    dtype = torch.uint8

    def __init__(self, wire: Codes) -> None:
        self._wire, self._block, self._bits = wire, wire.block, BITS[wire.dtype]
        self._largest = 2 ** (self._bits - 1) - 1

    def num_codes(self, numel: int) -> int:
        return self._wire.num_bytes(numel)

    def encode(self, elements: Tensor, codes: Tensor, start: int = 0) -> None:  # noqa: ARG002  # keeps nothing
        for some, integers, scales, scratch in self.slices(elements, codes):
            self.encode_slice(some.to(torch.float32), integers, scales, scratch)

    def encode_slice(self, elements: Tensor, integers: Tensor, scales: Tensor, scratch: Tensor) -> None:
        """`encode` for elements in fp32, as `slices` cuts them."""
        values = elements.view(-1, self._block)
        rounded = scratch[: values.numel()].view_as(values)
        scales.copy_(self._scales_of(torch.abs(values, out=rounded).amax(1)))
        # bf16 rounds a scale by 2**-9 of it, which moves no code beyond the largest integer. Nor do scales that are
        # nearly zero, and a block of zeros is not nan, because the smallest normal number is added: codes of values
        # below 1e-33 are smaller than they might be.
        divisors = scales.to(torch.float32).add_(torch.finfo(torch.float32).tiny).unsqueeze(1)
        self._pack(torch.div(values, divisors, out=rounded), integers)

    def decode(self, codes: Tensor, elements: Tensor) -> None:
        for some, integers, scales, scratch in self.slices(elements, codes):
            values, factors = self._unpacked(integers, scratch), scales.to(torch.float32).unsqueeze(1)
            if some.dtype == torch.float32:
                torch.mul(values, factors, out=some.view_as(values))
            else:
                some.view_as(values).copy_(values.mul_(factors))

    def add(self, codes: Tensor, elements: Tensor) -> None:
        for some, integers, scales, scratch in self.slices(elements, codes):
            some.add_(self.decoded_slice(integers, scales, scratch))

    def decoded_slice(self, integers: Tensor, scales: Tensor, scratch: Tensor) -> Tensor:
        """The elements in fp32, in `scratch`."""
        values = self._unpacked(integers, scratch)
        return values.mul_(scales.to(torch.float32).unsqueeze(1)).view(-1)

    def slices(self, elements: Tensor, codes: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Elements, their integers, their scales, and memory for as many in fp32, some blocks at a time. The memory is
        the same each time, because fresh pages would take longer than the arithmetic."""
        numel = elements.numel()
        size = _SLICE if elements.device.type == "cpu" else _SLICE_ON_DEVICE
        integers, scales = _cut(codes, numel * self._bits // 8)
        of_codes = torch.split(integers, size * self._bits // 8)
        of_scales = torch.split(scales, size // self._block)
        scratch = torch.empty(min(size, numel), dtype=torch.float32, device=elements.device)
        for parts in zip(torch.split(elements, size), of_codes, of_scales, strict=True):
            yield (*parts, scratch)

    def _scales_of(self, largest: Tensor) -> Tensor:
        """Those of blocks with these largest magnitudes."""
        # By a tensor: on CUDA, torch multiplies by the reciprocal of a number, which is another scale now and then.
        return largest.div_(largest.new_full((), self._largest))

    def _pack(self, scaled: Tensor, integers: Tensor) -> None:
        """Round elements, in units of their scales, into `integers`."""
        scaled.round_()
        if self._bits == 8:
            integers.view(torch.int8).copy_(scaled.view(-1))
        else:  # by int8, which takes a third of the time of a conversion to uint8
            low, high = scaled.to(torch.int8).view(torch.uint8).chunk(2, dim=1)
            torch.add(low, high, alpha=16, out=integers.view_as(low)).add_(8 * 17)

    def _unpacked(self, integers: Tensor, scratch: Tensor) -> Tensor:
        """The integers as fp32, one row for each block."""
        values = scratch[: integers.numel() * 8 // self._bits].view(-1, self._block)
        if self._bits == 8:
            return values.copy_(integers.view(torch.int8).view_as(values))
        low, high = values.chunk(2, dim=1)
        both = integers.view_as(low)
        low.copy_(both.bitwise_and(15))
        high.copy_(both.bitwise_right_shift(4))
        return values.sub_(8)


class Fp8Blocks(Blocks):
    """Blocks of elements as E4M3 with one scale each, a power of two.

    So scaling rounds nothing, and layers that multiply in fp8 with powers of two as scales (the plan's `fp8: rowwise`)
    make the same codes of what was decoded as of the elements themselves, but for those below 2^-15 of the largest of
    their block or row. A block has a scale of its own, so ranks need not agree on one by an all-reduce of maxima, as
    FSDP2's gathers in fp8 do.
    """

    _number = torch.float8_e4m3fn

    def _scales_of(self, largest: Tensor) -> Tensor:
        return torch.exp2(largest.div_(torch.finfo(self._number).max).log2_().ceil_())

    def _pack(self, scaled: Tensor, integers: Tensor) -> None:
        limit = torch.finfo(self._number).max  # log2 may be off by its last bit
        integers.view(self._number).copy_(scaled.clamp_(-limit, limit).view(-1))

    def _unpacked(self, integers: Tensor, scratch: Tensor) -> Tensor:
        """On CPUs by way of numbers in fp16 whose exponents are 8 smaller: torch (2.13) converts from E4M3 one element
        at a time, which takes ten times as long. Nan, which only a block with a scale of nan has, becomes a number."""
        values = scratch[: integers.numel()].view(-1, self._block)
        if integers.device.type != "cpu":
            return values.copy_(integers.view(self._number).view_as(values))
        bits = integers.view(torch.int8).to(torch.int16).mul_(2**7)  # its sign is in two bits
        bits.bitwise_and_(~(2**14))
        return values.copy_(bits.view(torch.float16).view_as(values)).mul_(2**8)


class ExactBlocks(Blocks):
    """Blocks whose elements become the same codes again when they have been decoded: see [Note: resting codes] in
    `memory/coded_rows.py`. In 8 bits scales are up to twice as large as those of `Blocks`, in 4 bits by a sixteenth.
    """

    def _scales_of(self, largest: Tensor) -> Tensor:
        num_bits = _BF16_BITS + 1 - self._bits
        mantissa, exponent = torch.frexp(super()._scales_of(largest))
        scales = torch.ldexp(mantissa.mul_(2**num_bits).ceil_(), exponent - num_bits)
        return scales.clamp_min_(2.0 ** (_FP16_EXPONENT + num_bits - 1))  # products are numbers in fp16, too


class FedBack:
    """Codes of elements and what was lost of those before them, of which the moving average is kept in `losses`, one
    for each element that this rank encodes for one collective (LoCo, arXiv:2407.04480, algorithm 1).

    What is not finite loses nothing, so that a step that is left out for it leaves nothing behind.
    """

    dtype = torch.uint8

    def __init__(self, blocks: Blocks, losses: Tensor, beta: float) -> None:
        self._blocks, self._losses, self._beta = blocks, losses, beta

    def num_codes(self, numel: int) -> int:
        return self._blocks.num_codes(numel)

    def encode(self, elements: Tensor, codes: Tensor, start: int = 0) -> None:
        for some, integers, scales, scratch in self._blocks.slices(elements, codes):
            kept = self._losses[start : start + some.numel()]
            meant = some.to(torch.float32, copy=True).add_(kept)
            self._blocks.encode_slice(meant, integers, scales, scratch)
            lost = meant.sub_(self._blocks.decoded_slice(integers, scales, scratch))
            lost.mul_(1 - self._beta).add_(kept, alpha=self._beta)
            kept.copy_(lost.nan_to_num_(0.0, 0.0, 0.0))
            start += some.numel()

    def decode(self, codes: Tensor, elements: Tensor) -> None:
        self._blocks.decode(codes, elements)

    def add(self, codes: Tensor, elements: Tensor) -> None:
        self._blocks.add(codes, elements)


class KernelBlocks:
    """`Blocks`, or `FedBack` with `losses`, in one pass over memory by the kernels of `codec_kernels.py`."""

    dtype = torch.uint8

    def __init__(self, wire: Codes, kernels: ModuleType, losses: Tensor | None) -> None:
        self._wire, self._kernels, self._losses = wire, kernels, losses

    def num_codes(self, numel: int) -> int:
        return self._wire.num_bytes(numel)

    def encode(self, elements: Tensor, codes: Tensor, start: int = 0) -> None:
        wire, losses = self._wire, self._losses
        if losses is not None and wire.feedback is not None:
            kept, beta = losses[start : start + elements.numel()], wire.feedback.beta
            self._kernels.encode(elements, *self._cut(codes, elements), wire.block, kept, beta)
        else:
            self._kernels.encode(elements, *self._cut(codes, elements), wire.block)

    def decode(self, codes: Tensor, elements: Tensor) -> None:
        self._kernels.decode(elements, *self._cut(codes, elements), self._wire.block, adds=False)

    def add(self, codes: Tensor, elements: Tensor) -> None:
        self._kernels.decode(elements, *self._cut(codes, elements), self._wire.block, adds=True)

    def _cut(self, codes: Tensor, elements: Tensor) -> tuple[Tensor, Tensor]:
        return _cut(codes, elements.numel() * BITS[self._wire.dtype] // 8)


class Resting:
    """Codes as which parameters rest: made so that they can be made again, once, and decoded as all others are."""

    dtype = torch.uint8

    def __init__(self, wire: Codes, device: torch.device) -> None:
        self._exact = Fp8Blocks(wire) if wire.dtype == "fp8" else ExactBlocks(wire)
        self._plain = codec_for(replace(wire, rests=False), device)

    def num_codes(self, numel: int) -> int:
        return self._exact.num_codes(numel)

    def encode(self, elements: Tensor, codes: Tensor, start: int = 0) -> None:
        self._exact.encode(elements, codes, start)

    def decode(self, codes: Tensor, elements: Tensor) -> None:
        self._plain.decode(codes, elements)

    def add(self, codes: Tensor, elements: Tensor) -> None:
        self._plain.add(codes, elements)


def _cut(codes: Tensor, num_bytes: int) -> tuple[Tensor, Tensor]:
    """The integers of a message, in so many bytes, and the scales."""
    return codes[:num_bytes], codes[num_bytes:].view(torch.bfloat16)


@functools.cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """The kernels for codes of integers, where there are any: on GPUs, with Triton, which torch brings for them."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module("shardwise.runtime.codec_kernels")


def codec_for(wire: Wire | Codes, device: torch.device = _CPU, losses: Tensor | None = None) -> Codec:
    """The codec of a format for elements on `device`; `losses` is the memory of its error feedback, if it has any. A
    new format is a class here and what it counts in `plan/placement/wire.py`."""
    if not isinstance(wire, Codes):
        return Cast(torch_dtype(wire.dtype))
    if wire.rests:
        return Resting(wire, device)
    kernels = kernels_on(device) if wire.dtype != "fp8" else None
    if kernels is not None:
        return KernelBlocks(wire, kernels, losses)
    blocks = Fp8Blocks(wire) if wire.dtype == "fp8" else Blocks(wire)
    return blocks if wire.feedback is None or losses is None else FedBack(blocks, losses, wire.feedback.beta)


class EncodedGather:
    """An all-gather whose parts are sent as codes. The work of `Collectives.all_gather`, from its start."""

    def __init__(
        self,
        codec: Codec,
        collectives: Communicator,
        parts: Sequence[Tensor],
        group: Group,
        subject: str,
        meter: ByteMeter,
        source: Tensor | None,
        encoded: Tensor | None,
    ) -> None:
        """`parts` are one per rank of the group, of equal length; the `group.index`-th is filled, or else `source` has
        its elements, or `encoded` its codes. `meter` counts the codes' bytes."""
        self._codec, self._parts, self._meter = codec, parts, meter
        num_codes = codec.num_codes(parts[0].numel())
        self._codes = collectives.buffer(num_codes * len(parts), codec.dtype)
        self._num_bytes = self._codes.nbytes
        meter.hold("working", self._num_bytes)
        self._chunks = self._codes.chunk(len(parts))
        if encoded is not None:
            self._chunks[group.index].copy_(encoded)
        else:
            codec.encode(parts[group.index] if source is None else source, self._chunks[group.index])
        self._work: Work | None = collectives.all_gather(self._codes, group, subject, self._chunks)

    def wait(self) -> None:
        """See `Work`: may be called again after it has raised."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for codes, elements in zip(self._chunks, self._parts, strict=True):
            self._codec.decode(codes, elements)
        del self._codes, self._chunks
        self._meter.drop("working", self._num_bytes)


class EncodedReduceScatter:
    """A reduce-scatter whose summands are sent as codes, each to the rank that sums them (qgZ of ZeRO++).

    `source` may be read and overwritten as soon as this exists; `out` may be a part of it. `Reduction` counts the
    bytes of all sums, by `SumOfCodes.memory_bytes`.
    """

    def __init__(
        self, codec: Codec, collectives: Communicator, out: Tensor, source: Tensor, group: Group, subject: str
    ) -> None:
        num_ranks, num_codes = len(group.ranks), codec.num_codes(out.numel())
        sent = collectives.buffer(num_ranks * num_codes, codec.dtype).chunk(num_ranks)
        for index, (chunk, codes) in enumerate(zip(source.chunk(num_ranks), sent, strict=True)):
            codec.encode(chunk, codes, index * out.numel())
        arrived = list(collectives.buffer((num_ranks - 1) * num_codes, codec.dtype).chunk(num_ranks - 1))
        arrived.insert(group.index, sent[group.index])
        self._codec, self._out, self._summands = codec, out, arrived
        self._work: Work | None = collectives.all_to_all(arrived, sent, group, subject)

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        _sum(self._codec, self._summands, self._out)
        self._summands = []


class EncodedAllReduce:
    """An all-reduce whose summands are sent as codes; see [Note: sums are not made codes] in `plan/placement/wire.py`.

    All ranks have the same sum, to the bit. As with `EncodedReduceScatter`, `out` may be `source`.
    """

    def __init__(
        self,
        codec: Codec,
        way: SumOfCodes,
        collectives: Communicator,
        out: Tensor,
        source: Tensor,
        group: Group,
        subject: str,
    ) -> None:
        self._codec, self._collectives, self._out = codec, collectives, out
        self._group, self._subject, self._plain = group, subject, way.plain
        num_ranks = len(group.ranks)
        self._summands: Sequence[Tensor] = ()
        self._sums: Tensor | None = None
        self._work: Work | None
        if way.gathers_codes:
            codes = collectives.buffer(num_ranks * codec.num_codes(out.numel()), codec.dtype)
            self._summands = codes.chunk(num_ranks)
            codec.encode(source, self._summands[group.index])
            self._work = collectives.all_gather(codes, group, subject, self._summands)
        else:
            own = out.chunk(num_ranks)[group.index]
            self._work = EncodedReduceScatter(codec, collectives, own, source, group, subject)

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        if self._plain is None:
            _sum(self._codec, self._summands, self._out)
            self._summands = ()
        elif self._sums is None:
            self._work = self._gather_sums(torch_dtype(self._plain.dtype))
            self.wait()
            return
        elif self._sums is not self._out:
            self._out.copy_(self._sums)
        self._work = self._sums = None

    def _gather_sums(self, dtype: torch.dtype) -> Work:
        """Start the second half: sums are rounded to the plain wire, on the rank that has summed them too."""
        self._sums = self._out
        if self._out.dtype != dtype:
            self._sums = self._collectives.buffer(self._out.numel(), dtype)
            place, num_ranks = self._group.index, len(self._group.ranks)
            self._sums.chunk(num_ranks)[place].copy_(self._out.chunk(num_ranks)[place])
        return self._collectives.all_gather(self._sums, self._group, self._subject)


def _sum(codec: Codec, summands: Sequence[Tensor], out: Tensor) -> None:
    """Into `out`, at least in fp32."""
    wide = torch.promote_types(out.dtype, torch.float32)
    total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
    codec.decode(summands[0], total)
    for codes in summands[1:]:
        codec.add(codes, total)
    if total is not out:
        out.copy_(total)
