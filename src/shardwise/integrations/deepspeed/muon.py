"""`optimizer.type: Muon`: shardwise's Muon, with DeepSpeed's defaults and its choice of matrices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError

_HALVES: dict[bool, tuple[dict[str, Any], str]] = {
    True: ({"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}, "muon_lr"),
    False: ({"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}, "adam_lr"),
}
"""By `use_muon`: the settings of a group and their defaults, and the option that replaces `lr`."""
_OTHERS = ("ns_method", "torch_adam", "adam_w_mode", "fp32_optimizer_states")
_NOT_MATRICES = ("embed", "lm_head")


def make_muon(params: Iterable[Any], options: Mapping[str, Any], model: nn.Module | None) -> torch.optim.Optimizer:
    """Muon for matrices, AdamW for the rest: embeddings, `lm_head`, and what is no matrix, by the names in `model`.

    A parameter's own `use_muon` overrides this choice, and settings of a group override `options`. The iteration is the
    standard one for any `ns_method`, of which DeepSpeed's `gram` is another order of the same operations. Raises
    `ConfigError` for other options.
    """
    known = {name for settings, rate in _HALVES.values() for name in (*settings, rate)}
    if unknown := sorted(options.keys() - known - set(_OTHERS)):
        raise ConfigError(
            f"optimizer.params are not valid for Muon: {', '.join(unknown)}. It has {', '.join(sorted(known))}."
        )
    if options.get("adam_w_mode") is False:
        raise ConfigError(
            "optimizer.params.adam_w_mode: false is not supported for Muon, whose other parameters are updated by "
            "AdamW. Leave it out."
        )
    names = {} if model is None else {param: name for name, param in model.named_parameters()}
    groups = [
        {"params": half, "use_muon": is_muon, **_settings(is_muon, options, group)}
        for group in _groups(list(params))
        for is_muon, half in _halves(group["params"], names).items()
        if half
    ]
    return sw.optim.Muon(groups)


def _groups(params: list[Any]) -> list[dict[str, Any]]:
    loose = [one for one in params if not isinstance(one, dict)]
    groups = [{**one, "params": list(one["params"])} for one in params if isinstance(one, dict)]
    return [*groups, *([{"params": loose}] if loose else [])]


def _halves(params: list[nn.Parameter], names: Mapping[nn.Parameter, str]) -> dict[bool, list[nn.Parameter]]:
    halves: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for param in params:
        if param.requires_grad:
            halves[_is_muon(param, names)].append(param)
    return halves


def _is_muon(param: nn.Parameter, names: Mapping[nn.Parameter, str]) -> bool:
    own = getattr(param, "use_muon", None)
    if own is not None:
        return bool(own)
    if param not in names:
        raise ConfigError(
            f"Muon cannot tell whether a parameter of shape {list(param.shape)} is a hidden matrix, because its name "
            f"is unknown here. Set param.use_muon to True or False on every parameter."
        )
    return param.dim() == 2 and not any(word in names[param].lower() for word in _NOT_MATRICES)


def _settings(is_muon: bool, options: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    defaults, rate = _HALVES[is_muon]
    found = {name: group.get(name, options.get(name, default)) for name, default in defaults.items()}
    if rate in options and "lr" not in group:
        found["lr"] = options[rate]
    if "betas" in found:
        found["betas"] = tuple(found["betas"])
    if "eps" in found:
        found["adamw_eps"] = found.pop("eps")
    return found
