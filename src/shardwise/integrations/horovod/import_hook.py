"""An import hook: `import horovod...` imports the modules of this package. Horovod itself is not needed."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from shardwise.errors import ConfigError
from shardwise.integrations.horovod.command_line import VERSION
from shardwise.integrations.horovod.names import refusal
from shardwise.integrations.name_table import attribute_errors

_PACKAGE = "shardwise.integrations.horovod"
_MODULES = {
    "horovod.common": "",
    "horovod.common.elastic": "elastic",
    "horovod.common.exceptions": "errors",
    "horovod.common.process_sets": "process_sets",
    "horovod.torch": "torch",
    "horovod.torch.compression": "torch.compression",
    "horovod.torch.elastic": "torch.elastic",
    "horovod.torch.elastic.sampler": "torch.elastic.sampler",
    "horovod.torch.elastic.state": "torch.elastic.state",
    "horovod.torch.functions": "torch.functions",
    "horovod.torch.mpi_ops": "torch.mpi_ops",
    "horovod.torch.optimizer": "torch.optimizer",
    "horovod.torch.sync_batch_norm": "torch.sync_batch_norm",
    "horovod.jax": "jax",
    "horovod.keras": "keras",
    "horovod.keras.callbacks": "callbacks",
    "horovod.numpy": "numpy",
    "horovod.tensorflow": "tensorflow",
    "horovod.tensorflow.compression": "tensorflow_reductions",
    "horovod.tensorflow.functions": "tensorflow",
    "horovod.tensorflow.keras": "keras",
    "horovod.tensorflow.keras.callbacks": "callbacks",
    "horovod.tensorflow.mpi_ops": "tensorflow",
}
_NAMES = {f"{_PACKAGE}.{ours}": name for name, ours in reversed(_MODULES.items()) if ours}
"""What scripts call modules of this package."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `horovod` and its submodules, and imports the modules of this package in their place."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "horovod" or name in _MODULES:
            return ModuleSpec(name, self, is_package=True)
        owner, _, last = name.rpartition(".")
        if owner in _NAMES:  # `from horovod.torch import last` asks for a module of this name if there is nothing else
            name = f"{_NAMES[owner]}.{last}"
            if message := refusal(name):
                raise ImportError(message, name=name)
            return None
        if name.startswith("horovod."):
            if message := refusal(name):
                raise ImportError(message, name=name)
            raise ModuleNotFoundError(
                f"{name} is not supported by shardwise (docs/horovod.md lists what is).", name=name
            )
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        replacement = _MODULES.get(name)
        if replacement:
            sys.modules[name] = found = importlib.import_module(f"{_PACKAGE}.{replacement}")
            found.__dict__.setdefault("__getattr__", attribute_errors(name, refusal))
            if not hasattr(found, "__path__"):  # a package in Horovod: Python imports no modules of what is none
                found.__path__ = []
        elif name == "horovod":
            module.__dict__.update(__version__=VERSION, is_shardwise=True, run=_run)


def install() -> None:
    """Let `import horovod.torch` import the module of this package, in this process.

    Raises `ConfigError` if Horovod itself has already been imported.
    """
    imported = sys.modules.get("horovod")
    if imported is not None and not hasattr(imported, "is_shardwise"):
        raise ConfigError(
            "Horovod itself has already been imported in this process. Call install() before anything imports it."
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _run(*args: object, **kwargs: object) -> None:
    """Not supported: raises `ConfigError`."""
    raise ConfigError(
        "horovod.run(function) is not supported. Put the function into a script: shardwise launch --as-horovod -np 2 "
        "script.py."
    )
