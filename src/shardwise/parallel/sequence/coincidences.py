"""Whether a dimension that has as many entries as a rank has tokens is the tokens.

Heads before tokens (`[batch, heads, tokens, dim]`), channels, and places of an expert may be as many by chance, and to
work along them mixes no tokens. So before a model is refused, its forward is rehearsed with another number of tokens: a
function that is right then too, in all of the forward, only met a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.memory import Unit
from shardwise.parallel.sequence.mixing import mixes, mixes_flattened
from shardwise.parallel.sequence.routing import numbers_tokens
from shardwise.plan.placement import Dtype
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.runtime.nested import tensors_in
from shardwise.system.torch_functions import is_called_by_ours

if TYPE_CHECKING:
    from shardwise.runtime.rehearsal import MixedSamples

Function = Callable[..., Any]
Called = tuple[Sequence[Any], Mapping[str, Any]]


@dataclass
class Coincidences:
    """Of one model. `around` is entered with the model's copy while that computes. Ranks have a multiple of `multiple`
    tokens."""

    model: nn.Module
    units: Sequence[Unit]
    device: torch.device
    compute: Dtype
    around: Callable[[nn.Module], AbstractContextManager[None]]
    multiple: int
    _known: dict[tuple[int, bool], frozenset[Function] | None] = field(default_factory=dict)
    """The functions that mix or number another number of tokens; `None` if the model cannot be rehearsed."""

    def is_one(self, func: Function, called: Called | None, num_tokens: int) -> bool:
        """Whether `func`, in a forward of whose tokens a rank has `num_tokens`, mixes and numbers none. The rehearsal
        needs what the model is `called` with; what is recomputed later does not know that. `False` for a model that
        cannot be rehearsed."""
        case = num_tokens, self.model.training
        if case not in self._known and called is not None:
            self._known[case] = self._found_otherwise(*called, num_tokens)
        found = self._known.get(case)
        return found is not None and func not in found

    def why_of_part(self, args: Sequence[Any], kwargs: Mapping[str, Any], num_tokens: int) -> str:
        """What a forward with `num_tokens` of a rank computes that is right for all tokens alone, and is not seen by
        sizes of tensors: with a number that depends on how many there are ([Note: numbers of samples] in
        `runtime/rehearsal/numbers_used.py`), along samples and tokens together, or in the backward, by hooks and
        functions of its own. "" if there is nothing, or if the model cannot be rehearsed."""
        from shardwise.runtime.rehearsal import MixedSamples, NumbersUsed  # few jobs need it

        some = self._other(args, kwargs, num_tokens)
        others = self._other(args, kwargs, some)
        flattened, used, of_others = _Flattened(some), NumbersUsed(some), NumbersUsed(others)
        mixed, mixed_of_others = MixedSamples(some), MixedSamples(others)
        try:
            self._rehearse(args, kwargs, num_tokens, some, used, flattened, mixed=mixed)
            self._rehearse(args, kwargs, num_tokens, others, of_others, mixed=mixed_of_others)
        except ModelError:
            return ""
        if flattened.found:
            return f"{flattened.found} along samples and tokens together"
        if mixed.found:
            return f"{mixed.found.partition(' ')[0]} of several tokens in the backward"
        name = used.difference(of_others)
        return f"{name} with a number that depends on how many tokens there are, as x.shape[1] does" if name else ""

    def _other(self, args: Sequence[Any], kwargs: Mapping[str, Any], num_tokens: int) -> int:
        from shardwise.runtime.rehearsal import size_unlike_others

        return size_unlike_others(self.model, (args, kwargs), 1, num_tokens, self.multiple)

    def _rehearse(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_tokens: int,
        other: int,
        *watches: AbstractContextManager[object],
        mixed: MixedSamples | None = None,
    ) -> None:
        """A forward with `other` tokens instead of `num_tokens`, inside `watches`. `mixed` finds what a backward gives
        tokens of several others, if it runs Python code of the model's. Raises `ModelError` for a model that cannot be
        rehearsed."""
        from shardwise.runtime.rehearsal import Twin, follow_backward, rehearse_forward, resized, runs_other_code

        given = resized((tuple(args), dict(kwargs)), 1, num_tokens, other)
        trains = mixed is not None and torch.is_grad_enabled()

        def run(twin: Twin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            with self.around(twin.model), ExitStack() as stack:
                for watch in watches:
                    if isinstance(watch, _Seen):
                        watch.model = twin.model
                    stack.enter_context(watch)
                stack.enter_context(torch.set_grad_enabled(trains))
                stack.enter_context(nullcontext() if mixed is None else mixed)
                output = twin.model(*args, **kwargs)
            outputs = [one for one in tensors_in(output) if one.requires_grad]
            if mixed is None or not outputs:
                return
            mixed.found = ""
            if mixed.has_hooks or runs_other_code(outputs):
                with self.around(twin.model), mixed, mixed.in_backward():
                    follow_backward(outputs, twin.model.parameters())

        rehearse_forward(run, self.model, self.units, MicroBatch(*given), device=self.device, compute=self.compute)

    def _found_otherwise(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], num_tokens: int
    ) -> frozenset[Function] | None:
        other = self._other(args, kwargs, num_tokens)
        seen = _Seen(other)
        try:
            self._rehearse(args, kwargs, num_tokens, other, seen)
        except ModelError:
            return None
        return frozenset(seen.found)


class _Seen(TorchFunctionMode):
    """Finds the functions by which a forward of `model` mixes tokens, of which there are `num_tokens`, or numbers
    them."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self.model: nn.Module | None = None
        self.found: set[Function] = set()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        is_mixing = mixes(func, args, kwargs, self._num_tokens) is not None
        is_numbering = self.model is not None and numbers_tokens(self.model, func, args, self._num_tokens)
        if is_mixing or is_numbering:
            self.found.add(func)
        return func(*args, **kwargs)


class _Flattened(TorchFunctionMode):
    """Finds the first function that works along samples and tokens together, of which there are `num_tokens`."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self.found = ""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.found and mixes_flattened(func, args, kwargs, result, self._num_tokens):
            self.found = "" if is_called_by_ours() else func.__name__  # our layers count the tokens of all ranks
        return result
