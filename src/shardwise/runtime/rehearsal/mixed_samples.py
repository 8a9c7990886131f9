"""Whether a forward mixes the samples of a batch: a mean over them, or a product of each with each.

In pipeline stages a call of the model is split along the samples ([Note: a split call] in `loop_calls.py`), and blocks
that mix samples would mix those of a part. They are found on fake tensors, with a number of samples of which no other
size is a multiple (`resized.py`): what is computed of a tensor with samples has as many dimensions of them, or mixes
them. Functions that leave the shape alone are known by name. Integers and booleans do not count: masks are made of
them.

A function that depends on how many samples there are mixes none, and is right for a whole batch alone. It is found by
`numbers_used.py`.

[Note: code of one's own in backwards] The backward of an `autograd.Function`, and hooks on what was computed, can do
either. Where there are some, a backward is followed as well. There sums over samples are gradients of parameters, and
right, unless something is computed of them for each sample: `grad - grad.mean(0)`, `grad / grad.norm()`.

[Note: states of forwards] A forward that counts its calls, or writes averages to a buffer, would do so once for each
part. It is found by what it leaves. Our own modules count samples, which add up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.runtime.nested import argument_tensors
from shardwise.system.graph_nodes import nodes_of
from shardwise.system.torch_functions import SHAPED_ALONG, dims_of, is_called_by_ours, named
from shardwise.system.torch_private import OpOverload, function_of

Tensor = torch.Tensor
_OTHERS = frozenset(named("histc"))
"""Count, and compute nothing that trains."""
_CHOOSING = frozenset({Tensor.__getitem__, *named("masked_select", "index_select", "gather", "take")})
"""By places or masks, if they are given some."""
_NORMS = frozenset(named("layer_norm", "rms_norm"))
_NORMS_OF_CHANNELS = frozenset(named("group_norm", "instance_norm"))
_SPATIAL = {
    function: num_dims
    for num_dims in (1, 2, 3)
    for kind in ("conv", "conv_transpose", "avg_pool", "max_pool", "lp_pool", "adaptive_avg_pool", "adaptive_max_pool")
    for function in named(f"{kind}{num_dims}d")
}
"""Functions that work along the last dimensions, with their number."""


class States:
    """What the modules of a `model` keep, before a forward."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, module) for name, module in model.named_modules() if not _is_ours(type(module))]
        self._buffers = {
            f"{name}.{key}".removeprefix("."): (buffer, buffer._version)
            for name, module in self._modules
            for key, buffer in module._buffers.items()
            if buffer is not None
        }
        self._numbers = self._counted()

    def changed(self) -> str:
        """How a forward has changed one of them, and would each time; "" if it has not."""
        buffers = {
            f"{name}.{key}".removeprefix("."): buffer
            for name, module in self._modules
            for key, buffer in module._buffers.items()
        }
        for name, (before, version) in self._buffers.items():
            now = buffers.get(name)
            if now is not None and now.shape == before.shape and (now is not before or now._version != version):
                return f"each call writes to the buffer {name}"
        numbers = self._counted()
        for name, number in self._numbers.items():
            if numbers.get(name) == number + 1:
                return f"{name} counts calls"
        return ""

    def _counted(self) -> dict[str, int]:
        return {
            f"{name}.{key}".removeprefix("."): value
            for name, module in self._modules
            for key, value in vars(module).items()
            if type(value) is int
        }


