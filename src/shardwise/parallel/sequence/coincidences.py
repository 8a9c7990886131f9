"""What a model's forward does with its tokens, seen in rehearsals with other numbers of them.

[Note: coincidences] Heads before tokens (`[batch, heads, tokens, dim]`), channels, and places of an expert may be as
many as tokens by chance, and to work along them mixes none. So before a model is refused for what it calls
(`mixing.py`), its forward is rehearsed with another number of tokens: a function that is right then too, in all of the
forward, only met a number.

[Note: tokens anywhere] In a rehearsal no other size is a multiple of the number of tokens, so that they are known in
whatever dimension they are. What a part of them lacks is looked for there, before the first forward of each kind. What
is computed of several may become a loss, but not be given back to tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.memory import Unit
from shardwise.parallel.sequence.mixing import mixes, mixes_flattened, refused_mixing
from shardwise.parallel.sequence.routing import numbers_tokens, refused_positions
from shardwise.plan.placement import Dtype
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.runtime.nested import argument_tensors, tensors_in
from shardwise.system.torch_functions import is_called_by_ours

if TYPE_CHECKING:
    from shardwise.runtime.rehearsal import NumbersUsed, Twin

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

    def refuse_part(self, args: Sequence[Any], kwargs: Mapping[str, Any], num_tokens: int) -> None:
        """Raise `ModelError` if a forward with `num_tokens` of a rank computes what is right for all tokens alone, and
        is not seen where it is called: of several tokens, also in the backward, by hooks and functions of its own, or
        with numbers that depend on how many there are, or number them (`runtime/rehearsal/numbers_used.py`). Of a model
        that cannot be rehearsed nothing is known."""
        try:
            seen, seen_of_others = self._looks(args, kwargs, num_tokens, self.multiple)
        except ModelError:
            try:  # it may need a number of tokens that even groups can have, as this one is
                groups = math.lcm(self.multiple, num_tokens & -num_tokens)
                seen, seen_of_others = self._looks(args, kwargs, num_tokens, groups)
            except ModelError:
                return
        if seen.mixing and seen_of_others.mixing:
            raise refused_mixing(*seen.mixing.split(" of ", 1))
        if seen.used.numbering and seen_of_others.used.numbering:
            raise refused_positions(seen.used.numbering)
        name = seen.used.difference(seen_of_others.used)
        if name:
            raise ModelError(
                f"The model computes {name} with a number that depends on how many tokens there are, as x.shape[1] "
                f"does, and each rank of a split sequence has a part of them. Let it take the length of the whole "
                f"sequence as an argument, compute it outside of the model, of what engine.join_sequence has joined, "
                f"or leave sp out of the mesh."
            )

    def _other(self, args: Sequence[Any], kwargs: Mapping[str, Any], num_tokens: int, multiple: int) -> int:
        from shardwise.runtime.rehearsal import size_unlike_others

        return size_unlike_others(self.model, (args, kwargs), 1, num_tokens, multiple)

    def _looks(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], num_tokens: int, multiple: int
    ) -> tuple[_Look, _Look]:
        """At forwards with two other numbers of tokens."""
        some = self._other(args, kwargs, num_tokens, multiple)
        others = self._other(args, kwargs, some, multiple)
        return self._look(args, kwargs, num_tokens, some), self._look(args, kwargs, num_tokens, others)

    def _look(self, args: Sequence[Any], kwargs: Mapping[str, Any], num_tokens: int, other: int) -> _Look:
        from shardwise.runtime.rehearsal import (  # few jobs need it
            MixedSamples,
            NumbersUsed,
            follow_backward,
            runs_other_code,
        )

        used, mixed, flattened = NumbersUsed(other), MixedSamples(other), _Flattened(other)
        look, trains = _Look(used), torch.is_grad_enabled()

        def run(twin: Twin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            used.given([*tensors_in((args, kwargs)), *twin.resting])
            samples = next((len(one) for one in argument_tensors((args, kwargs)) if one.dim()), 0)
            with self.around(twin.model), used, torch.set_grad_enabled(trains), flattened, mixed, mixed.given_back():
                outputs = list(tensors_in(twin.model(*args, **kwargs)))
                pooled = [mixed.mixing_in(one) for one in outputs if one.dim() > 1 and len(one) == samples]
            look.mixing = mixed.found or flattened.found or next(filter(None, pooled), "")
            if not look.mixing and (mixed.has_hooks or runs_other_code(outputs)):
                with self.around(twin.model), mixed, mixed.given_back():
                    follow_backward([one for one in outputs if one.requires_grad], twin.model.parameters())
                look.mixing = mixed.found

        self._rehearse(run, args, kwargs, num_tokens, other)
        look.mixing = _with_tokens(look.mixing, other, num_tokens)
        return look

    def _rehearse(
        self,
        run: Callable[[Twin, tuple[Any, ...], dict[str, Any]], object],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_tokens: int,
        other: int,
    ) -> None:
        """Let `run` call the model's copy with `other` tokens instead of `num_tokens`. Raises `ModelError` for a model
        that cannot be rehearsed."""
        from shardwise.runtime.rehearsal import rehearse_forward, resized

        given = MicroBatch(*resized((tuple(args), dict(kwargs)), 1, num_tokens, other))
        rehearse_forward(run, self.model, self.units, given, device=self.device, compute=self.compute)

    def _found_otherwise(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], num_tokens: int
    ) -> frozenset[Function] | None:
        other = self._other(args, kwargs, num_tokens, self.multiple)
        seen = _Seen(other)

        def run(twin: Twin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.model = twin.model
            with self.around(twin.model), seen, torch.no_grad():
                twin.model(*args, **kwargs)

        try:
            self._rehearse(run, args, kwargs, num_tokens, other)
        except ModelError:
            return None
        return frozenset(seen.found)


def _with_tokens(found: str, other: int, num_tokens: int) -> str:
    """What was found of shapes with `other` tokens, in those of the forward that comes."""
    sizes = re.compile(r"\b\d+\b")
    return sizes.sub(lambda one: str(int(one[0]) // other * num_tokens if int(one[0]) % other == 0 else one[0]), found)


@dataclass
class _Look:
    """What a rehearsed forward has computed. `mixing`: the function that mixes tokens, and of what; "" if none does."""

    used: NumbersUsed
    mixing: str = ""


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
        is_mixing = not self.found and mixes_flattened(func, args, kwargs, result, self._num_tokens)
        if is_mixing and not is_called_by_ours():  # our layers count the tokens of all ranks
            self.found = f"{func.__name__} of {list(args[0].shape)}"
        return result
