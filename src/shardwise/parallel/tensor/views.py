"""Detects forwards that take a part of the features for all of them, by their shapes on the first batch.

[Note: views] A forward with a hard-coded number of heads (`x.unflatten(-1, (3, 12, -1))`) also accepts a part of the
features, and makes the same number of narrower heads from it: shapes fit, but results are wrong. So at the first batch,
the unsplit and the split model both run on fake tensors, and their views are compared. Features are split by whole
heads, so only the dimension of a view that counts heads (in each fused part) may change. If another one changes, such
as tokens or the size of a head, the number of heads is hard-coded.

Shapes of outputs would not show it: heads of half the width make as many features.

The same two forwards show other code that is right for all features alone: a mean or softmax over split ones, a fused
matrix that is cut in two (`chunk`) without `parts` in the plan, a number that is made of how many there are, and a
product with the weight of another module, such as an embedding's as a head. With `tensor.sequence` they show an
attention, or a convolution, for whose modules no pattern gathers the sequence: it would see a rank's own tokens. All
are recorded in one list, and compared in order.

In an elastic job a rank may be lost before all have compared, or while they do. So the check is made again after a
recovery as long as no step is complete, which all ranks know alike: in each comparison all ranks along the axis send.

[Note: views in stages] A rank of a pipeline has no forward of the whole split model to run. So what its modules do is
recorded in the first forward of each stage, with values, and compared with what they do in the unsplit model.
"""

from __future__ import annotations

import copy
import math
import pickle
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.comm import Line
from shardwise.comm.agreed import raise_first
from shardwise.errors import CommError, CorruptionError, ModelError, StateError, TierError
from shardwise.memory import Unit
from shardwise.parallel.tensor.partition import AXIS
from shardwise.parallel.tensor.weights_used import PRODUCTS, of_another
from shardwise.plan.placement import Dtype
from shardwise.system.own_hooks import hook, hook_around
from shardwise.system.torch_functions import PRODUCTS_OF_TWO, added_up, dims_of, named
from shardwise.system.torch_private import DataDependentOutputException, DynamicOutputShapeException, tree_leaves

if TYPE_CHECKING:
    from shardwise.runtime.rehearsal import Twin

