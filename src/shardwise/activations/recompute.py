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
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from shardwise.activations.operators import Operator, draws
from shardwise.errors import ModelError
from shardwise.runtime import WrappedForward, in_backward, tensors_in

_CACHES = "transformers.cache_utils"
"""The module of all that transformers keeps keys and values in."""


Around = Callable[[], AbstractContextManager[Any]]


class Recomputing(WrappedForward):
    """In the place of the `forward` of `site`, a module of `unit`: results of the operators `keep` stay."""

    def __init__(
        self,
        unit: str,
        site: nn.Module,
        forward: Callable[..., Any],
        keep: frozenset[Operator],
        around: Around = nullcontext,
    ) -> None:
        """`around` makes what is entered while the forward is recomputed, where hooks of the module do not run."""
        super().__init__(forward)
        self._unit, self._keep, self._around = unit, keep, around
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

        results = _Results()
        given = (*args, *kwargs.values())  # one by one, so that autograd minds whether any of them is written to
        output = checkpoint(run, *given, use_reentrant=False, context_fn=partial(self._contexts, results))
        results.watch(output)
        return output

    def _contexts(self, results: _Results) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """What is around the forward, and around each time that it is recomputed."""
        if not self._keep:
            return nullcontext(), _Again(self._norms, [self._around])
        replaying = partial(_Replaying, self._keep, results, self._unit)
        return _Keeping(self._keep, results), _Again(self._norms, [self._around, replaying])


class _Again:
    """Around a forward that is recomputed, each time: what each of `around` makes, and running statistics of `norms`
    are afterwards what they were before."""

    def __init__(self, norms: Sequence[nn.Module], around: Sequence[Around]) -> None:
        self._norms, self._around = norms, around
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._inside = ExitStack()

    def __enter__(self) -> None:
        norms = [norm for norm in self._norms if norm.training]
        self._before = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers(recurse=False)]
        self._inside = ExitStack()
        for around in self._around:
            self._inside.enter_context(around())

    def __exit__(self, *error: Any) -> None:
        self._inside.__exit__(*error)
        with torch.no_grad():
            for buffer, was in self._before:
                buffer.copy_(was)
        self._before = []


class _Kept:
    """The result of one operator, and what tells whether anybody has written to it since."""

    def __init__(self, result: Any) -> None:
        self.result = tree_map_only(torch.Tensor, _alias, result)
        self.was_written_to = False
        self._versions: list[tuple[torch.Tensor, int]] = []
        self.storages: set[int] = set()
        tree_map_only(torch.Tensor, self.watch, self.result)

    def watch(self, tensor: torch.Tensor) -> None:
        """`tensor` is a view of it."""
        self._versions.append((_alias(tensor), tensor._version))
        self.storages.add(tensor.untyped_storage()._cdata)

    @property
    def is_as_it_was(self) -> bool:
        return not self.was_written_to and all(tensor._version == version for tensor, version in self._versions)


class _Results:
    """What is kept of one forward, in the order in which it came.

    PyTorch's count of how often a tensor was written to does not follow all views (`_unsafe_view`, which is what a
    linear layer without a bias returns). So writes inside of the forward are watched, and what the forward returns is.
    """

    def __init__(self) -> None:
        self.kept: list[_Kept] = []
        self._by_storage: dict[int, _Kept] = {}

    def add(self, result: Any) -> None:
        kept = _Kept(result)
        self.kept.append(kept)
        self._by_storage.update(dict.fromkeys(kept.storages, kept))

    def note_writes(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`func` writes to some of its arguments."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                for tensor in tensors_in(value):
                    kept = self._by_storage.get(tensor.untyped_storage()._cdata)
                    if kept is not None:
                        kept.was_written_to = True

    def watch(self, output: Any) -> None:
        """The forward has returned `output`, which others may write to."""
        for tensor in tensors_in(output):
            kept = self._by_storage.get(tensor.untyped_storage()._cdata)
            if kept is not None:
                kept.watch(tensor)
        self._by_storage.clear()


class _Keeping(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Keeps the results of some operators."""

    def __init__(self, operators: frozenset[Operator], results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
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


class _Replaying(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Gives the kept results out, in the same order."""

    def __init__(self, operators: frozenset[Operator], results: _Results, unit: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
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
        if not found.is_as_it_was:
            raise ModelError(
                f"The result of {func} in {self._unit} is changed in place, and the plan keeps it for the backward. "
                f"Leave this operator out of activations.keep, or let the model make a new tensor."
            )
        return tree_map_only(torch.Tensor, _alias, found.result)


def _is_kept(func: Any, operators: frozenset[Operator], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result of this call is. Not what an autograd function of the model's own computes inside, which it
    may write to: gradients are disabled there."""
    return func in operators and torch.is_grad_enabled() and not draws(func, args, kwargs)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, and the same count of how often it was written to, also below autograd."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


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
