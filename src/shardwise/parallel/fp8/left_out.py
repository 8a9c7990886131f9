"""Which layers multiply in 8 bits, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardwise.errors import ConfigError, nearest
from shardwise.parallel.experts import Experts
from shardwise.parallel.fp8.experts import says_what_it_computes
from shardwise.parallel.fp8.linear import Fp8Linear
from shardwise.parallel.fp8.recipes import RECIPES, Recipe
from shardwise.plan import Fp8
from shardwise.system.name_patterns import matches_end

AUTO = "auto"
_ROUTERS = ("router", "gate", "gating", "wg")
"""What routers are called in transformers (`gate` of Mixtral, Qwen, DeepSeek), here, and in DeepSpeed (`wg`)."""
_ADAPTERS = ("lora_A", "lora_B")
"""What peft calls the small matrices of an adapter."""
_EXPERT_DIMS = 3


def sorted_out(model: nn.Module, settings: Fp8, *, splits_experts: bool) -> dict[str, str]:
    """By path of every layer that multiplies with a weight: why it is left as it is, or "" for those that multiply in 8
    bits, in the model's order. `splits_experts`: along `tp` a rank has some features of transformers' experts.

    Raises `ConfigError` for a pattern of `settings.skip` that no layer matches.
    """
    assert settings.recipe is not None
    recipe = RECIPES[settings.recipe]
    skip = (AUTO,) if settings.skip is None else settings.skip
    layers = dict(_layers(model))
    _check_patterns(skip, layers)
    linear = [path for path, one in layers.items() if isinstance(one, nn.Linear) and not _is_adapter(path)]
    ends = dict(zip([*linear[-1:], *linear[:1]], ("the last linear layer", "the first linear layer"), strict=False))
    found = {}
    for path, layer in layers.items():
        reason = _unable_experts(layer, splits_experts) if _stacked(layer) else _unable(layer)
        reason = reason or _odd(layer, recipe)
        if not reason and any(matches_end(path, pattern) for pattern in skip if pattern != AUTO):
            reason = "named in fp8.skip"
        if not reason and AUTO in skip:
            reason = ends.get(path, "") or _unfit(path, layer, recipe)
        found[path] = reason
    return found


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers, and others that multiply with weights as large."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" or _stacked(module):
            yield path, module


def _stacked(module: nn.Module) -> bool:
    """Whether it is a layer of experts, with one matrix for each of them."""
    own = [one for one in module._parameters.values() if one is not None]
    return "Expert" in type(module).__name__ and any(one.dim() == _EXPERT_DIMS for one in own)


def _unable(layer: nn.Module) -> str:
    """Why a layer cannot multiply in 8 bits; "" if it can."""
    if not isinstance(layer, nn.Linear):
        return "Conv1D of transformers"
    if isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "part of nn.MultiheadAttention, which reads its weight itself"
    if "forward" in layer.__dict__ or type(layer).forward not in (nn.Linear.forward, Fp8Linear.forward):
        return f"a {type(layer).__name__} with a forward of its own"
    if not layer.weight.dtype.is_floating_point:
        return f"stored in {str(layer.weight.dtype).removeprefix('torch.')}"
    return ""


def _unable_experts(layer: nn.Module, is_split: bool) -> str:
    is_ours = isinstance(layer, Experts) and type(layer).made_of is Experts.made_of
    if "forward" in layer.__dict__ or not (is_ours or says_what_it_computes(layer)):
        return "stacked experts with a forward of their own"
    return "stacked experts of which each rank along tp has some features" if is_split and not is_ours else ""


def _odd(layer: nn.Module, recipe: Recipe) -> str:
    if any(size % recipe.multiple for sizes in _sizes(layer) for size in sizes):
        return f"with a size that is no multiple of {recipe.multiple}"
    return ""


def _sizes(layer: nn.Module) -> list[tuple[int, int]]:
    """Of each matrix of a linear layer, or of one of several experts: `[out, in]`."""
    if isinstance(layer, nn.Linear):
        return [(layer.out_features, layer.in_features)]
    sizes = [(param.shape[1], param.shape[2]) for param in layer.parameters() if param.dim() == _EXPERT_DIMS]
    return [(last, first) for first, last in sizes] if getattr(layer, "is_transposed", False) else sizes


def _unfit(path: str, layer: nn.Module, recipe: Recipe) -> str:
    """Why a layer is left out unless the plan says otherwise; "" if it is not."""
    if path.rpartition(".")[2] in _ROUTERS:
        return "a router"
    if _is_adapter(path):
        return "an adapter"
    if any(recipe.is_small(*sizes) for sizes in _sizes(layer)):
        return f"too small to gain from {recipe.name}"
    return ""


def _is_adapter(path: str) -> bool:
    return any(part in _ADAPTERS for part in path.split("."))


def _check_patterns(patterns: tuple[str, ...], layers: dict[str, nn.Module]) -> None:
    for pattern in patterns:
        if pattern != AUTO and not any(matches_end(path, pattern) for path in layers):
            raise ConfigError(
                f"The plan's fp8.skip has the pattern {pattern!r}, which matches no linear layer. "
                f"{nearest(pattern, layers)}"
            )
