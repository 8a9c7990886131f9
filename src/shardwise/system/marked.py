"""A tensor that is a part of something, and is known as such through the operations that keep it one.

A loop may compute with what a rank has of a whole, and go wrong without an error: shift labels within a part of a
sequence, or take the norm of a part of a matrix. So parts that loops are given are marked. The mark costs one call of
Python per operation of the loop on such a tensor, and nothing inside of models.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch

from shardwise.system.torch_private import DisableTorchFunctionSubclass, tree_flatten, tree_leaves, tree_unflatten

Tensor = torch.Tensor
_SHOWN = (Tensor.__format__, Tensor.__repr__)


class Marked(Tensor):
    """Asks its mark before each operation, and marks what comes of it. Copies by `copy` and `pickle` are plain."""

    mark: Any

    @classmethod
    def of(cls, tensor: Tensor, mark: Any) -> Self:
        """`tensor`, marked; they share their memory and their place in autograd's graph."""
        marked = tensor.as_subclass(cls)
        marked.mark = mark
        return marked

    @classmethod
    def _require_right(cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise if `func` would take a part for the whole."""

    @classmethod
    def _explain(
        cls, error: RuntimeError, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Raise another error for that of `func`, if it fails because a part is given for the whole."""

    @classmethod
    @abstractmethod
    def _completed(
        cls, results: Sequence[Any], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """The results of a call, which are tensors or not, as the loop is to have them, and the mark of each: `None`
        for those that are no parts."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not all(issubclass(cls, one) for one in types):
            return NotImplemented  # others know more: parameters at rest, logits that are split
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a function of the loop's is compiled for plain tensors
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is Tensor.backward and isinstance(args[0], cls):  # it runs what others have in the graph
            return func(args[0].plain(), *args[1:], **kwargs)
        if func is Tensor.__iter__:
            return iter(args[0].unbind(0))
        cls._require_right(func, args, kwargs)
        if func in _SHOWN:  # torch formats its own class alone
            return func(args[0].plain(), *args[1:])
        try:
            with DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        except RuntimeError as error:
            cls._explain(error, func, args, kwargs)
            raise
        if result is None or isinstance(result, bool | int | float | torch.Size | torch.dtype | torch.device):
            return result
        found, form = tree_flatten(result)
        results, marks = cls._completed(found, func, args, kwargs)
        return tree_unflatten(cls.each_marked(results, marks, tree_leaves((args, kwargs))), form)

    @classmethod
    def each_marked(cls, results: Sequence[Any], marks: Sequence[Any], given: Sequence[Any]) -> list[Any]:
        """`results` with their marks; tensors that were `given`, and changed in place, stay the same ones."""
        kept = set(map(id, given))
        return [
            one if mark is None or type(one) is not Tensor or id(one) in kept else cls.of(one, mark)
            for one, mark in zip(results, marks, strict=True)
        ]

    def plain(self) -> Tensor:
        """The same tensor without its mark."""
        with DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied: Tensor = copy.deepcopy(self.plain(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)
