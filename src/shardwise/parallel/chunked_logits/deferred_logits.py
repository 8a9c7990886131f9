"""Logits that are not computed yet, as a tensor that has their shape.

[Note: deferred logits] Models of transformers, and the code around them, take a loss of the head's output. So the head
gives a tensor that knows its input, and computes what is asked of it when it is asked, in chunks: the loss, log-
probabilities, an entropy. As `CutLogits` does for logits that are split, it means what the logits mean:

- what picks or regroups rows picks rows of the input; elementwise operators and softmax are noted, for later;
- what reads along the vocabulary and keeps a number or a few per row is computed in chunks, right away;
- any other operator computes all logits, which is right and costs what it is meant to avoid, so the first one of each
  kind is logged. They are kept then, as a model keeps them.
- a write raises `ModelError`: a tensor that does not exist has no views that would have to see it.

To autograd the tensor is a leaf, and all that is computed of it depends on the head's input instead. A gradient of the
leaf itself would be lost, so it raises `ModelError`.
"""

# ruff: noqa: ARG001  # functions in place of torch's have one signature

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardwise.errors import ModelError
from shardwise.parallel.chunked_logits.by_chunks import Autocast, enter, num_words, over_logits, rows_per_chunk
from shardwise.parallel.chunked_logits.losses import shaped
from shardwise.system.torch_functions import num_indexed
from shardwise.system.torch_private import DisableTorchFunctionSubclass, refuse_address, tree_leaves, tree_map
from shardwise.system.units import format_bytes

Tensor = torch.Tensor
Made = Callable[[Tensor], Tensor]
_log = logging.getLogger("shardwise")


@dataclass(frozen=True)
class Source:
    """The head whose logits they are, and how it was called."""

    head: nn.Module
    num_words: int
    chunk_bytes: int | None
    autocast: Autocast
    has_grad: bool
    versions: tuple[int, ...]
    logged: set[str] = field(default_factory=set)
    """Operators for which all logits were computed; each is logged once."""

    def require_unchanged(self) -> None:
        if _versions(self.head) != self.versions:
            raise ModelError(
                "Logits of a step are read after the head has changed. With loss: chunked they are computed when they "
                "are read; read them before the optimizer's step, or leave loss out of the plan."
            )


class DeferredLogits(torch.Tensor):
    """See [Note: deferred logits]."""

    _source: Source
    _rows: Tensor
    _made: Made
    _whole: Tensor | None

    @staticmethod
    def __new__(cls, source: Source, rows: Tensor, made: Made, dtype: torch.dtype) -> DeferredLogits:
        if source.has_grad and not torch.is_grad_enabled():  # what is made of logits here has no gradient later
            source = replace(source, has_grad=False)
        shape = (*rows.shape[:-1], source.num_words)
        requires_grad = source.has_grad and dtype.is_floating_point
        logits = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=rows.device, requires_grad=requires_grad
        )
        logits._source, logits._rows, logits._made, logits._whole = source, rows, made, None
        refuse_address(logits)
        if requires_grad:
            with DisableTorchFunctionSubclass():
                logits.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]  # torch's own
        return logits

    def whole(self, name: str = "whole") -> Tensor:
        """All logits, a plain tensor; `name` needs them. Differentiable."""
        whole = self._whole
        if whole is None or not self.is_computed:
            if name not in self._source.logged:
                self._source.logged.add(name)
                _log.warning(
                    "%s() needs all logits of the model, %s on this rank, so they are computed; loss: chunked does not "
                    "help there.",
                    name,
                    format_bytes(self.numel() * self.element_size()),
                )
            self._whole = whole = _computed(self, lambda logits: _full(self._made(logits))).view(self.shape)
        return whole

    @property
    def is_computed(self) -> bool:
        """Whether all logits are there, with the graph that a gradient needs: not if only a metric has asked."""
        whole = self._whole
        return whole is not None and (whole.requires_grad or not (self._source.has_grad and torch.is_grad_enabled()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped in torch
        return f"DeferredLogits of {list(self.shape)} in {self.dtype}, not computed"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in _METADATA:
            with DisableTorchFunctionSubclass():
                return func(*args, **given)
        name = _name(func)
        deferred = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, DeferredLogits)]
        is_first = bool(args) and isinstance(args[0], DeferredLogits)
        if is_first and _is_write(name):
            raise ModelError(
                f"{name}() writes to logits that are not computed yet (loss: chunked). Use the operator that makes a "
                f"new tensor, such as logits / temperature, or leave loss out of the plan."
            )
        made: Any = NotImplemented
        if not any(one.is_computed for one in deferred):
            found = _FUNCTIONS.get(name)
            if found is not None and (is_first or found in (_noted, _cross_entropy)):
                made = found(func, args, given)
        if made is not NotImplemented:
            return made

        def whole(leaf: Any) -> Any:
            return leaf.whole(name) if isinstance(leaf, DeferredLogits) else leaf

        return func(*tree_map(whole, args), **tree_map(whole, given))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is no class method
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Below autograd: the values. Gradients are refused by the leaf's hook."""

        def values(leaf: Any) -> Any:
            return leaf.whole(str(func)).detach() if isinstance(leaf, DeferredLogits) else leaf

        return func(*tree_map(values, args), **tree_map(values, dict(kwargs or {})))


