"""Reduces an optimizer's gradients over the ranks, during backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import ConfigError
from shardwise.integrations.horovod.current_session import CURRENT
from shardwise.integrations.horovod.ops import Op
from shardwise.integrations.horovod.pending import Handle
from shardwise.integrations.horovod.process_sets import ProcessSet
from shardwise.integrations.horovod.torch.parameter_groups import ParameterNames
from shardwise.integrations.horovod.torch.reductions import grouped_allreduce_async_, sparse_allreduce_async

Tensor = torch.Tensor
Parameter = torch.nn.Parameter


@dataclass(frozen=True)
class ReductionOptions:
    """Options of `DistributedOptimizer`."""

    op: Op
    compression: Any
    predivide_factor: float
    sparse_as_dense: bool
    process_set: ProcessSet


class GradientReduction:
    """The all-reduces of gradients in flight, and the number of backward passes of each parameter since the last step.

    A hook of each parameter issues its group's all-reduce when all gradients of the group are complete. All-reduces are
    matched by name, so the order in which the ranks' backward passes reach parameters does not matter.
    """

    def __init__(
        self, groups: Sequence[Sequence[Parameter]], names: ParameterNames, options: ReductionOptions, passes: int
    ) -> None:
        self.passes = passes
        self.is_synchronized = False
        self.skips_synchronize = False
        self.names = names
        self._options = options
        self._groups: list[tuple[Parameter, ...]] = []
        self._group_of: dict[Parameter, int] = {}
        self._counts: dict[Parameter, int] = {}
        self._in_flight: dict[int, tuple[Handle, Sequence[Parameter], list[Any]]] = {}
        """By group: the handle, the parameters, and the contexts of compression."""
        self._sparse: set[Parameter] = set()
        """Parameters whose gradients have been sparse. On a rank without a gradient, it is one without rows."""
        self._session = CURRENT.get()
        for group in groups:
            self._add_group(group)

    def _add_group(self, group: Sequence[Parameter]) -> None:
        index = len(self._groups)
        self._groups.append(tuple(group))
        for param in group:
            self._group_of[param] = index
            self._counts[param] = 0
            param.register_post_accumulate_grad_hook(self._on_gradient)

    @property
    def is_in_flight(self) -> bool:
        self._follow_session()
        return bool(self._in_flight) and not self.is_synchronized

    def _on_gradient(self, param: Tensor) -> None:
        """The hook of each parameter."""
        assert isinstance(param, Parameter)
        self._follow_session()
        if not self._options.process_set.included():
            return
        index = self._group_of[param]
        if self._counts[param] >= self.passes:
            raise AssertionError(
                f"The gradient of '{self.names.name_of(param)}' was computed more than backward_passes_per_step="
                f"{self.passes} times before step(). Increase it, or call step() or zero_grad() earlier."
            )
        self.is_synchronized = False
        self._counts[param] += 1
        if all(self._counts[one] == self.passes for one in self._trainable(index)):
            self._issue(index)

    def _trainable(self, index: int) -> list[Parameter]:
        """The parameters of a group but for those that have been frozen since."""
        return [param for param in self._groups[index] if param.requires_grad]

    def _issue(self, index: int) -> None:
        """Start to reduce a group. A missing gradient counts as zeros."""
        group, options = self._trainable(index), self._options
        for param in group:
            if param.grad is None:
                param.grad = _without_rows(param) if param in self._sparse else torch.zeros_like(param)
        if any(param.grad is not None and param.grad.is_sparse for param in group):
            if not options.sparse_as_dense:
                self._issue_sparse(index, group)
                return
            for param in group:
                if param.grad is not None and param.grad.is_sparse:
                    self._sparse.add(param)
                    param.grad = param.grad.to_dense()
        grads = [param.grad for param in group if param.grad is not None]
        compressed, contexts = zip(*map(options.compression.compress, grads), strict=True)
        op, prescale, postscale = options.op, 1.0, 1.0
        if options.predivide_factor != 1.0:
            op, prescale = Op.Sum, 1 / options.predivide_factor
            postscale = options.predivide_factor / (options.process_set.size() or 1)
        handle = grouped_allreduce_async_(
            compressed,
            name=self.names.name_of(self._groups[index][0]),
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            process_set=options.process_set,
        )
        self._in_flight[index] = handle, group, list(contexts)

    def _issue_sparse(self, index: int, group: Sequence[Parameter]) -> None:
        param = next(one for one in group if one.grad is not None and one.grad.is_sparse)
        name = self.names.name_of(param)
        if len(self._groups[index]) > 1:
            raise ConfigError(
                f"The gradient of '{name}' is sparse and cannot be in a group. Leave groups out, or set "
                f"sparse_as_dense=True."
            )
        assert param.grad is not None
        self._sparse.add(param)
        handle = sparse_allreduce_async(param.grad, name, self._options.op, self._options.process_set)
        self._in_flight[index] = handle, group, [None]

    def reset(self) -> None:
        """Drop what is in flight, without waiting for it."""
        self._in_flight.clear()
        self._counts = dict.fromkeys(self._counts, 0)
        self.is_synchronized = False

    def _follow_session(self) -> None:
        """Drop what was in flight in another session: it has failed, and an elastic loop runs again in a new one."""
        session = CURRENT.get()
        if session is not self._session:
            self.reset()
            self._session = session

    def synchronize(self, params: Iterable[Parameter]) -> None:
        """Wait until every `param.grad` is reduced. Groups that have not been issued are issued now.

        `params` are the optimizer's trainable parameters; new ones among them are added.
        """
        self._follow_session()
        if self._options.process_set.included():
            for param in params:
                if param not in self._group_of:
                    self._add_group([param])
            for index in range(len(self._groups)):
                if index not in self._in_flight and self._trainable(index):
                    self._issue(index)
            for handle, group, contexts in self._in_flight.values():
                self._write_back(group, handle.wait(), contexts)
        self._in_flight.clear()
        self._counts = dict.fromkeys(self._counts, 0)
        self.is_synchronized = True

    def _write_back(self, group: Sequence[Parameter], reduced: Any, contexts: list[Any]) -> None:
        if isinstance(reduced, Tensor):  # sparse
            group[0].grad = reduced
            return
        for param, one, context in zip(group, reduced, contexts, strict=True):
            grad = self._options.compression.decompress(one, context)
            assert param.grad is not None
            if grad.data_ptr() != param.grad.data_ptr():
                param.grad.copy_(grad)
            if param in self._sparse:  # sent as dense; the optimizer expects what the model gave it
                param.grad = param.grad.to_sparse(1)


def _without_rows(param: Parameter) -> Tensor:
    """A sparse gradient of zeros."""
    device = param.device
    indices, values = torch.empty(1, 0, dtype=torch.int64, device=device), param.new_empty(0, *param.shape[1:])
    return torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False, device=device)
