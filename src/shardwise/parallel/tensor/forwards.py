"""The forwards of split modules. Each is set as `module.forward`.

Copies of a model are made for rehearsals only; in a copy the forwards do not communicate (`Line.__deepcopy__`).

Modules keep their class, so hooks, names and `isinstance` stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shardwise.comm import Line
from shardwise.errors import ModelError
from shardwise.parallel.tensor.functions import apply as _apply
from shardwise.parallel.tensor.functions import copy_to, gather_from, gather_to, own_words, reduce_from, scatter_to
from shardwise.parallel.tensor.regions import SEQUENCE_DIM, Regions
from shardwise.plan.placement import Span
from shardwise.runtime.compiled import own_forward
from shardwise.runtime.hooks import in_backward

Tensor = torch.Tensor
Sizes = tuple[int, ...]
"""The sizes of the ranks' parts along a dimension."""
HIDDEN = "hidden_states"
MULTIPLY_SPLIT = "multiply_split"
"""The method of linear modules whose product depends on how it is split (`parallel/fp8/linear.py`, which only plans
that ask for it load): of input, weight, line, and which features are split, `in` or `out`."""


class Forward:
    """Replaces the forward of a module."""

    def __init__(self, module: nn.Module, line: Line, regions: Regions, *, on_sequence: bool = False) -> None:
        """`on_sequence`: the module's input and output are this rank's part of the sequence."""
        self.module = module
        self.line = line
        self.regions = regions
        self.on_sequence = on_sequence

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module's class."""
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def weight(self) -> Tensor:
        module: Any = self.module
        own: Tensor = module.weight
        return own


