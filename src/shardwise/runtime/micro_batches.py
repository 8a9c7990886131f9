"""The batch of one optimizer step as micro-batches, and the loss of each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, islice, pairwise
from typing import Any

import torch

from shardwise.comm.weighing import Weighing
from shardwise.errors import ConfigError, ModelError
from shardwise.runtime.nested import argument_tensors, tensors_in
from shardwise.system.even_parts import even_bounds, even_sizes
from shardwise.system.marked import Marked
from shardwise.system.torch_private import tree_map_only

Tensor = torch.Tensor
LossFunction = Callable[..., Tensor]
"""Called with the model's output, and the micro-batch's target if there are targets."""

_PLAIN = frozenset({Tensor, type(None), bool, int, float, str})
"""Types that hold nothing marked."""


class MicroSteps:
    """The micro-batches of the current step, counted where each ends: in `engine.step()`.

    [Note: micro-steps] How often a loop calls backward for a micro-batch, and whose backward it is, says nothing of
    when the micro-batch ends: a GAN calls it twice, another engine's runs through this model. So backwards are not
    counted. `engine.backward` divides its loss by the number of micro-batches, and `loss.backward()` does what it does
    in plain PyTorch: loops written for that divide the loss. DeepSpeed's loops do not, whichever they call, so for them
    gradients are divided as they arrive, together with the average over ranks.
    """

    def __init__(self) -> None:
        self.num_ended = 0
        self.divides_arriving = False
        """Whether the gradients of every backward are divided, and not losses given to `engine.backward`."""
        self.are_all_run = False
        """Whether one call has run all micro-batches of the step, so that the next end is that of the step."""
        self.num_dropped = 0
        """How many steps in a row were begun, and dropped by `zero_grad` before their last micro-batch."""

    def end(self, of: int, *, is_last: bool | None = None) -> bool:
        """End a micro-batch of a step that has `of`; returns whether the step is complete. `is_last` decides instead
        of the count, if it is given."""
        self.num_ended += 1
        is_complete = self.are_all_run or self.num_ended >= of if is_last is None else is_last
        if is_complete:
            self.num_dropped = 0
        return is_complete

    def drop(self, of: int) -> None:
        """`zero_grad` drops what has come of the current step, which begins anew."""
        if 0 < self.num_ended < of:
            self.num_dropped += 1
        self.begin_step()

    def begin_step(self) -> None:
        self.num_ended, self.are_all_run = 0, False


@dataclass(frozen=True)
class MicroBatch:
    """What the model is called with, and what its output is compared with, if that is given apart."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any = None
    has_target: bool = False
    weight: float = 1.0
    """How much it counts beside those of other ranks and the others of its step."""
    weighing: Weighing | None = None
    """Knows that weight while the loss is computed, if weights are used."""
    given: Any = None
    """The micro-batch as the loop gave it."""
    compute: Callable[[Any], Tensor] | None = None
    """Computes the loss of what was given, calling the model once; without it the model is called with the batch."""
    names: tuple[str, ...] = ()
    """What the model's forward calls `args`, if that is known."""
    rows: int | None = None
    """How many it has of one batch that was cut into micro-batches."""

    @cached_property
    def branches(self) -> tuple[tuple[str, bool], ...]:
        """What models of transformers read from the values of a batch to decide how to attend: by name, whether a mask
        hides nothing, and whether positions start anew within a row, as those of packed documents do."""
        found = []
        given = {**dict(zip(self.names, self.args, strict=False)), **self.kwargs}
        if not _PLAIN.issuperset(map(type, given.values())):  # forty calls of Python functions, for each micro-batch
            given = tree_map_only(Marked, Marked.plain, given)
        for inner in [one for one in given.values() if isinstance(one, Mapping)]:  # a batch in one argument
            given |= {name: value for name, value in inner.items() if isinstance(name, str)}
        for name, value in sorted(given.items()):
            if isinstance(value, Tensor) and not value.is_floating_point() and "mask" in name:
                found.append((name, bool(value.all())))
            elif isinstance(value, Tensor) and name == "position_ids":
                found.append((name, bool((value.diff(dim=-1) == 1).all())))
        return tuple(found)

    @cached_property
    def form(self) -> Hashable:
        """A key that is equal for micro-batches on which the forward does the same: it leaves out sizes, and all values
        but those on which models are known to branch."""

        def looks(value: Any) -> Hashable:
            if isinstance(value, Tensor):
                return type(value), ((value.dim(), value.dtype),)
            plain = value if isinstance(value, bool | str) or value is None else type(value)
            return plain, tuple((one.dim(), one.dtype) for one in tensors_in(value))

        named = tuple((key, looks(value)) for key, value in sorted(self.kwargs.items()))
        return tuple(map(looks, self.args)), named, self.branches

    def loss_by(self, model: Callable[..., Any], loss_fn: LossFunction | None) -> Tensor:
        """The loss, after a call of `model`."""
        if self.compute is None:
            return self.loss(model(*self.args, **self.kwargs), loss_fn)
        return self.loss(self.given, self.compute)

    def loss(self, output: Any, loss_fn: LossFunction | None) -> Tensor:
        """The loss of `output`: what `loss_fn` makes of it, else the output itself, or its `loss`."""
        loss: Any = output
        if loss_fn is not None:
            with nullcontext() if self.weighing is None else self.weighing.during(self.weight):
                loss = loss_fn(output, self.target) if self.has_target else loss_fn(output)
        elif isinstance(output, Mapping) or hasattr(output, "loss"):
            loss = output.get("loss") if isinstance(output, Mapping) else output.loss
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            whose = "loss_fn returns" if loss_fn is not None else "The model returns"
            cure = "" if loss_fn is not None else ", or give train_step a loss_fn that makes one of the output"
            raise ModelError(f"{whose} {shown}, but a step needs a loss: a tensor of one element. Return that{cure}.")
        return loss


