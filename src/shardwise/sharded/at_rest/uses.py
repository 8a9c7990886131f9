"""PyTorch's functions, grouped by what they do to a tensor that they are given.

Functions that are not listed here read or change the values; which of the two, is seen after the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from shardwise.system.torch_private import TENSOR_ATTRIBUTES, UNMARKED, OpOverload, OpOverloadPacket, written_by

Tensor = torch.Tensor
Function = Callable[..., Any]


def _getters(*names: str) -> set[Function]:
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}


METADATA: frozenset[Function] = frozenset(
    {
        *_getters(
            *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf"),
            *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn"),
            *("is_xpu", "is_mps", "is_mtia", "is_vulkan", "is_maia", "is_ipu", "is_xla", "output_nr", "names", "name"),
            *("retains_grad", "volatile", "grad_dtype", "_version", "_backward_hooks", "_post_accumulate_grad_hooks"),
            *("_base", "_cdata", "grad_fn", "_grad_fn"),
        ),
        *(Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size),
        *(Tensor.stride, Tensor.storage_offset, Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous),
        *(Tensor.is_signed, Tensor.get_device, Tensor.is_inference, Tensor.is_conj, Tensor.is_neg, Tensor.is_pinned),
        *(Tensor.is_coalesced, Tensor.dim_order, Tensor.__len__, Tensor.register_hook, Tensor._is_view),
        *(torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference, torch.is_conj, torch.is_neg),
        *(torch.numel, torch.result_type, torch.is_same_size, torch.is_distributed, Tensor.is_same_size),
        *(torch.autograd.grad, torch.autograd.backward, torch.autograd.graph.get_gradient_edge),
        torch._has_compatible_shallow_copy_type,
    }
)
"""They use only what is known without the values, or use a parameter only as a leaf of a graph."""
COUNTS: frozenset[Function] = frozenset(
    {Tensor.numel, Tensor.nelement, torch.numel, Tensor.size, Tensor.__len__, *_getters("nbytes", "shape")}
)
"""Those of them of which loops count the elements of all parameters."""

ALIKE: frozenset[Function] = frozenset(
    {torch.zeros_like, torch.empty_like, torch.ones_like, torch.full_like, torch.rand_like, torch.randn_like}
)
"""They make a tensor of the same shape and do not read the values."""

_ATTRIBUTES: Mapping[str, Any] = TENSOR_ATTRIBUTES
GET_GRAD: Function = _ATTRIBUTES["grad"].__get__
SET_GRAD: Function = _ATTRIBUTES["grad"].__set__
DELETE_GRAD: Function = _ATTRIBUTES["grad"].__delete__
GET_DATA: Function = _ATTRIBUTES["data"].__get__
SET_DATA: Function = _ATTRIBUTES["data"].__set__
GET_REQUIRES_GRAD: Function = _ATTRIBUTES["requires_grad"].__get__
SET_REQUIRES_GRAD: Function = _ATTRIBUTES["requires_grad"].__set__

DETACH: frozenset[Function] = frozenset({Tensor.detach, torch.detach, GET_DATA})
"""They return the same values, detached from any graph."""

COPIED: frozenset[Function] = frozenset({Tensor.numpy, Tensor.__array__, Tensor.tolist})
"""They expose memory, so they get a copy of the values, which cannot be written to."""

NODE: frozenset[Function] = frozenset({Tensor.view_as, Tensor.expand_as})
"""`param.view_as(param).grad_fn.next_functions[0][0]` is how torch itself (`get_gradient_edge`,
`register_multi_grad_hook`) and others find the node that accumulates a parameter's gradient."""

STORAGE: dict[Function, str] = {
    Tensor.untyped_storage: "its storage, for which torch.export asks, too (export a plain model with these values),",
    Tensor._typed_storage: "its storage",
    Tensor.storage: "its storage",
    Tensor.data_ptr: "the address of its memory",
    Tensor.__dlpack__: "its memory, for another library,",
    Tensor.set_: "its storage",
    Tensor.resize_: "its size",
    Tensor.resize_as_: "its size",
    Tensor.share_memory_: "its memory, to share it,",
}

NORMS: frozenset[Function] = frozenset({torch.linalg.vector_norm, Tensor.norm, torch.norm})

SUMS: frozenset[Function] = frozenset({torch.sum, Tensor.sum})
"""In a loss, as in `0 * sum(p.sum() for p in model.parameters())`, that of a part has the gradient of the whole one."""

COLLECTIVES: frozenset[Function] = frozenset(
    getattr(dist, name)
    for name in (
        *("all_reduce", "all_reduce_coalesced", "broadcast", "reduce", "scatter", "all_gather", "gather", "send"),
        *("all_gather_single", "all_gather_coalesced", "reduce_scatter", "reduce_scatter_single", "recv"),
        *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "isend", "irecv"),
    )
    if hasattr(dist, name)
)
"""Torch's own, as loops call them that averaged gradients themselves before they had an engine."""

IN_BACKGROUND: frozenset[Function] = frozenset({dist.isend, dist.irecv}) if dist.is_available() else frozenset()
"""Those of them that always go on after they have returned; others do with `async_op=True`."""

REDUCE: Function | None = getattr(dist, "reduce", None)
"""It leaves undefined what other ranks than one have then, while a tensor of a sharded model is the same on all."""

_WRITES_FIRST: frozenset[Function] = frozenset(
    {
        *(torch._amp_foreach_non_finite_check_and_unscale_, Tensor.apply_, Tensor.map_, Tensor.map2_),
        *(torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_),
    }
)
_SCHEMAS: Mapping[Function, Any] = {
    getattr(torch, name): getattr(torch.ops.aten, name).default._schema
    for name in (
        *(name.removeprefix("aten::") for name in sorted(UNMARKED)),
        *("_native_batch_norm_legit", "_fused_moving_avg_obs_fq_helper", "fused_moving_avg_obs_fake_quant"),
    )
    if hasattr(torch, name)
}
_BATCH_NORM = inspect.signature(functional.batch_norm)


def written_uncounted(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that `func` writes to without incrementing their versions. Operators of other libraries need not
    count, so all that an operator's schema names is among them: to take over a write twice does no harm."""
    if func in COLLECTIVES:  # what is given by name may be what is written to
        return [*args[:1], *kwargs.values()]
    if func in _WRITES_FIRST:
        return list(args[:1])
    if func is functional.batch_norm:
        bound = _BATCH_NORM.bind(*args, **kwargs)
        bound.apply_defaults()
        func, args, kwargs = torch.batch_norm, (), bound.arguments
    return [one for schema in _schemas_of(func) for one in written_by(schema, args, kwargs)]


def _schemas_of(func: Function) -> list[Any]:
    if isinstance(func, OpOverload):
        return [func._schema]
    if isinstance(func, OpOverloadPacket):
        return [getattr(func, name)._schema for name in func.overloads()]
    return [_SCHEMAS[func]] if func in _SCHEMAS else []


SCALINGS: frozenset[Function] = frozenset(
    {
        *(Tensor.mul_, Tensor.div_, Tensor.clamp_, Tensor.clamp_min_, Tensor.clamp_max_, Tensor.clip_, Tensor.zero_),
        *(Tensor.neg_, Tensor.nan_to_num_, Tensor.__imul__, Tensor.__itruediv__, Tensor.multiply_, Tensor.divide_),
    }
)
"""Elementwise changes that need no other elements, if their other arguments are numbers."""
