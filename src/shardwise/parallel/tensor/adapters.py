"""Low-rank adapters (LoRA, arXiv:2106.09685) on split linear modules, as the peft library wraps them.

This file knows classes of peft without importing it. The product of two small matrices, `lora_A` and then `lora_B`, is
added to the output of the wrapped `base_layer`. If that is a column module, `lora_B` is split by output features; if it
is a row module, `lora_A` is split by input features. The other matrix of the pair is replicated.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardwise.errors import ModelError
from shardwise.parallel.tensor.known_models import TensorRule

BASE, DOWN, UP, DROPOUT = "base_layer", "lora_A", "lora_B", "lora_dropout"
ORIGINAL = "original_module"


def is_adapted(module: nn.Module) -> bool:
    """Whether a module is a wrapper with adapters."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in (BASE, DOWN, UP))


def rules_inside(path: str, module: nn.Module, rule: TensorRule) -> dict[str, TensorRule]:
    """The rules of the modules inside a wrapper, by path, given the rule of the wrapped module.

    Raises `ModelError` for adapters that need the whole weight (DoRA).
    """
    if getattr(module, "lora_variant", None) or any((getattr(module, "use_dora", None) or {}).values()):
        raise ModelError(
            f"{path} has a variant of LoRA (such as DoRA) that needs whole weights, but tensor parallelism splits "
            f"them. Use plain LoRA, or leave {path} out of tensor.plan."
        )
    inside = {f"{path}.{BASE}": rule}
    matrix = {"column": UP, "row": DOWN, "mla_kv_a_proj": UP}.get(rule.style)  # others have whole inputs and outputs
    if matrix is not None:
        inside |= {f"{path}.{matrix}.{name}": rule for name, _ in getattr(module, matrix).named_children()}
    return inside


def refuse_prefixes(model: nn.Module) -> None:
    """Raise `ModelError` for prefix tuning (arXiv:2101.00190), which adds keys and values of all heads to the cache."""
    kinds = [getattr(config, "peft_type", None) for config in (getattr(model, "peft_config", None) or {}).values()]
    if "PREFIX_TUNING" in kinds:
        raise ModelError(
            f"{type(model).__name__} is trained by prefix tuning, whose keys and values are those of all heads, but "
            f"tensor parallelism gives each rank some of them. Use prompt tuning, P-tuning or LoRA, or leave 'tp' out "
            f"of the mesh."
        )


def trained_copies(path: str, module: nn.Module) -> list[str]:
    """The modules with which peft replaces a fully trained one (`modules_to_save`): the original and its copies, of
    which the active one is called."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict) or not isinstance(getattr(module, ORIGINAL, None), nn.Module):
        return []
    return [f"{path}.{ORIGINAL}", *(f"{path}.modules_to_save.{name}" for name in copies)]


def dropouts(module: nn.Module) -> Iterator[nn.Module]:
    """The dropout before each adapter."""
    found = getattr(module, DROPOUT, None)
    if isinstance(found, nn.Module):
        yield from (one for one in found.children() if isinstance(one, nn.modules.dropout._DropoutNd))