def defer(head: nn.Module, hidden: Tensor, chunk_bytes: int | None) -> Tensor | None:
    """The logits of `head` for `hidden` [..., H], not computed yet; `None` if one chunk has them all. All ranks along
    `tp` call."""
    words = num_words(head)
    if words is None or hidden.numel() // max(1, hidden.shape[-1]) <= rows_per_chunk(hidden, words, chunk_bytes):
        return None
    has_grad = torch.is_grad_enabled() and (hidden.requires_grad or any(one.requires_grad for one in head.parameters()))
    autocast = Autocast.now(hidden.device)
    source = Source(head, words, chunk_bytes, autocast, has_grad, _versions(head))
    weight = next((one for one in head.parameters() if one.is_floating_point()), hidden)
    return DeferredLogits(
        source, enter(head, hidden), lambda logits: logits, autocast.dtype if autocast.is_enabled else weight.dtype
    )


def _versions(head: nn.Module) -> tuple[int, ...]:
    """They change if its parameters do: in a step of an engine, which counts, or by a write."""
    with DisableTorchFunctionSubclass():
        return head.__dict__.get("num_updates", 0), *(param._version for param in head.parameters())


def _refuse_gradient(grad: Tensor) -> None:
    raise ModelError(
        "A gradient came for logits that were never computed (loss: chunked): a function of autograd was given the "
        "head's output as it is. Give it logits.whole(), or leave loss out of the plan."
    )


def _full(tensor: Tensor) -> Tensor:
    from shardwise.parallel.tensor import full_tensor  # only ranks with split logits load it

    return full_tensor(tensor)


def _computed(logits: DeferredLogits, compute: Callable[..., Tensor], *per_row: Tensor) -> Tensor:
    """What `compute` makes of the rows of `logits` [N, V], in chunks. `per_row` are [N, ...]."""
    source = logits._source
    source.require_unchanged()
    rows = logits._rows
    with torch.set_grad_enabled(source.has_grad and torch.is_grad_enabled()):
        (found,) = over_logits(
            source.head,
            rows.reshape(-1, rows.shape[-1]),
            lambda *given: (compute(*given),),
            per_row,
            chunk_rows=rows_per_chunk(rows, source.num_words, source.chunk_bytes),
            around=source.autocast,
        )
    return found


# -- functions: each gets torch's function, and its arguments -------------------------------------------------


def _with_rows(logits: DeferredLogits, rows: Tensor) -> DeferredLogits:
    return DeferredLogits(logits._source, rows, logits._made, logits.dtype)


