"""What a stage passes to the next: one or several tensors, which are arguments of the module with which that begins,
or results of modules that it or a later stage reads.

[Note: several tensors] Blocks may take and return tuples, such as (hidden, residual) or (hidden, mask). In the first
forward of each kind a stage finds out which tensor arguments of the next stage's first module depend on activations,
and passes these on; the next stage computes the others itself, from the batch. Tensors with gradients are followed by
their gradients in the backward. The layout that precedes the first message of a kind also says what earlier modules
have returned, so that stand-ins for them can be unpacked as the model's forward does.

[Note: results that are carried] A later stage may read what a module has returned in another way than as an argument
of its first module: a skip of a U-Net, a sum over layers, the features of an image tower. A survey (`survey.py`) finds
these results before the first forward, and each stage in between passes them on, and their gradients back: whoever
reads one adds to its gradient. What arrives as an argument and as a result is sent once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn

from shardwise.errors import ModelError
from shardwise.system.torch_private import tree_flatten, tree_unflatten, treespec_dumps

Tensor = torch.Tensor
Shapes = tuple[tuple[int, ...], ...]
"""Of several tensors, sorted."""
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""Dtypes that can be sent."""
_SENT = frozenset(DTYPES.values())
BY_SHAPES = (
    "They may depend on the shapes of the batch, and on its values where the first such forward selected by a mask of "
    "the batch or read integers of it. Where something else decides on them, such as an activation or an argument that "
    "is no tensor, let each micro-batch have as many of these, or leave pp out of the mesh."
)
_LEAVES = frozenset({Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype})
"""Types without anything in them."""


class Layout(NamedTuple):
    """Shape and dtype of a tensor, and whether a gradient of it is sent back in training."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_grad: bool = True

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)

    def plain(self) -> list[object]:
        return [list(self.shape), str(self.dtype).removeprefix("torch."), self.has_grad]

    @classmethod
    def of_plain(cls, plain: Sequence[Any]) -> Layout:
        shape, dtype, has_grad = plain
        return cls(tuple(shape), DTYPES[dtype], has_grad)


class Result(NamedTuple):
    """One of the tensors that a module of a stage has returned, in the order of `described`, in one of its calls."""

    module: str
    call: int
    place: int

    def __str__(self) -> str:
        return f"{self.module}#{self.call}.{self.place}"

    @classmethod
    def of(cls, name: str) -> Result | None:
        """Of its text; `None` for the name of something else."""
        module, _, places = name.partition("#")
        call, _, place = places.partition(".")
        return cls(module, int(call), int(place)) if places else None


@dataclass(frozen=True)
class StageMessageLayout:
    """The layout of a message: `arguments` has, for each tensor among the arguments of the next stage's first module,
    its number in the message, or -1 if that stage computes it, and `results` the numbers of carried results. `returned`
    has, by module and call, what earlier modules have returned (see `described`). `varies`: whether other micro-batches
    of its kind may have other shapes."""

    tensors: tuple[Layout, ...]
    arguments: tuple[int, ...]
    returned: Mapping[str, Sequence[Any]] = field(default_factory=dict, compare=False)
    results: Mapping[Result, int] = field(default_factory=dict)
    varies: bool = field(default=False, compare=False)

    def encoded(self) -> bytes:
        """As a message."""
        results = [[*result, number] for result, number in self.results.items()]
        plain = [[one.plain() for one in self.tensors], list(self.arguments), dict(self.returned), results, self.varies]
        return json.dumps(plain).encode()

    @classmethod
    def of_encoded(cls, message: bytes) -> StageMessageLayout:
        tensors, arguments, returned, results, varies = json.loads(message)
        numbers = {Result(*result): number for *result, number in results}
        return cls(tuple(map(Layout.of_plain, tensors)), tuple(arguments), returned, numbers, varies)

    @cached_property
    def alike(self) -> dict[str, Layout]:
        """The modules that have returned one tensor, of the same layout in every call, with that."""
        first = {name: calls[0].get("tensor") for name, calls in self.returned.items() if calls}
        return {
            name: Layout.of_plain(plain)
            for name, plain in first.items()
            if plain is not None and all(call == {"tensor": plain} for call in self.returned[name])
        }

    @cached_property
    def _shapes(self) -> dict[str, frozenset[Shapes]]:
        """Those that each module has returned, in each of its calls."""
        return {
            name: frozenset(tuple(sorted(_shapes_in(call))) for call in calls) for name, calls in self.returned.items()
        }

    def require_same(self, name: str, value: Any) -> None:
        """Raise `ModelError` if module `name` has returned tensors of other shapes than this layout says: later stages
        make their stand-ins by it, and models compute with shapes."""
        known = self._shapes.get(name)
        if known is None:
            return
        is_plain = type(value) is Tensor and value.dtype in _SENT  # as most are; the rest is described, as it was then
        shapes: Shapes = (value.shape,) if is_plain else tuple(sorted(_shapes_in(described(value))))
        if shapes not in known:
            raise ModelError(
                f"{name} returned tensors of shapes {_listed(next(iter(known)))} for micro-batches like this one, and "
                f"now of {_listed(shapes)}. {BY_SHAPES}"
            )

    @property
    def num_bytes(self) -> int:
        return bytes_of(self.tensors)

    @property
    def message_bytes(self) -> int:
        """Of the tensors, and of this layout if it precedes each of them."""
        return self.num_bytes + (len(self.encoded()) if self.varies else 0)

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that are sent back in training."""
        return bytes_of([one for one in self.tensors if one.has_grad])


