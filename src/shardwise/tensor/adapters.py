"""Adapters of low rank (LoRA, arXiv:2106.09685), as the peft library wraps them around a linear module.

Facts about classes of that library, which is not imported. A product of two small matrices, `lora_A` and then `lora_B`,
is added to what the wrapped `base_layer` returns. So the matrix on the side on which the base is cut is cut along with
it, and the other one, whose other side is the rank of the adapter, is whole everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from shardwise.errors import ModelError
from shardwise.tensor.tables import TensorRule

BASE, DOWN, UP, DROPOUT = "base_layer", "lora_A", "lora_B", "lora_dropout"
ORIGINAL = "original_module"


def is_adapted(module: nn.Module) -> bool:
    """Whether adapters are wrapped around a module."""
    return all(isinstance(getattr(module, name, None), nn.Module) for name in (BASE, DOWN, UP))


def rules_inside(path: str, module: nn.Module, rule: TensorRule) -> dict[str, TensorRule]:
    """What a rule for the wrapped module means for what is inside, by path.

    Raises `ModelError` for adapters that look at the whole of a weight (DoRA).
    """
    if getattr(module, "lora_variant", None) or any((getattr(module, "use_dora", None) or {}).values()):
        raise ModelError(
            f"{path} has a variant of LoRA (DoRA or the like) that works on whole weights, and the plan's tensor "
            f"parallelism cuts them. Use plain LoRA, or leave {path} out by tensor.plan."
        )
    inside = {f"{path}.{BASE}": rule}
    cut = {"column": UP, "row": DOWN, "mla_kv_a_proj": UP}.get(rule.style)  # others have whole inputs and outputs
    if cut is not None:
        inside |= {f"{path}.{cut}.{name}": rule for name, _ in getattr(module, cut).named_children()}
    return inside


def trained_copies(path: str, module: nn.Module) -> list[str]:
    """The modules that peft keeps in the place of one that is trained whole (`modules_to_save`): the original and its
    copies, of which the active one is called."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict) or not isinstance(getattr(module, ORIGINAL, None), nn.Module):
        return []
    return [f"{path}.{ORIGINAL}", *(f"{path}.modules_to_save.{name}" for name in copies)]


def dropouts(module: nn.Module) -> Iterator[nn.Module]:
    """The dropout before each adapter."""
    found = getattr(module, DROPOUT, None)
    if isinstance(found, nn.Module):
        yield from (one for one in found.children() if isinstance(one, nn.modules.dropout._DropoutNd))
