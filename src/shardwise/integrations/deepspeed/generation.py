"""`generate` of a model that an engine trains: inside `Engine.inference`, so that parameters are gathered once, and
ranks need no common number of tokens."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from shardwise import Engine
from shardwise.integrations.deepspeed.config import TranslatedConfig

_SYNCED = "synced_gpus"
"""The argument of transformers' `generate` that makes all ranks call the model equally often."""


class Generation:
    """Takes the place of a model's `generate`. All ranks call; prompts and numbers of tokens may differ."""

    def __init__(self, engine: Engine, plain: Callable[..., Any], keep_bytes: int | None) -> None:
        """`plain` is the model's own `generate`, and `keep_bytes` an argument of `Engine.inference`."""
        self._engine = engine
        self._plain = plain
        self._keep_bytes = keep_bytes
        self._takes_synced = _SYNCED in inspect.signature(plain).parameters

    @classmethod
    def install(cls, engine: Engine, keep_bytes: int | None) -> None:
        """Let the model of `engine` generate so from now on, as DeepSpeed's hybrid engine does: scripts call
        `engine.module.generate`."""
        model: Any = engine.module
        cls.remove(model)
        if hasattr(model, "generate"):
            model.generate = cls(engine, model.generate, keep_bytes)

    @staticmethod
    def remove(model: nn.Module) -> None:
        """Give `model` its own `generate` back."""
        found = vars(model).get("generate")
        if isinstance(found, Generation):
            del model.generate

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._takes_synced:
            kwargs[_SYNCED] = False
        with self._engine.inference(self._keep_bytes):
            return self._plain(*inputs, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the model belongs to no engine, and gets its own `generate`."""
        return copy.deepcopy(self._plain, memo)


def bytes_to_keep(engine: Engine, config: TranslatedConfig) -> int | None:
    """How much of the model stays whole on a rank while it generates, by the config's `hybrid_engine`."""
    if not config.value("hybrid_engine.pin_parameters"):
        return 0
    parts = int(config.value("hybrid_engine.inference_tp_size"))
    if parts == 1:
        return None
    width = {"bf16": 2, "fp16": 2}.get(engine.plan.precision)
    return sum(param.numel() * (width or param.itemsize) for param in engine.module.parameters()) // parts
