"""Looks up operators by their names in a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from shardwise.errors import ConfigError, nearest
from shardwise.system.torch_private import OpOverload

Operator = OpOverload

GROUPS = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_mm_v2"),
    "attention": (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
    ),
}
"""Groups of operators of `torch.ops.aten`; some versions of PyTorch lack some of them."""


def operators_named(names: Iterable[str], where: str = "activations.keep") -> frozenset[Operator]:
    """All overloads of `matmul`, `attention` or `aten.NAME`.

    Raises `ConfigError` for an unknown operator, and for one that draws random numbers.
    """
    found: set[Operator] = set()
    for name in names:
        if name in GROUPS:
            found.update(one for part in GROUPS[name] for one in _overloads(part))
            continue
        namespace, _, short = name.replace("::", ".").partition(".")
        overloads = _overloads(short.partition(".")[0]) if namespace == "aten" else []
        if not overloads:
            raise ConfigError(
                f"{where} names {name!r}, which is no operator of PyTorch's aten. "
                f"{nearest(name, [*GROUPS, 'aten.mm', 'aten.addmm', 'aten.bmm', 'aten.convolution'])}"
            )
        if any(torch.Tag.nondeterministic_seeded in one.tags and _dropout_at(one) is None for one in overloads):
            raise ConfigError(
                f"{where} names {name!r}, which draws random numbers: without drawing them again, later "
                f"numbers would differ from those of the forward. Leave it out."
            )
        found.update(overloads)
    return frozenset(found)


def draws(operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers: attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    place = _dropout_at(operator)
    if place is None:
        return True
    share = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(share != 0.0)


def _dropout_at(operator: Operator) -> int | None:
    """The index of the dropout probability among the operator's arguments."""
    names = [argument.name for argument in operator._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def _overloads(name: str) -> list[Operator]:
    packet = getattr(torch.ops.aten, name, None) if name else None
    return [getattr(packet, one) for one in packet.overloads()] if packet is not None else []
