"""Functions that mix the tokens of a sample, of which a rank has a part: pooling, shifts, sums over tokens.

[Note: along tokens] Attention alone is computed over all ranks. A mean over the tokens, the first one, or the one
before would be those of a rank's own part, and no error would follow. They are recognized by what they are called with:
a tensor whose second dimension has as many entries as a rank has tokens, and that dimension as the one to work along.
Others that are as long by chance are told apart by `coincidences.py`.
Tensors of two dimensions count only if they are integers (token ids, masks), since features of whole samples may be as
many as tokens. A convolution that is wider than 1 is refused whatever it is given, as `nn.Conv1d` is, and so is a
product of matrices that adds up over as many entries, wherever they are: attention without `softmax`, or with a head
less, is one. Other functions of transposed tensors are seen in a model alone, before its first forward
(`coincidences.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.system.torch_functions import PRODUCTS_OF_TWO, added_up, dims_of, named, picks

Tensor = torch.Tensor
Function = Callable[..., Any]

_DIM_AT: Mapping[Function, tuple[int, int | None]] = {
    **dict.fromkeys(named("mean", "sum", "prod", "nanmean", "nansum", "any", "all", "flip"), (1, None)),
    **dict.fromkeys(named("amax", "amin", "max", "min", "argmax", "argmin", "median"), (1, None)),
    **dict.fromkeys(named("var", "std", "var_mean", "std_mean"), (1, None)),
    **dict.fromkeys(named("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "logsumexp"), (1, None)),
    **dict.fromkeys(named("softmax", "log_softmax", "select", "narrow", "index_select", "gather"), (1, None)),
    **dict.fromkeys(named("sort", "argsort"), (1, -1)),
    **dict.fromkeys(named("count_nonzero"), (1, None)),
    **dict.fromkeys(named("topk", "kthvalue", "diff"), (2, -1)),
    Tensor.unfold: (1, None),
    **dict.fromkeys(named("norm", "vector_norm", "quantile", "roll"), (2, None)),
    **dict.fromkeys(named("chunk", "split", "tensor_split"), (2, 0)),
    **dict.fromkeys(named("unbind"), (1, 0)),
    **dict.fromkeys(named("normalize", "cosine_similarity"), (2, 1)),
}
"""Functions that work along dimensions, with the place of that argument, and its default."""
_SELECTING = frozenset(named("select", "narrow", "index_select", "gather", "chunk", "split", "tensor_split", "unbind"))
_INDEXING = frozenset({Tensor.__getitem__, Tensor.__setitem__})
JOINS = frozenset(named("cat", "concat", "concatenate"))
_CONVOLUTIONS = frozenset(named("conv1d"))
_POOLS = frozenset(
    named("avg_pool1d", "max_pool1d", "lp_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "interpolate")
)
"""Both take tokens as the last dimension."""
_SOFTMAX = frozenset(named("softmax"))
CURE = (
    "Shift labels before engine.split_sequence (labels[:, i] is what token i predicts); pool what engine.join_sequence "
    "has joined, outside of the model."
)
HasTokens = Callable[[Tensor], bool]
"""Whether dimension 1 of a tensor is a rank's tokens."""


def refuse_mixing(
    func: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_tokens: int,
    is_coincidence: Callable[[Function], bool],
) -> None:
    """Raises `ModelError` if a call in a forward mixes a rank's `num_tokens` tokens. `is_coincidence` tells whether
    another dimension only has as many entries where this function is called."""
    shape = mixes(func, args, kwargs, num_tokens)
    if shape is not None and not is_coincidence(func):
        raise refused_mixing(getattr(func, "__name__", str(func)), str(list(shape)))


def refused_mixing(name: str, shape: str) -> ModelError:
    """Of a function, given tensors of this shape."""
    return ModelError(
        f"The model calls {name} on a tensor of shape {shape} and mixes its tokens, of which each rank of a split "
        f"sequence has a part. {CURE} Attend by scaled_dot_product_attention, or leave sp out of the mesh."
    )


