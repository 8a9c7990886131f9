"""`init_inference`: a model for inference alone, by `shardwise.load_for_inference`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, StateError
from shardwise.integrations.deepspeed.accelerator import get_accelerator
from shardwise.integrations.deepspeed.inference_config import InferenceConfig, read_inference_config
from shardwise.system.own_hooks import hook
from shardwise.system.printable import printable

_TORCH = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HALVES = (torch.float16, torch.bfloat16)


class InferenceEngine(nn.Module):
    """What `init_inference` returns. `generate` and other attributes are those of the model, which is `module`."""

    def __init__(self, model: nn.Module, config: InferenceConfig) -> None:
        super().__init__()
        self.module = model
        self._config = config
        self._times: list[float] | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        return self.module(*inputs, **kwargs)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure each forward of the model from now on, also those of `generate`."""
        if self._times is None:
            self._times = []
            started: list[float] = []

            def begin(*_: object) -> None:
                get_accelerator().synchronize()
                started.append(time.perf_counter())

            def end(*_: object) -> None:
                get_accelerator().synchronize()
                assert self._times is not None
                self._times.append(1000 * (time.perf_counter() - started.pop()))

            self.module.register_forward_pre_hook(hook(begin), prepend=True)
            self.module.register_forward_hook(hook(end))

    def model_times(self) -> list[float]:
        """The milliseconds of the forwards since the last call. Raises `StateError` if none were measured."""
        if self._times is None:
            raise StateError("model_times() needs profile_model_time() before the forwards that it is about.")
        times, self._times = self._times, []
        return times

    def destroy(self) -> None:
        """Does nothing: there is no workspace."""


def init_inference(
    model: nn.Module,
    config: Mapping[str, Any] | str | Path | None = None,
    *,
    world: sw.World | None = None,
    **kwargs: Any,
) -> InferenceEngine:
    """Split `model` over `tensor_parallel.tp_size` ranks, convert it to `dtype`, and freeze it. All ranks call.

    The config, a mapping or a JSON file, and keyword arguments are those of `deepspeed.init_inference`; the defaults
    too, of which `dtype` is fp16. docs/deepspeed-names.md says what becomes of each. `model` stays the same object; it
    may have been built inside `OnDevice(dtype, "meta")`, and is never whole then. Further ranks have the model once
    more. `world` is for ranks that have already joined one.

    Raises `ConfigError` for arguments that are contradictory or not supported, and the errors of
    `shardwise.load_for_inference`.
    """
    asked = read_inference_config(config, kwargs)
    _check_policy(asked.value("injection_policy"))
    joined = sw.World.join() if world is None else world
    try:
        split = sw.load_for_inference(
            asked.checkpoint,
            model=model,
            mesh={"tp": asked.tp_size},
            weights=asked.weights,
            dtype=_TORCH.get(asked.precision) or _computed_in(model),
            device="cpu" if asked.value("keep_module_on_host") else joined.device,
            world=joined,
        )
    except BaseException as error:
        if world is None:
            joined.close(error)
        raise
    if joined.rank == 0 and (report := asked.report()):
        print(f"shardwise: notes on the arguments of init_inference()\n{printable(report)}")
    return InferenceEngine(split, asked)


def _computed_in(model: nn.Module) -> torch.dtype:
    """The dtype in which weights of 8 bits are computed with: the model's own if that has 16 bits, or else fp16."""
    own = next((param.dtype for param in model.parameters() if param.is_floating_point()), torch.float16)
    return own if own in _HALVES else torch.float16


def _check_policy(policy: object) -> None:
    if policy is not None and not (
        isinstance(policy, Mapping) and all(isinstance(one, type) and issubclass(one, nn.Module) for one in policy)
    ):
        raise ConfigError(f"injection_policy is {policy!r}; it must map classes of modules to names of linear layers.")
