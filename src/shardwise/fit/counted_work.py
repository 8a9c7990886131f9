"""What any model computes, counted in a rehearsal on fake tensors: every operator, between the moments of a pass.

FLOPs are those of torch's own registry (`torch.utils.flop_counter`), and of what it lacks: attention on processors, and
grouped products. Attention counts all pairs of positions, causal or not, as everywhere in the field, and says whether
a mask leaves half of them out, of which kernels compute nothing. Operators that only make views cost nothing on a
device; blocks of memory are counted with the operator that allocates them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardwise.fit.operations import Copying, Operation, Operations, Worked
from shardwise.program import Moment
from shardwise.runtime.hooks import in_backward
from shardwise.runtime.nested import argument_tensors
from shardwise.runtime.rehearsal import Heard
from shardwise.system.telemetry import Ledger
from shardwise.system.torch_private import UncompiledMode, asks_device, storage_id

NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
"""The dtypes for which hardware has rates."""
_ATTENTION = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "flex_attention")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2")
_COLLECTIVES: Mapping[str, str] = {
    "all_reduce": "all_reduce",
    "gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "exchange": "all_gather",
}
"""What a ledger calls the verbs of messages."""
BACKWARD_OF_ATTENTION = 2.5
"""Five products in its backward for two in its forward: scores are computed again (Dao et al., arXiv:2205.14135)."""

Dispatch = Callable[..., Any]
_Taken = tuple[Operations, Operations, Operations, int]


class CountedOperations(UncompiledMode):
    """Inside `with`, `operations` grows by what is computed; `recomputed` and `weights` by those of them that a
    backward computes again, and that make gradients of parameters of linear layers."""

    def __init__(self, resting: Sequence[torch.Tensor] = ()) -> None:
        from torch.utils.flop_counter import flop_registry  # loaded only by jobs that count

        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._registry = flop_registry
        self._resting = {storage_id(one.untyped_storage()) for one in resting if one.layout is torch.strided}
        self._known: dict[Operation, Operation] = {}
        self.is_paused = False
        self.operations: list[Operation] = []
        self.recomputed: list[Operation] = []
        self.weights: list[Operation] = []
        self.num_routed = 0
        """Since `take`."""
        self._factors: dict[int, tuple[StorageWeakRef, int]] = {}
        """Storages from which `weights` are computed, and their bytes. The weak reference prevents that another one
        gets the same identity."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if asks_device(func, args):
            return args[0].device
        result = func(*args, **(kwargs or {}))
        self.hear(func, args, kwargs or {}, result)
        return result

    def hear(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Count an operation that has run, if this mode is told of it and not entered itself."""
        if self.is_paused:
            return
        if not is_free(func):
            self._count(func, args, kwargs, result)
        elif _name(func) in _ALLOCATING and isinstance(result, torch.Tensor) and result.numel():
            self.add(Operation("memory", kernels=0, allocated_bytes=_allocated([], [result])))

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        given, made = list(argument_tensors((args, kwargs))), list(argument_tensors(result))
        operation = _operation(func, args, kwargs, given, made, result, self._registry)
        self.add(operation)
        if not in_backward():
            return
        if torch.is_grad_enabled():
            self.recomputed.append(self.operations[-1])
        elif _name(func) in ("mm", "_scaled_mm_v2") and not self._reads_params(given):
            self.weights.append(self.operations[-1])
            for storage in (one.untyped_storage() for one in given):
                self._factors.setdefault(storage_id(storage), (StorageWeakRef(storage), storage.nbytes()))

    def add(self, operation: Operation) -> None:
        """Count `operation`; equal ones are one object, because a model has many of them."""
        self.operations.append(self._known.setdefault(operation, operation))

    def _reads_params(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether an operand of a product is a parameter: then its result is the gradient of an input."""
        return any(storage_id(one.untyped_storage()) in self._resting for one in given)

    def take(self) -> _Taken:
        """What was counted since the last call: all, computed again, and for gradients of parameters, and the bytes of
        what these are computed from."""
        factors_bytes = sum(num_bytes for _, num_bytes in self._factors.values())
        if self.num_routed:
            self.add(Operation("memory", kernels=0, routed_calls=self.num_routed))
            self.num_routed = 0
        found = tuple(self.operations), tuple(self.recomputed), tuple(self.weights), factors_bytes
        self.operations.clear()
        self.recomputed.clear()
        self.weights.clear()
        self._factors.clear()
        return found


class CountedWork:
    """A `Watch` of rehearsals: `worked` has what the last pass computed before each moment, messages included that
    `ledger` is told of. `num_ranks` are the sizes of mesh axes."""

    def __init__(self, num_ranks: Mapping[str, int] | None) -> None:
        self.worked: list[Worked] = []
        self.ledger: Ledger = _CountingLedger(self._note_message, self._note_call)
        self._counting: CountedOperations | None = None
        self._num_ranks = dict(num_ranks or {})
        self._known: dict[_Taken, _Taken] = {}

    @contextmanager
    def during(self, resting: Sequence[torch.Tensor]) -> Iterator[Heard]:
        self.worked = []
        self._counting = CountedOperations(resting)
        yield self._counting.hear

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, what is computed does not count: training computes it in its first step alone."""
        counting = self._counting
        if counting is None:
            yield
            return
        before, counting.is_paused = counting.is_paused, True
        try:
            yield
        finally:
            counting.is_paused = before

    def note_moment(self, moment: Moment) -> None:
        if self._counting is not None:
            found = self._counting.take()
            self.worked.append(Worked(moment, *self._known.setdefault(found, found)))

    def note_copy(self, verb: str, tier: str, num_bytes: int) -> None:
        if self._counting is not None:
            kind: Copying = "evict" if verb == "evict" else "fetch"
            self._counting.add(Operation(kind, num_bytes=num_bytes, axis=tier, kernels=0))

    def _note_call(self) -> None:
        if self._counting is not None and not self._counting.is_paused:
            self._counting.num_routed += 1

    def _note_message(self, verb: str, axis: str, sent_bytes: int) -> None:
        num_ranks = self._num_ranks.get(axis, 1)
        if self._counting is None or num_ranks < 2:
            return
        kind = _COLLECTIVES[verb]
        rounds = 2 if kind == "all_reduce" else 1
        whole = sent_bytes * num_ranks / (rounds * (num_ranks - 1))
        self._counting.add(Operation(kind, num_bytes=whole, axis=axis))  # type: ignore[arg-type]  # one of them


class _CountingLedger(Ledger):
    """A ledger that passes on what it is told."""

    def __init__(self, told: Callable[[str, str, int], None], told_of_call: Callable[[], None]) -> None:
        super().__init__()
        self._told, self._told_of_call = told, told_of_call

    def called(self, verb: str, axis: str) -> None:
        super().called(verb, axis)
        self._told_of_call()

    def sent(self, verb: str, axis: str, num_bytes: int) -> None:
        super().sent(verb, axis, num_bytes)
        self._told(verb, axis, num_bytes)


_ALLOCATING = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
_PASSING = ("_unsafe_view", "lift_fresh")
_LOOK_UP = ("embedding", "index_select", "nll_loss_forward")
"""They read as much of their first operand as they return."""


@cache
def _name(func: Any) -> str:
    return str(func._overloadpacket).partition(".")[2]


@cache
def is_free(func: Any) -> bool:
    """Whether it only makes a view or allocates."""
    aliases = [one.alias_info for one in func._schema.returns]
    is_view = all(one is not None and not one.is_write for one in aliases)
    return func.namespace == "prim" or is_view or _name(func) in (*_ALLOCATING, *_PASSING)


def _operation(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    result: Any,
    registry: Mapping[Any, Dispatch],
) -> Operation:
    name = _name(func)
    read = (*given[1:], *made) if name in _LOOK_UP else given
    num_bytes = sum(one.numel() * one.element_size() for one in (*read, *made))
    dtype = NAMES.get(given[0].dtype, "-") if given else "-"
    allocated = _allocated(given, made)
    if any(mark in name for mark in _ATTENTION) and dtype != "-":
        return _attention(func, args, kwargs, given, dtype, num_bytes, allocated)
    if name in _PRODUCTS and dtype != "-":
        left, right = given[-2:] if name in ("addmm", "baddbmm") else given[:2]
        return _product(left, right, made[0], NAMES.get(left.dtype, dtype), num_bytes, allocated)
    formula = registry.get(func._overloadpacket)
    if formula is not None and dtype != "-":
        flops = int(formula(*args, **kwargs, out_val=result))  # with `None` for a gradient that nobody needs
        area = max(1, made[0].numel())
        shape = (area, 1, max(1, flops // (2 * area)))
        return Operation("product", shape, dtype, flops, num_bytes, allocated_bytes=allocated)
    written = NAMES.get(made[0].dtype, "-") if made else dtype
    return Operation("memory", dtype=written, num_bytes=num_bytes, allocated_bytes=allocated)


def _allocated(given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The bytes of each storage of `made` that is not one of `given`."""
    known = {storage_id(one.untyped_storage()) for one in given if one.layout is torch.strided}
    found: dict[int, int] = {}
    for one in made:
        if one.layout is torch.strided:
            storage = one.untyped_storage()
            found.setdefault(storage_id(storage), storage.nbytes())
    return tuple(num_bytes for storage, num_bytes in found.items() if storage not in known and num_bytes)


def _product(
    left: torch.Tensor,
    right: torch.Tensor,
    made: torch.Tensor,
    dtype: str,
    num_bytes: int,
    allocated: tuple[int, ...],
) -> Operation:
    """Of matrices, batches of them, or groups of rows (`_grouped_mm`)."""
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    batch = math.prod(left.shape[:-2]) if left.dim() == right.dim() == 3 else 1
    if left.dim() == right.dim() == 2 and made.dim() == 3:  # groups of columns: their lengths add up to k
        batch, k = made.shape[0], max(1, k // made.shape[0])
    shape = (m, n, k) if batch == 1 else (m, n, k, batch)
    return Operation("product", shape, dtype, 2 * batch * m * n * k, num_bytes, allocated_bytes=allocated)


def _attention(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Sequence[torch.Tensor],
    dtype: str,
    num_bytes: int,
    allocated: tuple[int, ...],
) -> Operation:
    tensors = [one for one in given if one.dim() == 4]
    is_backward = "backward" in _name(func)
    query, key = tensors[1:3] if is_backward else tensors[:2]
    batch, heads, queries, size = query.shape
    keys = key.shape[-2]
    flops = 4 * batch * heads * queries * keys * size * (BACKWARD_OF_ATTENTION if is_backward else 1)
    shape = (batch * heads, queries, keys, size)
    return Operation(
        "attention",
        shape,
        dtype,
        flops,
        num_bytes,
        allocated_bytes=allocated,
        is_backward=is_backward,
        is_causal=queries == keys and _is_causal(func, args, kwargs),
    )


def _is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the operator is told so; with a mask of its own in a tensor it computes all pairs."""
    names = [one.name for one in func._schema.arguments] if hasattr(func, "_schema") else []
    if "is_causal" not in names:
        return False
    place = names.index("is_causal")
    return bool(args[place] if place < len(args) else kwargs.get("is_causal", False))
