"""What a model is made of when it is sharded is what it stays made of: whoever changes that is told at once."""

from __future__ import annotations

import weakref

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from shardwise.errors import ModelError


class Structure:
    """Refuses parameters, and modules with parameters, that are put into `model`, until `release`."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = weakref.WeakKeyDictionary({module: path for path, module in model.named_modules()})
        self._handles = [
            register_module_parameter_registration_hook(self._require_same_parameter),
            register_module_module_registration_hook(self._require_known_module),
        ]

    def release(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _require_same_parameter(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        if module in self._paths and module._parameters.get(name) is not param:
            raise ModelError(
                f"{self._path(module, name)} was assigned to a model that is sharded, so no engine would train it. "
                f"Add, tie or replace parameters before shard(). To change values write to the parameter: "
                f"param.copy_(values) under torch.no_grad(), or engine.load_state_dict(state)."
            )

    def _require_known_module(self, module: nn.Module, name: str, inner: nn.Module | None) -> None:
        if module not in self._paths or inner is None or module._modules.get(name) is inner:
            return
        if name == "parametrizations" or any(one not in self._paths for one in inner.modules() if one._parameters):
            raise ModelError(
                f"{self._path(module, name)} was put into a model that is sharded, so no engine would train its "
                f"parameters. Add modules, adapters and parametrizations before shard()."
            )

    def _path(self, module: nn.Module, name: str) -> str:
        path = self._paths[module]
        return f"{path}.{name}" if path else name