def mixes(
    func: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_tokens: int,
    has_tokens: HasTokens | None = None,
    dim: int = 1,
) -> tuple[int, ...] | None:
    """The shape of the tensor of which `func(*args, **kwargs)` mixes `num_tokens` tokens; `None` if it does not.

    Tensors with tokens in dimension `dim` are recognized by their shape, unless `has_tokens` knows them.
    """
    if func in PRODUCTS_OF_TWO:
        return _added_up(func, args, kwargs, num_tokens, has_tokens, dim)
    has_tokens = has_tokens or (lambda tensor: _has_tokens(tensor, num_tokens))
    if func in JOINS:
        return _joined(args, kwargs, has_tokens, dim)
    given = args[0] if args else kwargs.get("input")
    if not isinstance(given, Tensor):
        return None
    if func in _DIM_AT:
        is_mixing = _works_along(func, given, args, kwargs, num_tokens, has_tokens, dim)
    elif func in _INDEXING:
        is_mixing = has_tokens(given) and picks(args[1], given.dim(), num_tokens, dim)
    elif func is functional.pad:
        pads = args[1] if len(args) > 1 else kwargs.get("pad", ())
        start = 2 * (given.dim() - 1 - dim)
        is_mixing = has_tokens(given) and any(pads[start : start + 2])
    elif func in _CONVOLUTIONS:
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        is_mixing = weight.shape[-1] > 1
    elif func in _POOLS:
        is_mixing = given.dim() == 3 and given.shape[-1] == num_tokens
    else:
        return None
    return tuple(given.shape) if is_mixing else None


def mixes_flattened(
    func: Function, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, num_tokens: int
) -> bool:
    """Whether a function works along samples and tokens together, `[samples * tokens, ...]`, other than to sum up all
    elements as a loss does, or to choose some. `num_tokens` is a number that nothing else has."""
    if func not in _DIM_AT or func in _SELECTING or (isinstance(result, Tensor) and not result.dim()):
        return False
    if not (args and isinstance(args[0], Tensor) and _is_flattened(num_tokens, args[0])):
        return False
    return mixes(func, args, kwargs, num_tokens, partial(_is_flattened, num_tokens), 0) is not None


def _is_flattened(num_tokens: int, tensor: Tensor) -> bool:
    return tensor.dim() in (1, 2) and tensor.is_floating_point() and tensor.shape[0] % num_tokens == 0


def _has_tokens(tensor: Tensor, num_tokens: int) -> bool:
    is_wide = tensor.dim() > 2 or (tensor.dim() == 2 and not tensor.is_floating_point())
    return is_wide and tensor.shape[1] == num_tokens and not isinstance(tensor, torch.nn.Parameter)


def _works_along(
    func: Function,
    given: Tensor,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_tokens: int,
    has_tokens: HasTokens,
    dim: int,
) -> bool:
    dims = dims_of(given, args, kwargs, *_DIM_AT[func])
    if func in _SOFTMAX and given.dim() == 4 and dims == [3]:  # weights of an attention of the model's own
        return given.shape[-2:] == (num_tokens, num_tokens)
    return dim in dims and has_tokens(given)


def _added_up(
    func: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_tokens: int,
    has_tokens: HasTokens | None,
    of_tokens: int,
) -> tuple[int, ...] | None:
    """The shape of the operand over whose tokens a product of matrices adds up. In a model they may be anywhere."""
    for operand, dims in added_up(func, args, kwargs):
        are_tokens = of_tokens in dims if has_tokens else num_tokens in {operand.shape[dim] for dim in dims}
        if are_tokens and (has_tokens is None or has_tokens(operand)):
            return tuple(operand.shape)
    return None


def _joined(
    args: Sequence[Any], kwargs: Mapping[str, Any], has_tokens: HasTokens, of_tokens: int
) -> tuple[int, ...] | None:
    tensors = args[0] if args else kwargs.get("tensors", ())
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    for one in tensors:
        if dim in (of_tokens, of_tokens - one.dim()) and has_tokens(one):
            return tuple(one.shape)
    return None
