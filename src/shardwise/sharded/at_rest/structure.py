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
    """The modules of all sharded models of the process, with the `Structure` of each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_registered = False
        self._structures: weakref.WeakKeyDictionary[nn.Module, Structure] = weakref.WeakKeyDictionary()

    def add(self, structure: Structure, model: nn.Module) -> None:
        with self._lock:
            if not self._is_registered:
                register_module_parameter_registration_hook(self._parameter)
                register_module_module_registration_hook(self._module)
                self._is_registered = True
            for module in model.modules():
                self._structures[module] = structure

    def drop(self, structure: Structure, model: nn.Module) -> None:
        with self._lock:
            for module in model.modules():
                if self._structures.get(module) is structure:
                    del self._structures[module]

    def _parameter(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        structure = self._structures.get(module)
        if structure is not None:
            structure.require_same_parameter(module, name, param)

    def _module(self, module: nn.Module, name: str, inner: nn.Module | None) -> None:
        structure = self._structures.get(module)
        if structure is not None:
            structure.require_known_module(module, name, inner)


_WATCH = _Watch()


class Structure:
    """Refuses new parameters, and new modules with parameters, in `model`, until `release`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._paths = weakref.WeakKeyDictionary({module: path for path, module in model.named_modules()})
        _WATCH.add(self, model)

    def release(self) -> None:
        model = self._model()
        if model is not None:
            _WATCH.drop(self, model)

    def require_same_parameter(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        """Called before `param` becomes `module.name`."""
        if module._parameters.get(name) is not param:
            raise ModelError(
                f"{self._path(module, name)} was assigned to a model that is sharded, so no engine would train it. "
                f"Add, tie or replace parameters before shard(). To change values write to the parameter: "
                f"param.copy_(values) under torch.no_grad(), or engine.load_state_dict(state)."
            )

    def require_known_module(self, module: nn.Module, name: str, inner: nn.Module | None) -> None:
        """Called before `inner` becomes `module.name`."""
        if inner is None or module._modules.get(name) is inner:
            return
        if name == "parametrizations" or any(one not in self._paths for one in inner.modules() if one._parameters):
            raise ModelError(
                f"{self._path(module, name)} was put into a model that is sharded, so no engine would train its "
                f"parameters. Add modules, adapters and parametrizations before shard()."
            )

    def _path(self, module: nn.Module, name: str) -> str:
        path = self._paths[module]
        return f"{path}.{name}" if path else name