def _shapes_in(description: Any) -> Iterator[tuple[int, ...]]:
    """Those of the tensors in a description (see `described`)."""
    if isinstance(description, list):
        for one in description:
            yield from _shapes_in(one)
    elif isinstance(description, dict):
        for kind, inner in description.items():
            if kind == "tensor" and isinstance(inner, list):
                yield tuple(inner[0])
            else:
                yield from _shapes_in(inner)


def _listed(shapes: Shapes) -> str:
    return " and ".join(str(list(shape)) for shape in shapes) or "no tensor"


def bytes_of(tensors: Iterable[Layout]) -> int:
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in tensors)  # a tensor would be counted in a rehearsal


@dataclass
class StageMessage:
    """Tensors with their layout. For the receiver, `replaced` has, by the identity of an argument that was computed
    from stand-ins, this argument and the received tensor: later modules may be called with the same one. `entry` is the
    number of the module that was given the arguments."""

    tensors: list[Tensor]
    layout: StageMessageLayout
    replaced: dict[int, tuple[ref[Tensor], Tensor]] = field(default_factory=dict)
    entry: int | None = None
    _leaves: list[Tensor] = field(default_factory=list)
    _later: list[ref[Tensor]] = field(default_factory=list)
    """The arguments of further calls of the first module in the forward, which are the stage's own."""

    def expecting_gradients(self) -> StageMessage:
        """This message, whose tensors get gradients where its layout says so, unless gradients are disabled."""
        places = [place for place, one in enumerate(self.layout.tensors) if one.has_grad and torch.is_grad_enabled()]
        self._leaves = [self.tensors[place].requires_grad_() for place in places]
        for place, tensor in zip(places, _Received.apply(*self._leaves) if places else (), strict=True):  # type: ignore[no-untyped-call]  # torch's own
            self.tensors[place] = tensor
        return self

    def gradients(self) -> list[Tensor]:
        """After a backward: of those that get one, zeros where none has come."""
        return [torch.zeros_like(one) if one.grad is None else one.grad for one in self._leaves]

    def result(self, result: Result) -> Tensor | None:
        """A result that was carried here."""
        number = self.layout.results.get(result)
        return None if number is None else self.tensors[number]

    def entering(self, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[Any, Any]:
        """The arguments of a call of `name`, the first module of the stage, with the received tensors among them."""
        leaves, rebuilt = flattened(args, kwargs)
        indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(indices) != len(self.layout.arguments):
            raise ModelError(
                f"{name} is called with {len(indices)} tensors on its own pipeline stage, and with "
                f"{len(self.layout.arguments)} at the end of the stage before it. The arguments of a stage's first "
                f"module must not depend on values."
            )
        for index, number in zip(indices, self.layout.arguments, strict=True):
            if number >= 0:
                self.replaced[id(leaves[index])] = ref(leaves[index]), self.tensors[number]
                leaves[index] = self.tensors[number]
        return rebuilt(leaves)

    def within(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """The arguments of a call of a later module, with received tensors instead of the ones that `entering`
        replaced; `None` if there are no such."""
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor and id(args[0]) not in self.replaced:
            return None
        leaves, rebuilt = flattened(args, kwargs)
        if self.replaced.keys().isdisjoint(map(id, leaves)):
            return None
        given = [self._instead_of(leaf) for leaf in leaves]
        return None if all(new is leaf for new, leaf in zip(given, leaves, strict=True)) else rebuilt(given)

    def note_later_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first module of the stage is called with these once more, as one block of several layers (ALBERT)."""
        self._later += map(ref, argument_leaves(args, kwargs))

    @property
    def is_entered_once(self) -> bool:
        """Whether the first module has had one call in the forward."""
        return not self._later

    def is_known_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the first module was called with these in the forward."""
        leaves = argument_leaves(args, kwargs)
        later = [leaf for one in self._later if (leaf := one()) is not None]
        return any(self._instead_of(leaf) is not leaf or any(leaf is one for one in later) for leaf in leaves)

    def _instead_of(self, leaf: Any) -> Any:
        original, received = self.replaced.get(id(leaf), (None, None))
        return received if original is not None and original() is leaf else leaf


class _Received(torch.autograd.Function):
    """Tensors that get gradients, as no leaves: the first module of a stage may change what it is called with in place,
    as `x += y` and `nn.ReLU(inplace=True)` do, which torch allows of no leaf and no view of one."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(one.detach() for one in leaves)

    @staticmethod
    def backward(_: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return gradients


def joined(messages: Sequence[StageMessage], rows: Sequence[int], what: str) -> StageMessage:
    """The message for a whole batch, from those for parts of it with so many `rows` each. `what` is called with it.

    Raises `ModelError` if a tensor has another first dimension than the rows of its part.
    """
    for message, num in zip(messages, rows, strict=True):
        odd = next((one.shape for one in message.tensors if one.dim() == 0 or one.shape[0] != num), None)
        if odd is not None:
            raise ModelError(
                f"{what} is called with a tensor of shape {list(odd)} for {num} samples, so the parts into which a "
                f"call of the model splits its batch cannot be put together: the first dimension of what blocks "
                f"return has to be the samples'. Use engine.train_step(batch), which does not put them together."
            )
    # the part with most arguments has those of the whole batch: models drop masks that hide nothing
    known = max((message.layout for message in messages), key=lambda layout: len(layout.arguments))
    tensors = [torch.cat([one.detach() for one in parts]) for parts in zip(*(m.tensors for m in messages), strict=True)]
    layouts = tuple(one._replace(shape=tuple(tensor.shape)) for one, tensor in zip(known.tensors, tensors, strict=True))
    of_parts = [(message.layout, num) for message, num in zip(messages, rows, strict=True)]
    of_parts.sort(key=lambda one: one[0] is not known)
    differing = of_parts if known.varies else of_parts[:1]
    returned = _of_all([(layout.returned, num) for layout, num in differing], sum(rows))
    return StageMessage(tensors, StageMessageLayout(layouts, known.arguments, returned, known.results))


def _of_all(found: Sequence[tuple[Any, int]], total: int) -> Any:
    """A description (see `described`) for `total` samples, of those for parts, each with its number of samples. Tensors
    whose first dimension is that of samples, or differs between the parts as that of what is selected does, have it of
    all parts. What is not alike is that of the first part."""
    one, _ = found[0]
    if isinstance(one, list):
        lists = [(other, num) for other, num in found if isinstance(other, list) and len(other) == len(one)]
        return [_of_all([(other[place], num) for other, num in lists], total) for place in range(len(one))]
    if not isinstance(one, dict):
        return one
    alike = [(other, num) for other, num in found if isinstance(other, dict) and other.keys() == one.keys()]
    if not isinstance(one.get("tensor"), list):
        return {key: _of_all([(other[key], num) for other, num in alike], total) for key in one}
    shape, *rest = one["tensor"]
    sizes = [(size, num) for other, num in alike for size in other["tensor"][0][:1]]
    if shape and all(size == num for size, num in sizes):
        shape = [total, *shape[1:]]
    elif len({size for size, _ in sizes}) > 1 and sum(num for _, num in sizes) == total:
        shape = [sum(size for size, _ in sizes), *shape[1:]]
    return {"tensor": [shape, *rest]}


def flattened(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]]:
    """The leaves of the arguments of a call, and what makes arguments of others in their places.

    Most calls have no nests, for which `tree_flatten` makes fifty calls of Python functions.
    """
    leaves = [*args, *kwargs.values()]
    if are_leaves(args, kwargs):
        num = len(args)
        return leaves, lambda given: (tuple(given[:num]), dict(zip(kwargs, given[num:], strict=True)))
    leaves, spec = tree_flatten((args, kwargs))

    def rebuilt(given: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = tree_unflatten(given, spec)
        return args, kwargs

    return leaves, rebuilt


def are_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nothing is in the arguments of a call but they themselves."""
    return _LEAVES.issuperset(map(type, args)) and _LEAVES.issuperset(map(type, kwargs.values()))


def argument_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """All tensors among the arguments of a call, in tuples, lists and dicts."""
    return [leaf for leaf in flattened(args, kwargs)[0] if isinstance(leaf, Tensor)]


def numbered(tensors: Sequence[Tensor], sent: Iterable[int]) -> tuple[list[Tensor], tuple[int, ...]]:
    """The different ones of `tensors` at the indices `sent`, and for each of `tensors` its number among them, or -1."""
    numbers: dict[int, int] = {}
    chosen: list[Tensor] = []
    arguments = [-1] * len(tensors)
    for index in sent:
        tensor = tensors[index]
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(chosen)
            chosen.append(tensor)
        arguments[index] = numbers[id(tensor)]
    return chosen, tuple(arguments)


def described(value: Any, tensors: list[Tensor] | None = None) -> dict[str, Any]:
    """What a module returned, as plain data: the layouts of tensors in tuples, lists, dicts and outputs of
    transformers, and numbers. The tensors are appended to `tensors`."""
    if isinstance(value, Tensor) and value.dtype in DTYPES.values():
        if tensors is not None:
            tensors.append(value)
        return {"tensor": Layout.of(value).plain()}
    if type(value) in (tuple, list):
        return {type(value).__name__: [described(item, tensors) for item in value]}
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: described(item, tensors) for key, item in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    leaves, spec = tree_flatten(value, is_leaf=lambda one: one is not value)
    if len(leaves) == 1 and leaves[0] is value:
        return {"other": type(value).__name__}
    try:
        shape = treespec_dumps(spec)
    except (NotImplementedError, TypeError):  # it holds what no text can say
        return {"other": type(value).__name__}
    return {"tree": {"shape": shape, "leaves": [described(leaf, tensors) for leaf in leaves]}}
