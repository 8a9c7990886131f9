"""A twin of a model: a copy whose tensors have shapes, dtypes and a device, but no bytes.

[Note: twins] The model itself is not used, because modules keep what they compute (tables of positions, counters), and
a rehearsal must not leave tensors without bytes in it. So everything in a module is copied except its tensors and the
hooks of an engine that trains the model. Parameters are views of flat buffers, as in training. [Note: integers] in
`integers.py` says which tensors have bytes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm.line import LEDGER_OF_COPIES
from shardwise.errors import ModelError
from shardwise.memory import Flat, FlatGradients, FullState, Unit, place, torch_dtype
from shardwise.runtime.nested import optimizers_in, tensors_in
from shardwise.runtime.rehearsal.integers import like
from shardwise.runtime.rehearsal.rebound import note_empty, rebind
from shardwise.system.own_hooks import is_own
from shardwise.system.telemetry import ByteMeter, Ledger


class TwinGradients(FlatGradients):
    """Records that gradients arrived, without storing them."""

    first_comes: Callable[[torch.Tensor], None] | None = None
    """Told of each parameter's first gradient in a backward."""

    def arrive(self, index: int, grad: torch.Tensor, is_last: bool = True) -> bool:
        if self.first_comes is not None and not self.touched_here[index]:
            self.first_comes(grad)
        self.touched_here[index] = True
        if is_last and not self._has_come[index]:
            self._has_come[index] = True
            self.num_to_come -= 1
        return not self.num_to_come


class TwinFlat(Flat):
    """A flat buffer that is always allocated, and only records gradients."""

    _Gradients = TwinGradients

    def __init__(self, flat: Flat, device: torch.device) -> None:
        super().__init__(flat.spec, flat.slots, flat.params, flat.coordinate, ByteMeter(), device)
        self.full = torch.empty(flat.spec.numel, dtype=torch_dtype(flat.spec.table.compute), device=device)
        self.params = tuple(self._twin_of(index) for index in range(len(flat.slots)))

    def _twin_of(self, index: int) -> nn.Parameter:
        slot, original = self.slots[index], self.params[index]
        view = self.full.as_strided(*place(slot))
        param = nn.Parameter(view, requires_grad=original.requires_grad)
        param.__dict__.update(original.__dict__)  # some models keep attributes on their parameters
        return param

    def become(self, state: FullState) -> None:
        if not self.spec.resident:
            self.state = state


class Twin:
    """Twins of a model and its units. Must be made and used inside one and the same `FakeTensorMode`."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], device: torch.device, ledger: Ledger | None) -> None:
        """`ledger` counts what the model would send within its layers."""
        self._device = device
        self._memo: dict[int, Any] = {id(LEDGER_OF_COPIES): ledger}
        self._flats = {flat.name: TwinFlat(flat, device) for unit in units for flat in unit.flats}
        for unit in units:
            for flat in unit.flats:
                twins = zip(flat.params, self._flats[flat.name].params, strict=True)
                self._memo.update({id(param): twin for param, twin in twins})
        self.model = self._copied(model)
        self.units = [self._unit(unit) for unit in units]

    def copied(self, thing: Any) -> Any:
        """A copy of an object that refers to the model or its tensors; the copy refers to the twin's."""
        return copy.deepcopy(thing, self._memo)

    @property
    def resting(self) -> list[torch.Tensor]:
        """Tensors that are not activations: parameters, buffers, and other tensors that modules keep."""
        kept = [tensor for module in self.model.modules() for tensor in tensors_in(vars(module))]
        return kept + [flat.full for flat in self._flats.values()]

    def _unit(self, unit: Unit) -> Unit:
        flats: tuple[Flat, ...] = tuple(self._flats[flat.name] for flat in unit.flats)
        twins = [self._memo.get(id(site)) for site in unit.sites]  # some may have been taken out of the model
        return Unit(unit.spec, flats, [one for one in twins if one is not None])

    def _copied(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            for tensor in tensors_in(vars(module)):
                if id(tensor) not in self._memo:
                    self._memo[id(tensor)] = like(tensor, self._device)
            for optimizer in optimizers_in(vars(module)):  # a forward may read a learning rate, and takes no step
                self._memo[id(optimizer)] = optimizer
            for hooks in _hooks_of(module):
                theirs = [(key, hook) for key, hook in hooks.items() if not is_own(hook)]
                self._memo[id(hooks)] = OrderedDict(theirs)
        note_empty(model, self._memo)
        try:
            copied = copy.deepcopy(model, self._memo)
            for module in copied.modules():
                for hooks in _hooks_of(module):
                    hooks.update(copy.deepcopy(dict(hooks), self._memo))
        except Exception as error:
            raise ModelError(
                f"{type(model).__name__} cannot be rehearsed, because it cannot be copied without its tensors: "
                f"{type(error).__name__}: {error}. Keep what cannot be copied (files, locks, processes) outside of "
                f"the model's modules."
            ) from error
        rebind(copied, self._memo)
        for module in copied.modules():  # a compiled forward is bound to the original
            if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable"):
                del module.forward
        return copied


def _hooks_of(module: nn.Module) -> Iterator[dict[int, Callable[..., Any]]]:
    yield module._forward_pre_hooks
    yield module._forward_hooks
