"""A unit's forward that is computed again in the backward, in the place of keeping what it has saved.

[Note: what is the same again] PyTorch's non-reentrant checkpointing brings the random numbers, on the CPU and on the
device, and autocast. Besides, a forward may change what it is given or what it keeps. Running statistics of batch
norms are put back after the second time. A cache of transformers' decoders, to which each block adds its keys and
values, is given to the second time as it was before the first: as a copy that shares all tensors, since they are
replaced by longer ones and never written to.

[Note: results that are kept] With some operators' results at hand the second time runs without these operators. PyTorch
has that too (`create_selective_checkpoint_contexts`), but counts all operators, so that in a forward and in what is
recomputed of it the same ones have to run, and an engine gathers parameters inside; it keeps attention with dropout as
well, after which all that is drawn is drawn from another place of the generator; and it can be sent back once only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from shardwise.activations.operators import Operator, draws
from shardwise.errors import ModelError
from shardwise.runtime import WrappedForward, in_backward

_CACHES = "transformers.cache_utils"
"""The module of all that transformers keeps keys and values in."""


class Recomputing(WrappedForward):
    """In the place of the `forward` of `site`, a module of `unit`: results of the operators `keep` stay."""

    def __init__(self, unit: str, site: nn.Module, forward: Callable[..., Any], keep: frozenset[Operator]) -> None:
        super().__init__(forward)
        self._unit, self._keep = unit, keep
        self._norms = [module for module in site.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if in_backward():
            raise ModelError(
                f"{self._unit} is recomputed by the model (torch.utils.checkpoint, gradient_checkpointing), and the "
                f"plan recomputes it too. Let one of the two do it: turn it off in the model, or leave out activations."
            )
        names, num_args = list(kwargs), len(args)
        before = [_as_it_is(value) for value in (*args, *kwargs.values())]
        is_first = True

        def run(*given: Any) -> Any:
            nonlocal is_first
            if not is_first:
                given = tuple(
                    value if was is None else _as_it_is(was) for value, was in zip(given, before, strict=True)
                )
            is_first = False
            return self.forward(*given[:num_args], **dict(zip(names, given[num_args:], strict=True)))

        given = (*args, *kwargs.values())  # one by one, so that autograd minds whether any of them is written to
        return checkpoint(run, *given, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What is around the forward, and around each time that it is recomputed."""
        if not self._keep:
            return nullcontext(), _Again(self._norms, nullcontext)
        kept: list[Any] = []
        return _Keeping(self._keep, kept), _Again(self._norms, partial(_Replaying, self._keep, kept, self._unit))


class _Again:
    """Around a forward that is recomputed, each time: what `around` makes, and running statistics of `norms` are
    afterwards what they were before."""

    def __init__(self, norms: Sequence[nn.Module], around: Callable[[], AbstractContextManager[Any]]) -> None:
        self._norms, self._around = norms, around
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._inside: AbstractContextManager[Any] = nullcontext()

    def __enter__(self) -> None:
        norms = [norm for norm in self._norms if norm.training]
        self._before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
        self._inside = self._around()
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        with torch.no_grad():
            for buffer, was in self._before:
                buffer.copy_(was)
        self._before = []


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Keeps the results of some operators, in the order in which they come."""

    def __init__(self, operators: frozenset[Operator], kept: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._operators, self._kept = operators, kept

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._operators and not draws(func, args, kwargs or {}):
            kept = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
            versions: list[tuple[torch.Tensor, int]] = []
            tree_map_only(torch.Tensor, lambda one: versions.append((one, one._version)), kept)
            self._kept.append((kept, versions))
        return result


class _Replaying(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Gives the kept results out, in the same order."""

    def __init__(self, operators: frozenset[Operator], kept: list[Any], unit: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._operators, self._left, self._unit = operators, iter(list(kept)), unit

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in self._operators or draws(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        found = next(self._left, None)
        if found is None:
            raise ModelError(
                f"{self._unit} computes something else when it is recomputed: {func} ran more often than in the "
                f"forward. Make what its forward does depend on its arguments alone, or leave out activations."
            )
        kept, versions = found
        if any(tensor._version != version for tensor, version in versions):
            raise ModelError(
                f"{self._unit} changes the result of {func} in place, which the plan keeps for its backward. Leave "
                f"this operator out of activations.keep, or let the forward make a new tensor."
            )
        return tree_map_only(torch.Tensor, torch.Tensor.detach, kept)


def _as_it_is(value: Any, depth: int = 3) -> Any:
    """`value` as it is now, if there is a cache of transformers in it, else `None`: see [Note: what is the same again].

    Tensors are shared.
    """
    if depth == 0 or not any(base.__module__ == _CACHES for base in type(value).__mro__):
        return None
    now = copy.copy(value)
    for name, one in vars(value).items():
        if isinstance(one, list):
            copied = [_as_it_is(each, depth - 1) for each in one]
            now.__dict__[name] = [each if was is None else was for each, was in zip(one, copied, strict=True)]
        elif isinstance(one, dict):
            now.__dict__[name] = dict(one)
        else:
            was = _as_it_is(one, depth - 1)
            now.__dict__[name] = one if was is None else was
    return now
