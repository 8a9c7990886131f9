"""`DistributedOptimizer`: wraps any torch optimizer and averages gradients over the ranks during backward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from shardwise.integrations.horovod.current_session import current_session
from shardwise.integrations.horovod.ops import Adasum, Average, Op
from shardwise.integrations.horovod.process_sets import ProcessSet, global_process_set
from shardwise.integrations.horovod.torch.compression import Compression
from shardwise.integrations.horovod.torch.gradient_reduction import GradientReduction, ReductionOptions
from shardwise.integrations.horovod.torch.parameter_groups import ParameterNames, gradient_groups
from shardwise.integrations.horovod.torch.reductions import allreduce_async

Parameter = torch.nn.Parameter


class _Distributed(torch.optim.Optimizer):
    """The methods that `DistributedOptimizer` adds to the wrapped optimizer's class."""

    op: Op
    process_set: ProcessSet
    gradient_predivide_factor: float
    sparse_as_dense: bool
    _reduction: GradientReduction

    @property
    def backward_passes_per_step(self) -> int:
        return self._reduction.passes

    @property
    def _parameter_names(self) -> dict[Parameter, str]:
        """Read by scripts that know Horovod's optimizer."""
        return self._reduction.names.by_parameter

    def synchronize(self) -> None:
        """Wait until every `param.grad` is averaged. `step` does so too, except within `skip_synchronize`."""
        self._reduction.synchronize(_trainable(self))

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` not wait, since the loop has called `synchronize`, for example to clip gradients."""
        self._reduction.skips_synchronize = True
        try:
            yield
        finally:
            self._reduction.skips_synchronize = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes that are accumulated before gradients are reduced."""
        self._reduction.passes = passes

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """See torch. Gradients that `closure` computes are averaged too, before they are used."""
        reduction = self._reduction
        if reduction.skips_synchronize:
            reduction.is_synchronized = False
            return super().step(closure)
        if closure is None:
            if reduction.is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(), so it averages gradients a second time. Call it within `with "
                    "optimizer.skip_synchronize():`.",
                    stacklevel=2,
                )
            self.synchronize()
            reduction.is_synchronized = False
            return super().step()

        def closure_and_synchronize() -> float:
            loss = closure()
            self.synchronize()
            reduction.is_synchronized = False
            return loss

        return super().step(closure_and_synchronize)

    def load_state_dict(self, state_dict: Any) -> None:
        """See torch. Gradients in flight are dropped, for example when a state is restored after an error."""
        self._reduction.reset()
        super().load_state_dict(state_dict)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._reduction.is_in_flight:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() and before optimizer.step(), while gradients "
                "are in flight. Call optimizer.synchronize() before it."
            )
        super().zero_grad(*args, **kwargs)


class _AdasumDistributed(torch.optim.Optimizer):
    """Each rank updates with its own gradients; the updates are reduced by Adasum."""

    _names: ParameterNames
    _options: ReductionOptions

    def synchronize(self) -> None:
        """Does nothing: nothing is in flight before `step`."""

    def skip_synchronize(self) -> NoReturn:
        raise AssertionError(
            "skip_synchronize() is not possible with op=Adasum: step() reduces updates, not gradients."
        )

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Does nothing: `step` uses the gradients that have been accumulated."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        process_set, compression = self._options.process_set, self._options.compression
        if not process_set.included():
            return super().step(closure)
        before = {param: param.detach().clone() for param in _trainable(self)}
        result = super().step(closure)
        in_flight = []
        for param, old in before.items():
            update, context = compression.compress(param.detach() - old)
            name = f"update.{self._names.name_of(param)}"
            in_flight.append((param, allreduce_async(update, name=name, op=Adasum, process_set=process_set), context))
        with torch.no_grad():
            for param, handle, context in in_flight:
                param.copy_(before[param] + compression.decompress(handle.wait(), context))
        return result


for _mixin in (_Distributed, _AdasumDistributed):
    _mixin.__dict__["step"].hooked = True  # else torch would run the optimizer's hooks here and in the inner step


def _trainable(optimizer: torch.optim.Optimizer) -> list[Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]


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
    """An optimizer of the same class as `optimizer`, with its groups and state, that averages gradients over the ranks.

    Each gradient is sent as soon as the backward has computed it, small ones together. `step` waits for them; then
    `param.grad` is the average. `backward_passes_per_step` backward passes are summed on each rank first.
    `gradient_predivide_factor` divides gradients before the sum; the rest of the average is divided after it. `groups`,
    a number or lists of parameters, are sent when all their gradients are computed. With `op=Adasum`, updates are
    reduced instead of gradients. Parameters that are added or unfrozen later are included from the next `step`.

    Raises `ValueError` for duplicate or missing names, for contradictory options, and before `init`.
    """
    current_session()
    if gradient_predivide_factor != 1.0 and Op(op) is not Average:
        raise ValueError("gradient_predivide_factor needs op=hvd.Average. Leave one of them out.")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be at least 1.")
    params = _trainable(optimizer)
    names = ParameterNames(params, named_parameters)
    options = ReductionOptions(Op(op), compression, float(gradient_predivide_factor), sparse_as_dense, process_set)
    is_adasum = options.op is Adasum
    mixin = _AdasumDistributed if is_adasum else _Distributed
    wrapper_class = type(type(optimizer).__name__, (mixin, type(optimizer)), {})
    wrapper: Any = object.__new__(wrapper_class)
    # It shares param_groups, state, hooks and options with `optimizer`, but not `step`, which schedulers replace.
    wrapper.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    wrapper.op, wrapper.process_set = options.op, process_set
    wrapper.gradient_predivide_factor, wrapper.sparse_as_dense = gradient_predivide_factor, sparse_as_dense
    if is_adasum:
        wrapper._names, wrapper._options = names, options
    else:
        wrapper._reduction = GradientReduction(
            gradient_groups(params, groups or num_groups), names, options, backward_passes_per_step
        )
    return wrapper
