"""`deepspeed.zero`: building a model without having it whole on any rank, and gathering parameters temporarily."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, StateError
from shardwise.init import is_deferred
from shardwise.integrations.deepspeed.engine import engines_of
from shardwise.integrations.deepspeed.initialization import init_distributed_if_launched

OneOrSeveral = nn.Parameter | Iterable[nn.Parameter] | nn.Module


@contextmanager
def Init(  # noqa: N802
    module: nn.Module | None = None,
    data_parallel_group: object = None,
    mem_efficient_linear: bool = True,
    remote_device: str | None = None,
    pin_memory: bool = False,
    config_dict_or_path: object = None,
    config: object = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    mpu: object = None,
    zero_param_parallel_group: object = None,
    zero_quantized_weights: bool = False,
    zero_quantized_nontrainable_weights: bool = False,
    sequence_data_parallel_group: object = None,
    param_swapper: object = None,
) -> Iterator[None]:
    """A model built inside is never whole on any rank: `shardwise.deferred_init`.

    Initializes torch's default process group before, under a launcher that says where ranks meet as `torchrun` does.
    With `module`, which is built already, nothing is deferred. The config that `initialize` gets decides in which
    precision the model computes, where parameters are kept, as what they are sent, and whether memory is pinned;
    those arguments have no effect here, nor has `dtype`: masters keep the values in fp32. Raises `ConfigError` for
    groups of ranks.
    """
    groups = (data_parallel_group, mpu, zero_param_parallel_group, sequence_data_parallel_group)
    if any(group is not None for group in groups):
        raise ConfigError(
            "zero.Init() with groups of ranks is not supported. Set tensor_parallel, sequence_parallel_size or "
            "zero_hpz_partition_size in the config instead."
        )
    if enabled:
        init_distributed_if_launched()  # constructors may ask torch.distributed for their rank
    with sw.deferred_init() if enabled and module is None else nullcontext():
        yield


def MiCS_Init(  # noqa: N802
    module: nn.Module | None = None,
    data_parallel_group: object = None,
    sequence_data_parallel_group: object = None,
    mem_efficient_linear: bool = True,
    remote_device: str | None = None,
    pin_memory: bool = False,
    config_dict_or_path: object = None,
    config: object = None,
    enabled: bool = True,
    dtype: torch.dtype | None = None,
    mpu: object = None,
) -> AbstractContextManager[None]:
    """`Init`. Among how many ranks parameters are sharded, the `mics_shard_size` of the config that `initialize` gets
    decides."""
    return Init(
        module,
        data_parallel_group,
        enabled=enabled,
        mpu=mpu,
        sequence_data_parallel_group=sequence_data_parallel_group,
    )


@contextmanager
def OnDevice(dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> Iterator[None]:  # noqa: N802
    """A model built inside has floating-point tensors of `dtype` on `device`.

    On `meta` it is built as inside `Init`: `initialize` computes its values.
    """
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with sw.deferred_init() if str(device) == "meta" else torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def GatheredParameters(  # noqa: N802
    params: OneOrSeveral, modifier_rank: int | None = None, fwd_module: object = None, enabled: bool = True
) -> Iterator[None]:
    """Inside, `params` are whole on every rank. With `modifier_rank`, changes by that rank are kept. All ranks call.

    They may be of several engines, such as a model and its moving average.

    Before `initialize`, changes to parameters that were built inside `Init` are recorded, and parameters that have
    values are left alone: `initialize` gives every rank the values of rank 0, so only those can be changed there.
    """
    with ExitStack() as stack:
        if enabled:
            _gather(_listed(params), modifier_rank, stack)
        yield


def _gather(params: list[nn.Parameter], modifier_rank: int | None, stack: ExitStack) -> None:
    """Make `params` whole until `stack` is closed."""
    found = engines_of(params)
    for engine, names in found:
        write, writer = modifier_rank is not None, modifier_rank or 0
        stack.enter_context(engine.shardwise.gathered(*names, write=write, writer=writer))
    if found:
        return
    if modifier_rank not in (None, 0):
        raise StateError(
            f"GatheredParameters(modifier_rank={modifier_rank}) before initialize(): it gives every rank the values of "
            f"rank 0, so changes by others would be lost. Use modifier_rank=0, or do this after initialize()."
        )
    if any(param.is_meta for param in params):
        raise StateError(
            "GatheredParameters was used on parameters without values, on the meta device. Build the model inside "
            "deepspeed.zero.Init, or move it after initialize()."
        )
    deferred = nn.ParameterList(param for param in params if is_deferred(param))
    if len(deferred):
        stack.enter_context(sw.deferred_init(deferred))


def _listed(params: OneOrSeveral) -> list[nn.Parameter]:
    if isinstance(params, nn.Parameter):
        return [params]
    return list(params.parameters() if isinstance(params, nn.Module) else params)


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Inside, forwards of `model`, an engine, compute no gradients, and parameters are gathered once.

    Yields the engine. All ranks call; they may generate different numbers of tokens, and for different numbers of
    prompts. See `Engine.inference`.
    """
    with model.shardwise.inference(), _own_pace():
        yield model


@contextmanager
def _own_pace() -> Iterator[None]:
    """Inside, transformers' `generate` does not wait for other ranks by default, as it does while a config of stage 3
    lives (`synced_gpus`): a rank with more prompts than others would wait for ever."""
    module: Any = sys.modules.get("transformers.generation.utils")
    if module is None:
        yield
        return
    before, module.is_deepspeed_zero3_enabled = module.is_deepspeed_zero3_enabled, lambda: False
    try:
        yield
    finally:
        module.is_deepspeed_zero3_enabled = before


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Not needed: the first step records which parameters a module uses."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Not needed; see `register_external_parameter`."""
