"""`optimizer.type: OneBitAdam`, `OneBitLamb` and `ZeroOneAdam`: shardwise's own, with DeepSpeed's arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

import shardwise as sw
from shardwise.errors import ConfigError

_log = logging.getLogger("shardwise")
_KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "onebitadam": sw.optim.OneBitAdam,
    "onebitlamb": sw.optim.OneBitLamb,
    "zerooneadam": sw.optim.ZeroOneAdam,
}
_BACKENDS = ("nccl", "mpi", "hccl", "compressed")
_NO_EFFECT = ("cuda_aware", "comm_backend_name", "bias_correction", "deepspeed")
_WITHOUT = ("max_grad_norm", "amsgrad", "eps_inside_sqrt")
"""Settings that have to be off: DeepSpeed refuses the first two itself, and never reads the third."""
_LOCAL_STEPS = ("local_step_scaler", "local_step_clipper")
"""Settings of 0/1 Adam for steps in which nothing is sent, and parameters of the ranks diverge."""


def is_onebit(name: str) -> bool:
    """Whether `optimizer.type` names an optimizer that sends one bit per element."""
    return name.lower() in _KINDS


def require_stage_0(name: str, stage: int) -> None:
    """Raise `ConfigError` for a ZeRO stage that such an optimizer cannot have."""
    if is_onebit(name) and stage > 0:
        raise ConfigError(
            f"optimizer.type is {name!r}, which averages momenta of whole parameters, and zero_optimization.stage is "
            f"{stage}, which shards its states. DeepSpeed refuses both together too, since its pull request 1169; "
            f"before, stage 1 ran. Set the stage to 0, or take AdamW."
        )


def make_onebit(name: str, params: Iterable[Any], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed calls `name`. Backends of its own communication have no effect, nor have local steps
    of 0/1 Adam, which is logged: all steps average.

    Raises `ConfigError` for options that it does not have.
    """
    for key in _WITHOUT:
        if options.get(key):
            cure = " To clip gradients, set gradient_clipping." if key == "max_grad_norm" else " Leave it out."
            raise ConfigError(f"optimizer.params.{key} is not supported for {name}.{cure}")
    backend = options.get("comm_backend_name", _BACKENDS[0])
    if backend not in _BACKENDS:
        raise ConfigError(
            f"optimizer.params.comm_backend_name is {backend!r}; DeepSpeed has {', '.join(_BACKENDS)}. Here messages "
            f"go as all others do, so leave it out."
        )
    own = {key: value for key, value in options.items() if key not in (*_NO_EFFECT, *_WITHOUT)}
    if _KINDS[name.lower()] is sw.optim.ZeroOneAdam:
        own = {key: value for key, value in own.items() if key not in _LOCAL_STEPS}
        if options.get("local_step_clipper") != 1:
            _log.info(
                "%s takes no local steps, between which parameters of the ranks would differ: momenta are averaged in "
                "every step, as with local_step_clipper: 1. To send nothing in most steps, take AdamW and islands in a "
                "plan: mesh: {island: N}, islands: {every: 16}.",
                name,
            )
    if isinstance(own.get("betas"), list):
        own["betas"] = tuple(own["betas"])
    try:
        return _KINDS[name.lower()](params, **own)
    except TypeError as error:
        raise ConfigError(f"optimizer.params are not valid for {name}: {error}.") from error
