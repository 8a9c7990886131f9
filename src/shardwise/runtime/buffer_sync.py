"""Buffers that a forward changes (running statistics). After each step all ranks of a data-parallel group take the
values of its first rank, which is rank 0 if there are no model axes.

[Note: which buffers change] This is not declared anywhere, and it may start at any time: a batch norm is unfrozen, a
statistic is assigned anew. So before each verdict a rank compares its buffers, by object and by bytes, with what they
were when the ranks last agreed. Version counters would miss changes, because batch norm and `.data` write without them.
Buffers known to change are sent, not compared. A change on any rank is reported with the verdict, which is sent anyway;
only then do the ranks exchange names and shapes. Buffers on a device are compared there, and the result goes with the
verdict as a tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import reduce

import torch
from torch import nn

from shardwise.comm import DataGroup
from shardwise.errors import ModelError
from shardwise.memory import copy_into, is_dense

Tensor = torch.Tensor
Layout = tuple[torch.Size, torch.dtype]

_EXACT_BYTES = 64 << 10
"""A buffer of up to this many bytes is compared with a copy, a larger one with sums, which take hardly any memory."""
_WORDS = 1024
"""Words of 8 bytes per row of a sum."""


class BufferSync:
    """Finds the buffers that change on any rank, and from then on keeps them the same on all."""

    def __init__(self, model: nn.Module, data_group: DataGroup, on_host: Callable[[torch.device], bool]) -> None:
        """`on_host(device)`: whether the host can read memory of that device without waiting."""
        self._data_group = data_group
        self._on_host = on_host
        self._owners = {f"{name}." if name else "": module._buffers for name, module in model.named_modules()}
        self._shared: dict[str, Layout] = {}
        """The buffers that are kept the same, and their shape and dtype on the first rank of the group."""
        self._watch = _Watch(self._present())

    def has_news(self) -> bool:
        """Whether a buffer that is not kept the same has changed on this rank, or one that is has another shape or
        dtype."""
        present = self._present()
        if not self._shared.keys() <= present.keys():
            return True
        for name, buffer in present.items():
            layout = self._shared.get(name)
            is_as_known = self._watch.knows(name, buffer) if layout is None else _layout(buffer) == layout
            if not is_as_known:
                return True
        return any(self._watch.has_seen_change(device) for device in self._watch.devices if self._on_host(device))

    def news_on_device(self) -> Tensor | None:
        """`has_news` for devices that the host cannot read without waiting: a 0-d bool tensor, `None` if there is no
        such device."""
        away = [device for device in self._watch.devices if not self._on_host(device)]
        changes = [self._watch.change_on(device) for device in away]
        return reduce(torch.logical_or, (changed.to(away[0]) for changed in changes[1:]), changes[0]) if away else None

    def learn(self) -> int:
        """Decide which buffers are kept the same. Collective. Returns the bytes that this sends per step. Raises
        `ModelError` for a sparse or quantized buffer that changes."""
        sent = self._data_group.exchange(json.dumps(self._changes()).encode(), "buffers")
        messages = [json.loads(message) for message in sent]
        changed = {name for one in messages for name in one["changed"]} | self._shared.keys()
        of_first = messages[0]["layouts"]
        for name in sorted(changed & of_first.keys()):
            shape, dtype, is_dense = of_first[name]
            if not is_dense:
                raise ModelError(
                    f"The buffer {name} has changed, and one that is sparse or quantized cannot be kept the same on "
                    "all ranks. Make it a dense tensor, or let each rank have its own: sync_buffers: false."
                )
            self._shared[name] = torch.Size(shape), getattr(torch, dtype)
        self._shared = {name: layout for name, layout in sorted(self._shared.items()) if name in of_first}
        present = self._present()
        for name, layout in self._shared.items():
            if name not in present or _layout(present[name]) != layout:
                self._put(name, torch.empty(layout[0], dtype=layout[1], device=self._device(present, name)))
        present = self._present()
        self._watch = _Watch({name: one for name, one in present.items() if name not in self._shared})
        return sum(present[name].nbytes for name in self._shared)

    def share(self) -> None:
        """Give all ranks of the group the values of its first, in one message per dtype and device. Collective."""
        by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
        for name in self._shared:
            prefix, key = _split(name)
            buffer = self._owners[prefix][key]
            assert buffer is not None  # or there would have been news
            by_kind.setdefault((buffer.dtype, buffer.device), []).append((name, buffer))
        for named in by_kind.values():
            together = torch.cat([buffer.detach().reshape(-1) for _, buffer in named])
            self._data_group.broadcast(together, "buffers")
            if self._data_group.is_first:
                continue
            start = 0
            for name, buffer in named:
                values = together[start : start + buffer.numel()].view(buffer.shape)
                if buffer.is_inference():  # an inference tensor cannot be written to
                    self._put(name, values.clone())
                else:
                    copy_into(buffer.detach(), values)
                start += buffer.numel()

    def _present(self) -> dict[str, Tensor]:
        """All buffers of the model, each once, by the first of its names."""
        seen: set[int] = set()
        present: dict[str, Tensor] = {}
        for prefix, buffers in self._owners.items():
            if buffers:  # most modules have none, and this is asked in each step
                for key, buffer in buffers.items():
                    if buffer is not None and id(buffer) not in seen:
                        seen.add(id(buffer))
                        present[prefix + key] = buffer
        return present

    def _changes(self) -> dict[str, object]:
        """This rank's message: which buffers have changed, and the shape and dtype of each."""
        present = self._present()
        others = {name for name, one in present.items() if not self._watch.knows(name, one)}
        changed = (self._watch.changed() | others) - self._shared.keys()
        return {
            "changed": sorted(changed),
            "layouts": {
                name: (tuple(one.shape), str(one.dtype).removeprefix("torch."), is_dense(one))
                for name, one in present.items()
            },
        }

    def _put(self, name: str, buffer: Tensor) -> None:
        prefix, key = _split(name)
        if prefix not in self._owners:
            raise ModelError(f"Rank 0 has a buffer {name}, but this rank has no module for it; build the same on all.")
        self._owners[prefix][key] = buffer

    def _device(self, present: Mapping[str, Tensor], name: str) -> torch.device:
        if name in present:
            return present[name].device
        return next((one.device for one in present.values()), torch.device("cpu"))


