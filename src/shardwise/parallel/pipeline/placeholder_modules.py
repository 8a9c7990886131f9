"""Modules that stand for those of other stages."""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from inspect import getattr_static
from typing import Any, NoReturn, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ModelError, StateError
from shardwise.parallel.pipeline.placeholder_values import TensorFacts
from shardwise.system.own_hooks import is_own
from shardwise.system.whose_code import called_by_script

Tensor = torch.Tensor
_GO_THROUGH_PARAMS = {nn.Module.parameters.__code__, nn.Module.named_parameters.__code__}


class ElsewhereError(ModelError, AttributeError):
    """The forward reads an attribute of a module on another stage; being an `AttributeError`, it answers `hasattr`."""


class Owner(Protocol):
    """The model that runs, with absent modules in it."""

    @property
    def is_in_forward(self) -> bool:
        """Whether a forward of the model, or its loss, is being computed."""
        ...

    def pass_by(self, name: str, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward of a module that is not in the running stage."""
        ...

    def stand_in_for(self, facts: TensorFacts) -> Tensor:
        """A stand-in for a parameter or buffer of another stage."""
        ...

    def note_asked(self) -> None:
        """Code goes through parameters outside of a forward, and this module has none."""
        ...

    def is_set_in_forward(self, kind: type[nn.Module], name: str) -> bool:
        """Whether modules of a class have set an attribute to a tensor."""
        ...


class PlaceholderModule(nn.Module):
    """Stands for a module of another stage, or for one inside it.

    It has the plain attributes of that module. While a forward runs, it looks like that module to a forward that goes
    through all modules: it is an instance of its class, and has stand-ins for its parameters, buffers and inner
    modules, of which the forward may read shapes, dtypes and devices. The parameters that the module shares with one of
    this stage are the real ones, and so are modules in it that a stage here calls by themselves.
    """

    def __init__(
        self,
        name: str,
        number: int,
        original: nn.Module,
        owner: Owner,
        kept: set[Tensor],
        guests: Collection[str],
    ) -> None:
        """`guests` are the names of modules that are here although what contains them is not."""
        super().__init__()
        self._name, self._number, self._owner, self._original_class = name, number, owner, type(original)
        self._plain = {
            key: value
            for key, value in original.__dict__.items()
            if not key.startswith("_") and not isinstance(value, nn.Module | Tensor) and not callable(value)
        }
        own: list[tuple[str, Tensor | None, bool]] = [(key, one, True) for key, one in original._parameters.items()]
        own += [(key, one, False) for key, one in original._buffers.items()]
        self._facts = {
            key: TensorFacts(f"{name}.{key}", tuple(one.shape), one.dtype, one.device, one.requires_grad, is_param)
            for key, one, is_param in own
            if one is not None and one not in kept
        }
        self._lacks_params = any(param not in kept for param in original.parameters())
        self.__dict__["_inner"] = {
            key: child if f"{name}.{key}" in guests else _Inner(f"{name}.{key}", number, child, owner, kept, guests)
            for key, child in original._modules.items()
            if child is not None
        }
        self.training = original.training
        self.__dict__["_parameters"] = _InForward(self._stand_ins)
        self.__dict__["_modules"] = _InForward(self._unregistered)
        for key, param in original._parameters.items():
            if param is not None and param in kept:
                self.register_parameter(key, param)
        for key, child in original._modules.items():
            if child is not None and any(param in kept for param in child.parameters()):
                self.add_module(key, self._inner[key])
        if original.state_dict(keep_vars=True):
            refuse_states(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlaceholderModule:
        """For rehearsals, which copy all of a deep model's: what is empty, or never changes, takes no time."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        for key, value in self.__dict__.items():
            is_simple = type(value) in (dict, OrderedDict) and (not value or key == "_facts")
            copied.__dict__[key] = value.copy() if is_simple else copy.deepcopy(value, memo)
        return copied

    @property  # type: ignore[misc]  # typeshed's can be set
    def __class__(self) -> type[nn.Module]:  # type: ignore[override]  # what isinstance() asks
        return self._original_class if self._is_in_forward() else type(self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.pass_by(self._name, self._number, args, kwargs)

    def register_forward_hook(self, hook: Any, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._kept(hook, super().register_forward_hook(hook, *args, **kwargs))

    def register_forward_pre_hook(self, hook: Any, *args: Any, **kwargs: Any) -> RemovableHandle:
        return self._kept(hook, super().register_forward_pre_hook(hook, *args, **kwargs))

    def _kept(self, hook: Any, handle: RemovableHandle) -> RemovableHandle:
        """Of a loop's own hooks none stays here: it would see stand-ins. It runs on the rank that has the module."""
        if not (is_own(hook) or self._is_in_forward()):
            handle.remove()
        return handle

    def _is_in_forward(self) -> bool:
        owner: Owner | None = self.__dict__.get("_owner")
        return owner is not None and owner.is_in_forward

    def _stand_ins(self) -> dict[str, Any]:
        """Those for parameters, while a forward runs."""
        if not self._is_in_forward():
            if self._lacks_params:
                self._owner.note_asked()
            return {}
        return {key: self._owner.stand_in_for(facts) for key, facts in self._facts.items() if facts.is_param}

    def _unregistered(self) -> dict[str, Any]:
        """The inner modules, while a forward runs."""
        return self._inner if self._is_in_forward() else {}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            own = self.__dict__
            if "_owner" not in own or name.startswith("__"):
                raise
            if self._owner.is_set_in_forward(self._original_class, name):
                raise ModelError(
                    f"The model's forward reads {name} of {self._name}, a tensor which that module computes, but it "
                    f"lies on another pipeline stage. Pipeline stages pass on only activations."
                ) from None
            if name in own.get("_plain", {}):
                return own["_plain"][name]
            if self._is_in_forward() and name in own.get("_facts", {}):
                return self._owner.stand_in_for(own["_facts"][name])
            if self._is_in_forward() and name in own.get("_inner", {}):
                return own["_inner"][name]
            computed = getattr_static(self._original_class, name, None)
            if self._is_in_forward() and isinstance(computed, property) and computed.fget is not None:
                return computed.fget(self)  # the dtype of its parameters, say
            if not self._is_in_forward():
                raise ElsewhereError(
                    f"{own.get('_name')}.{name} lies on another pipeline stage, and this rank has none. "
                    f"engine.get('{own.get('_name')}.{name}'), of a parameter, and engine.set(name, value), called by "
                    f"all ranks, read and write those of any stage; model.named_parameters() are those of this rank's."
                ) from None
            raise ElsewhereError(
                f"The model's forward reads {name} of {own.get('_name')}, which lies on another pipeline stage. A "
                f"pipeline can only call the modules of its stages; list others: pipeline.stages."
            ) from None

    def __delattr__(self, name: str) -> None:
        """Also of what it has from that module: code that sets something on a module (NEFTune's strength) and deletes
        it after training does so on all ranks."""
        own = self.__dict__
        is_taken_over = name in own.get("_plain", {})
        if is_taken_over:
            del own["_plain"][name]
        if not is_taken_over or name in own:
            super().__delattr__(name)


class BatchNormElsewhere(nn.modules.batchnorm._BatchNorm):
    """On a rank without batch norms: `torch.optim.swa_utils.update_bn` asks whether a model has any, and returns at
    once if it finds none, while ranks that have some call the model."""

    def __init__(self) -> None:
        super().__init__(0, affine=False, track_running_stats=False)


class _Inner(PlaceholderModule):
    """Stands for a module inside of a module of another stage."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise ModelError(
            f"The model's forward calls {self._name}, which lies inside a module of another pipeline stage. A pipeline "
            f"can only call the modules of its stages; list others: pipeline.stages."
        )

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._inner.values())

    def __len__(self) -> int:
        return len(self._inner)

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: int | str) -> nn.Module:
        inner: dict[str, PlaceholderModule] = self._inner
        return list(inner.values())[key] if isinstance(key, int) else inner[key]


class _InForward(dict[str, Any]):
    """Parameters or modules of an absent module: registered ones, and others while a forward runs."""

    def __init__(self, others: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self.others = others

    def items(self) -> Any:
        return {**self.others(), **dict(super().items())}.items()

    def values(self) -> Any:
        return dict(self.items()).values()


def asked_for_parameters() -> nn.Module | None:
    """The module whose `parameters()` or `named_parameters()` a loop in the user's own code goes through just now."""
    called = called_by_script(sys._getframe(1))
    return called.f_locals["self"] if called is not None and called.f_code in _GO_THROUGH_PARAMS else None


def refuse_states(module: nn.Module) -> list[RemovableHandle]:
    """Refuse the module's own `state_dict` and `load_state_dict`, because it is not whole on this rank. Until what is
    returned is removed."""
    return [
        module.register_state_dict_pre_hook(_refuse_state),
        module.register_load_state_dict_pre_hook(_refuse_loading),
    ]


def _refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001  # as torch calls it
    """`keep_vars=True` only asks which parameters are here, and is allowed."""
    if not keep_vars:
        raise StateError(
            "model.state_dict() would have no more than this rank's pipeline stages. Call engine.state_dict(), on all "
            "ranks: it has the whole model's. engine.save(folder) writes checkpoints."
        )


def _refuse_loading(*_: object) -> NoReturn:
    raise StateError(
        "model.load_state_dict() would reach no more than this rank's pipeline stages. Call "
        "engine.load_state_dict(state), on all ranks, with the whole model's state."
    )
