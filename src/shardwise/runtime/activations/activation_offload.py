"""Offloads what a unit's forward saves for its backward, and prefetches it one unit ahead in the backward.

[Note: saved storages] Autograd hands over tensors; memory is taken by their storages. Each storage is offloaded once,
as a whole, however many tensors of however many units are views of it, and is fetched as one. Not offloaded are
parameters (their memory is the engine's), buffers, small storages, and those on another device.

[Note: order on a device] Copies run on separate streams. A unit's storages are copied as soon as its forward has
finished, and freed at the end of the next such unit's forward, behind an event. So later computations cannot reuse
memory that is still being copied, and the host does not wait. In the backward, the first access to a saved tensor of a
unit starts the copies of the preceding unit, into memory of the current stream, which waits for them when they are
needed. On a CPU a copy completes at once, and a unit's storages are freed at the end of its own forward.

[Note: in-place changes] Autograd compares versions when a saved tensor is used, but not for tensors that hooks have
packed. So the version of each is compared when its storage is freed: a tensor that was changed before then raises in
the backward, as in plain PyTorch. A change after that is harmless, since the copy has the older values.

[Note: repeated backwards] A retained graph (`retain_graph`) keeps the copies too; another backward fetches them again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.memory import Copied, Copy
from shardwise.runtime import WrappedForward
from shardwise.runtime.activations.stores import Away, Store, bytes_of
from shardwise.system.torch_private import FakeTensor, storage_id, unwatched

Tensor = torch.Tensor
SMALL_BYTES = 4096
"""Smaller storages are not offloaded."""


class SavedElsewhere(WrappedForward):
    """Replaces the `forward` of `site`: `offloading` keeps what it saves."""

    def __init__(self, unit: str, site: nn.Module, forward: Callable[..., Any], offloading: Offloading) -> None:
        super().__init__(forward)
        self._unit, self._site, self._offloading = unit, site, offloading

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        group = _Group(self._unit, self._offloading, self._site.buffers())
        with saved_tensors_hooks(group.pack, _unpack):
            output = self.forward(*args, **kwargs)
        self._offloading.leave(group)
        return output


class Offloading:
    """The saved tensors of one model that are offloaded.

    Storages of the tensors `resting` are never offloaded. With `waits`, copies are asynchronous.
    """

    def __init__(self, store: Store, device: torch.device, resting: Iterable[Tensor], *, waits: bool) -> None:
        self.store = store
        self.device = device
        self.resting = frozenset(storage_id(tensor.untyped_storage()) for tensor in resting)
        self.known: weakref.WeakValueDictionary[int, Item] = weakref.WeakValueDictionary()
        """Items by their storage, while the storage lives or a graph needs the item."""
        self._latest: weakref.ref[_Group] | None = None
        self._leaving: _Group | None = None
        """The group whose copies have been started but not waited for."""
        self._begun: weakref.ref[_Group] | None = None
        self._waits = waits

    @unwatched
    def leave(self, group: _Group) -> None:
        """End the forward of a unit: start to copy what it saved."""
        self.free_copied()
        group.evict()
        before = self._latest() if self._latest is not None else None
        group.before = weakref.ref(before) if before is not None else None
        self._latest = weakref.ref(group)
        self._leaving = group
        if not self._waits:
            self.free_copied()

    def free_copied(self) -> None:
        """Free the storages that have been copied."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.free()

    def begin(self, group: _Group) -> None:
        """A backward accesses a saved tensor of `group`: fetch it, and prefetch the groups before it."""
        last = self._begun() if self._begun is not None else None
        if last is group:
            return
        self.free_copied()
        if last is not None:
            last.let_go()
        self._begun = weakref.ref(group)
        group.fetch()
        before = group.before() if group.before is not None else None
        if before is not None:
            before.fetch()
            ahead = before.before() if before.before is not None else None
            if ahead is not None:
                ahead.look_ahead()


