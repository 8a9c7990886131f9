"""Changes to models and checks of settings that the Accelerate and Lightning integrations share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.integrations.checkpoint_folders import STATE_FOLDER
from shardwise.integrations.plans import has_stages
from shardwise.plan.comm_hooks import instead_of_hook
from shardwise.system.flags import says_yes
from shardwise.system.own_hooks import hook

_ZERO_GRAD = "zero_grad"
_HAND_OVER = "hand_over"
_NO_SYNC = "no_sync"
_FUSED = "fused_lm_head"
"""The argument by which TRL's forward gives log-probabilities in the place of logits."""
_CALL = "_compiled_call_impl"
"""What torch's `Module.__call__` calls in the place of forward and hooks, if it is there."""
_FSDP_MARK = "_is_fsdp_managed_module"
"""The attribute by which transformers recognizes FSDP:
https://github.com/huggingface/transformers/blob/main/src/transformers/distributed/fsdp.py"""
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


def param_ids(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def engine_folder(folder: str, number: int) -> Path:
    return Path(folder) / (STATE_FOLDER if number == 0 else f"{STATE_FOLDER}-{number}")


def synchronize_generation(model: nn.Module) -> None:
    """Let transformers treat models that generate like those of FSDP: `generate()` continues until all ranks have
    finished. Other modules do without: they would compute what LayerDrop skips, and here ranks may skip others."""
    for module in model.modules():
        if hasattr(module, "generation_config"):
            setattr(module, _FSDP_MARK, True)


def refuse_other_engines(arguments: dict[str, Any]) -> None:
    """Raise `ConfigError` for arguments of an `Accelerator`, and environment variables, that select another engine."""
    for name, engine in _REFUSED.items():
        if arguments.get(name) is not None:
            raise ConfigError(f"{name}= selects {engine}, but shardwise uses a plan instead. Leave {name} out.")
    for variable, engine in _REFUSED_VARIABLES.items():
        if says_yes(os.environ.get(variable)):
            raise ConfigError(
                f"{variable} is set, which selects {engine}, but shardwise uses a plan instead. Start the script with "
                f"shardwise launch or torchrun."
            )


def refuse_comm_hook(handler: Any) -> None:
    """Raise `ConfigError` for accelerate's `DistributedDataParallelKwargs` if they name a hook that compresses
    gradients: nothing would call it."""
    for name in ("comm_hook", "comm_wrapper"):
        asked = getattr(handler, name, None)
        kind = str(getattr(asked, "value", asked or "no"))
        if kind == "no":
            continue
        raise ConfigError(
            f"{name} is {kind}, a hook of DistributedDataParallel, which does not wrap a sharded model. Leave it out, "
            f"and {instead_of_hook(kind, handler.comm_state_option)}."
        )


def patch_zero_grad(model: nn.Module, engine: sw.Engine, hand_over: Callable[[], None] | None = None) -> None:
    """Let `model.zero_grad()`, which Trainer calls in every step, drop all gradients in one call, if `engine` has no
    others.

    `hand_over`, if given, makes the model a plain one again; see `take_over`."""

    def zero_grad(set_to_none: bool = True) -> None:
        if set_to_none and engine.module is model:
            engine.zero_grad()
        else:
            type(model).zero_grad(model, set_to_none=set_to_none)

    setattr(zero_grad, _HAND_OVER, hand_over)
    model.__dict__[_ZERO_GRAD] = zero_grad


def before_calls(model: nn.Module, engine: sw.Engine, act: Callable[[], None]) -> Callable[[], None]:
    """Call `act`, which may be collective, before each call of `model`, which `engine` trains. Returns what ends that.

    In pipeline stages a call makes further ones of the same module, part by part, and ranks make these at different
    times; so it is not a hook there.
    """
    if not has_stages(engine.plan):
        return model.register_forward_pre_hook(hook(lambda *_: act()), prepend=True).remove
    call, depth = vars(model)[_CALL], 0

    def acting(*args: Any, **kwargs: Any) -> Any:
        nonlocal depth
        if not depth:
            act()
        depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            depth -= 1

    def end() -> None:
        if vars(model).get(_CALL) is acting:  # else the engine has been closed, and has removed it
            model.__dict__[_CALL] = call

    acting.compiles_nothing = True  # type: ignore[attr-defined]  # as what it calls
    model.__dict__[_CALL] = acting
    return end


def is_prepared(model: nn.Module) -> bool:
    """Whether an engine has `model`, by `patch_zero_grad`."""
    return _ZERO_GRAD in vars(model)


def take_over(model: nn.Module) -> bool:
    """Let whoever has sharded `model` make it a plain one again. All ranks call. False if that is not possible.

    [Note: one Trainer after another] Scripts give a model that one Trainer has trained to another one, for a second
    stage or only to evaluate. Plain torch has nothing to hand over. Here `engine.unshard()` ends the first engine,
    and each rank has the whole model again, exactly, also of split layers and experts. Optimizer states are dropped,
    like those of a Trainer that is not used any more.
    """
    hand_over = getattr(vars(model)[_ZERO_GRAD], _HAND_OVER, None)
    if hand_over is None:
        return False
    hand_over()
    return True


def gather_fused_heads(model: nn.Module, plan: sw.Plan) -> None:
    """Let a model of TRL's trainers over `tp` have all words of its head where its forward reads the head's weight by
    itself (`add_fused_lm_head`). Asked again, it changes nothing."""
    if (plan.mesh or {}).get("tp", 1) == 1:
        return
    for module in model.modules():
        fused = getattr(module.__dict__.get("forward"), "__func__", None)
        if _FUSED in getattr(getattr(fused, "__code__", None), "co_varnames", ()):
            module.__dict__["forward"] = MethodType(_with_whole_head(fused), module)


def _with_whole_head(fused: Any) -> Any:
    """`fused` is TRL's forward. This is no hook, because adapters of peft call the forward of their model without."""

    @wraps(fused)
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get(_FUSED):
            return fused(model, *args, **kwargs)
        head = model.get_output_embeddings()
        with sw.tensor.whole_head(getattr(head, "base_layer", head)):  # with an adapter of peft TRL reads the base
            return fused(model, *args, **kwargs)

    return forward


def refuse_no_sync(model: nn.Module) -> None:
    """Let `model.no_sync()`, which only DDP's wrapper has, say what is there in its place."""

    def no_sync() -> NoReturn:
        raise ConfigError(
            "model.no_sync() is DistributedDataParallel's, and a sharded model is not wrapped: use accelerator.no_sync("
            "model), or accelerate's accumulate(). LocalSGD, which calls it, lets each rank train a copy of its own, "
            "and here ranks share one: leave LocalSGD out, or give it enabled=False. What it does is islands in the "
            "plan, with optimizer: {lr: 1, momentum: 0}."
        )

    if not hasattr(model, _NO_SYNC):
        model.__dict__[_NO_SYNC] = no_sync


def remove_patches(model: nn.Module) -> None:
    """Undo `patch_zero_grad`, `refuse_no_sync` and `synchronize_generation`, for a plain model may generate on one
    rank."""
    for name in (_ZERO_GRAD, _NO_SYNC):
        model.__dict__.pop(name, None)
    for module in model.modules():
        module.__dict__.pop(_FSDP_MARK, None)
