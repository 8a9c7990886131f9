"""`DistributedOptimizer`: any torch optimizer whose gradients are averaged over the ranks as backwards make them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NoReturn

import torch

from shardwise.errors import ConfigError
from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.pending import Handle
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.compression import Compression
from shardwise.integrations.horovod.torch.mpi_ops import (
    Adasum,
    Average,
    Op,
    allreduce_async,
    grouped_allreduce_async_,
    sparse_allreduce_async,
)

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


class _Reduction:
    """What of each gradient is under way, and how often it has been added to since the last step.

    A hook of each parameter issues its gradient, or its group's when that is complete. It is an all-reduce by name, so
    the order in which backwards of different ranks come to their parameters does not matter.
    """

    def __init__(self, groups: Sequence[Sequence[Parameter]], names: dict[Parameter, str], how: dict[str, Any]) -> None:
        self.passes: int = how["backward_passes_per_step"]
        self.is_synchronized = False
        self.skips_synchronize = False
        self._names = names
        self._compression = how["compression"]
        self._op = Op(how["op"])
        self._predivide = float(how["gradient_predivide_factor"])
        self._sparse_as_dense: bool = how["sparse_as_dense"]
        self._process_set: ProcessSet = how["process_set"]
        self._groups = [tuple(group) for group in groups]
        self._group_of = {param: place for place, group in enumerate(self._groups) for param in group}
        self._counts: dict[Parameter, int] = dict.fromkeys(self._group_of, 0)
        self._under_way: dict[int, tuple[Handle, list[Any]]] = {}
        self._sparse: set[Parameter] = set()
        """Whose gradients have been sparse: a rank that has none gives no rows."""
        for param in self._group_of:
            param.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    @property
    def is_under_way(self) -> bool:
        return bool(self._under_way) and not self.is_synchronized

    def _arrived(self, param: Tensor) -> None:
        assert isinstance(param, Parameter)
        if not self._process_set.included():
            return
        place = self._group_of[param]
        if self._counts[param] >= self.passes:
            raise AssertionError(
                f"The gradient of '{self._names[param]}' was added to more than backward_passes_per_step="
                f"{self.passes} times before step(). Raise that, or call step() or zero_grad() earlier."
            )
        self._counts[param] += 1
        if all(self._counts[one] == self.passes for one in self._groups[place]):
            self._issue(place)

    def _issue(self, place: int) -> None:
        """What has no gradient on this rank counts as zeros."""
        group = self._groups[place]
        for param in group:
            if param.grad is None:
                param.grad = _no_rows(param) if param in self._sparse else torch.zeros_like(param)
        grads = [param.grad for param in group if param.grad is not None]
        if grads[0].is_sparse:
            self._under_way[place] = self._issue_sparse(place, group[0])
            return
        sent, contexts = zip(*map(self._compression.compress, grads), strict=True)
        before, after = 1.0, 1.0
        op = self._op
        if self._predivide != 1.0:
            op, before = Op.Sum, 1 / self._predivide
            after = self._predivide / (self._process_set.size() or 1)
        handle = grouped_allreduce_async_(
            sent,
            name=self._names[group[0]],
            op=op,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self._process_set,
        )
        self._under_way[place] = handle, list(contexts)

    def _issue_sparse(self, place: int, param: Parameter) -> tuple[Handle, list[Any]]:
        assert param.grad is not None
        self._sparse.add(param)
        if self._sparse_as_dense:
            param.grad = param.grad.to_dense()
            self._issue(place)
            return self._under_way[place]
        if len(self._groups[place]) > 1:
            raise ConfigError(
                f"The gradient of '{self._names[param]}' is sparse and cannot go in a group. Leave groups out, or set "
                f"sparse_as_dense=True."
            )
        return sparse_allreduce_async(param.grad, self._names[param], self._op, self._process_set), [None]

    def forget(self) -> None:
        """What was under way will not be waited for: parameters are those of another moment."""
        self._under_way.clear()
        self._counts = dict.fromkeys(self._counts, 0)
        self.is_synchronized = False

    def synchronize(self) -> None:
        """Until every `param.grad` is what all ranks have made of it; what has not been issued is issued now."""
        if self._process_set.included():
            for place in range(len(self._groups)):
                if place not in self._under_way:
                    self._issue(place)
            for place, (handle, contexts) in self._under_way.items():
                reduced = handle.wait()
                self._put_back(self._groups[place], reduced, contexts)
        self._under_way.clear()
        self._counts = dict.fromkeys(self._counts, 0)
        self.is_synchronized = True

    def _put_back(self, group: Sequence[Parameter], reduced: Any, contexts: list[Any]) -> None:
        if isinstance(reduced, Tensor):  # a sparse one
            group[0].grad = reduced
            return
        for param, one, context in zip(group, reduced, contexts, strict=True):
            grad = self._compression.decompress(one, context)
            assert param.grad is not None
            if grad.data_ptr() != param.grad.data_ptr():
                param.grad.copy_(grad)


class _Distributed(torch.optim.Optimizer):
    """Methods that `DistributedOptimizer` puts before those of the wrapped optimizer's class."""

    _reduction: _Reduction

    def synchronize(self) -> None:
        """Wait until every `param.grad` is averaged; `step` does it, unless within `skip_synchronize`."""
        self._reduction.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it `step` does not wait: for loops that call `synchronize` themselves, such as to clip gradients."""
        self._reduction.skips_synchronize = True
        try:
            yield
        finally:
            self._reduction.skips_synchronize = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """So many backwards are added up on this rank before gradients travel."""
        self._reduction.passes = passes

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        reduction = self._reduction
        if not reduction.skips_synchronize:
            if reduction.is_synchronized:
                warnings.warn(
                    "optimizer.step() was called after optimizer.synchronize(), and averages gradients once more. Put "
                    "it into `with optimizer.skip_synchronize():`.",
                    stacklevel=2,
                )
            reduction.synchronize()
        reduction.is_synchronized = False
        return super().step(closure)

    def load_state_dict(self, state_dict: Any) -> None:
        """See torch. Gradients that are under way are waited for no more, as after an error between ranks."""
        self._reduction.forget()
        super().load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._reduction.is_under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() and before optimizer.step(): gradients are on "
                "their way. Call optimizer.synchronize() before."
            )
        super().zero_grad(*args, **kwargs)


class _AdasumDistributed(torch.optim.Optimizer):
    """Each rank updates by its own gradients, and the updates are reduced by Adasum."""

    _names: dict[Parameter, str]
    _how: dict[str, Any]
    _num_backwards: int = 0

    def synchronize(self) -> None:
        """Nothing is under way before `step`."""

    def skip_synchronize(self) -> NoReturn:
        raise AssertionError("skip_synchronize() has no place with op=Adasum: updates travel in step(), not gradients.")

    def set_backward_passes_per_step(self, passes: int) -> None:
        self._how["backward_passes_per_step"] = passes

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        before = {param: param.detach().clone() for param in self._names}
        result = super().step(closure)
        compression = self._how["compression"]
        under_way = []
        for param, name in self._names.items():
            sent, context = compression.compress(param.detach() - before[param])
            handle = allreduce_async(sent, name=f"update.{name}", op=Adasum, process_set=self._how["process_set"])
            under_way.append((param, handle, context))
        with torch.no_grad():
            for param, handle, context in under_way:
                param.copy_(before[param] + compression.decompress(handle.wait(), context))
        return result


for _kind in (_Distributed, _AdasumDistributed):
    _kind.__dict__["step"].hooked = True  # else torch would call an optimizer's hooks here, and in the step within


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """An optimizer of the same class as `optimizer`, with its groups and state, that averages gradients over ranks.

    They travel as soon as the backward has made them, small ones together; `step` waits for them, and afterwards
    `param.grad` is the average. `backward_passes_per_step` backwards are added up on each rank before.
    `gradient_predivide_factor` divides a part before the sum and the rest after it. `groups`, a number or lists of
    parameters, travel when they are complete. With `op=Adasum`, updates travel instead of gradients.

    Raises `ValueError` for names that come twice or are missing, and for contradictory options.
    """
    if gradient_predivide_factor != 1.0 and Op(op) is not Average:
        raise ValueError("gradient_predivide_factor is a part of averaging. Leave it out, or take op=hvd.Average.")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be at least 1.")
    names = _names_of(optimizer, named_parameters)
    how = {
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
    }
    is_adasum = Op(op) is Adasum
    mixin = _AdasumDistributed if is_adasum else _Distributed
    kind = type(type(optimizer).__name__, (mixin, type(optimizer)), {})
    made: Any = object.__new__(kind)
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}  # which schedulers wrap
    made.__dict__.update(own)  # its groups, state, hooks and options are the optimizer's own
    if is_adasum:
        made._names, made._how = names, how
    else:
        made._reduction = _Reduction(_grouped(list(names), groups or num_groups), names, how)
    current_session()
    return made


def _names_of(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Parameter]] | None
) -> dict[Parameter, str]:
    """A name for every parameter of the optimizer that takes gradients."""
    held = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    if named_parameters is None:
        return {param: f"gradient.noname.{place}" for place, param in enumerate(held)}
    listed = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in listed):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter).")
    by_name: dict[str, Parameter] = {}
    for name, param in listed:
        if by_name.setdefault(name, param) is not param:
            raise ValueError(f"named_parameters has two parameters named '{name}'. Give each a name of its own.")
    named = {param: f"gradient.{name}" for name, param in reversed(by_name.items())}
    missing = [tuple(param.shape) for param in held if param not in named]
    if missing:
        raise ValueError(
            f"{len(missing)} parameters of the optimizer are not in named_parameters; the first has shape {missing[0]}."
        )
    return {param: named[param] for param in held}


def _no_rows(param: Parameter) -> Tensor:
    indices, values = torch.empty(1, 0, dtype=torch.int64), param.new_empty(0, *param.shape[1:])
    return torch.sparse_coo_tensor(indices.to(param.device), values, param.shape, check_invariants=False)


def _grouped(params: list[Parameter], groups: Any) -> list[list[Parameter]]:
    """Which gradients travel together: what lists say, or as many lists as a number says; the others by themselves."""
    if not groups:
        return [[param] for param in params]
    if isinstance(groups, int):
        count = min(groups, len(params))
        each, more = divmod(len(params), count)
        starts = [place * each + min(place, more) for place in range(count + 1)]
        return [params[start:stop] for start, stop in pairwise(starts)]
    held = set(params)
    listed = [[param for param in group if param in held] for group in groups]
    together = [param for group in listed for param in group]
    if len(together) > len(set(together)):
        raise ValueError("A parameter is in two groups.")
    return [group for group in listed if group] + [[param] for param in params if param not in set(together)]
