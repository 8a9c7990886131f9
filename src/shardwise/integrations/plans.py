"""Combines a plan with the settings of a library for precision, compilation and accumulation."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError

PlanLike = sw.Plan | str | Path | dict[str, Any]
_PRECISIONS = {"no": None, "bf16": "bf16", "fp16": "fp16"}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
HALVES = {"bf16", "fp16"}


def has_stages(plan: sw.Plan) -> bool:
    """Whether the plan's mesh splits models into pipeline stages."""
    return (plan.mesh or {}).get("pp", 1) != 1


def refuse_elastic_job(library: str) -> None:
    """Raise `ConfigError` in a rank of `shardwise launch --elastic`, also the only one, which others would join."""
    if "SHARDWISE_MEMBER" in os.environ:
        raise ConfigError(
            f"{library} makes a process group and divides the samples for one number of ranks, so its script could not "
            f"go on without a lost rank, nor let one join. Start it with --max-restarts N instead of --elastic: when a "
            f"rank is lost, all restart, and the script goes on from its last checkpoint."
        )


def data_share(plan: sw.Plan, rank: int, size: int) -> tuple[int, int]:
    """The index of the data shard of `rank`, and the number of shards, for a world of `size` ranks.

    The same as `engine.data_ranks`, before there is an engine. Raises `ConfigError` for a mesh of another size.
    """
    return sw.Mesh.of(plan.mesh, size).data_place(rank) if plan.mesh else (rank, size)


def resolved_plan(plan: sw.Plan, model: nn.Module, mixed_precision: str, compiler: str | None, library: str) -> sw.Plan:
    """`plan` with the precision and compiler set in the library, if the plan does not set them.

    `mixed_precision` is `no`, `bf16` or `fp16`. With `no`, parameters compute in the dtype in which they were loaded.
    Raises `ConfigError` if plan and library contradict each other.
    """
    overrides = []
    given = plan.precision if "precision" in plan.model_fields_set else None
    if mixed_precision not in _PRECISIONS:
        raise ConfigError(
            f"mixed_precision {mixed_precision!r} is not supported with {library}. Use bf16, fp16 or no; for fp8 take "
            f"bf16, and set fp8: tensorwise in the plan."
        )
    if given == "auto":
        raise ConfigError(
            f"The plan's precision is auto, but a model under {library} is fed in the precision that is set there. Set "
            f"bf16, fp16 or none there, and leave precision out of the plan."
        )
    if given is not None and mixed_precision != "no" and given in HALVES and given != mixed_precision:
        raise ConfigError(
            f"The plan sets precision {given}, but {library} is set to {mixed_precision}. Set only one of them."
        )
    own = dtype_of(model) if mixed_precision == "no" else _PRECISIONS[mixed_precision]
    if given is None and own is not None:
        overrides.append(f"precision={own}")
    if compiler is not None:
        if plan.compile not in (None, compiler):
            raise ConfigError(
                f"The plan sets compile {plan.compile}, but {library} is set to {compiler}. Set only one of them."
            )
        overrides.append(f"compile={compiler}")
    return sw.load_plan(plan, overrides)


def with_fp8(plan: sw.Plan, settings: dict[str, Any]) -> sw.Plan:
    """`plan` with what the library was told about fp8; what the plan itself says counts more."""
    if "fp8" in plan.model_fields_set:
        return plan
    return sw.load_plan({**{name: getattr(plan, name) for name in plan.model_fields_set}, "fp8": settings})


def dtype_of(model: nn.Module) -> str | None:
    """`bf16` or `fp16` if all floating-point parameters of the model are; `None` otherwise."""
    kinds = {param.dtype for param in model.parameters() if param.is_floating_point()}
    return _NAMES.get(kinds.pop()) if len(kinds) == 1 else None


def require_agreement(plan: sw.Plan, field: str, value: object, wanted: object, where: str) -> None:
    """Raise `ConfigError` where a field that the plan sets and an argument of the library contradict each other."""
    if field in plan.model_fields_set and value != wanted:
        raise ConfigError(
            f"The plan sets {field} {value} ({plan.origin(field)}), but {where} is {wanted}. Leave {field} out of the "
            f"plan; it is taken from {where}."
        )


def without(plan: sw.Plan, *fields: str) -> sw.Plan:
    """The plan without `fields` that the library handles itself."""
    kept = {name: getattr(plan, name) for name in plan.model_fields_set if name not in fields}
    return plan if len(kept) == len(plan.model_fields_set) else sw.load_plan(kept)


def with_rows_on_host(plan: sw.Plan, rows: Iterable[str]) -> sw.Plan:
    """`plan` with these rows of its table (`optim`, `grad`, `param`) on the host, and everything else as it says."""
    changed = plan.model_dump(exclude_unset=True)
    kept = changed.get("rows") or {}
    tiers = {row: {**(kept.get(row) or {}), "tier": "host"} for row in rows}
    return sw.load_plan({**changed, "rows": {**kept, **tiers}})
