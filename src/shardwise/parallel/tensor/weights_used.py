"""What a forward computes of weights by itself, of which each rank has a part.

A split module multiplies with its part, and what comes out is joined. Other code that takes the weight finds that part
without a word: a hook that scales by `module.weight.norm()`, a penalty on it, a fused loss that multiplies with the
head's. So the first forward in training, and the first one in evaluation, are watched, whoever made the plan, and each
function of such a weight is computed once more without values, on the whole shape. A result that has the same shape
there was computed of the part alone, as in [Note: part by part] in `sharded/at_rest/parts.py`, which looks at code
between steps. What is right by parts is left alone: `weight.norm(dim=1)` of one that is split along dimension 0.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwise.errors import ModelError
from shardwise.parallel.tensor.partition import AXIS
from shardwise.system.own_hooks import hook_around
from shardwise.system.torch_functions import named
from shardwise.system.torch_private import CALL_CODE, tree_map_only

Tensor = torch.Tensor
Shape = tuple[int, ...]
PRODUCTS = frozenset({*named("linear", "matmul", "mm"), Tensor.__matmul__, nn.functional.embedding})
"""With which modules multiply by their weights."""


class Weight(NamedTuple):
    """A parameter of which a rank has a part, or what was computed of one: its name, and the shape of the whole."""

    name: str
    whole: Shape


class WeightsUsed:
    """Watches the first forwards of a `model`, of which `wholes` are the parameters that are split."""

    def __init__(self, model: nn.Module, wholes: Mapping[nn.Parameter, Weight]) -> None:
        self._model, self._wholes = model, wholes
        self._seen: set[bool] = set()
        self._calls: list[ExitStack] = []
        """Those that are running, from outside inwards."""
        self.is_in_stages = False
        """Whether calls of the model run some of its modules each, and who makes them says which are to be watched."""

    def watch(self) -> Callable[[], None]:
        """Begin; returns what ends it."""
        handles = hook_around([self._model], self._enter, self._leave, first=True)

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end

    def watched(self) -> AbstractContextManager[object]:
        """A context for a forward that is to be watched, of a model in stages."""
        return _Watch(self._model, self._wholes)

    def _enter(self, module: nn.Module, *_: object) -> None:
        is_known = self.is_in_stages or bool(self._calls) or module.training in self._seen
        self._calls.append(ExitStack())
        if not is_known:
            self._calls[-1].enter_context(self.watched())

    def _leave(self, module: nn.Module, *_: object) -> None:
        if self._calls:  # else another hook has raised before ours came
            self._calls.pop().close()
            self._seen.add(module.training)


class _Watch(TorchFunctionMode):
    def __init__(self, model: nn.Module, wholes: Mapping[nn.Parameter, Weight]) -> None:
        super().__init__()
        self._wholes = wholes
        self._names = {module: name for name, module in model.named_modules()}
        self._made: dict[int, tuple[weakref.ref[Tensor], Weight, nn.Parameter]] = {}
        """What was computed of weights, by identity."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if args and isinstance(args[0], Tensor):
            first = self._known(args[0])
            second = self._known(args[1]) if first is None and func in PRODUCTS and len(args) > 1 else None
            if first is not None or second is not None:
                self._look(func, args, kwargs, result, first, second)
        return result

    def _known(self, one: object) -> tuple[Weight, nn.Parameter] | None:
        if isinstance(one, nn.Parameter):
            weight = self._wholes.get(one)
            return None if weight is None else (weight, one)
        made, *known = self._made.get(id(one), (lambda: None, None, None))
        return tuple(known) if made() is one and one is not None else None  # type: ignore[return-value]

    def _look(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        first: tuple[Weight, nn.Parameter] | None,
        second: tuple[Weight, nn.Parameter] | None,
    ) -> None:
        """Raise `ModelError` if `func` computes with a part alone, or note of what its result is a part."""
        known = first or second
        assert known is not None
        weight, param = known
        module = _running()
        where = self._names.get(module, "") if module is not None else ""
        is_own = module is not None and any(one is param for one in module._parameters.values())
        shapes = weight.name, self._wholes[param].whole, tuple(param.shape)
        if func in PRODUCTS:
            if not is_own:
                raise ModelError(of_another(where, *shapes))
            if first is not None:
                raise ModelError(_of_part(where, func, *shapes))
            return
        if not isinstance(result, Tensor) or result is args[0] or func.__name__.startswith("new_"):
            return
        whole = _whole_shape(func, args, kwargs, weight)
        if whole == result.shape:
            raise ModelError(_of_part(where, func, *shapes) if is_own else of_another(where, *shapes))
        if whole is not None:
            self._made[id(result)] = weakref.ref(result), Weight(weight.name, whole), param


def _whole_shape(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], weight: Weight
) -> Shape | None:
    """The shape of the result if the first argument was whole; `None` if that cannot be computed without values."""
    given = torch.empty(weight.whole, dtype=args[0].dtype, device="meta")
    others = tree_map_only(Tensor, lambda one: torch.empty_like(one, device="meta"), (args[1:], dict(kwargs)))
    try:
        with torch.no_grad():
            made = func(given, *others[0], **others[1])
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
        return None
    return tuple(made.shape) if isinstance(made, Tensor) else None


def _running() -> nn.Module | None:
    """The module whose forward, or a hook of which, is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CALL_CODE:
        frame = frame.f_back
    found: nn.Module | None = None if frame is None else frame.f_locals["self"]
    return found


def of_another(where: str, name: str, whole: Sequence[int], part: Sequence[int]) -> str:
    """The sentence for a module that multiplies with the weight of another, or takes something of it."""
    return (
        f"{where or 'The model'} computes with {name}, {list(whole)}, of which tensor.plan leaves {list(part)} on a "
        f"rank along {AXIS}. Let a module of its own have the weight (such as head.weight = embed.weight, with the "
        f"style vocabulary), gather it there with sw.tensor.whole_head(module), or leave the module out of tensor.plan."
    )


def _of_part(where: str, func: Callable[..., Any], name: str, whole: Sequence[int], part: Sequence[int]) -> str:
    return (
        f"{where or 'The model'}, or a hook of it, takes {func.__name__} of {name} in its forward, and of "
        f"{list(whole)} this rank has {list(part)} along {AXIS}: it would be that of the part alone. Take it outside "
        f"of the model: engine.get({name!r}), called by all ranks, gives the whole tensor, and a sum in the loss is "
        f"that of the whole one, as in param.pow(2).sum().sqrt(). Or leave the module out of tensor.plan."
    )