class MixedSamples(TorchFunctionMode):
    """Finds the first function of a forward's own code that mixes `num_samples` samples."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._num_samples = num_samples
        self.found = ""
        self.has_hooks = False
        """Whether the forward has registered a hook on what it has computed."""
        self._sums: dict[int, tuple[weakref.ref[Tensor], str]] | None = None
        """In `given_back`: what was computed of several samples, by identity, and by which function of what."""

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """A context in which something may be computed of several samples, as a loss is, and gradients of parameters
        are in a backward (see [Note: code of one's own in backwards]), but not given to each of them."""
        self._sums = {}
        try:
            yield
        finally:
            self._sums = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is Tensor.register_hook:
            self.has_hooks |= not _is_ours((*args, *kwargs.values())[1])
        if not self.found and not isinstance(func, OpOverload):  # those are autograd's, which compute on fake tensors
            given = [one for one in argument_tensors((args, kwargs)) if one.is_floating_point()]
            most = max((self._num_dims(one) for one in given), default=0)
            mixing = ""
            if most > 0 and self._mixes(func, args, kwargs, result, most):
                shapes = ", ".join(str(list(one.shape)) for one in given)
                mixing = f"{getattr(func, '__name__', func)} of {shapes}"
            if self._sums is not None:
                mixing = self._given_back(self._sums, mixing, func, (args, kwargs), result)
            self.found = mixing
        return result

    def mixing_in(self, tensor: Tensor) -> str:
        """By which function, of what, this was computed of several samples, in `given_back`; "" if it was not."""
        known = None if self._sums is None else self._sums.get(id(tensor))
        return known[1] if known is not None and known[0]() is tensor else ""

    def _given_back(
        self,
        sums: dict[int, tuple[weakref.ref[Tensor], str]],
        mixing: str,
        func: Callable[..., Any],
        given: Any,
        result: Any,
    ) -> str:
        """What a function gives samples of several of them; "" if nothing. What else it has computed of several is
        noted in `sums`."""
        if func in _CHOOSING and any(not one.is_floating_point() for one in argument_tensors(given)):
            mixing = ""  # as many samples as the batch says, each for itself
        mixing = next(filter(None, map(self.mixing_in, argument_tensors(given))), mixing)
        if not mixing or is_called_by_ours():  # attention that is split works on all tokens
            return ""
        made = list(argument_tensors(result))
        sums.update({id(one): (weakref.ref(one), mixing) for one in made})
        return mixing if any(self._num_dims(one) for one in made if one.is_floating_point()) else ""

    def _num_dims(self, tensor: Tensor) -> int:
        return 0 if isinstance(tensor, nn.Parameter) else len(self._dims(tensor))

    def _dims(self, tensor: Tensor) -> list[int]:
        """The dimensions of a tensor that are samples, maybe together with others."""
        return [dim for dim, size in enumerate(tensor.shape) if size > 0 and size % self._num_samples == 0]

    def _mixes(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, most: int
    ) -> bool:
        if func in _OTHERS or getattr(func, "__name__", "").startswith("new_"):
            return False
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if func in SHAPED_ALONG and first is not None:
            dims = dims_of(first, args, kwargs, *SHAPED_ALONG[func])
            return any(first.shape[dim] % self._num_samples == 0 for dim in dims)
        if func is functional.batch_norm:
            return bool(args[5] if len(args) > 5 else kwargs.get("training"))
        dims = [] if first is None else self._dims(first)
        if first is not None and dims and _works_along(func, first, args, kwargs, dims):
            return True
        if func is Tensor.__getitem__ and first is not None and first.shape[0] == self._num_samples:
            index = args[1][0] if isinstance(args[1], tuple) else args[1]
            if isinstance(index, Tensor) and not index.is_floating_point() and index.dtype != torch.bool:
                return True  # in another order
        made = [one for one in argument_tensors(result) if one.is_floating_point()]
        return any(self._num_dims(one) not in range(1, most + 1) for one in made)


def _works_along(
    func: Callable[..., Any], given: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], dims: Sequence[int]
) -> bool:
    """Whether a function that leaves the number of dimensions alone works along one of `dims`: it normalizes, pools,
    pads, stretches or convolves along it."""
    if func in _NORMS:
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        return max(dims) >= given.dim() - len(shape)
    if func in _NORMS_OF_CHANNELS:
        return max(dims) >= 1
    if func in _SPATIAL:
        weight = args[1] if len(args) > 1 else kwargs.get("weight")
        kernel = weight.shape if isinstance(weight, Tensor) else ()  # a pool's may be a number
        along = (dim - given.dim() for dim in dims if dim >= given.dim() - _SPATIAL[func])
        return any(not kernel or kernel[dim] > 1 for dim in along)
    if func is functional.interpolate:
        return max(dims) >= 2
    if func is functional.pad:
        pads = args[1] if len(args) > 1 else kwargs["pad"]
        return any(any(pads[2 * (given.dim() - 1 - dim) :][:2]) for dim in dims)
    if func is Tensor.unfold:
        dimension = kwargs["dimension"] if "dimension" in kwargs else args[1]
        return dimension % given.dim() in dims
    return False


def runs_other_code(outputs: Iterable[Tensor]) -> bool:
    """Whether the backward of `outputs` may run Python code that is not this library's: see [Note: code of one's own in
    backwards]."""
    functions = filter(None, map(function_of, nodes_of(outputs)))
    return not all(map(_is_ours, functions))


def _is_ours(code: Any) -> bool:
    """Whether a function or class is this library's."""
    return str(getattr(code, "__module__", "")).startswith(f"{__name__.partition('.')[0]}.")


def follow_backward(outputs: Sequence[Tensor], inputs: Iterable[Tensor]) -> None:
    """A backward from `outputs` to those `inputs` that train, in which modes see what Python code calls. Given tensors,
    torch would run it as a function that a mode is asked for, and leave that mode meanwhile."""
    wanted = [get_gradient_edge(one) for one in inputs if one.requires_grad]
    if wanted:
        given = [torch.ones_like(one) for one in outputs]
        torch.autograd.grad([get_gradient_edge(one) for one in outputs], wanted, given, allow_unused=True)
