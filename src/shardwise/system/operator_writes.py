"""Which of its arguments an operator of PyTorch writes to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

UNMARKED = frozenset(
    {
        *("aten::batch_norm", "aten::native_batch_norm", "aten::_batch_norm_impl_index", "aten::cudnn_batch_norm"),
        *("aten::miopen_batch_norm", "aten::batch_norm_update_stats", "aten::batch_norm_gather_stats"),
        "aten::batch_norm_gather_stats_with_counts",
    }
)
"""Operators that write to running statistics, in training if they can be told whether they train, and whose schemas do
not say so. Nor do they count these writes in the versions of tensors."""


def may_write(schema: Any) -> bool:
    """Whether an operator with this schema may write to an argument."""
    return schema.is_mutable or schema.name in UNMARKED


def written_by(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator with this schema writes to when it is called with `args` and `kwargs`."""
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given.update(zip(given, args, strict=False))
    given.update(kwargs)
    names = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
    if schema.name in UNMARKED and given.get("training", True):
        names += ["running_mean", "running_var"]
    return [given.get(name) for name in names]
