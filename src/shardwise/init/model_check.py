"""Checks that a model can be sharded, and that it is the same on all ranks."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.comm import DataGroup, World
from shardwise.errors import ConfigError, ModelError
from shardwise.init.shared_memory import check_memory
from shardwise.memory import is_at_rest, is_dense

_MOST_SHOWN = 4


def check_model(model: nn.Module) -> torch.device:
    """The one device of all parameters, possibly the meta device. Raises `ModelError` if the model cannot be
    sharded."""
    _refuse_scripts(model)
    _refuse_lazy(model)
    _refuse_wrappers(model)
    by_device: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        by_device.setdefault(param.device, name)
        if is_at_rest(param):
            raise ModelError(
                f"Parameter {name} is sharded by an engine already. Use that engine, change its plan with "
                f"engine.reshard(plan), or build a new model."
            )
        if is_distributed(param):
            raise ModelError(
                f"Parameter {name} is a DTensor: another library has spread the model over ranks already "
                f"(fully_shard, parallelize_module). Leave that call out, and shard the plain model."
            )
        if param.grad is not None:
            raise ModelError(
                f"Parameter {name} has a gradient already, which no step of the engine would use. Call "
                f"optimizer.zero_grad() before shard(), or shard before the first backward."
            )
        if param._post_accumulate_grad_hooks:
            raise ModelError(
                f"Parameter {name} has a post-accumulate hook, which would see a gradient of this rank alone, before "
                f"it is averaged, and could not change what the step uses. Remove it; between backward and step "
                f"param.grad is the averaged gradient."
            )
        if getattr(param, "_in_backward_optimizers", None):  # torch.distributed.optim._apply_optimizer_in_backward
            raise ModelError(
                f"Parameter {name} has an optimizer that steps inside the backward, where its gradient is this rank's "
                f"alone. Make one optimizer of model.parameters(), and give it to shard()."
            )
        if param.is_complex():
            raise ModelError(
                f"Parameter {name} is {param.dtype}, {param.layout}; only dense real parameters can be sharded. Keep "
                f"its real and imaginary parts, nn.Parameter(torch.view_as_real(values)), and take "
                f"torch.view_as_complex of them in the forward."
            )
        if not is_dense(param):
            raise ModelError(
                f"Parameter {name} is {_kind_of(param)}; only dense real parameters can be sharded. Keep what it is "
                f"made of as parameters or buffers of its module, such as codes in int8 and their scales, and make it "
                f"of these in the forward."
            )
    for name, buffer in model.named_buffers():
        if not is_dense(buffer):
            raise buffer_refused(name, buffer)
    check_memory(model)
    if not by_device:
        raise ModelError("The model has no parameters, so there is nothing to shard.")
    if len(by_device) > 1:
        where = ", ".join(f"{name} on {device}" for device, name in by_device.items())
        raise ModelError(
            f"The model's parameters are on different devices: {where}. Move the model to one with .to(device)."
        )
    return next(iter(by_device))


def _kind_of(tensor: torch.Tensor) -> str:
    """What a tensor is that is not dense: `sparse (torch.sparse_csr)`, `a MaskedTensor, which wraps other tensors`."""
    if tensor.is_nested:
        return "nested"
    if tensor.is_quantized:
        return f"quantized ({tensor.dtype})"
    if tensor.layout != torch.strided:
        return f"{'sparse' if 'sparse' in str(tensor.layout) else 'opaque'} ({tensor.layout})"
    return f"a {type(tensor).__name__}, which wraps other tensors"


def buffer_refused(name: str, buffer: torch.Tensor) -> ModelError:
    """The error for a buffer that is not dense."""
    return ModelError(
        f"The buffer {name} is {_kind_of(buffer)}, and only values of dense tensors can be sent to all ranks. Make it "
        f"a dense tensor, or a plain attribute of its module, which each rank has for itself."
    )


def is_distributed(param: nn.Parameter) -> bool:
    """Whether it is a DTensor."""
    known = sys.modules.get("torch.distributed.tensor")  # whose import would take a second
    return known is not None and isinstance(param, known.DTensor)


def _refuse_scripts(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = f"Module {name}" if name else "The model"
            raise ModelError(
                f"{what} was made by torch.jit: it runs outside of Python, where its parameters cannot be gathered. "
                f"Shard the original nn.Module; to compile it, set `compile` in the plan."
            )


def _refuse_wrappers(model: nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # whose import would take a second
    wrappers = (DistributedDataParallel, *(() if fsdp is None else (fsdp.FullyShardedDataParallel,)))
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            what = f"Module {name}" if name else "The model"
            raise ModelError(
                f"{what} is a {type(module).__name__}, which spreads a model over ranks by itself, with gradients and "
                f"parameters of its own. Leave that wrapper out, and shard the plain model (what it has as .module, "
                f"before it was wrapped).{_instead_of_hooks(module)}"
            )


def _instead_of_hooks(module: nn.Module) -> str:
    """What a plan has for the hooks that were registered with DistributedDataParallel, if there are any."""
    from shardwise.plan.comm_hooks import instead_of_hook, name_of, settings_of  # only what is refused needs it

    return "".join(
        f" Instead of its hook {name_of(hook)}, {instead_of_hook(name_of(hook), settings_of(state))}."
        for hook, state in getattr(module, "_comm_hooks", ())
    )


def _refuse_lazy(model: nn.Module) -> None:
    for kind, named in (("Parameter", model.named_parameters()), ("Buffer", model.named_buffers())):
        for name, tensor in named:
            if nn.parameter.is_lazy(tensor):
                raise ModelError(
                    f"{kind} {name} has no shape yet: call the model once on a batch, so that its lazy modules know "
                    f"their sizes, then make the optimizer and shard it."
                )


def check_same_everywhere(model: nn.Module, data_group: DataGroup) -> None:
    """Raise on every rank, naming the first difference, unless all ranks of the data-parallel group built the same
    parameters. All ranks must call."""
    mine = [
        [name, list(param.shape), str(param.dtype), param.requires_grad] for name, param in model.named_parameters()
    ]
    mine += [[name, list(buffer.shape), str(buffer.dtype), False] for name, buffer in model.named_buffers()]
    digest = hashlib.sha256(json.dumps(mine).encode()).digest()
    digests = data_group.exchange(digest, "model")
    if len(set(digests)) == 1:
        return
    theirs = [json.loads(message) for message in data_group.exchange(json.dumps(mine).encode(), "models")]
    odd = next(place for place, other in enumerate(theirs) if other != theirs[0])
    ranks = data_group.rank_at(0), data_group.rank_at(odd)
    raise ModelError(f"The ranks built different models: {_first_difference(theirs[0], theirs[odd], ranks)}")


def check_same_settings(settings: Mapping[str, object], kind: str, world: World) -> None:
    """Raise `ConfigError` on every rank, naming what differs, unless all have the same `settings`. All ranks must call.

    `kind` names the settings, such as "plan"; values are anything that JSON can hold.
    """
    messages = world.exchange(json.dumps(settings, default=repr).encode(), kind)
    odd = next((rank for rank, message in enumerate(messages) if message != messages[0]), None)
    if odd is None:
        return
    told = [json.loads(message) for message in messages]
    keys = dict.fromkeys([*told[0], *told[odd]])
    differing = [key for key in keys if told[0].get(key) != told[odd].get(key)]
    shown = "; ".join(
        f"{key} is {told[0].get(key)!r} on rank 0 and {told[odd].get(key)!r} on rank {odd}"
        for key in differing[:_MOST_SHOWN]
    )
    more = f"; and {len(differing) - _MOST_SHOWN} more" if len(differing) > _MOST_SHOWN else ""
    raise ConfigError(f"The ranks were given different {kind}s: {shown}{more}. Give all ranks the same {kind}.")


def _first_difference(first: list[list[object]], other: list[list[object]], ranks: tuple[int, int]) -> str:
    for one, two in zip(first, other, strict=False):
        if one != two:
            return (
                f"rank {ranks[0]} has {one[0]} {one[1]} {one[2]} where rank {ranks[1]} has {two[0]} {two[1]} {two[2]}. "
                f"Build the model from the same configuration on all ranks: layers whole, which the plan splits (mesh: "
                f"{{tp: 2}}, {{pp: 2}}, {{ep: 2}}), not a part on each rank."
            )
    return f"rank {ranks[0]} has {len(first)} parameters and buffers, rank {ranks[1]} has {len(other)}."
