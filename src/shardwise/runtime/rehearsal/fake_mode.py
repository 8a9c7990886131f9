"""Torch's fake tensors, whose operators take less time.

[Note: operators of fake tensors] Torch's mode looks at each call for what rehearsals never have: symbolic sizes,
constants, values that are propagated, custom operators. It takes 0.2 ms for an operator that it has in its cache, and a
millisecond for one that it has not, because the cache is asked with all sizes, which are others in each rehearsal. Of
operators that only compute shapes or make a view, and whose tensors are all on one device, it would call the meta
kernel and give the result that device: here this is done at once. Integers with values may be among the operands behind
the first one: labels, token ids, places. Many meta kernels are decompositions in Python, which
take ten times as long as to make the result where its layout is known: of elementwise ones and sums it is that of
contiguous operands, or of the first one. All others, and arguments of another kind, are left to torch.
`tests/pure/test_fake_mode.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwise.system.torch_private import FakeTensor, FakeTensorMode, as_on_meta, asks_device, fake_tensor

aten = torch.ops.aten
_META = torch.device("meta")
_MASKS = (torch.bool, torch.uint8)
_VIEWS = (
    aten.alias.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten._unsafe_view.default,
)
_OF_ONE = frozenset(
    {
        aten.cos.default,
        aten.div.Scalar,
        aten.exp.default,
        aten.gelu.default,
        aten.mul.Scalar,
        aten.neg.default,
        aten.pow.Tensor_Scalar,
        aten.relu.default,
        aten.rsqrt.default,
        aten.sigmoid.default,
        aten.silu.default,
        aten.sin.default,
        aten.tanh.default,
    }
)
_OF_TWO = frozenset({aten.add.Tensor, aten.div.Tensor, aten.mul.Tensor, aten.sub.Tensor})
_INDEXING = frozenset({aten.index.Tensor, aten.index_put.default, aten.index_put_.default})
_COMPUTING = (
    *_INDEXING,
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten.add_.Tensor,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.cat.default,
    aten.clone.default,
    aten.cumsum.default,
    aten.div_.Tensor,
    aten.embedding.default,
    aten.embedding_dense_backward.default,
    aten.empty_like.default,
    aten.eq.Scalar,
    aten.floor_divide.default,
    aten.gather.default,
    aten.gelu_backward.default,
    aten.histc.default,
    aten.masked_fill.Scalar,
    aten.mean.dim,
    aten.mm.default,
    aten.mul_.Tensor,
    aten.ne.Scalar,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.nll_loss_backward.default,
    aten.nll_loss_forward.default,
    aten.ones_like.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.silu_backward.default,
    aten.slice_backward.default,
    aten.sort.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.topk.default,
    aten.zeros_like.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._to_copy.default,
    aten.zero_.default,
    aten.fill_.Scalar,
)
_MAKING = frozenset({aten.arange.default, aten.arange.start_step, aten.empty.memory_format, aten.empty_strided.default})
DIRECT = frozenset((*_VIEWS, *_OF_ONE, *_OF_TWO, *_COMPUTING, *_MAKING))
"""Operators that are called at once."""


class FakeMode(FakeTensorMode):
    """See [Note: operators of fake tensors]."""

    def __init__(self, *, allow_non_fake_inputs: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=allow_non_fake_inputs)
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """Those of all fake tensors on a device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `UncompiledMode`

    def __torch_dispatch__(
        self,
        func: Any,  # an operator
        types: Sequence[type],  # torch's signature
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if asks_device(func, args):
            return args[0].device
        device = self._device_of(func, args, kwargs or {}) if func in DIRECT else None
        if device is None:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        if func in _MAKING:
            return self._on(device, func(*args, **{**(kwargs or {}), "device": _META}))
        made = _known(func, args, kwargs or {})
        if made is None:
            there = {name: value for name, value in (kwargs or {}).items() if name != "device"}
            with as_on_meta(self):
                made = func(*map(_without_values, args), **there)
        return self._on(device, made)

    def _device_of(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.device | None:
        """That of all tensors, if they are on one device, and of the result. The first one is fake; others may have
        values."""
        asked: torch.device | None = kwargs.get("device")
        if func in _MAKING:
            return asked if asked is not None and asked.type == "cpu" else None
        if func in _INDEXING and any(one is not None and one.dtype in _MASKS for one in args[1]):
            return None  # how many it selects is not known
        found = self._common_device(args, None)
        return found if asked in (None, found) else None

    def _common_device(self, values: Iterable[Any], found: torch.device | None) -> torch.device | None:
        for one in values:
            if type(one) is FakeTensor:
                device = one.fake_device if one.fake_mode is self and one.constant is None else None
            elif isinstance(one, torch.Tensor):
                device = one.device if found is not None and type(one) is torch.Tensor else None
            elif type(one) in (list, tuple) and any(isinstance(other, torch.Tensor) for other in one):
                device = self._common_device(one, found)
            else:
                continue
            if device is None or (found is not None and device != found):
                return None
            found = device
        return found

    def _on(self, device: torch.device, made: Any) -> Any:
        if isinstance(made, (list, tuple)):
            return type(made)(self._on(device, one) for one in made)
        if type(made) is FakeTensor:  # what was written to
            return made
        if device not in self._attributes:
            first = FakeTensor(self, made, device)
            self._attributes[device] = dict(vars(first))
            return first
        return fake_tensor(made, device, self._attributes[device])


def _without_values(given: Any) -> Any:
    """An operand that has values, or several, as the meta kernel takes it."""
    if type(given) is torch.Tensor:
        return aten.empty_strided.default(given.shape, given.stride(), dtype=given.dtype, device=_META)
    if type(given) is list and any(type(one) is torch.Tensor for one in given):
        return [_without_values(one) for one in given]
    return given


def _known(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The result on the meta device of an operator, if that is known at once."""
    if func in _OF_ONE or func in _OF_TWO:
        return _elementwise(args)
    make = _MAKERS.get(func)
    made: torch.Tensor | None = None if make is None else make(*args, **kwargs)
    return made


def _elementwise(args: Sequence[Any]) -> torch.Tensor | None:
    """Of tensors of one dtype, of which one has its shape, and of numbers."""
    tensors = [one for one in args[:2] if type(one) is FakeTensor]
    if len(tensors) < 2 and not all(type(one) in (FakeTensor, int, float) for one in args[:2]):
        return None
    shape, dtype = tensors[0].shape, tensors[0].dtype
    if not dtype.is_floating_point or any(one.dtype != dtype for one in tensors):
        return None
    for one in tensors[1:]:
        if _spans(one.shape, shape):
            shape = one.shape
        elif not _spans(shape, one.shape):
            return None
    if all(one.is_contiguous() for one in tensors):
        return _empty(shape, dtype)
    return _like(tensors[0], dtype) if shape == tensors[0].shape else None


def _copy(given: torch.Tensor, *, dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor | None:
    others = any(value for name, value in more.items() if name != "device")
    return None if others else _like(given, dtype or given.dtype)


def _reduced(
    given: torch.Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    if not dims or not given.dtype.is_floating_point or not given.is_contiguous():
        return None
    gone = {dim % given.dim() for dim in dims}
    sizes = [1 if place in gone else size for place, size in enumerate(given.shape) if keepdim or place not in gone]
    return _empty(sizes, dtype or given.dtype)


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    """Contiguous, unless operands look like images whose channels come last."""
    first = tensors[0]
    if any(
        one.dtype != first.dtype or one.dim() != first.dim() or not one.numel() or not _is_no_image(one)
        for one in tensors
    ):
        return None
    sizes = list(first.shape)
    others = [[size for place, size in enumerate(one.shape) if place != dim % first.dim()] for one in tensors]
    if not sizes or any(one != others[0] for one in others):
        return None
    sizes[dim] = sum(one.shape[dim] for one in tensors)
    return _empty(sizes, first.dtype)


def _is_no_image(tensor: torch.Tensor) -> bool:
    return tensor.dim() < 4 or (tensor.stride(-1) == 1 and tensor.shape[-1] > 1 and tensor.shape[1] > 1)


def _put_back(grad: torch.Tensor, sizes: Sequence[int], *_: int) -> torch.Tensor:
    return _empty(sizes, grad.dtype)


_MAKERS: Mapping[Callable[..., Any], Callable[..., torch.Tensor | None]] = {
    aten._to_copy.default: _copy,
    aten.cat.default: _joined,
    aten.mean.dim: _reduced,
    aten.slice_backward.default: _put_back,
    aten.sum.dim_IntList: _reduced,
}


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    made: torch.Tensor = aten.empty.memory_format(shape, dtype=dtype, device=_META)
    return made


def _like(given: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor without gaps whose dims lie in the order in which those of `given` do, if that is not ambiguous."""
    if given.is_contiguous():
        return _empty(given.shape, dtype)
    steps = given.stride()
    if len(set(steps)) < len(steps) or 0 in steps or min(given.shape) < 2:
        return None
    strides, step = [0] * len(steps), 1
    for place in sorted(range(len(steps)), key=steps.__getitem__):
        strides[place] = step
        step *= given.shape[place]
    made: torch.Tensor = aten.empty_strided.default(given.shape, strides, dtype=dtype, device=_META)
    return made


def _spans(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether `other` is broadcast to `shape`."""
    matches = (size in (1, full) for size, full in zip(reversed(other), reversed(shape), strict=False))
    return len(other) <= len(shape) and all(matches)
