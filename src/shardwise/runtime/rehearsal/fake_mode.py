"""Torch's fake tensors, whose operators take less time.

[Note: operators of fake tensors] Torch's mode looks at each call for what rehearsals never have: symbolic sizes,
constants, values that are propagated, custom operators. It takes 0.2 ms for an operator that it has in its cache, and a
millisecond for one that it has not, because the cache is asked with all sizes, which are others in each rehearsal. Of
operators that only compute shapes or make a view, and whose tensors are all on one device, it would call the meta
kernel and give the result that device: here this is done at once. The meta kernels of elementwise ones are
decompositions in Python; where operands are contiguous, so is the result. All others, and arguments of another kind,
are left to torch. `tests/pure/test_fake_mode.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwise.system.torch_private import FakeTensor, FakeTensorMode, as_on_meta, asks_device, fake_tensor

aten = torch.ops.aten
_META = torch.device("meta")
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
_COMPUTING = (
    aten.add_.Tensor,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.cat.default,
    aten.clone.default,
    aten.gelu_backward.default,
    aten.mean.dim,
    aten.mm.default,
    aten.mul_.Tensor,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.silu_backward.default,
    aten.slice_backward.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._to_copy.default,
    aten.zero_.default,
    aten.fill_.Scalar,
)
_MAKING = frozenset({aten.empty.memory_format, aten.empty_strided.default})
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
        made = _elementwise(func, args)
        if made is None:
            there = {name: value for name, value in (kwargs or {}).items() if name != "device"}
            with as_on_meta(self):
                made = func(*args, **there)
        return self._on(device, made)

    def _device_of(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.device | None:
        """That of all tensors, if they are fake ones of this mode, on one device, and of the result."""
        asked: torch.device | None = kwargs.get("device")
        if func in _MAKING:
            return asked if asked is not None and asked.type == "cpu" else None
        found = self._common_device(args)
        return found if asked in (None, found) else None

    def _common_device(self, values: Iterable[Any]) -> torch.device | None:
        found: torch.device | None = None
        for one in values:
            if type(one) is FakeTensor:
                device = one.fake_device if one.fake_mode is self and one.constant is None else None
            elif isinstance(one, torch.Tensor):
                return None
            elif type(one) in (list, tuple) and one and isinstance(one[0], torch.Tensor):
                device = self._common_device(one)
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


def _elementwise(func: Callable[..., Any], args: Sequence[Any]) -> torch.Tensor | None:
    """The result on the meta device of an elementwise operator, if that is known at once: of contiguous tensors of one
    dtype, of which one has its shape, and of numbers."""
    if func not in _OF_ONE and func not in _OF_TWO:
        return None
    tensors = [one for one in args[:2] if type(one) is FakeTensor]
    if len(tensors) < 2 and not all(type(one) in (FakeTensor, int, float) for one in args[:2]):
        return None
    shape, dtype = tensors[0].shape, tensors[0].dtype
    if not dtype.is_floating_point or not all(one.dtype == dtype and one.is_contiguous() for one in tensors):
        return None
    for one in tensors[1:]:
        if _spans(one.shape, shape):
            shape = one.shape
        elif not _spans(shape, one.shape):
            return None
    made: torch.Tensor = aten.empty.memory_format(shape, dtype=dtype, device=_META)
    return made


def _spans(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether `other` is broadcast to `shape`."""
    matches = (size in (1, full) for size, full in zip(reversed(other), reversed(shape), strict=False))
    return len(other) <= len(shape) and all(matches)