class Item:
    """One storage: on the device until `free`, and again from `fetch` on."""

    def __init__(self, storage: torch.UntypedStorage, device: torch.device, dtype: torch.dtype) -> None:
        """`dtype` is that of the first saved tensor with this storage."""
        self._dtype = dtype if storage.nbytes() % dtype.itemsize == 0 else torch.uint8
        self._numel = storage.nbytes() // self._dtype.itemsize
        self.version = 0
        """The version of the last tensor saved before offloading; a tensor with another version has other values."""
        self._device = device
        self._known = weakref.ref(storage)
        self._storage: torch.UntypedStorage | None = storage
        self._whole: Tensor | None = None
        self._away: Away | None = None
        self._arriving: Copy = Copied()

    def has(self, storage: torch.UntypedStorage, version: int) -> bool:
        """Whether this is the item of `storage` with the values of a tensor with that version."""
        return self._known() is storage and (self._away is None or self.version == version)

    def evict(self, store: Store, unit: str) -> None:
        if self._away is None and self._storage is not None:
            self._away = store.put(self._storage, unit)

    def free(self) -> None:
        if self._away is not None and self._storage is not None:
            self._away.finish_copy()
            self._storage = None

    def look_ahead(self) -> None:
        if self._away is not None and self._whole is None:
            self._away.look_ahead()

    def fetch(self) -> None:
        if self._storage is None and self._whole is None and self._away is not None:
            self._whole = torch.empty(self._numel, dtype=self._dtype, device=self._device)
            self._arriving = self._away.fetch(self._whole)

    def whole(self) -> Tensor:
        """The whole storage as a flat tensor, ready to be read."""
        self.fetch()
        self._arriving.wait()
        if self._whole is None:
            assert self._storage is not None
            return bytes_of(self._storage, self._device).view(self._dtype)
        return self._whole

    def let_go(self) -> None:
        """Free the memory on the device; it can be fetched again."""
        if self._away is not None and self._whole is not None:
            self._arriving.wait()
            self._whole, self._arriving = None, Copied()

    def __del__(self) -> None:
        if self._away is not None:
            self._arriving.wait()
            self._away.release()


class _Group:
    """What one call of one module has saved, in order."""

    def __init__(self, unit: str, offloading: Offloading, buffers: Iterable[Tensor]) -> None:
        self.unit = unit
        self.offloading = offloading
        self.before: weakref.ref[_Group] | None = None
        """The group of the preceding call, which the backward reaches next."""
        self._stays = offloading.resting | {storage_id(buffer.untyped_storage()) for buffer in buffers}
        self._views: list[_View] = []
        """Kept until `free`; afterwards only autograd holds the views."""
        self._items: list[weakref.ref[Item]] = []

    @unwatched
    def pack(self, tensor: Tensor) -> _View | _NotOffloaded:
        if not self._leaves(tensor):
            return _NotOffloaded(self.unit, tensor)
        view = _View(self, self._item(tensor), tensor)
        self._views.append(view)
        return view

    def _leaves(self, tensor: Tensor) -> bool:
        is_plain = type(tensor) in (Tensor, nn.Parameter, FakeTensor)
        if not is_plain or tensor.layout is not torch.strided or tensor.device.type != self.offloading.device.type:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= SMALL_BYTES and storage_id(storage) not in self._stays

    def _item(self, tensor: Tensor) -> Item:
        storage = tensor.untyped_storage()
        item = self.offloading.known.get(storage_id(storage))
        if item is None or not item.has(storage, tensor._version):
            item = self.offloading.known[storage_id(storage)] = Item(storage, tensor.device, tensor.dtype)
        item.version = tensor._version
        return item

    def evict(self) -> None:
        items = dict.fromkeys(view.item for view in self._views)
        for item in items:
            item.evict(self.offloading.store, self.unit)
        self._items = [weakref.ref(item) for item in items]

    def free(self) -> None:
        for view in self._views:
            view.free()
        for item in self._alive():
            item.free()
        self._views.clear()

    def fetch(self) -> None:
        for item in self._alive():
            item.fetch()

    def look_ahead(self) -> None:
        for item in self._alive():
            item.look_ahead()

    def let_go(self) -> None:
        for item in self._alive():
            item.let_go()

    def _alive(self) -> list[Item]:
        return [item for item in (ref() for ref in self._items) if item is not None]


class _View:
    """A saved tensor whose storage is offloaded."""

    def __init__(self, group: _Group, item: Item, tensor: Tensor) -> None:
        self.group, self.item = group, item
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        self._version = tensor._version
        self._tensor: Tensor | None = tensor.detach()
        self._was_written_to = False

    def free(self) -> None:
        if self._tensor is not None:
            self._was_written_to = self._tensor._version != self._version
            self._tensor = None

    def tensor(self) -> Tensor:
        self.group.offloading.begin(self.group)
        if self._was_written_to or (self._tensor is not None and self._tensor._version != self._version):
            raise written_to(self.group.unit, self._shape)
        whole = self.item.whole()
        if whole.dtype != self._dtype:  # in a rehearsal a view would count as memory
            whole = whole.view(self._dtype)
        return whole.as_strided(self._shape, self._stride, self._offset)


class _NotOffloaded:
    """A saved tensor that is not offloaded."""

    def __init__(self, unit: str, tensor: Tensor) -> None:
        self._unit = unit
        self._version = tensor._version
        self._tensor = tensor.detach()  # the tensor itself may hold the node that holds this object

    def tensor(self) -> Tensor:
        if self._tensor._version != self._version:
            raise written_to(self._unit, self._tensor.shape)
        return self._tensor


def _unpack(saved: _View | _NotOffloaded) -> Tensor:
    return saved.tensor()


def written_to(unit: str, shape: torch.Size) -> RuntimeError:
    """An error worded as PyTorch's."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of "
        f"shape {list(shape)} that the forward of {unit} has saved. Change a copy of it instead."
    )
