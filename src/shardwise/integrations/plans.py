"""What a plan comes to under a library that has settings of its own for the same things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError

PlanLike = sw.Plan | str | Path | dict[str, Any]
_SAME = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
HALVES = {"bf16", "fp16"}


def require_no_stages(plan: sw.Plan, library: str) -> None:
    """Raise `ConfigError` for a plan with stages of a pipeline, for which the library has no loop."""
    if (plan.mesh or {}).get("pp", 1) != 1:
        raise ConfigError(
            f"The plan's mesh has pp, and {library} calls the whole model for each batch. Take a mesh without stages "
            f"here (dp, node, local, ep, tp, sp); or keep pp, and train in a loop of your own: engine = "
            f"sw.shard(model, plan, optimizer=optimizer), then engine.train_step(batch) (docs/pipeline.md)."
        )


def share_of_data(plan: sw.Plan, rank: int, size: int) -> tuple[int, int]:
    """Which share of the data `rank` of `size` is to be given, and of how many: the same for all that share in it.

    What `engine.data_ranks` will be, before there is an engine. Raises `ConfigError` for a mesh of another size.
    """
    return sw.Mesh.of(plan.mesh, size).data_place(rank) if plan.mesh else (rank, size)


def settled(plan: sw.Plan, model: nn.Module, mixed_precision: str, compiler: str | None, library: str) -> sw.Plan:
    """`plan` with the precision and the compiler that the library was asked for, where it says nothing of them.

    `mixed_precision` is `no`, `bf16` or `fp16`. A model that was loaded in bf16 is computed in bf16.
    """
    overrides = []
    if mixed_precision == "no" and "precision" not in plan.model_fields_set:
        plan = _each_in_its_own(plan, model)
    said = plan.precision if "precision" in plan.model_fields_set else None
    if mixed_precision not in _SAME:
        raise ConfigError(f"mixed_precision is {mixed_precision!r}, which no plan has. Take bf16, fp16 or no.")
    if said is not None and mixed_precision != "no" and said in HALVES and said != mixed_precision:
        raise ConfigError(
            f"The plan says precision {said}, and {library} was asked for {mixed_precision}. Say one of the two."
        )
    if said is None:
        own = dtype_of(model)
        overrides.append(f"precision={own if mixed_precision == 'no' and own else _SAME[mixed_precision]}")
    if compiler is not None:
        if plan.compile not in (None, compiler):
            raise ConfigError(
                f"The plan says compile {plan.compile}, and {library} was asked for {compiler}. Say one of the two."
            )
        overrides.append(f"compile={compiler}")
    return sw.load_plan(plan, overrides)


def _each_in_its_own(plan: sw.Plan, model: nn.Module) -> sw.Plan:
    """`plan`, by which frozen parameters in bf16 or fp16 stay so beside others in fp32: a base and its adapters."""
    if dtype_of(model) is not None:
        return plan
    names: dict[str, list[str]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad and param.dtype in _NAMES:
            names.setdefault(_NAMES[param.dtype], []).append(name)
    if not names:
        return plan
    rules = {f"frozen in {dtype}": {"params": found, "precision": dtype} for dtype, found in names.items()}
    kept = {name: getattr(plan, name) for name in plan.model_fields_set}
    return sw.load_plan({**kept, "rules": {**(plan.rules or {}), **rules}})


def dtype_of(model: nn.Module) -> str | None:
    """`bf16` or `fp16` if all floating-point parameters of the model are; `None` otherwise."""
    kinds = {param.dtype for param in model.parameters() if param.is_floating_point()}
    return _NAMES.get(kinds.pop()) if len(kinds) == 1 else None


def require_agreement(plan: sw.Plan, field: str, value: object, wanted: object, where: str) -> None:
    """Raise `ConfigError` where a field that the plan sets and an argument of the library contradict each other."""
    if field in plan.model_fields_set and value != wanted:
        raise ConfigError(
            f"The plan says {field} {value} ({plan.origin(field)}), and {where} says {wanted}. Leave {field} out of "
            f"the plan: {where} counts."
        )


def without(plan: sw.Plan, *fields: str) -> sw.Plan:
    """The plan without what the library does itself."""
    kept = {name: getattr(plan, name) for name in plan.model_fields_set if name not in fields}
    return plan if len(kept) == len(plan.model_fields_set) else sw.load_plan(kept)
