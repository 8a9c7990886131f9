"""What `prepare` of Accelerate refuses, and what it tells a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.folders import STATE_FOLDER

_ZERO_GRAD = "zero_grad"
_NO_SYNC = "no_sync"
_MANAGED = "_is_fsdp_managed_module"
"""What transformers looks for: https://github.com/huggingface/transformers/blob/main/src/transformers/distributed/fsdp.py"""
_REFUSED = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "fsdp_plugin": "FSDP",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "torch's tensor parallelism",
    "parallelism_config": "a ParallelismConfig",
}
_REFUSED_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a ParallelismConfig",
}


def ids_of(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def engine_folder(folder: str, number: int) -> Path:
    return Path(folder) / (STATE_FOLDER if number == 0 else f"{STATE_FOLDER}-{number}")


def generate_in_step(model: nn.Module) -> None:
    """Let `generate()` of transformers go on until all ranks are done, and layers be called whether they are dropped or
    not: what it does for models whose weights all ranks gather together."""
    for module in model.modules():
        if hasattr(module, "generation_config"):
            setattr(module, _MANAGED, True)


def refuse_engines(arguments: dict[str, Any]) -> None:
    for name, engine in _REFUSED.items():
        if arguments.get(name) is not None:
            raise ConfigError(f"{name}= asks for {engine}, and a plan is in its place. Leave {name} out.")
    for variable, engine in _REFUSED_VARIABLES.items():
        if os.environ.get(variable, "false").lower() in ("true", "1", "yes"):
            raise ConfigError(
                f"{variable} is set, which asks for {engine}, and a plan is in its place. Start the script with "
                f"shardwise launch, or torchrun."
            )


def zero_together(model: nn.Module, engine: sw.Engine) -> None:
    """Let `model.zero_grad()`, which Trainer calls in every step, forget all gradients at once, and not one by one."""

    def zero_grad(set_to_none: bool = True) -> None:
        if set_to_none:
            engine.zero_grad()
        else:
            type(model).zero_grad(model, set_to_none=False)

    model.__dict__[_ZERO_GRAD] = zero_grad


def refuse_no_sync(model: nn.Module) -> None:
    """Let `model.no_sync()`, which only DDP's wrapper has, say what is there in its place."""

    def no_sync() -> NoReturn:
        raise ConfigError(
            "model.no_sync() is DistributedDataParallel's, and a sharded model is not wrapped: use accelerator.no_sync("
            "model), or accelerate's accumulate(). LocalSGD, which calls it, lets each rank train a copy of its own, "
            "and here ranks share one: leave LocalSGD out, or give it enabled=False."
        )

    if not hasattr(model, _NO_SYNC):
        model.__dict__[_NO_SYNC] = no_sync


def zero_apart(model: nn.Module) -> None:
    """Take that back."""
    for name in (_ZERO_GRAD, _NO_SYNC):
        model.__dict__.pop(name, None)
