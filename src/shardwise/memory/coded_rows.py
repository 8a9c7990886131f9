"""Frozen parameters that rest as codes, and their addresses.

[Note: resting codes] Each matrix of a frozen flat buffer lies as integers with a scale for each block, and is decoded
where it is computed with: as it arrives from other ranks, which are sent the codes that lie here, or from the rank's
own if it has all. Whatever else reads or writes a parameter between computations (first values, checkpoints, exports,
moves to another layout) has elements in the dtype of the parameter. So between computations a tensor of these
parameters is an address, as on a disk (`disk_memory.py`), and this finds the codes by it.

Elements that were decoded and are made codes again, on any number of ranks, are the same elements: scales have so few
bits that an integer times its scale is exact in bf16, whose significand has eight, and are rounded up, so that the
largest integer of a block gives the same scale again (`ExactBlocks` in `runtime/codec.py`). So a run that goes on from
a checkpoint in bf16 has the same values to the bit.
"""

from __future__ import annotations

import mmap
import threading
from typing import Protocol

import torch

from shardwise.plan.placement import Codes
from shardwise.plan.placement.wire import SCALE_BYTES

Tensor = torch.Tensor


class Rows(Protocol):
    """Tensors of a flat buffer that are no memory of their own: addresses of what lies on a disk, or as codes."""

    name: str

    @property
    def num_changes(self) -> int:
        """How often the addresses have been written through, by torch's counter."""
        ...

    def has(self, tensor: Tensor) -> bool:
        """Whether `tensor` is an address of these."""
        ...

    def read(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        """The values that the flat `tensor` stands for, in memory: in `out`, if given, which has its dtype and
        length."""
        ...

    def write(self, tensor: Tensor, values: Tensor) -> None:
        """Write `values`, flat and of any dtype and device, to the place that `tensor` stands for."""
        ...

    def keep_for(self, reader: threading.Event) -> None:
        """Do not write until the event is set: another thread reads, for a checkpoint."""
        ...


class RestCodec(Protocol):
    """Makes codes of whole blocks, and elements of codes."""

    def num_codes(self, numel: int) -> int: ...

    def encode(self, elements: Tensor, codes: Tensor, start: int = 0) -> None: ...

    def decode(self, codes: Tensor, elements: Tensor) -> None: ...


class CodedRows:
    """`numel` parameters in `dtype`, whole blocks, as codes on `device`. `Rows` by the addresses in `param`."""

    def __init__(
        self,
        name: str,
        codec: RestCodec,
        codes: Codes,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        made: Tensor | None = None,
    ) -> None:
        """Of zeros, unless codes are `made` already."""
        self.name = name
        self._codec, self._block = codec, codes.block
        if made is None:
            made = torch.zeros(codec.num_codes(numel), dtype=torch.uint8, device=device)
        self._codes = made
        # Pages that are never touched take no memory.
        self._addresses = torch.frombuffer(mmap.mmap(-1, numel * dtype.itemsize), dtype=torch.uint8)
        self.param = self._addresses.view(dtype)
        self._begun: dict[int, Tensor] = {}
        """By place, blocks of which a part was written, as elements: they are made codes when all is there."""
        self._readers: list[threading.Event] = []

    @classmethod
    def of(cls, made: Tensor, name: str, codec: RestCodec, codes: Codes, dtype: torch.dtype) -> CodedRows:
        """Those of which `made`, from `codes_of`, are the codes: whole blocks."""
        numel = made.numel() // codec.num_codes(codes.block) * codes.block
        return cls(name, codec, codes, numel, dtype, made.device, made)

    @property
    def codes(self) -> Tensor:
        """Of all parameters, as a message has them."""
        while self._begun:
            self._encode(*self._begun.popitem())
        return self._codes

    def decode(self, out: Tensor) -> None:
        """Fill `out` with all of them."""
        self._codec.decode(self.codes, out)

    def codes_of(self, tensor: Tensor) -> Tensor:
        """A copy of those of the flat `tensor`, which begins with a block: of whole blocks."""
        at = self._place(tensor) // self.param.element_size()
        return self._some(self.codes, at, self._block_start(at + tensor.numel() - 1) + self._block)

    @property
    def num_changes(self) -> int:
        return self._addresses._version

    def has(self, tensor: Tensor) -> bool:
        return tensor.numel() > 0 and 0 <= self._place(tensor) < self._addresses.numel()

    def read(self, tensor: Tensor, out: Tensor | None = None) -> Tensor:
        size, place = self.param.element_size(), self._place(tensor)
        start = self._block_start(place // size)
        stop = self._block_start((place + tensor.nbytes - 1) // size) + self._block
        raw = self._decode(start, stop).view(torch.uint8)[place - start * size :][: tensor.nbytes]
        if out is None:
            return raw.view(tensor.dtype)
        out.view(torch.uint8).copy_(raw)
        return out

    def write(self, tensor: Tensor, values: Tensor) -> None:
        while self._readers:
            self._readers.pop().wait()
        at = self._place(tensor) // self.param.element_size()
        left = values.to(self._codes.device, self.param.dtype)
        while left.numel():
            start = self._block_start(at)
            num = (left.numel() // self._block) * self._block if at == start else 0
            if num:
                self._encode(at, left[:num])
            else:
                num = min(left.numel(), start + self._block - at)
                self._begin(start)[at - start :][:num].copy_(left[:num])
            at, left = at + num, left[num:]

    def keep_for(self, reader: threading.Event) -> None:
        self._readers.append(reader)

    def _place(self, tensor: Tensor) -> int:
        return tensor.data_ptr() - self._addresses.data_ptr()

    def _block_start(self, at: int) -> int:
        return at // self._block * self._block

    def _begin(self, start: int) -> Tensor:
        """The elements of one block, to be written to."""
        if start not in self._begun:
            self._begun[start] = self._decode(start, start + self._block)
        return self._begun[start]

    def _encode(self, start: int, elements: Tensor) -> None:
        """Whole blocks."""
        numel = elements.numel()
        for begun in [begun for begun in self._begun if start <= begun < start + numel]:
            del self._begun[begun]
        codes = torch.empty(self._codec.num_codes(numel), dtype=torch.uint8, device=self._codes.device)
        self._codec.encode(elements.contiguous(), codes)
        blocks = slice(start // self._block, (start + numel) // self._block)
        for here, made in zip(self._by_block(self._codes), self._by_block(codes), strict=True):
            here[blocks].copy_(made)

    def _decode(self, start: int, stop: int) -> Tensor:
        """Whole blocks, in memory of their own."""
        codes = self._some(self._codes, start, stop)
        elements = torch.empty(stop - start, dtype=self.param.dtype, device=codes.device)
        self._codec.decode(codes, elements)
        for begun, block in self._begun.items():
            if start <= begun < stop:
                elements[begun - start :][: self._block].copy_(block)
        return elements

    def _some(self, codes: Tensor, start: int, stop: int) -> Tensor:
        """Of whole blocks, in memory of their own."""
        blocks = slice(start // self._block, stop // self._block)
        return torch.cat([part[blocks].reshape(-1) for part in self._by_block(codes)])

    def _by_block(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """The integers of a message, and the bytes of its scales, one row for each block."""
        num = codes.numel() // self._codec.num_codes(self._block)
        scales = num * SCALE_BYTES
        return codes[:-scales].view(num, -1), codes[-scales:].view(num, -1)
