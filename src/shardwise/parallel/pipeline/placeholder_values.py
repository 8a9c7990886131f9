"""Stand-ins for what a stage does not have: results of modules of earlier stages, and parameters of other stages.

[Note: stand-ins] The model's own forward runs on every stage, and reads shapes, dtypes and devices of tensors of
others. Stand-ins have these, but other values, which nobody may use. In a watched forward every operation is followed
(`dependence.py`); in others a gradient that flows to a stand-in is an error. Their values are finite, positive and all
different, so that the gradient of a penalty on them is not zero by chance. Where a result is carried to the stage (see
[Note: results that are carried]), its modules get that instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from shardwise.errors import ModelError
from shardwise.parallel.pipeline.stage_messages import Layout, Result, StageMessage
from shardwise.parallel.pipeline.watched_names import FINITE, OWN, Names, foreign
from shardwise.runtime import tensors_in
from shardwise.system.torch_private import FakeTensor, tree_unflatten, treespec_loads

if TYPE_CHECKING:
    from shardwise.parallel.pipeline.dependence import Dependence

Tensor = torch.Tensor


class TensorFacts(NamedTuple):
    """What a stand-in for a parameter or buffer of another stage needs to know of it."""

    name: str
    """In the whole model."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    is_param: bool

    def __deepcopy__(self, _: dict[int, Any]) -> TensorFacts:
        """Nothing in it changes, and a copy for a rehearsal has those of all other stages."""
        return self


