"""Adapters of the peft library merged into the weights that they adapt, as tensors arrive: what peft's
`merge_and_unload` makes of the whole model, without the whole model.

This file knows methods of peft's layers without importing it. Each adapted layer, and each module that peft replaces
while it trains (`modules_to_save`, trainable tokens), is copied without its memory; the copy gets the whole tensors,
merges them by peft's own code, and gives the weights of the layer inside it. So variants of LoRA and other methods are
merged as far as peft itself can do that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any, cast

import torch
from torch import nn

from shardwise.checkpoint.formats.rearrangement import Group, Rearrangement, dropped, renamed
from shardwise.errors import ModelError
from shardwise.memory.dtypes import dtype_of_codes

Tensor = torch.Tensor
CONFIGS = "peft_config"
"""An attribute of a model that has adapters, with their configurations by name."""
_MERGES, _UNLOADS = "merge", "unload_and_optionally_merge_module"
_REPLACED = frozenset({"base_layer", "original_module"})
"""What layers of peft call the module that they replace."""


def base_model(model: nn.Module) -> nn.Module:
    """The model whose adapters peft's wrapper trains; `model` itself if it is no such wrapper."""
    if not hasattr(model, CONFIGS) or not hasattr(model, "get_base_model"):
        return model
    base: nn.Module = cast(Any, model).get_base_model()
    return base


def merging(model: nn.Module, likes: Mapping[str, Tensor], ties: Mapping[str, str]) -> Rearrangement | None:
    """For tensors with the names, shapes and dtypes of `likes`, which arrive in that order; `None` without adapters.

    `ties` maps other names of a parameter to the one in `likes`, those of other pipeline stages included. Names in the
    result are those of the model without adapters. Raises `ModelError` for adapters that cannot be merged into weights.
    """
    wrapped = dict(_wrapped(model))
    if not hasattr(model, CONFIGS) and not wrapped:
        return None
    _refuse_what_has_no_weights(model)
    _refuse_ties(ties)
    groups: dict[str, list[str]] = {path: [] for path in wrapped}
    bare: list[Group] = []
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, like in likes.items():
        path = next((path for path in _ancestors(name) if path in wrapped), None)
        if path is None:
            bare.append(renamed(name, plain_name(model, name), like))
        elif name in own:
            _refuse_codes(name, own[name])
            groups[path].append(name)
        else:  # a buffer, which comes with the layer
            bare.append(dropped(name))
    layers = [
        _layer(model, path, wrapped[path], {name: likes[name] for name in names}) for path, names in groups.items()
    ]
    return Rearrangement([*bare, *layers], likes)


def plain_name(model: nn.Module, name: str) -> str:
    """The name, in the model without adapters, of a parameter or module that they do not replace."""
    for path, module in model.named_modules():
        if hasattr(module, CONFIGS) and hasattr(module, "get_base_model"):
            prefix = f"{path}." if path else ""
            base = module.get_base_model()
            inner = next(inner for inner, one in module.named_modules() if one is base)
            if name.startswith(f"{prefix}{inner}."):
                return prefix + name.removeprefix(f"{prefix}{inner}.")
    return name


def _wrapped(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are to be replaced by what is inside them."""
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(one) for one in inside):
            continue
        if hasattr(module, _UNLOADS) or (hasattr(module, _MERGES) and hasattr(module, "base_layer")):
            inside.append(f"{path}.")
            yield path, module


def _ancestors(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _layer(model: nn.Module, path: str, module: nn.Module, likes: Mapping[str, Tensor]) -> Group:
    plain = plain_name(model, path)

    def make(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copied = copied_with(module, {name.removeprefix(f"{path}."): tensor for name, tensor in given.items()})
        with torch.no_grad():
            inner = _merged(copied, plain)
        return {f"{plain}.{name}": tensor.detach() for name, tensor in inner.state_dict(keep_vars=True).items()}

    metas = {name: torch.empty_like(like, device="meta") for name, like in likes.items()}
    made = {name: torch.empty_like(one, device="meta") for name, one in make(metas).items()}
    return Group(tuple(likes), made, make)


def _merged(layer: Any, name: str) -> nn.Module:
    try:
        if hasattr(layer, _UNLOADS):
            inner = getattr(layer, _UNLOADS)(merge=True, safe_merge=False, adapter_names=None)
        else:
            layer.merge()
            inner = layer.get_base_layer()
    except (NotImplementedError, ValueError, TypeError) as error:
        raise ModelError(
            f"The adapters of {name} cannot be merged: {error} Pass merge_adapters=False, or save them apart: "
            f"model.save_pretrained(folder, state_dict=engine.state_dict(rank_0_only=True))."
        ) from error
    assert isinstance(inner, nn.Module)
    return inner


def copied_with(module: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
    """A copy of `module` without hooks, with `tensors` as its parameters. Buffers and all else are the module's own."""
    copied = copy.copy(module)
    own: dict[str, Any] = copied.__dict__
    for key in [key for key in own if key.endswith("_hooks") or key.endswith("_hooks_with_kwargs")]:
        own[key] = type(own[key])()
    own.pop("forward", None)  # one that was replaced is not called here
    if isinstance(own.get("merged_adapters"), list):
        own["merged_adapters"] = list(own["merged_adapters"])
    own["_parameters"] = {
        name: None if param is None else nn.Parameter(tensors[name], requires_grad=False)
        for name, param in module._parameters.items()
    }
    own["_modules"] = {
        name: None if child is None else copied_with(child, _below(name, tensors))
        for name, child in module._modules.items()
    }
    return copied


def _below(path: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    dotted = f"{path}."
    return {name.removeprefix(dotted): one for name, one in tensors.items() if name.startswith(dotted)}


def _refuse_what_has_no_weights(model: nn.Module) -> None:
    configs = getattr(model, CONFIGS, None) or {}
    for name, config in configs.items():
        if getattr(config, "is_prompt_learning", False):
            raise ModelError(
                f"The adapter {name!r} ({getattr(config, 'peft_type', '')}) is a prompt, which is no part of the "
                f"model's weights and cannot be merged into them. Pass merge_adapters=False."
            )


def _refuse_ties(ties: Mapping[str, str]) -> None:
    """By names, which all stages know. peft's own `merge_and_unload` adds what one of two tied layers has learned to
    both, or unties them in memory, where the configuration still says that files have one tensor."""
    for alias, name in ties.items():
        layers = sorted({_adapted_layer(alias), _adapted_layer(name)})
        is_one_layer = f"{layers[-1]}.".startswith(f"{layers[0]}.")  # that of trained tokens has its weight twice
        if layers != sorted({alias, name}) and not is_one_layer:
            raise ModelError(
                f"{alias} is tied to {name}, and has adapters or is trained as a copy: merged, the two differ, where "
                f"files and samplers of the model have one tensor. Pass merge_adapters=False, and give the sampler "
                f"base and adapters apart; or untie them before adapters are added: a copy of the weight as a "
                f"parameter of its own, and config.tie_word_embeddings = False."
            )


def _adapted_layer(name: str) -> str:
    """The layer of peft that has the parameter `name`; `name` itself if there is none."""
    return ".".join(takewhile(lambda part: part not in _REPLACED, name.split(".")))


def _refuse_codes(name: str, param: Tensor) -> None:
    if dtype_of_codes(param) is not None:
        raise ModelError(
            f"{name} has codes of a quantizer, into which no adapter can be merged without rounding again. Pass "
            f"merge_adapters=False, and give the sampler base and adapters apart."
        )
