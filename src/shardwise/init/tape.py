"""Histories of tensors that have no memory yet, and their replay.

[Note: histories] A tensor made inside `deferred_init` is an ordinary tensor with an empty storage. The storage carries
an `Origin`: all operations that wrote to it, in order, with their inputs, and for a random one the state of the
generator. To compute one storage, only the operations that it depends on are replayed: backwards from its last write to
an operation that overwrites all of it, and the same for their inputs. So a rank computes only the parameters of which
it keeps a part, bit for bit as the plain constructor does, whatever was drawn before or in between.

Recording below autograd, on ordinary CPU tensors, needs no rules for `.data`, views and casts, and parameters stay the
same objects. Random operations run once while recording, because the state of a generator cannot be known without
drawing; so recording takes the plain constructor's time.

[Note: the default dtype] It belongs to the process, like the default generator. Who sets it while values are computed
changes what other threads make meanwhile (loaders, ranks that are threads), and of two that set and restore it one can
leave it to the other's: tests of ranks as threads then had bf16 for the rest of their process, once in a few hundred
runs beside a load. So a factory's dtype is written down with it, and an operation that needs the default (integers that
become floats) or the default generator (random ones without an argument for another) holds a lock.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.errors import ModelError
from shardwise.system.torch_private import OpOverload, tree_flatten, tree_iter, tree_map

Tensor = torch.Tensor
Function = OpOverload
_ORIGIN = "shardwise_origin"
"""The attribute of a storage with its history; the storage lives as long as any tensor on it."""
PROCESS_WIDE = threading.RLock()
"""Held by who replaces the default dtype or generator. See [Note: the default dtype]."""
_NUMBERS = itertools.count()


@dataclass(eq=False)
class Origin:
    """The history of one storage: its size in bytes, its device, and the operations that wrote to it."""

    num_bytes: int
    device: torch.device
    writes: list[Operation] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Ref:
    """A tensor on a storage with a history: shape, stride, offset and dtype."""

    origin: Origin
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def to(cls, tensor: Tensor, origin: Origin) -> Ref:
        return cls(origin, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)

    @property
    def covers_all(self) -> bool:
        """Whether these elements are the whole storage. Overlapping strides of 0 do not count."""
        num_bytes = self.dtype.itemsize
        for size in self.shape:
            num_bytes *= size
        return num_bytes == self.origin.num_bytes and 0 not in self.stride

    def identity(self, names: dict[Origin, int]) -> str:
        name = names.setdefault(self.origin, len(names))
        return f"{name}{self.shape}{self.stride}{self.offset}{self.dtype}"


@dataclass(eq=False)
class Operation:
    """One call that was not made, or whose result was discarded. Tensor arguments are `Ref`s or real values."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[Ref, ...]
    """New tensors that it returns, in order."""
    needs: tuple[Ref, ...]
    """Tensors whose values must be computed before."""
    overwritten: tuple[Origin, ...]
    """Storages that it overwrites completely without reading them."""
    default_dtype: torch.dtype | None
    """What the result depends on, if it does. See [Note: the default dtype]."""
    generator_state: Tensor | None
    number: int = field(default_factory=lambda: next(_NUMBERS))
    """Operations that depend on each other are ordered by it, whichever recordings they come from."""

    def identity(self, names: dict[Origin, int]) -> Iterator[bytes | memoryview]:
        """Everything that determines its result, for a digest; `names` are those of storages so far."""
        leaves, structure = tree_flatten((self.args, self.kwargs))
        yield f"{self.function} {structure} {self.default_dtype}".encode()
        for leaf in leaves:
            if isinstance(leaf, Ref):
                yield leaf.identity(names).encode()
            elif isinstance(leaf, Tensor):
                yield f"{leaf.shape} {leaf.dtype}".encode()
                yield tensor_bytes(leaf)
            else:
                yield repr(leaf).encode()
        yield from (ref.identity(names).encode() for ref in self.made)
        if self.generator_state is not None:
            yield tensor_bytes(self.generator_state)