class Column(Forward):
    """A linear module split by output features. Its input is replicated, or split along the sequence."""

    def __init__(
        self,
        *given: Any,
        sizes: Sizes,
        gathers: bool,
        is_cut: bool,
        shared: SharedHeads | None,
        on_sequence: bool,
        is_entered: bool,
        is_alone: bool,
    ) -> None:
        """`is_cut`: its output is left split as `CutLogits`; `is_entered`: the parent module enters the region;
        `is_alone`: the module is a region by itself."""
        super().__init__(*given, on_sequence=on_sequence)
        self.is_entered = is_entered
        self.is_alone = is_alone
        self.sizes = sizes
        self.gathers = gathers
        self.is_cut = is_cut
        self._gathered: set[str] = set()
        self.shared = shared
        kind = type(self.module)
        self.is_conv1d = kind.__name__ == "Conv1D"
        self.is_linear = kind.forward is nn.Linear.forward or self.is_conv1d

    def __call__(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        entered = tensor
        if not self.is_entered:
            entered = self.regions.enter(self.module, tensor, on_sequence=self.on_sequence, is_alone=self.is_alone)
        own = {} if self.shared is None else self.shared.params(self.module, self.line)
        made = None
        if self.is_linear:
            made = self.regions.product(self.module, entered, own, is_conv1d=self.is_conv1d)
        if made is None:
            with with_params(self.module, own):
                made = self._made_of(entered, *args, **kwargs)
        if self.gathers or (self.is_cut and self.regions.keeps_whole):  # a generated token has one row of logits
            return gather_from(made, self.line, -1, self.sizes)
        return self.as_cut(made) if self.is_cut else made

    def _made_of(self, entered: Tensor, *args: Any, **kwargs: Any) -> Any:
        multiply = getattr(self.module, MULTIPLY_SPLIT, None)
        if multiply is None:
            return self.original(entered, *args, **kwargs)
        made, bias = multiply(entered, self.weight, self.line, "out"), self.module._parameters.get("bias")
        return made if bias is None else made + bias.to(made.dtype)

    def entered(self, tensor: Tensor) -> Tensor:
        """Its input, outside of regions, for products with parts of it; `as_cut` makes whole results of those."""
        if self.is_entered:
            return tensor
        if not self.on_sequence or self.regions.keeps_whole:
            return copy_to(tensor, self.line)
        return gather_to(tensor, self.line, SEQUENCE_DIM, [tensor.shape[SEQUENCE_DIM]] * self.line.num_ranks)

    def as_cut(self, part: Tensor) -> Tensor:
        """This rank's features as a tensor with those of all ranks."""
        from shardwise.parallel.tensor.split_logits import Cut, cut_logits  # only ranks with split logits load it

        return cut_logits(part, Cut(self.line, part.dim() - 1, self.sizes, self._gathered))


class SharedHeads:
    """Key and value heads that several ranks hold, because there are fewer heads than ranks: their gradients are
    summed."""

    def __init__(self, dim: int, ranges: Sequence[Span], size: int) -> None:
        """`ranges` are the ranks' parts along `dim` of the weight, of `size` in total; a bias has the same parts."""
        self.dim, self.ranges, self.size = dim, tuple(ranges), size

    def params(self, module: nn.Module, line: Line) -> dict[str, Tensor]:
        """The module's parameters, with gradients that are summed over the ranks that hold the same heads."""
        own = self.ranges[line.index]
        found = {}
        for name, dim in (("weight", self.dim), ("bias", 0)):
            param = module._parameters.get(name)
            if param is not None:
                found[name] = _sum_shared_heads(param, line, dim, own, self.size)
        return found


class Row(Forward):
    """A linear module split by input features. Each rank computes a partial sum of the output."""

    def __init__(self, *given: Any, sizes: Sizes, scatters: bool, is_conv1d: bool, on_sequence: bool) -> None:
        super().__init__(*given, on_sequence=on_sequence)
        self.sizes = sizes
        self.scatters = scatters
        self.is_conv1d = is_conv1d

    def __call__(self, tensor: Tensor) -> Tensor:
        own = scatter_to(tensor, self.line, -1, self.sizes) if self.scatters else tensor
        weight, made = self.weight, None
        try:
            if (multiply := getattr(self.module, MULTIPLY_SPLIT, None)) is not None:
                made = multiply(own, weight, self.line, "in")
            else:
                made = own @ weight if self.is_conv1d else functional.linear(own, weight)
        finally:
            if made is None:  # a recomputation stops early by raising one of torch's exceptions here
                self.regions.reset()
        return self.regions.leave(made, self.module._parameters.get("bias"), on_sequence=self.on_sequence)


class VocabularyEmbedding(Forward):
    """An embedding split by vocabulary."""

    def __init__(self, module: nn.Module, line: Line, regions: Regions, own: Span) -> None:
        super().__init__(module, line, regions)
        self.own = own

    def __call__(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        local, is_here = own_words(tokens, self.own)
        made = self.original(local, *args, **kwargs)
        return reduce_from(made.masked_fill(~is_here.unsqueeze(-1), 0), self.line)


class EmbeddingColumn(Forward):
    """An embedding split by features."""

    def __init__(self, module: nn.Module, line: Line, regions: Regions, sizes: Sizes, *, gathers: bool) -> None:
        super().__init__(module, line, regions)
        self.sizes = sizes
        self.gathers = gathers

    def __call__(self, tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = self.original(tokens, *args, **kwargs)
        return gather_from(made, self.line, -1, self.sizes) if self.gathers else made


class SummedGrads(Forward):
    """A module with replicated parameters that works on split tensors: the gradients of its parameters are summed over
    ranks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = {name: copy_to(param, self.line) for name, param in self.module._parameters.items() if param is not None}
        with with_params(self.module, own):
            return self.original(*args, **kwargs)


class LatentAndRotary(Forward):
    """The projection of multi-head latent attention that is replicated. Its last `num_rotary` features are the keys'
    rotary part, which the heads of all ranks read, so their gradients are summed over the ranks. The others are the
    latent, which only a column module reads."""

    def __init__(self, *given: Any, num_rotary: int) -> None:
        super().__init__(*given)
        self.num_rotary = num_rotary

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = self.original(*args, **kwargs)
        latent, rotary = torch.split(made, [made.shape[-1] - self.num_rotary, self.num_rotary], dim=-1)
        return torch.cat([latent, copy_to(rotary, self.line)], dim=-1)


class OwnHeads(Forward):
    """An attention module whose `argument`, of shape `[batch * heads, ...]`, is narrowed to this rank's heads."""

    def __init__(self, *given: Any, argument: str, own: Span, num_heads: int) -> None:
        super().__init__(*given)
        self.argument, self.own, self.num_heads = argument, own, num_heads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        whole = kwargs.get(self.argument)
        if isinstance(whole, Tensor):
            by_head = whole.view(-1, self.num_heads, *whole.shape[1:])
            kwargs[self.argument] = by_head.narrow(1, self.own.start, self.own.numel).flatten(0, 1)
        return self.original(*args, **kwargs)


class AdapterDropout(Forward):
    """Dropout before an adapter. Whether a region is open does not determine which generator it needs."""

    def __init__(self, *given: Any, is_replicated: bool) -> None:
        """`is_replicated`: its input is the same on all ranks, and so must be its mask."""
        super().__init__(*given)
        self.is_replicated = is_replicated

    def __call__(self, tensor: Tensor) -> Tensor:
        if not self.module.training:
            return tensor
        with self.regions.random_numbers(are_common=self.is_replicated):
            made: Tensor = self.original(tensor)
        return made


class RegionEntry(Forward):
    """A module that enters a region with `tensor.sequence`: its hidden states are gathered to the whole sequence."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_hidden_states(args, kwargs, self.module, self._enter)
        return self.original(*args, **kwargs)

    def _enter(self, tensor: Tensor) -> Tensor:
        return self.regions.enter(self.module, tensor, on_sequence=True, is_alone=False)


class SequenceEdge(Forward):
    """The first or last block of the list in which each rank has its part of the sequence.

    `begins_stage`: the block receives the part from the previous pipeline stage.
    """

    def __init__(self, *given: Any, is_first: bool, is_last: bool, begins_stage: bool = False) -> None:
        super().__init__(*given)
        self.is_first = is_first
        self.is_last = is_last
        self.begins_stage = begins_stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_first:
            split = partial(self.regions.split_sequence, is_training=self.module.training)
            args, kwargs = with_hidden_states(args, kwargs, self.module, split)
        elif self.begins_stage:
            self.regions.enter_sequence_part(is_training=self.module.training)
        try:
            made = self.original(*args, **kwargs)
        finally:
            if (self.is_first or self.begins_stage) and in_backward():
                self.regions.end_recomputation()
        if not self.is_last:
            return made
        if isinstance(made, tuple):
            return (self.regions.gather_sequence(made[0]), *made[1:])
        return self.regions.gather_sequence(made)


def with_hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any], module: nn.Module, change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block or attention module, with its hidden states changed: the first argument, or the one
    called `hidden_states`."""
    if args and isinstance(args[0], Tensor):
        return (change(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get(HIDDEN), Tensor):
        return args, {**kwargs, HIDDEN: change(kwargs[HIDDEN])}
    raise ModelError(
        f"tensor.sequence expects the hidden states of {type(module).__name__} as its first argument or as {HIDDEN}=, "
        f"but found no tensor there. Leave tensor.sequence out of the plan."
    )


@contextmanager
def with_params(module: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Inside, the module uses `tensors` instead of its parameters of the same names."""
    params: dict[str, Any] = module._parameters
    before = {name: params[name] for name in tensors}
    params.update(tensors)
    try:
        yield
    finally:
        params.update(before)


@contextmanager
def whole_head(module: nn.Module) -> Iterator[None]:
    """Inside, `weight` and `bias` of a head that is split by words along `tp` have those of all ranks, for code that
    multiplies with them by itself, such as fused losses. They are gathered, and every rank of the axis has to compute
    the same with them; their gradient is that of its own words.

    All ranks of the axis enter, in a forward of the model. A module that is not split is left as it is. Raises
    `ModelError` for one whose output is not gathered.
    """
    forward = own_forward(module)
    if not isinstance(forward, Column):
        yield
        return
    if not forward.is_alone:
        raise ModelError(
            f"whole_head is for a head that is split by words, and this {type(module).__name__} has the style column. "
            f"Give it vocabulary or vocabulary_cut in tensor.plan."
        )
    dims = {"weight": 1 if forward.is_conv1d else 0, "bias": 0}
    own = {name: module._parameters.get(name) for name in dims}
    whole = {
        name: gather_from(param, forward.line, dims[name], forward.sizes)
        for name, param in own.items()
        if param is not None
    }
    with with_params(module, whole):
        yield


def _sum_shared_heads(param: Tensor, line: Line, dim: int, own: Span, size: int) -> Tensor:
    made: Tensor = _apply(_SumSharedHeads, param, line, dim, own, size)
    return made


class _SumSharedHeads(torch.autograd.Function):
    """The tensor unchanged. Backward: the gradients of all ranks that hold the same part are summed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, line: Line, dim: int, own: Span, size: int) -> Tensor:
        ctx.args = line, dim, own, size
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        line, dim, own, size = ctx.args
        shape = list(grad.shape)
        shape[dim] = size
        whole = grad.new_zeros(shape)
        whole.narrow(dim, own.start, own.numel).copy_(grad)
        return line.sum(whole).narrow(dim, own.start, own.numel).contiguous(), None, None, None, None


@contextmanager
def whole_sequences(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, no sequence is split in `modules` and their children, as without `tensor.sequence`: a generated token has
    no parts, and without gradients there is little to save. All ranks along the axis enter and leave."""
    every = _regions_of(modules)
    for regions in every:
        regions.keeps_whole = True
    try:
        yield
    finally:
        for regions in every:
            regions.keeps_whole = False


def keeps_whole_sequences(model: nn.Module) -> bool:
    """Whether `model` runs inside `whole_sequences`."""
    return any(regions.keeps_whole for regions in _regions_of([model]))


def _regions_of(modules: Iterable[nn.Module]) -> list[Regions]:
    forwards = (child.__dict__.get("forward") for module in modules for child in module.modules())
    return list({id(one.regions): one.regions for one in forwards if isinstance(one, Forward)}.values())