class _Watch:
    """A snapshot of some buffers: which objects, and which bytes."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        self._buffers = dict(buffers)
        dense = {name: one for name, one in buffers.items() if is_dense(one)}
        self._addresses = {name: one.data_ptr() for name, one in dense.items()}
        self._bytes: dict[torch.device, dict[str, Tensor]] = {}
        for name, one in dense.items():
            self._bytes.setdefault(one.device, {})[name] = _bytes(one)
        self._seen = {device: _digest(views.values()) for device, views in self._bytes.items()}

    def knows(self, name: str, buffer: Tensor) -> bool:
        """Whether it is the same object with the same memory."""
        if self._buffers.get(name) is not buffer:
            return False
        return name not in self._addresses or self._addresses[name] == buffer.data_ptr()

    @property
    def devices(self) -> list[torch.device]:
        return list(self._bytes)

    def has_seen_change(self, device: torch.device) -> bool:
        return not torch.equal(self._seen[device], _digest(self._bytes[device].values()))

    def change_on(self, device: torch.device) -> Tensor:
        """`has_seen_change` as a tensor on `device`, so that the host need not wait."""
        return (self._seen[device] != _digest(self._bytes[device].values())).any()

    def changed(self) -> set[str]:
        """The names of the buffers whose bytes have changed."""
        found: set[str] = set()
        for device, views in self._bytes.items():
            start = 0
            for name, view in views.items():
                now = _digest([view])
                if not torch.equal(now, self._seen[device][start : start + now.numel()]):
                    found.add(name)
                start += now.numel()
        return found


def _digest(views: Iterable[Tensor]) -> Tensor:
    """The bytes that are compared: of a small buffer its own, of a large one sums over rows and columns."""
    parts: list[Tensor] = []
    for view in views:
        rows = view.numel() // (8 * _WORDS) if view.numel() > _EXACT_BYTES else 0
        if rows:
            whole = view[: rows * 8 * _WORDS]
            if whole.storage_offset() % 8:
                whole = whole.clone()
            words = whole.view(torch.int64).view(rows, _WORDS)
            parts += [words.sum(0).view(torch.uint8), words.sum(1).view(torch.uint8)]
        parts.append(view[rows * 8 * _WORDS :])
    return torch.cat(parts)


def _bytes(buffer: Tensor) -> Tensor:
    """The buffer's memory as bytes, including gaps between elements: a copy made without them would not follow later
    changes."""
    one = buffer.detach()
    if not one.is_contiguous():
        extent = 1 + sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True))
        one = one.as_strided((extent if one.numel() else 0,), (1,))
    return one.reshape(-1).view(torch.uint8)


def _layout(buffer: Tensor) -> Layout:
    return buffer.shape, buffer.dtype


def _split(name: str) -> tuple[str, str]:
    prefix, dot, key = name.rpartition(".")
    return prefix + dot, key
