"""Recomputes a unit's forward in the backward instead of keeping what it saved.

[Note: equal recomputation] PyTorch's non-reentrant checkpointing restores random number generators, on the CPU and on
the device, and autocast. In addition a forward may change its inputs or its own state. Running statistics of batch
norms are restored after the recomputation. A cache of transformers' decoders, to which each block appends its keys and
values, is passed to the recomputation as it was before the forward: as a copy that shares all tensors, since caches
replace them by longer ones and never write to them. Which experts tokens go to is not decided again: see
[Note: decided once] in `runtime/decisions.py`.

[Note: kept results] With some operators' results kept, the recomputation skips these operators. PyTorch has this too
(`create_selective_checkpoint_contexts`), but it counts all operators, so that a forward and its recomputation must run
the same ones, while an engine gathers parameters inside; it also keeps attention with dropout, after which later random
numbers come from another state of the generator; and it supports only one backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import ModelError
from shardwise.runtime import Decisions, WrappedForward, in_backward, tensors_in
from shardwise.runtime.activations.operators import Operator, draws
from shardwise.system.torch_private import TorchDispatchMode, storage_id, tree_map_only, with_same_version

_CACHES = "transformers.cache_utils"
"""The module of transformers with all its key-value caches, and their layers, which have no base in common (5.23)."""


Around = Callable[[], AbstractContextManager[Any]]


class Recomputing(WrappedForward):
    """Replaces the `forward` of `site`, a module of `unit`. Results of the operators `keep` are kept."""

    def __init__(
        self,
        unit: str,
        site: nn.Module,
        forward: Callable[..., Any],
        keep: frozenset[Operator],
        around: Around,
    ) -> None:
        """`around` makes the context of a recomputation, in which the module's hooks do not run."""
        super().__init__(forward)
        self._unit, self._keep, self.around = unit, keep, around
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
        before = [_cache_snapshot(value) for value in (*args, *kwargs.values())]
        is_first, decisions = True, Decisions()

        def run(*given: Any) -> Any:
            nonlocal is_first
            if not is_first:
                given = tuple(
                    value if was is None else _cache_snapshot(was) for value, was in zip(given, before, strict=True)
                )
            is_first = False
            with decisions.inside():
                return self.forward(*given[:num_args], **dict(zip(names, given[num_args:], strict=True)))

        results = _Results()
        # Separate arguments, so that autograd detects in-place changes of any of them.
        given = (*args, *kwargs.values())
        output = checkpoint(run, *given, use_reentrant=False, context_fn=partial(self._contexts, results))
        results.watch(output)
        return output

    def _contexts(self, results: _Results) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of the forward, and of each recomputation."""
        if not self._keep:
            return nullcontext(), _Recomputation(self._norms, [self.around])
        replaying = partial(_Replaying, self._keep, results, self._unit)
        return _Keeping(self._keep, results), _Recomputation(self._norms, [self.around, replaying])


class _Recomputation:
    """The context of a recomputation: it enters what `around` makes, and restores running statistics of `norms` at the
    end."""

    def __init__(self, norms: Sequence[nn.Module], around: Sequence[Around]) -> None:
        self._norms, self._around = norms, around
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._inside = ExitStack()

    def __enter__(self) -> None:
        norms = [norm for norm in self._norms if norm.training]
        self._before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
        with ExitStack() as entered:  # which are left again if a later one cannot be entered
            for around in self._around:
                entered.enter_context(around())
            self._inside = entered.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        with torch.no_grad():
            for buffer, was in self._before:
                buffer.copy_(was)
        self._before = []


class _Kept:
    """The result of one operator, with the versions that show whether it was changed in place since."""

    def __init__(self, result: Any) -> None:
        self.result = tree_map_only(torch.Tensor, with_same_version, result)
        self.is_changed = False
        self._versions: list[tuple[torch.Tensor, int]] = []
        self.storages: set[int] = set()
        tree_map_only(torch.Tensor, self.watch, self.result)

    def watch(self, tensor: torch.Tensor) -> None:
        """Also check `tensor`, a view of the result."""
        self._versions.append((with_same_version(tensor), tensor._version))
        if tensor.layout is torch.strided:
            self.storages.add(storage_id(tensor.untyped_storage()))

    @property
    def is_unchanged(self) -> bool:
        return not self.is_changed and all(tensor._version == version for tensor, version in self._versions)


class _Results:
    """The kept results of one forward, in the order of the calls.

    PyTorch's version counters are not shared by all views (`_unsafe_view`, which a linear layer without a bias
    returns). So writes inside the forward are tracked, and so is the forward's output.
    """

    def __init__(self) -> None:
        self.kept: list[_Kept] = []
        self._by_storage: dict[int, _Kept] = {}

    def add(self, result: Any) -> None:
        kept = _Kept(result)
        self.kept.append(kept)
        self._by_storage.update(dict.fromkeys(kept.storages, kept))

    def note_writes(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Mark the results that `func` writes to."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in _strided_in(value):
                    kept = self._by_storage.get(storage_id(tensor.untyped_storage()))
                    if kept is not None:
                        kept.is_changed = True

    def watch(self, output: Any) -> None:
        """Check the versions of `output`, which the forward has returned and others may write to."""
        for tensor in _strided_in(output):
            kept = self._by_storage.get(storage_id(tensor.untyped_storage()))
            if kept is not None:
                kept.watch(tensor)
        self._by_storage.clear()


class _Keeping(TorchDispatchMode):
    """Keeps the results of some operators."""

    def __init__(self, operators: frozenset[Operator], results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._operators, self._results = operators, results

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if _is_kept(func, self._operators, args, kwargs or {}):
            self._results.add(result)
        elif func._schema.is_mutable:
            self._results.note_writes(func, args, kwargs or {})
        return result


class _Replaying(TorchDispatchMode):
    """Returns the kept results, in the same order."""

    def __init__(self, operators: frozenset[Operator], results: _Results, unit: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._operators, self._left, self._unit = operators, iter(list(results.kept)), unit

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not _is_kept(func, self._operators, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        found = next(self._left, None)
        if found is None:
            raise ModelError(
                f"{self._unit} computes something else when it is recomputed: {func} ran more often than in the "
                f"forward. Make what its forward does depend on its arguments alone, or leave out activations."
            )
        if not found.is_unchanged:
            raise ModelError(
                f"The result of {func} in {self._unit} is changed in place, and the plan keeps it for the backward. "
                f"Leave this operator out of activations.keep, or let the model make a new tensor."
            )
        return tree_map_only(torch.Tensor, with_same_version, found.result)


def _strided_in(value: Any) -> list[torch.Tensor]:
    """The tensors in `value` that have a storage, as sparse ones have not."""
    return [tensor for tensor in tensors_in(value) if tensor.layout is torch.strided]


def _is_kept(func: Any, operators: frozenset[Operator], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result of this call is kept. Calls inside a custom autograd function, which may write to their
    results, are not: gradients are disabled there."""
    return func in operators and torch.is_grad_enabled() and not draws(func, args, kwargs)


def _cache_snapshot(value: Any, depth: int = 3) -> Any:
    """The state of `value` now, if it is a cache of transformers, else `None`: see [Note: equal recomputation].

    Tensors are shared.
    """
    if depth == 0 or not any(base.__module__ == _CACHES for base in type(value).__mro__):
        return None
    now = copy.copy(value)
    for name, one in vars(value).items():
        if isinstance(one, list):
            copied = [_cache_snapshot(each, depth - 1) for each in one]
            now.__dict__[name] = [each if was is None else was for each, was in zip(one, copied, strict=True)]
        elif isinstance(one, dict):
            now.__dict__[name] = dict(one)
        else:
            was = _cache_snapshot(one, depth - 1)
            now.__dict__[name] = one if was is None else was
    return now
