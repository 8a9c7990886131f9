"""Trial steps of optimizers, by twins over small parameters of their own: nothing of the user's is touched."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import nn

from shardwise.optim.cooperative import Alone, Cooperative
from shardwise.optim.states import first_states
from shardwise.program import States

Tensor = torch.Tensor
Shape = tuple[int, ...]
SMALL, LARGE = 6, 160
"""The longest dim of parameters in trials: many steps are taken on small ones; a few on ones that are large enough for
what libraries do to large tensors alone, such as factors from 128 rows on or codes from 4096 elements on."""
NUM_STEPS, NUM_LARGE_STEPS = 24, 8
COUNTS = (100, 1000, 10_000)
"""Steps at which a trial looks, besides those that the optimizer's settings and code name."""
MAX_COUNT = 1_000_000


class Trial:
    """A twin of an optimizer over parameters of its own, with the settings of one group.

    With `part`, from where to where, it has that part of each parameter, flat, and of each gradient.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: Mapping[str, Any],
        shapes: Sequence[Shape],
        part: tuple[float, float] | None = None,
        watch: AbstractContextManager[None] | None = None,
    ) -> None:
        self._shapes, self._part = shapes, part
        self._watch = watch or nullcontext()
        self._numbers = torch.Generator().manual_seed(0)
        self.params = [nn.Parameter(value) for value in self._drawn()]
        self.first = [value.clone() for value in self.values]
        self.twin = cast("Any", twin_of(optimizer, group, self.params))
        _set_apart(self.twin, optimizer)
        self._group = self.twin.param_groups[0]
        self._lr = self._group.get("lr")
        self._num_steps = 0
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        self._needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        self._has_modes = has_modes(self.twin)
        if self._has_modes:
            self.twin.train()

    @property
    def values(self) -> list[Tensor]:
        return [param.detach().flatten() for param in self.params]

    def states(self) -> States:
        """What the twin keeps for the first parameter."""
        param = self.params[0]
        kept = [value for value in self.twin.state[param].values() if is_like(value, param)]
        copies = [value for value in kept if value.dtype == param.dtype]
        return States(len(copies), sum(value.itemsize for value in kept) - sum(value.itemsize for value in copies))

    def odd_state(self) -> str:
        """A state that is neither a tensor nor a number nor text, or is no parameter's; empty if there is none."""
        for owner, states in self.twin.state.items():
            if not isinstance(owner, Tensor):
                return f"a state {owner!r} for no parameter"
            for key, value in states.items():
                if not isinstance(value, Tensor | int | float | str | None):
                    return f"its state {key} as a {type(value).__name__}"
        return ""

    def run(self, num_steps: int, turning_points: Sequence[int] = ()) -> None:
        """Take some steps, then some about each of these counts of steps."""
        for _ in range(num_steps - 1):
            self.step()
        before = self._counts()
        self.step()
        counters = [at for at, count in self._counts().items() if count == before.get(at, count) + 1]
        for number in turning_points:
            for at in counters:
                self._set_count(at, number - 2)
            for _ in range(4):
                self.step()

    def step(self, closure: Callable[[], Tensor] | None = None) -> None:
        """With gradients of various sizes, and a learning rate that changes, and is not always 0."""
        if isinstance(self._lr, int | float):
            self._group["lr"] = self._lr if self._num_steps % 2 == 0 else self._lr / 2 or 1e-2
        size = (1.0, 1e-3, 30.0, 0.1)[self._num_steps % 4]
        for param, grad in zip(self.params, self._drawn(), strict=True):
            param.grad = grad * size
        if closure is None and self._needs_closure:
            closure = lambda: torch.tensor(1.0, device="cpu")  # noqa: E731
        self._num_steps += 1
        with self._watch:
            type(self.twin).step(self.twin, *([] if closure is None else [closure]))
            if self._has_modes and self._num_steps % 5 == 0:
                self.twin.eval()
                self.twin.train()

    def _drawn(self) -> list[Tensor]:
        """Values for each parameter, the same for all parts of it."""
        every = [torch.randn(shape, generator=self._numbers, device="cpu") for shape in self._shapes]
        if self._part is None:
            return every
        start, stop = self._part
        return [one.flatten()[int(start * one.numel()) : int(stop * one.numel())].clone() for one in every]

    def _counts(self) -> dict[tuple[int, str], float]:
        """Every number that the twin keeps, by the number of its container and by its key."""
        return {
            (number, key): float(value)
            for number, container in enumerate(self._containers())
            for key, value in container.items()
            if type(value) in (int, float) or (isinstance(value, Tensor) and value.numel() == 1)
        }

    def _set_count(self, at: tuple[int, str], count: int) -> None:
        number, key = at
        container = list(self._containers())[number]
        value = container[key]
        container[key] = torch.full_like(value, count) if isinstance(value, Tensor) else type(value)(count)

    def _containers(self) -> Iterator[dict[str, Any]]:
        yield from (vars(self.twin), self._group)
        yield from (self.twin.state[param] for param in self.params)


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.train()` and `optimizer.eval()` move parameters between two points, as schedule-free ones
    (arXiv:2405.15682) do."""
    return all(callable(getattr(type(optimizer), name, None)) for name in ("train", "eval"))


def shapes_of(group: Mapping[str, Any], longest: int) -> list[Shape]:
    """The shapes of the parameters of `group`, with no dim above `longest`, or if there are many an eighth of it."""
    shapes = []
    for param in group["params"]:
        limit = longest if param.dim() <= 2 or longest <= SMALL else longest // 8
        shape = tuple(min(size, limit) for size in param.shape)
        shapes.append(shape if torch.Size(shape).numel() > 1 else (SMALL,))
    return list(dict.fromkeys(shapes))


def turning_points(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> list[int]:
    """Counts of steps at which it may change what it does: integers in its settings and its code, and round ones."""
    numbers = [*group.values(), *vars(optimizer).values(), *COUNTS]
    for kind in type(optimizer).__mro__:
        if kind is torch.optim.Optimizer:
            break
        for value in vars(kind).values():
            if isinstance(value, FunctionType):
                numbers += _constants(inspect.unwrap(value).__code__)
    return sorted({number for number in numbers if type(number) is int and NUM_STEPS < number <= MAX_COUNT})


def _constants(code: CodeType) -> Iterator[Any]:
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _constants(value)
        else:
            yield value


def twin_of(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], params: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    """Another optimizer of the same class over `params`, with this group's settings, without states and hooks."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.__dict__.pop("step", None)  # a scheduler may have wrapped the original's
    hooks = {key: type(value)() for key, value in optimizer.__dict__.items() if key.endswith("_hooks")}
    twin.__dict__.update(hooks)
    if isinstance(twin, Cooperative):
        twin.peers = Alone()
    twin.state = defaultdict(dict, first_states(optimizer, params))
    # Capturable updates demand a device, and compute the same.
    on_host = {"capturable": False} if group.get("capturable") else {}
    twin.param_groups = [{**group, **on_host, "params": list(params)}]
    return twin


def _set_apart(twin: torch.optim.Optimizer, optimizer: torch.optim.Optimizer) -> None:
    """Give `twin` its own of what the steps of one that keeps more than states could change. What it holds of the
    model's parameters, it has empty."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    empty = {id(param): nn.Parameter(torch.empty(0, device="cpu")) for param in params}
    for container in (vars(twin), twin.param_groups[0]):
        for key, value in container.items():
            if isinstance(value, Tensor | list | tuple | dict | set) and key not in ("state", "param_groups", "params"):
                try:
                    container[key] = copy.deepcopy(value, dict(empty))
                except Exception:  # something that cannot be copied, such as a process group
                    continue


def is_like(value: object, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == param.shape