def origin_of(tensor: Tensor) -> Origin | None:
    """The history of a tensor's storage; `None` for an ordinary tensor."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    origin: Origin | None = getattr(tensor.untyped_storage(), _ORIGIN, None)
    return origin


def set_origin(storage: torch.UntypedStorage, origin: Origin | None) -> None:
    if origin is None:
        delattr(storage, _ORIGIN)
    else:
        setattr(storage, _ORIGIN, origin)


def origin_of_storage(storage: torch.UntypedStorage) -> Origin | None:
    origin: Origin | None = getattr(storage, _ORIGIN, None)
    return origin


def values_of(tensor: Tensor) -> Tensor:
    """A real tensor with the values that `tensor` has by its history; `tensor` itself if it has no history."""
    origin = origin_of(tensor)
    if origin is None:
        return tensor
    return Ref.to(tensor, origin).on(replay([origin])[origin])


def fill(storage: torch.UntypedStorage, origin: Origin) -> None:
    """Compute the values of a storage, for all tensors on it."""
    values = replay([origin])[origin]
    storage.resize_(origin.num_bytes)
    storage.copy_(values, non_blocking=False)
    set_origin(storage, None)


def digest_of(origins: Iterable[Origin]) -> bytes:
    """Equal on two ranks if they would compute the same values, element for element."""
    targets, names = list(origins), dict[Origin, int]()
    digest = hashlib.sha256()
    for operation in _leading_to(targets):
        for part in operation.identity(names):
            digest.update(part)
    digest.update(repr([names.setdefault(origin, len(names)) for origin in targets]).encode())
    return digest.digest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


@torch.no_grad()
def replay(targets: Sequence[Origin]) -> dict[Origin, torch.UntypedStorage]:
    """Compute the storages of `targets`. Other storages are freed after their last use."""
    operations = _leading_to(targets)
    last_use = {origin: op.number for op in operations for origin in _touched(op)}
    storages: dict[Origin, torch.UntypedStorage] = {}
    for operation in operations:
        _run(operation, storages)
        for origin in _touched(operation):
            if last_use[origin] == operation.number and origin not in targets:
                del storages[origin]
    return {origin: _storage(origin, storages) for origin in targets}


def _leading_to(targets: Iterable[Origin]) -> list[Operation]:
    """Every operation on which the last values of `targets` depend, in the order of recording."""
    found: dict[int, Operation] = {}
    due = [(origin, 2**63) for origin in targets]
    followed: set[tuple[Origin, int]] = set()
    while due:
        origin, before = due.pop()
        for operation in reversed(origin.writes):
            if operation.number >= before:
                continue
            if (origin, operation.number) in followed:
                break
            followed.add((origin, operation.number))
            if operation.number not in found:
                found[operation.number] = operation
                due += [(ref.origin, operation.number) for ref in operation.needs]
            if origin in operation.overwritten:
                break
    return [found[number] for number in sorted(found)]


def _touched(operation: Operation) -> set[Origin]:
    refs = (leaf for leaf in tree_iter((operation.args, operation.kwargs)) if isinstance(leaf, Ref))
    return {ref.origin for ref in (*refs, *operation.made)}


def _run(operation: Operation, storages: dict[Origin, torch.UntypedStorage]) -> None:
    def real(leaf: Any) -> Any:
        return leaf.on(_storage(leaf.origin, storages)) if isinstance(leaf, Ref) else leaf

    args, kwargs = tree_map(real, (operation.args, operation.kwargs))
    with _default_dtype(operation.default_dtype) if operation.default_dtype is not None else nullcontext():
        result = call(operation.function, args, kwargs, operation.generator_state)
    if not operation.made:
        return
    made = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
    for ref, tensor in zip(operation.made, made, strict=True):
        if (tuple(tensor.shape), tensor.dtype) != (ref.shape, ref.dtype):
            raise ModelError(
                f"{operation.function} made {list(ref.shape)} {ref.dtype} when the model was built, but now makes "
                f"{list(tensor.shape)} {tensor.dtype}. Build the model without deferred_init."
            )
        if tensor.stride() != ref.stride or tensor.untyped_storage().nbytes() != ref.origin.num_bytes:
            tensor = ref.on(_storage(ref.origin, storages)).copy_(tensor)
        storages[ref.origin] = tensor.untyped_storage()


def call(function: Callable[..., Any], args: Any, kwargs: Any, generator_state: Tensor | None) -> Any:
    """Call `function` with random numbers from `generator_state`; the user's generators are unchanged."""
    if generator_state is None:
        return function(*args, **kwargs)
    device = _device_of(args, kwargs)
    generator = torch.Generator(device)
    generator.set_state(generator_state)
    assert isinstance(function, Function)
    seeded = _with_generator(function)
    if seeded is not None:
        return seeded(*args, **kwargs, generator=generator)
    common = common_generator(device)
    with PROCESS_WIDE:
        before = common.get_state()
        common.set_state(generator_state)
        try:
            return function(*args, **kwargs)
        finally:
            common.set_state(before)


def has_generators(device: torch.device) -> bool:
    """Whether the default generator of `device` is accessible, so that random operations can be deferred."""
    return device.type == "cpu" or hasattr(getattr(torch, device.type, None), "default_generators")


def common_generator(device: torch.device) -> torch.Generator:
    """The default generator of `device`."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


def _device_of(args: Any, kwargs: Any) -> torch.device:
    named = kwargs.get("device")
    tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
    return torch.device(named) if named is not None else tensors[0].device if tensors else torch.device("cpu")


def _with_generator(function: Function) -> Function | None:
    """`function`, or an overload of it, with a `generator` argument: `randn` has a separate overload for it."""
    names = [argument.name for argument in function._schema.arguments]
    if "generator" in names:
        return function
    packet = function.overloadpacket
    for overload in packet.overloads():
        other: Function = getattr(packet, overload)
        theirs = [argument.name for argument in other._schema.arguments]
        if "generator" in theirs and [name for name in theirs if name != "generator"] == names:
            return other
    return None


def _storage(origin: Origin, storages: dict[Origin, torch.UntypedStorage]) -> torch.UntypedStorage:
    """Memory for `origin`, uninitialized if no operation has made it: it will be overwritten completely."""
    if origin not in storages:
        storages[origin] = torch.empty(origin.num_bytes, dtype=torch.uint8, device=origin.device).untyped_storage()
    return storages[origin]


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    with PROCESS_WIDE:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