Shape = tuple[int, ...]
_VIEWS = frozenset(
    {
        torch.Tensor.view,
        torch.Tensor.reshape,
        torch.reshape,
        torch.Tensor.unflatten,
        torch.unflatten,
        torch.Tensor.flatten,
        torch.flatten,
    }
)
_REDUCTIONS: Mapping[Callable[..., Any], int] = {
    **dict.fromkeys(named("mean", "sum", "amax", "amin", "max", "min", "prod", "var", "std", "median", "argmax"), 1),
    **dict.fromkeys(named("softmax", "log_softmax", "logsumexp", "cumsum", "cumprod", "sort"), 1),
    **dict.fromkeys(named("norm", "vector_norm", "topk", "normalize"), 2),
}
"""Functions that need all entries of a dimension, with the place of that argument."""
_CUTS: Mapping[Callable[..., Any], int] = dict.fromkeys(named("chunk", "split", "tensor_split"), 2)
_MIXING: Mapping[Callable[..., Any], tuple[int, str, int]] = {
    torch.nn.functional.scaled_dot_product_attention: (1, "key", -2),
    torch.conv1d: (0, "input", -1),
}
"""Functions that read several tokens for each: the place and the name of the argument with them, and the dimension."""
_SIGNS = [f"__{way}{sign}__" for sign in ("mul", "truediv", "add", "sub", "pow") for way in ("", "r", "i")]
_ARITHMETIC = frozenset(
    {
        *named("mul", "multiply", "div", "divide", "true_divide", "add", "sub", "subtract", "pow"),
        *named("mul_", "div_", "add_", "sub_", "pow_", "scaled_dot_product_attention"),
        *(getattr(torch.Tensor, name) for name in _SIGNS),
    }
)
"""Functions that compute with numbers, of which some depend on how many features, heads or tokens there are."""
_RECURRENT = frozenset(named("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""They do too, in the first or second dimension of their first argument."""
_WATCHED = frozenset(
    {*_VIEWS, *_REDUCTIONS, *_CUTS, *PRODUCTS, torch.Tensor.__getitem__, *_MIXING, *_RECURRENT, *PRODUCTS_OF_TWO}
)
_UNCHANGED = (torch.Tensor, int, float, complex, str, type(None), torch.dtype, torch.device)


@dataclass(frozen=True)
class View:
    """A view that the forward of the module at `path` took."""

    path: str
    source: Shape
    target: Shape


@dataclass(frozen=True)
class Reduction:
    """A function of all entries along some dimensions of a tensor, whose sizes are `sizes`."""

    path: str
    what: str
    sizes: Shape


@dataclass(frozen=True)
class Cut:
    """A piece of a dimension of that size."""

    path: str
    size: int
    piece: int


@dataclass(frozen=True)
class ForeignWeight:
    """The weight of another module, with which that at `path` computes."""

    path: str
    name: str
    shape: Shape


@dataclass(frozen=True)
class Mixing:
    """A function that reads so many tokens together."""

    path: str
    what: str
    num_tokens: int


@dataclass(frozen=True)
class Number:
    """A function that computes with these numbers."""

    path: str
    what: str
    numbers: tuple[float, ...]


_FAILURES = (RuntimeError, ValueError, IndexError, AssertionError)
"""What a forward raises where shapes do not fit."""
Step = View | Reduction | Cut | ForeignWeight | Mixing | Number


class ViewCheck:
    """Compares the views in the first forward of a split model with those of the unsplit model."""

    def __init__(self, model: nn.Module, parts: Collection[int]) -> None:
        """Create it before the model is split; `parts` are the numbers of fused matrices in its modules."""
        self._unsplit = _on_meta_device(model)
        self._parts = frozenset(parts)

    def watch(self, model: nn.Module, units: Sequence[Unit], compute: Dtype, line: Line) -> Callable[[], None]:
        """Call it after the model is split. The first forward raises `ModelError` on all ranks of `line` if the views
        differ; one in a void iteration, in which `line` is silent, is none. Does nothing if the model could not be
        copied. Returns what ends it."""
        unsplit = self._unsplit
        if unsplit is None:
            return lambda: None
        device = units[0].flats[0].device

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if line.is_silent:
                return
            handle.remove()
            unsplit.train(module.training)
            problem, expected, is_all = "", list[Step](), False
            try:
                if _looks(units, line):
                    expected, is_all = _steps(unsplit, (), args, kwargs, device, compute)
                    found, _ = _steps(module, units, args, kwargs, device, compute)
                    problem = difference(expected if is_all else expected[: len(found)], found, self._parts)
            except _FailedError as failed:
                problem = failed.reason(expected, self._parts, is_all=is_all)
            except ModelError:  # the model cannot be copied
                pass
            raise_first(line.exchange(problem.encode()), ModelError)

        handle = model.register_forward_pre_hook(hook(before), prepend=True, with_kwargs=True)
        return handle.remove

    def in_stages(
        self, model: nn.Module, units: Sequence[Unit], device: torch.device, compute: Dtype, line: Line
    ) -> StageViews | None:
        """The same check for the stages that this rank has of `model`; `None` if that could not be copied."""
        if self._unsplit is None:
            return None
        return StageViews(self._unsplit, model, units, self._parts, device, compute, line)


class StageViews:
    """Compares the views in the first forward of each stage with those of the `unsplit` model: [Note: views in
    stages]."""

    def __init__(
        self,
        unsplit: nn.Module,
        model: nn.Module,
        units: Sequence[Unit],
        parts: Collection[int],
        device: torch.device,
        compute: Dtype,
        line: Line,
    ) -> None:
        self._unsplit = unsplit
        self._model = model
        self._parts = parts
        self._device = device
        self._compute = compute
        self._line = line
        self._looks = _looks(units, line)
        self._names = {module: name for name, module in model.named_modules()}
        self._compared: set[tuple[str, ...]] = set()

    @contextmanager
    def compared(self, called: nn.Module, pieces: Sequence[str]) -> Iterator[None]:
        """A context for a forward of `called` that runs `pieces`, modules of this rank by name. At its end, the first
        time, all ranks of the line raise `ModelError` if their views differ. All of them enter it alike."""
        if tuple(pieces) in self._compared or called not in self._names:
            yield
            return
        self._compared.add(tuple(pieces))
        given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        found: list[Step] = []
        with ExitStack() as hooks:
            noted = hook(lambda _, args, kwargs: given.append((args, kwargs)))
            hooks.callback(called.register_forward_pre_hook(noted, with_kwargs=True).remove)
            stack = _followed(self._model, hooks)
            with _Record(found, stack, self._model) as record:
                try:
                    yield
                except (CommError, StateError, TierError, CorruptionError, ModelError):
                    raise  # of ranks and their memory, or a sentence already, not of shapes
                except _FAILURES as error:
                    failed = _FailedError(record.path, error, _of(pieces, found))  # before the unsplit ones come in
                    expected = self._expected(called, pieces, given) if _is_in(record.path, pieces) else None
                    if expected is None:
                        raise
                    raise ModelError(failed.reason(expected, self._parts)) from error
        expected = self._expected(called, pieces, given) if self._looks else None
        problem = difference(expected or [], _of(pieces, found), self._parts)
        raise_first(self._line.exchange(problem.encode()), ModelError)

    def _expected(
        self, called: nn.Module, pieces: Sequence[str], given: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> list[Step] | None:
        """What the unsplit modules do; `None` if they read values, or are given objects, such as a cache, that they may
        change, so that they cannot be compared."""
        if not given or not all(isinstance(leaf, _UNCHANGED) for leaf in tree_leaves(given[0])):
            return None
        above = self._names[called]
        unsplit = self._unsplit.get_submodule(above)
        unsplit.train(called.training)
        try:
            steps, is_all = _steps(unsplit, (), *given[0], self._device, self._compute)
        except ModelError:
            return None
        if not is_all:
            return None
        prefix = f"{above}." if above else ""
        steps = [replace(step, path=f"{prefix}{step.path}" if step.path else above) for step in steps]
        return _of(pieces, steps)


def _of(pieces: Sequence[str], steps: Iterable[Step]) -> list[Step]:
    return [step for step in steps if _is_in(step.path, pieces)]


def difference(expected: Sequence[Step], found: Sequence[Step], parts: Collection[int]) -> str:
    """An error message about the first step over split features that is wrong; "" if there is none, or if the forwards
    cannot be compared because they took different paths. `parts` are the numbers of fused matrices."""
    if [(type(step), step.path) for step in expected] != [(type(step), step.path) for step in found]:
        return ""
    for whole, part in zip(expected, found, strict=True):
        if message := _wrong(whole, part, parts):
            return message
    return ""


def _wrong(whole: Step, part: Step, parts: Collection[int]) -> str:
    where = whole.path or "The model"
    match whole, part:
        case View(), View() if not _is_right(whole, part, parts):
            return (
                f"{where} views {list(whole.source)} as {list(whole.target)}, and the part of it "
                f"that tensor.plan leaves on a rank along {AXIS}, {list(part.source)}, as {list(part.target)}: its "
                f"forward has a hard-coded number of heads or features. Derive it from the input, such as "
                f"x.unflatten(-1, (-1, head_dim)), name the attribute with this number in tensor.divide, or declare "
                f"fused matrices with parts."
            )
        case Reduction(), Reduction() if whole.sizes != part.sizes:
            return (
                f"{where} computes {whole.what} over {list(whole.sizes)} entries, of which tensor.plan leaves "
                f"{list(part.sizes)} on a rank along {AXIS}: the result would be that of a part. Compute it where the "
                f"features are whole (before a column module, behind a row module, or behind column_gathered); with "
                f"tensor.sequence, of tokens, between a column and a row module, where those are whole."
            )
        case Cut(), Cut() if whole.size != part.size and not _is_even(whole, parts):
            return (
                f"{where} takes {whole.piece} of {whole.size} features, of which tensor.plan leaves {part.size} on a "
                f"rank along {AXIS}, so {part.piece} of others would be taken. Declare fused matrices of equal size "
                f"with parts, or make them modules of their own."
            )
        case Mixing(), Mixing() if whole.num_tokens > part.num_tokens:
            return (
                f"{where} computes {whole.what} over {whole.num_tokens} tokens, of which tensor.sequence leaves "
                f"{part.num_tokens} on a rank along {AXIS}. Give the linear modules before it the style column in "
                f"tensor.plan, and the one behind it row, between which the sequence is whole; or leave "
                f"tensor.sequence out of the plan."
            )
        case Number(), Number() if whole.numbers != part.numbers:
            return (
                f"{where} computes {whole.what} with {', '.join(map(str, whole.numbers))}, and with "
                f"{', '.join(map(str, part.numbers))} on the part of the features, or with tensor.sequence of the "
                f"tokens, that tensor.plan leaves on a rank along {AXIS}: the number is made of a size that is split. "
                f"Take it from what is not, such as an attribute that tensor.divide does not name."
            )
        case ForeignWeight(), ForeignWeight() if whole.shape != part.shape:
            return of_another(where, whole.name, whole.shape, part.shape)
    return ""


def _is_even(cut: Cut, parts: Collection[int]) -> bool:
    return cut.size == cut.piece or (cut.size % cut.piece == 0 and cut.size // cut.piece in parts)


def _is_right(whole: View, part: View, parts: Collection[int]) -> bool:
    if len(whole.source) != len(part.source) or len(whole.target) != len(part.target):
        return False
    for source, target in _groups(whole.source, whole.target):
        whole_before, whole_after = whole.source[source], whole.target[target]
        part_before, part_after = part.source[source], part.target[target]
        if math.prod(part_before) != math.prod(part_after):
            return False  # another dimension has absorbed the difference
        changed = [at for at, (one, other) in enumerate(zip(whole_after, part_after, strict=True)) if one != other]
        if len(whole_before) != 1 or len(whole_after) == 1 or not changed:
            continue
        is_split = whole_before != part_before
        if not is_split or len(changed) > 1 or math.prod(whole_after[: changed[0]]) not in {1, *parts}:
            return False
    return True


def _groups(source: Shape, target: Shape) -> list[tuple[slice, slice]]:
    """The smallest groups of dimensions with the same number of elements on both sides of a view."""
    groups = []
    at, to = 0, 0
    while at < len(source) and to < len(target):
        first, last = at, to
        here, there = source[at], target[to]
        at, to = at + 1, to + 1
        while here != there:
            if here < there and at < len(source):
                here, at = here * source[at], at + 1
            elif there < here and to < len(target):
                there, to = there * target[to], to + 1
            else:
                return [(slice(0, len(source)), slice(0, len(target)))]  # a dimension has no elements
        groups.append((slice(first, at), slice(last, to)))
    return groups


def _steps(
    model: nn.Module,
    units: Sequence[Unit],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device,
    compute: Dtype,
) -> tuple[list[Step], bool]:
    """The steps of a forward of `model` that shapes decide on, and whether these are all, or those up to where it needs
    values that a rehearsal does not have. Raises `ModelError` if it cannot be copied."""
    from shardwise.runtime.micro_batches import MicroBatch
    from shardwise.runtime.rehearsal import rehearse_forward  # only jobs with a plan of their own for tp load it

    found: list[Step] = []
    is_all = [True]

    def run(twin: Twin, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with ExitStack() as hooks, _Record(found, _followed(twin.model, hooks), twin.model) as record:
            try:
                twin.model(*args, **kwargs)
            except Exception as error:
                is_read = isinstance(error, DataDependentOutputException | DynamicOutputShapeException)
                if units and not is_read and isinstance(error, _FAILURES):
                    raise _FailedError(record.path, error, found) from error
                is_all[0] = False

    rehearse_forward(run, model, units, MicroBatch(args, kwargs), device=device, compute=compute)
    return found, is_all[0]


class _FailedError(ModelError):
    """The forward of the split model fails where that of the unsplit one does not."""

    def __init__(self, path: str, error: Exception, found: Sequence[Step]) -> None:
        """`path` is the module in which it fails, after the steps `found`."""
        super().__init__(
            f"The forward of {path or 'the model'} fails on the part of the features, or with tensor.sequence of the "
            f"tokens, that tensor.plan leaves on a rank along {AXIS}: {str(error).rstrip('.')}. What it combines with "
            f"split features has to be split as they are: by a pattern of its own in tensor.plan, by an attribute in "
            f"tensor.divide, or, for a parameter of one number per feature or head, a slice; or leave the module out "
            f"of tensor.plan."
        )
        self._found = found

    def reason(self, expected: Sequence[Step], parts: Collection[int], *, is_all: bool = True) -> str:
        """The first step before that is not as `expected`, as `q, k, v = x.split(...)` takes too few parts; or the
        error itself, unless the unsplit model could be followed no further either (`is_all`)."""
        because = str(self) if is_all or len(self._found) < len(expected) else ""
        return difference(expected[: len(self._found)], self._found, parts) or because


def _looks(units: Sequence[Unit], line: Line) -> bool:
    """Whether this rank compares: of those whose parts have the same shapes, and all find the same, the first alone."""
    slots = [slot for unit in units for flat in unit.flats for slot in flat.slots]
    sizes = [pair for slot in slots for pair in zip(slot.shape, slot.whole_shape, strict=True)]
    return not line.index or any(own not in (whole, whole / line.num_ranks) for own, whole in sizes)


def _followed(model: nn.Module, hooks: ExitStack) -> list[str]:
    """The names of the modules whose forwards are running, from outside inwards, until `hooks` are closed."""
    stack: list[str] = []

    def enter(path: str, *_: object) -> None:
        stack.append(path)

    def leave(*_: object) -> None:
        stack.pop()

    for path, module in model.named_modules():
        for handle in hook_around([module], partial(enter, path), leave, first=True):
            hooks.callback(handle.remove)
    return stack


def _is_in(path: str, pieces: Sequence[str]) -> bool:
    return any(path == piece or path.startswith(f"{piece}.") for piece in pieces)


class _Record(TorchFunctionMode):
    """Records the steps of a forward, except those of collectives (`unwatched`) and inside functions of torch."""

    def __init__(self, found: list[Step], stack: Sequence[str], model: nn.Module) -> None:
        super().__init__()
        self._found = found
        self._stack = stack
        self._names = {param: name for name, param in model.named_parameters()}
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], nn.Parameter]] = {}
        """Tensors of as many elements that were made of parameters, such as `weight.t()` and `weight.float()`, by their
        ids, each with its parameter."""
        self._owners: dict[nn.Parameter, set[str]] = {}
        """The modules that have each parameter."""
        for path, module in model.named_modules():
            for param in module.parameters(recurse=False):
                self._owners.setdefault(param, set()).add(path)
        self.path = ""
        """The module in which the last function of torch was called."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._stack:
            self.path = self._stack[-1]
        result = func(*args, **(kwargs or {}))
        weight = self._weight_of(args[0]) if args else None
        if weight is not None and isinstance(result, torch.Tensor) and result.numel() == weight.numel():
            self._made[id(result)] = weakref.ref(result), weight
        if func in _WATCHED or func in _ARITHMETIC or weight is not None:
            self._found += self._steps(func, args, kwargs or {}, result)
        return result

    def _weight_of(self, one: object) -> nn.Parameter | None:
        """The parameter that `one` is, or of which it was made."""
        if isinstance(one, nn.Parameter) and one in self._names:
            return one
        made, weight = self._made.get(id(one), (lambda: None, None))
        return weight if made() is one else None

    def _steps(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Iterator[Step]:
        path = self.path
        given = args[0] if args else None
        if func not in PRODUCTS and self._is_some(given, func, result):
            yield from self._foreign(path, args[:1])
        if func in _ARITHMETIC and isinstance(result, torch.Tensor) and result.is_floating_point():
            numbers = tuple(one for one in (*args, *kwargs.values()) if type(one) in (int, float))
            if numbers:
                yield Number(path, func.__name__, numbers)
        if func not in _WATCHED:
            return
        if func in PRODUCTS_OF_TWO and not any(one in self._names for one in tree_leaves(args) if _is_tensor(one)):
            yield Reduction(path, func.__name__, _sizes_added_up(func, args, kwargs))
        if not isinstance(given, torch.Tensor):
            return
        if func in _MIXING:
            place, name, dim = _MIXING[func]
            num_tokens = _argument(args, kwargs, place, name).shape[dim]
            is_pointwise = func is torch.conv1d and _argument(args, kwargs, 1, "weight").shape[-1] == 1
            if not is_pointwise or result.shape[dim] != num_tokens:
                yield Mixing(path, func.__name__, num_tokens)
        elif func in _RECURRENT:
            yield Mixing(path, func.__name__, math.prod(given.shape[:-1]))
        elif func in PRODUCTS:
            yield from self._foreign(path, args[:2])
        elif not given.is_floating_point():
            return
        elif func in _VIEWS and isinstance(result, torch.Tensor):
            yield View(path, tuple(given.shape), tuple(result.shape))
        elif func in _REDUCTIONS:
            if dims := dims_of(given, args, kwargs, _REDUCTIONS[func]):
                yield Reduction(path, func.__name__, tuple(given.shape[dim] for dim in dims))
        elif func in _CUTS:
            (dim,) = dims_of(given, args, kwargs, _CUTS[func]) or (0,)
            yield Cut(path, given.shape[dim], result[0].shape[dim])
        elif func is torch.Tensor.__getitem__ and _is_last(args[1]):
            yield Cut(path, given.shape[-1], result.shape[-1])

    def _is_some(self, given: object, func: Callable[..., Any], result: object) -> bool:
        """Whether `result` is a sum over a weight, or some of its values, and not only like it (`weight.new_zeros`)."""
        weight = self._weight_of(given)
        is_fewer = weight is not None and isinstance(result, torch.Tensor) and result.numel() != weight.numel()
        return is_fewer and not getattr(func, "__name__", "").startswith("new_")

    def _foreign(self, path: str, given: Iterable[Any]) -> Iterator[ForeignWeight]:
        for weight in map(self._weight_of, given):
            if weight is not None and path not in self._owners[weight]:
                yield ForeignWeight(path, self._names[weight], tuple(weight.shape))


def _sizes_added_up(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shape:
    """The sizes of the dimensions over which a product of what was computed adds up."""
    return tuple(operand.shape[dim] for operand, dims in added_up(func, args, kwargs) for dim in dims)


def _is_tensor(one: object) -> bool:
    return isinstance(one, torch.Tensor)


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs[name]


def _is_last(index: Any) -> bool:
    """Whether an index takes a range of the last dimension: `x[..., :n]`."""
    return isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and _is_range(index[1])


def _is_range(one: Any) -> bool:
    return isinstance(one, slice) and one.step in (None, 1)


def _on_meta_device(model: nn.Module) -> nn.Module | None:
    """A copy whose parameters are on the meta device; `None` for a model that cannot be copied."""
    memo: dict[int, Any] = {
        id(param): nn.Parameter(
            torch.empty(param.shape, dtype=param.dtype, device="meta"), requires_grad=param.requires_grad
        )
        for param in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError, ValueError, AttributeError, pickle.PickleError):
        return None
