"""Refusing changes to the structure of a sharded model as soon as they are made.

[Note: one hook for the process] torch iterates over its registration hooks without a lock, whenever any thread builds
any module. So ours are registered once, with the first engine, stay registered, and look up which model a module
belongs to. If hooks came and went with engines, they would now and then break a constructor in another thread.
"""

from __future__ import annotations

import threading
import weakref

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.errors import ModelError


class _Watch:
    """The modules of all sharded models of the process, with the `Structure` of each.

    Structures are their engines': they have parameters, by which a model would keep itself alive here, and its engine,
    if a program drops both without `close()`, as one does that trains a model for each fold of its data.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_registered = False
        self._structures: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Structure]] = weakref.WeakKeyDictionary()

    def add(self, structure: Structure, model: nn.Module) -> None:
        with self._lock:
            if not self._is_registered:
                register_module_parameter_registration_hook(self._parameter)
                register_module_module_registration_hook(self._module)
                self._is_registered = True
            for module in model.modules():
                self._structures[module] = weakref.ref(structure)

    def follow(self, structure: Structure, module: nn.Module) -> None:
        """`module`, which has no parameters yet, has become a part of the model."""
        with self._lock:
            if self._of(module) is None:
                self._structures[module] = weakref.ref(structure)

    def drop(self, structure: Structure) -> None:
        """Modules that were taken out of the model are dropped, too."""
        with self._lock:
            for module in [module for module, known in self._structures.items() if known() is structure]:
                del self._structures[module]

    def _parameter(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        if (structure := self._of(module)) is not None:
            structure.require_same_parameter(module, name, param)

    def _module(self, module: nn.Module, name: str, inner: nn.Module | None) -> None:
        if (structure := self._of(module)) is not None:
            structure.require_known_module(module, name, inner)

    def _of(self, module: nn.Module) -> Structure | None:
        known = self._structures.get(module)
        return None if known is None else known()


_WATCH = _Watch()


class Structure:
    """Refuses new parameters, and new modules with parameters, in `model`, until `release`.

    Torch's functions that rebuild a module (`weight_norm`, `prune.remove`, `register_parametrization`) take a parameter
    out of it before they register what is refused. So a refusal puts back what the module has lost, and training can
    go on.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._paths = weakref.WeakKeyDictionary({module: path for path, module in modules.items()})
        self._had = weakref.WeakKeyDictionary(
            {module: (dict(module._parameters), dict(module._buffers)) for module in modules.values()}
        )
        _WATCH.add(self, model)

    def release(self) -> None:
        _WATCH.drop(self)

    def require_same_parameter(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """Called before `param` becomes `module.name`."""
        if module._parameters.get(name) is not param:
            self._put_back(module)
            raise ModelError(
                f"{self._path(module, name)} was assigned to a model that is sharded, so no engine would train it. "
                f"Add, tie or replace parameters before shard(). To change values write to the parameter: "
                f"param.copy_(values) under torch.no_grad(), or engine.load_state_dict(state)."
            )

    def require_known_module(self, module: nn.Module, name: str, inner: nn.Module | None) -> None:
        """Called before `inner` becomes `module.name`."""
        if inner is None or module._modules.get(name) is inner:
            return
        if name == "parametrizations" or any(one not in self._had for one in inner.modules() if one._parameters):
            if name == "parametrizations":
                module.__class__ = type(module).__bases__[0]  # torch has given it a class of its own
            self._put_back(module)
            raise ModelError(
                f"{self._path(module, name)} was put into a model that is sharded, so no engine would train its "
                f"parameters. Add modules, adapters and parametrizations before shard()."
            )
        path = self._path(module, name)
        for inside, one in inner.named_modules():
            self._paths.setdefault(one, f"{path}.{inside}" if inside else path)
            _WATCH.follow(self, one)

    def _put_back(self, module: nn.Module) -> None:
        params, buffers = self._had.get(module, ({}, {}))
        module._parameters.update({name: param for name, param in params.items() if name not in module._parameters})
        module._buffers.update({name: buffer for name, buffer in buffers.items() if name not in module._buffers})
        for name in (*params, *buffers):
            module.__dict__.pop(name, None)  # a plain attribute would hide it

    def _path(self, module: nn.Module, name: str) -> str:
        path = self._paths[module]
        return f"{path}.{name}" if path else name