def micro_batches(
    batch: Any, target: Any, num: int, weighing: Weighing, names: tuple[str, ...] = ()
) -> list[MicroBatch]:
    """`num` micro-batches of `batch`, with their weights; see `Engine.train_step` for what that may be, and
    `MicroBatch` for `names`.

    Raises `ConfigError` for one that cannot be split evenly, where samples are not weighed, or that has too few.
    """
    inputs = _parts(batch, num, "batch", is_even=not weighing.is_used)
    counts = inputs.counts if isinstance(inputs, _Cut) else [None] * num
    targets = [None] * num if target is None else _parts(target, num, "target", is_even=not weighing.is_used)
    parts = [
        called_with(part, one, has_target=target is not None, names=names, rows=rows)
        for part, one, rows in zip(inputs, targets, counts, strict=True)
    ]
    if not weighing.is_used:
        return parts
    if isinstance(inputs, _Cut):
        weights = [weighing.current * count * num / sum(inputs.counts) for count in inputs.counts]
        weighing.take(1)
    else:
        weights = weighing.take(num)
    return [replace(part, weight=weight, weighing=weighing) for part, weight in zip(parts, weights, strict=True)]


def parts_of(whole: MicroBatch, most_for: Callable[[int], int]) -> tuple[list[MicroBatch], list[int]]:
    """At most `most_for(samples)` parts of what a model is called with, split along the samples, and how many each has.

    Samples are the first dimension of its tensors. Tensors without dimensions, and those with one entry in the first,
    are every part's. It stays whole if that leaves it open what belongs to a sample: if tensors differ in the first
    dimension, also if only vectors have more than one entry there (the bounds of documents that are packed into one
    row), if lists have as many entries as there are samples, or if each sample has several rows of tokens, which models
    for multiple choice put into the first dimension. A part has another size than the dimensions after the first one,
    so that it is seen if a model puts its samples there.
    """
    given = (whole.args, whole.kwargs)
    tensors = list(argument_tensors(given))
    found = {one.shape[0] for one in tensors if one.dim()} - {1}
    of_tables = {one.shape[0] for one in tensors if one.dim() > 1}
    ids = whole.kwargs.get("input_ids")
    has_choices = isinstance(ids, Tensor) and ids.dim() > 2
    if has_choices or len(found) != 1 or of_tables == {1} or not (rows := found.pop()) or _has_list_of(rows, given):
        return [whole], [1]
    others = {size for one in tensors if one.dim() and one.shape[0] == rows for size in one.shape[1:]}
    ways = (even_sizes(rows, num) for num in range(min(most_for(rows), rows), 1, -1))
    sizes = next((sizes for sizes in ways if not others & set(sizes)), [rows])
    bounds = [0, *accumulate(sizes)]
    shares = (_share(given, slice(start, stop), rows) for start, stop in pairwise(bounds))
    return [replace(whole, args=args, kwargs=kwargs) for args, kwargs in shares], list(sizes)