def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _detached(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits = args[0]
    return DeferredLogits(replace(logits._source, has_grad=False), logits._rows.detach(), logits._made, logits.dtype)


def _reshaped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Views that keep the order of elements: rows stay rows if the vocabulary stays the last dimension."""
    logits = args[0]
    shape = func(torch.empty(logits.shape, device="meta"), *args[1:], **kwargs).shape
    if not shape or shape[-1] != logits.shape[-1]:
        return NotImplemented
    return _with_rows(logits, logits._rows.reshape(*shape[:-1], logits._rows.shape[-1]))


def _divided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """split, chunk and unbind along another dimension than the vocabulary."""
    logits, *others = args
    at = 0 if _name(func) in ("unbind", "__iter__") else 1
    dim = kwargs.get("dim", others[at] if len(others) > at else 0)
    if dim % logits.dim() == logits.dim() - 1:
        return NotImplemented
    size = kwargs.get("split_size", kwargs.get("split_size_or_sections", kwargs.get("chunks", *others[:1])))
    rows = logits._rows.unbind(dim) if at == 0 else func(logits._rows, size, dim=dim % logits.dim())
    made = tuple(_with_rows(logits, one) for one in rows)
    return iter(made) if _name(func) == "__iter__" else made


def _indexed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An index of rows; of words only if it takes them all."""
    logits, index = args
    index = index if isinstance(index, tuple) else (index,)
    if any(isinstance(one, list | DeferredLogits) for one in index):
        return NotImplemented
    taken = sum(num_indexed(one) for one in index)
    places = [place for place, one in enumerate(index) if one is Ellipsis]
    if places:
        filling = (slice(None),) * (logits.dim() - taken)
        index = (*index[: places[0]], *filling, *index[places[0] + 1 :])
        taken = logits.dim()
    if taken == logits.dim():
        if not (isinstance(index[-1], slice) and index[-1] == slice(None)):
            return NotImplemented
        index = index[:-1]
    return _with_rows(logits, logits._rows[index])


def _joined(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tokens of all ranks along `sp`, by `whole_outputs.join`."""
    logits, line, sample, dim = args
    dim %= logits.dim()
    if dim == logits.dim() - 1:
        return NotImplemented
    return _with_rows(logits, func(logits._rows, line, sample, dim))


def _noted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise function of logits, numbers and tensors that say something of every word."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    first, *others = (leaf for leaf in leaves if isinstance(leaf, DeferredLogits))
    if any(one._rows is not first._rows for one in others):
        return NotImplemented
    plain = [leaf for leaf in leaves if not isinstance(leaf, DeferredLogits)]
    if any(one.dim() > 1 or one.requires_grad for one in plain):
        return NotImplemented
    return _put_off(first, func, args, kwargs)


def _put_off(first: DeferredLogits, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    autocast = Autocast.now(first.device)

    def with_values(value_of: Callable[[DeferredLogits], Tensor]) -> Any:
        def value(leaf: Any) -> Any:
            return value_of(leaf) if isinstance(leaf, DeferredLogits) else leaf

        with autocast.again():
            return func(*tree_map(value, args), **tree_map(value, kwargs))

    probe = with_values(lambda one: torch.empty(0, one.shape[-1], dtype=one.dtype, device=one.device))
    if probe.device != first.device or probe.shape != (0, first.shape[-1]):
        return NotImplemented

    def made(logits: Tensor) -> Tensor:
        found: Tensor = with_values(lambda one: one._made(logits))
        return found

    return DeferredLogits(first._source, first._rows, made, probe.dtype)


def _over_words(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """softmax and log_softmax."""
    logits, *others = args
    given = dict(kwargs)
    dim = given.pop("dim", others.pop(0) if others else None)
    if not _is_last(logits, dim) or (others and _name(func) not in ("softmax", "log_softmax")):
        return NotImplemented
    dtype = given.get("dtype", next((one for one in others if isinstance(one, torch.dtype)), None))
    return _put_off(logits, func, (logits,), {"dim": -1, "dtype": dtype})


def _reduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One number for each row."""
    logits, *others = args
    given = dict(kwargs)
    dim = given.pop("dim", others.pop(0) if others else None)
    keepdim = bool(given.pop("keepdim", others.pop(0) if others else False))
    if not _is_last(logits, dim) or others or given.pop("out", None) is not None:
        return NotImplemented
    found = _computed(logits, lambda chunk: func(logits._made(chunk), -1, **given))
    return found.view(*logits.shape[:-1], *([1] if keepdim else []))


def _gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    logits, *others = args
    dim, index = (kwargs.get(name, *others[place : place + 1]) for place, name in enumerate(("dim", "index")))
    if not _is_last(logits, dim) or index.shape[:-1] != logits.shape[:-1] or kwargs.keys() - {"dim", "index"}:
        return NotImplemented
    found = _computed(
        logits, lambda chunk, words: func(logits._made(chunk), -1, words), index.reshape(-1, index.shape[-1])
    )
    return found.view(index.shape)


def _cross_entropy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    logits, targets = given["input"], given["target"]
    is_known = isinstance(logits, DeferredLogits) and not isinstance(targets, DeferredLogits)
    if not is_known or logits.dim() != 2 or targets.dim() != 1 or targets.is_floating_point():  # [N, V] and [N]
        return NotImplemented
    if any(given.get(name) is not None for name in ("weight", "size_average", "reduce")):
        return NotImplemented
    reduction, ignore_index = given.get("reduction", "mean"), given.get("ignore_index", -100)
    options = {"ignore_index": ignore_index, "label_smoothing": given.get("label_smoothing", 0.0)}

    def losses(chunk: Tensor, words: Tensor) -> Tensor:
        return functional.cross_entropy(shaped(logits._made(chunk)), words, reduction="none", **options)

    found = _computed(logits, losses, targets)
    if reduction == "mean":
        found = found.sum() / (targets != ignore_index).sum()
    elif reduction == "sum":
        found = found.sum()
    return found.to(logits.dtype)


def _is_last(logits: DeferredLogits, dim: Any) -> bool:
    dims = dim if isinstance(dim, list | tuple) else [dim]
    return len(dims) == 1 and isinstance(dims[0], int) and dims[0] % logits.dim() == logits.dim() - 1


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", str(func))
    return name


def _is_write(name: str) -> bool:
    return name in _WRITES or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


_ELEMENTWISE = (
    *("neg", "__neg__", "tanh", "exp", "log", "square", "sqrt", "pow", "__pow__", "nan_to_num"),
    *("mul", "multiply", "__mul__", "__rmul__", "div", "divide", "true_divide", "__truediv__"),
    *("add", "__add__", "__radd__", "sub", "subtract", "__sub__", "__rsub__"),
    *("clamp", "clamp_min", "clamp_max", "clip", "masked_fill", "where"),
    *("float", "double", "half", "bfloat16", "to", "type", "type_as"),
)
_WRITES = frozenset(
    f"__{name}__" for name in ("setitem", *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"))
) | {"__iand__", "__ior__", "__ixor__"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_ELEMENTWISE, _noted),
    **dict.fromkeys(("contiguous", "clone"), _same),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _reshaped),
    **dict.fromkeys(("split", "chunk", "unbind", "__iter__"), _divided),
    **dict.fromkeys(("softmax", "log_softmax"), _over_words),
    **dict.fromkeys(("logsumexp", "sum", "mean", "amax", "amin", "argmax", "argmin"), _reduced),
    "__getitem__": _indexed,
    "detach": _detached,
    "gather": _gathered,
    "join": _joined,
    "cross_entropy": _cross_entropy,
}
_PROPERTIES = (
    *("shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "output_nr"),
    *("is_sparse", "is_quantized", "is_meta", "is_cuda", "is_cpu", "is_nested", "is_mkldnn", "is_xpu", "itemsize"),
)
_QUESTIONS = (
    *("size", "dim", "numel", "nelement", "element_size", "get_device", "__len__"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_inference", "is_signed"),
)
_METADATA: frozenset[Any] = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(Tensor, name) for name in _QUESTIONS),
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    }
)