class Placeholders:
    """The stand-ins of one forward of a stage. `pieces` are the modules of all stages, in order, and `first` is the
    number of the one with which this stage begins. `device` is that of its parameters. `sequence_parts`: into how many
    parts the received sequence is split. `why_unknown`: why it is unknown which results have to be carried to this
    stage, if it is. `around_more`: see `Passing`."""

    def __init__(
        self,
        stage: int,
        pieces: Sequence[str],
        first: int,
        arrived: StageMessage | None,
        device: torch.device | None = None,
        sequence_parts: int = 1,
        why_unknown: str = "",
        around_more: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._around_more = around_more
        self.dependence: Dependence | None = None
        """Follows what is computed from stand-ins, in a forward that is watched."""
        self._stage = stage
        self._pieces = pieces
        self._first = first
        self._arrived = arrived
        self._device = device
        self._sequence_parts = sequence_parts
        self._why_unknown = why_unknown
        self._num_calls: defaultdict[str, int] = defaultdict(int)
        self._made: dict[Layout, Tensor] = {}
        self._params: dict[str, Tensor] = {}

    def of_module(self, name: str) -> Any:
        """What a module of an earlier stage returns."""
        assert self._arrived is not None
        layout = self._arrived.layout.alike.get(name)
        made = None if layout is None or self._arrived.layout.results else self._made.get(layout)
        if made is not None and self.dependence is None:
            return made.view_as(made)  # another tensor over it, for `StageMessage.within`
        calls = self._arrived.layout.returned.get(name)
        if not calls:
            return self._of_layout(Layout.of(self._arrived.tensors[0]), Result(name, 0, 0))
        call = min(self._num_calls[name], len(calls) - 1)
        self._num_calls[name] += 1
        return self._of(calls[call], (Result(name, call, place) for place in count()))

    def of_param(self, facts: TensorFacts, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A parameter or buffer of another stage; it takes no memory."""
        known = self._params.get(facts.name)
        if known is not None:
            return known
        with torch.inference_mode(False), torch.set_grad_enabled(facts.requires_grad):  # it has what that has
            value = torch.full((), 0.5 if dtype.is_floating_point else 0, dtype=dtype, device=device)
            value = value.requires_grad_(facts.requires_grad).expand(facts.shape)
            if facts.requires_grad:
                self._guard(value, facts.name)
        if facts.is_param:
            value._is_param = True  # what isinstance(..., nn.Parameter) asks
        if self.dependence is not None:
            self.dependence.mark(value, facts.name)
        self._params[facts.name] = value
        return value

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A context in which a forward is watched."""
        from shardwise.parallel.pipeline.dependence import (  # only ranks with a pipeline load it
            Dependence,
            FunctionsOfValues,
        )

        self.dependence = Dependence(partial(self.refuse, does="reads a number from"))
        if self._arrived is not None:
            self.note_own(self._arrived.tensors)
        with FunctionsOfValues(self.dependence), self.dependence:
            yield

    @property
    def batch_decides_sizes(self) -> bool:
        """Whether a watched forward has shown that values of the batch decide on shapes."""
        return self.dependence is not None and self.dependence.batch_decides_sizes

    def note_own(self, value: object) -> None:
        """Follow tensors that this stage received, or that its modules have returned."""
        if self.dependence is not None:
            for tensor in tensors_in(value):
                self.dependence.mark(tensor, OWN)

    def marks(self, tensor: Tensor) -> Names:
        """In a watched forward: what the tensor depends on, `OWN` included."""
        assert self.dependence is not None
        return self.dependence.names(tensor)

    def foreign_in(self, value: object) -> Names:
        """In a watched forward: the stand-ins on which tensors in `value` depend."""
        assert self.dependence is not None
        return foreign(self.dependence.names(list(tensors_in(value))))

    def require_none(self, value: object, does: str) -> None:
        """In a watched forward: raise `ModelError` if tensors in `value` depend on stand-ins."""
        names = self.foreign_in(value)
        if names:
            self.refuse(names, does)

    def refuse(self, names: Names, does: str) -> NoReturn:
        """Raise `ModelError`: the forward does something with what `names` stand for, if that is known."""
        names = frozenset(_module_of(name.removeprefix(FINITE)) for name in names)
        where = f"In pipeline stage {self._stage}, which begins with {self._pieces[self._first]}, the forward"
        params = sorted(names - set(self._pieces))
        if params:
            raise ModelError(
                f"{where} {does} the values of {_listed(params)} of another stage (a penalty on weights, say), which "
                f"this one does not have. Leave such a penalty to the optimizer (weight_decay), or let the module "
                f"itself add it to a tensor that the blocks after it take and return. To multiply with a weight (an "
                f"embedding's, as a head), give it to a module of its own (head.weight = embed.weight)."
            )
        known = [name for name in self._pieces if name in names]
        what = f"what {_listed(known)} returned" if known else "what modules of earlier stages returned"
        because = f" That was impossible: {self._why_unknown}" if self._why_unknown else ""
        raise ModelError(
            f"{where} {does} {what} (a skip connection, or a sum over layers), which is not passed on to it. What "
            f"later stages read is found before the first step, by a forward on fake tensors.{because} Let the blocks "
            f"between take and return it too, say a sum that each adds to, or put the modules between which it is used "
            f"in one stage: pipeline.stages. Or leave pp out of the mesh: zero3 shards the parameters of any model."
        )

    def _of(self, description: Any, results: Iterator[Result]) -> Any:
        """A value with received results and stand-ins, from its description (see `described`)."""
        [(kind, inner)] = description.items()
        if kind == "tensor":
            return self._of_layout(Layout.of_plain(inner), next(results))
        if kind == "plain":
            return inner
        if kind == "dict":
            return {key: self._of(item, results) for key, item in inner.items()}
        if kind == "tree":
            leaves = [self._of(item, results) for item in inner["leaves"]]
            return tree_unflatten(leaves, treespec_loads(inner["shape"]))
        if kind == "other":
            raise ModelError(
                f"{next(results).module} returns {inner}, of which later pipeline stages cannot make a stand-in. Let "
                f"it return tensors in tuples, lists or dicts."
            )
        items = [self._of(item, results) for item in inner]
        return tuple(items) if kind == "tuple" else items

    def _of_layout(self, layout: Layout, result: Result) -> Tensor:
        """A tensor of this layout. Reentrant checkpointing makes what a module returns in a forward without gradients
        an output of its node, and calls the module again in the backward: if that returned the same tensor, it would
        depend on itself, and the backward would never end."""
        made = self._received_or_made(layout, result)
        return made.data if made.requires_grad and not torch.is_grad_enabled() else made

    def _received_or_made(self, layout: Layout, result: Result) -> Tensor:
        """A stand-in has memory of its own, because the model may write to it."""
        assert self._arrived is not None
        received = self._arrived.result(result)
        if received is not None:
            return received
        known = self._made.get(layout)
        if known is not None and self.dependence is None:
            return known.view_as(known)
        first = next(iter(self._arrived.tensors), None)  # none in a survey of what has no arguments of earlier modules
        device = self._device if first is None else first.device
        shape = list(layout.shape)
        if self._sequence_parts > 1 and first is not None and tuple(shape) == tuple(first.shape):
            shape[-2] *= self._sequence_parts  # masks are made for whole sequences
        gets_grads = any(tensor.requires_grad for tensor in self._arrived.tensors)
        needs_grad = gets_grads and layout.dtype.is_floating_point
        with torch.set_grad_enabled(needs_grad), nullcontext() if known is None else self._around_more():
            made = _varied(shape, layout.dtype, device, needs_grad=needs_grad)
        if needs_grad:  # reentrant checkpointing asks its arguments, and runs modules without gradients itself
            self._guard(made, str(result))
        self._made[layout] = made
        if self.dependence is not None:
            self.dependence.mark(made, str(result))
        return made

    def _guard(self, tensor: Tensor, name: str) -> None:
        """Raise if a gradient flows back to a stand-in: then the stage's output depends on it."""
        pieces, stage, first = self._pieces, self._stage, self._first  # the hook must not refer to the tensor

        def refuse(gradient: Tensor | None) -> None:
            if gradient is None or isinstance(gradient, FakeTensor):  # rehearsed: it has no values
                return
            if bool(gradient.count_nonzero()):
                names: Names = frozenset() if Result.of(name) is not None else frozenset({name})
                Placeholders(stage, pieces, first, None).refuse(names, "uses")

        tensor.register_hook(refuse)


def _module_of(name: str) -> str:
    """The module of a result, or what else the name stands for."""
    result = Result.of(name)
    return name if result is None else result.module


def _varied(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None, *, needs_grad: bool) -> Tensor:
    """Different values from 0.5 to 1.5, or zeros of other dtypes than floating-point ones; none in a rehearsal. With
    `needs_grad` it is no leaf, so that a model may write to it."""
    start = torch.full((), 0.5 if dtype.is_floating_point else 0, dtype=dtype, device=device)
    made = start.requires_grad_(needs_grad)
    differs = dtype.is_floating_point and not isinstance(start, FakeTensor)
    for dim, size in enumerate(shape if differs else ()):
        if size > 1:
            below = len(shape) - dim - 1
            steps = torch.linspace(0, 0.5**below / 2, size, dtype=dtype, device=device)
            made = made + steps.view(*[1] * dim, size, *[1] * below)
    return made.expand(shape).clone() if made.shape != torch.Size(shape) or made is start else made


def _listed(names: Sequence[str]) -> str:
    """Such as `tokens, blocks.0 and blocks.1`, or `blocks.0 and 5 more modules`."""
    if len(names) > 3:
        return f"{names[0]} and {len(names) - 1} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