def side_inputs(whole: MicroBatch, rows: int, part_rows: int) -> dict[str, Tensor]:
    """The tensors, by name, that have as many rows as `whole` has samples, and may be every sample's all the same:
    those that have as many entries in another dimension too, such as a mask `[tokens, tokens]`; in parts of one row,
    which torch broadcasts to any number, also others beside the first that are no integers."""
    given = {**{_name(whole, place): one for place, one in enumerate(whole.args)}, **whole.kwargs}
    tensors = {name: one for name, one in given.items() if isinstance(one, Tensor) and one.dim() and len(one) == rows}
    if len(tensors) < 2:
        return {}
    first = next(iter(tensors))
    return {
        name: one
        for name, one in tensors.items()
        if rows in one.shape[1:]
        or (part_rows == 1 and name != first and (one.is_floating_point() or one.dtype == torch.bool))
    }


def _name(part: MicroBatch, place: int) -> str:
    return part.names[place] if place < len(part.names) else f"argument {place}"


def _has_list_of(rows: int, value: Any) -> bool:
    """Whether `value` has a list or tuple of so many things other than tensors."""
    if isinstance(value, Mapping):
        return any(_has_list_of(rows, item) for item in value.values())
    if not isinstance(value, tuple | list):
        return False
    is_of_tensors = any(isinstance(item, Tensor) for item in value)
    return (len(value) == rows and not is_of_tensors and not any(True for _ in argument_tensors(value))) or any(
        _has_list_of(rows, item) for item in value
    )


def mean_loss(losses: Sequence[Tensor], parts: Sequence[MicroBatch]) -> Tensor:
    """The mean over the samples of all micro-batches, without dimensions."""
    weights = [part.weight for part in parts]
    if all(weight == weights[0] for weight in weights):
        return (sum(losses[1:], start=losses[0]) / len(losses)).reshape(())
    counted = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight]
    return (sum(counted[1:], start=counted[0]) / sum(weights)).reshape(())


def called_with(
    part: Any, target: Any = None, *, has_target: bool = False, names: tuple[str, ...] = (), rows: int | None = None
) -> MicroBatch:
    """What a model is called with for a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(part, Mapping):
        return MicroBatch((), dict(part), target, has_target, given=part, names=names, rows=rows)
    args = tuple(part) if isinstance(part, tuple | list) and not hasattr(part, "_fields") else (part,)
    return MicroBatch(args, {}, target, has_target, given=part, names=names, rows=rows)


class _Cut(list[Any]):
    """Micro-batches of one batch, and the rows that each has of it; where that is none, it is a stand-in of one row."""

    def __init__(self, parts: Iterable[Any], counts: Sequence[int]) -> None:
        super().__init__(parts)
        self.counts = tuple(counts)


def _parts(value: Any, num: int, what: str, *, is_even: bool) -> Sequence[Any]:
    if isinstance(value, list | Iterator):
        parts = list(islice(value, num)) if isinstance(value, Iterator) else value
        if len(parts) != num:
            raise ConfigError(
                f"{what} has {len(parts)} micro-batches, but the plan's accumulate is {num}. Give as many, or one "
                f"{what} as a tensor, tuple or dict, which is split along its first dimension."
            )
        return parts
    if num == 1:
        return [value]
    rows = {one.shape[0] for one in argument_tensors(value) if one.dim()}
    if not rows:
        raise ConfigError(
            f"{what} has no tensor that could be split into {num} micro-batches (the plan's accumulate). Give tensors "
            f"whose first dimension is the samples, or a list of {num} micro-batches."
        )
    if len(rows) > 1 or (is_even and next(iter(rows)) % num) or not next(iter(rows)):
        told = " and ".join(map(str, sorted(rows)))
        raise ConfigError(
            f"{what} has tensors of {told} rows, which cannot be split into {num} even micro-batches (the plan's "
            f"accumulate). Give a multiple of {num} rows, or a list of {num} micro-batches."
        )
    bounds = even_bounds(next(iter(rows)), num)
    spans = [slice(start, stop) if start < stop else slice(0, 1) for start, stop in pairwise(bounds)]
    return _Cut([_share(value, span, bounds[-1]) for span in spans], even_sizes(bounds[-1], num))


def _share(value: Any, span: slice, of: int) -> Any:
    """The rows of one micro-batch; what is no tensor, or a tensor that does not have `of` rows, is every
    micro-batch's."""
    if isinstance(value, Tensor):
        return value[span] if value.dim() and value.shape[0] == of else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_share(item, span, of) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(_share(item, span, of) for item in value)
    if isinstance(value, Mapping):
        return {key: _share(item, span, of) for key, item in value.items()}
    return value
