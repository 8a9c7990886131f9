"""A model from a Python file, built without memory: its units, and what it holds on a batch."""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardwise.cli.explanation import UnitSize, describe_offload
from shardwise.errors import ConfigError, ModelError, nearest
from shardwise.fit.budget import Fitted, Ranks, fit_on_fewer, host_bytes_on, within_budget
from shardwise.fit.clock import RankProgram
from shardwise.fit.few_blocks import count_alike
from shardwise.fit.fewer_groups import fewer_groups
from shardwise.fit.foreseen import (
    Counted,
    choices_of,
    count_step,
    device_here,
    largest_pp_rank,
    rank_units,
    rows_of,
    updates_of,
)
from shardwise.fit.hardware import Hardware
from shardwise.fit.measured_work import OperatorClock
from shardwise.fit.smaller_meshes import PlainModel, in_words, joined
from shardwise.fit.stage_balance import stage_balance
from shardwise.memory import UnitChoice, choose_units, in_own_precision, unit_specs
from shardwise.parallel.conversions import Converted, check_plan, conversions_of, convert
from shardwise.parallel.experts import EXPERT_LOAD, expert_split
from shardwise.parallel.outline import SmallerMeshes, smaller_meshes
from shardwise.parallel.pipeline import stage_layout
from shardwise.plan import Budget, Plan
from shardwise.plan.mesh import SEQUENCE_AXIS, Mesh
from shardwise.plan.replica_groups import Smaller, fastest, fastest_of_each_size, mesh_of, num_leaving
from shardwise.program import UnitSpec
from shardwise.runtime.activations import treatments_for
from shardwise.system.machine import memory_here
from shardwise.system.units import format_bytes


def units_of(
    source: str, model: nn.Module, plan: Plan, mesh: Mesh, optimizer: str | None = None
) -> tuple[tuple[UnitSpec, ...], tuple[UnitSize, ...]]:
    """The units that `plan` makes of `model`, which was built from `source`, and their sizes."""
    choices, rows = choices_of(model, plan, mesh), rows_of(model, plan, mesh)
    updates = updates_of(model, optimizer) if optimizer else None
    on_cpu = device_here().type == "cpu"
    specs = unit_specs(choices, rows, mesh, updates, on_cpu=on_cpu)
    kept = [(choice, spec) for choice, spec in zip(choices, specs, strict=True) if spec.flats]
    if not kept:
        raise ModelError(f"{source} builds a {type(model).__name__} without parameters, so there is nothing to shard.")
    treatments = treatments_for(model, choose_units(model, plan), plan)
    sizes = (replace(_size(choice, spec), activations=treatments.describe(choice.name)) for choice, spec in kept)
    return tuple(spec for _, spec in kept), tuple(sizes)


def within_budget_of(
    model: nn.Module, plan: Plan, mesh: Mesh, optimizer: str | None, num_states: int, per_host: int
) -> Fitted:
    """`plan` with the offload that its budget requires, with `per_host` ranks on each host."""
    updates = updates_of(model, optimizer) if optimizer else None
    ranks = Ranks(on_cpu=device_here().type == "cpu", num_local=per_host)
    return within_budget(model, in_own_precision(plan, model), mesh, ranks, updates, num_states)


def converted(model: nn.Module, plan: Plan) -> Converted:
    """Convert the modules of `model` in place, as `shard` does first."""
    found = convert(model, conversions_of(plan, model))
    check_plan(found, plan)
    return found


def ranks_on(per_host: int, hardware: Hardware | None) -> Ranks:
    """Those of a job with so many on each host, which have the memory of the `hardware`, if that is given."""
    if hardware is None or hardware.host is None:
        return Ranks(on_cpu=device_here().type == "cpu", num_local=per_host)
    device_bytes = None if hardware.is_processor else hardware.memory_bytes
    return Ranks(hardware.is_processor, per_host, hardware.host.memory_bytes, device_bytes)


def smaller_meshes_of(
    model: nn.Module, plan: Plan, mesh: Mesh, optimizer: str | None, num_states: int, ranks: Ranks
) -> SmallerMeshes:
    """Where an elastic job goes on without a whole replica group, and what fewer ranks keep off their devices. `plan`
    still has its budget."""
    updates = updates_of(model, optimizer) if optimizer else None
    own = in_own_precision(plan, model)

    def fit(there: Plan, on: Mesh) -> Plan:
        return fit_on_fewer(model, there, on, ranks, updates, num_states)

    smaller = smaller_meshes(model, own, mesh, fit)
    return fewer_groups(own, mesh, fit).beside(smaller, has_budget=plan.budget != Budget())


def room_after_a_loss(
    model: nn.Module,
    plan: Plan,
    smaller: SmallerMeshes,
    mesh: Mesh,
    optimizer: str | None,
    num_states: int,
    ranks: Ranks,
) -> str:
    """How much of a host's memory an elastic job takes without one of its ranks, in a sentence; empty if none goes on.
    Where it is not known of the `ranks`, this machine's is shown beside it."""
    size = mesh.world_size - num_leaving(mesh, smaller.meshes)
    if size in (0, mesh.world_size):
        return ""
    on = mesh_of(mesh.named_sizes, smaller.meshes, size)
    own = in_own_precision(plan, model)
    there = smaller.plan_on(own.model_copy(update={"mesh": on.named_sizes}), size)
    updates = updates_of(model, optimizer) if optimizer else None
    found = host_bytes_on(model, there, on, ranks, updates, num_states)
    room, has = ranks.host_bytes, "it has"
    if room is None:
        room, has = memory_here().total_bytes, "this machine has"
    needs = (
        f"with {size} ranks left, a host holds up to {format_bytes(found.held)}, with images and copies and without "
        f"activations, and {format_bytes(found.images)} more while ranks recover; {has} {format_bytes(room)}"
    )
    if smaller.least > size:
        needs += f". The budget needs {smaller.least} ranks, so the job waits for others, or ends"
    elif found.held + found.images > room:
        needs += ". That is too little: the system may end ranks for lack of memory"
    return needs


def stages_of(model: nn.Module, plan: Plan, mesh: Mesh) -> str:
    """Which rank along the pipeline has which modules, one line each; "" without a pipeline."""
    return str(stage_layout(model, plan, mesh)) if mesh.has_stages else ""


def stages_by_unit(model: nn.Module, plan: Plan, mesh: Mesh) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """The pipeline rank that has the units of `units_of`, and for each unit the stages that use it; (0, ()) without a
    pipeline."""
    if not mesh.has_stages:
        return 0, ()
    layout = stage_layout(model, plan, mesh)
    pp_rank = largest_pp_rank(model, layout)
    by_stage = layout.params_by_stage(model)
    own = {stage: by_stage[stage] for stage in layout.at(pp_rank)}
    rows = rows_of(model, plan, mesh)
    every = choices_of(model, plan, mesh)
    choices = [choice for choice, spec in zip(every, unit_specs(every, rows, mesh), strict=True) if spec.flats]
    return pp_rank, tuple(
        tuple(stage for stage, params in own.items() if any(param in params for param in choice.params.values()))
        for choice in choices
    )


def experts_of(model: nn.Module, plan: Plan, mesh: Mesh) -> tuple[str, int]:
    """Which rank along `ep` has which experts, one line each, and the elements that all expert modules send for one
    choice of a token, one way; ("", 0) without expert parallelism."""
    experts = expert_split(model, plan, mesh, 0)
    return ("", 0) if experts is None else (str(experts), sum(found.hidden_size for found in experts.modules))


@dataclass(frozen=True)
class Foreseen:
    """What was counted of the rank that is explained, and, if it was asked for, what a clock needs of all ranks."""

    counted: Counted
    programs: tuple[RankProgram, ...] = ()


def activations_of(
    model: nn.Module,
    source: str,
    plan: Plan,
    mesh: Mesh,
    converted: Converted,
    expert_load: float,
    optimizer: str | None,
    *,
    hardware: Hardware | None,
) -> Foreseen:
    """What `model`, with its `converted` modules, holds and sends in a forward and backward on the batch that
    `FILE:CALLABLE` returns; with a pipeline, for the rank with the most parameters.

    Runs the file and the callable, and `count_step`, on tensors without values, which claim to be on a GPU if this
    machine has one. With the `hardware` on which a step is to be timed, the programs of all ranks are returned too.
    """
    batch = batch_from(source)
    pp_rank = largest_pp_rank(model, stage_layout(model, plan, mesh)) if mesh.has_stages else 0
    if hardware is None:
        return Foreseen(count_step(model, batch, plan, mesh, expert_load=expert_load, converted=converted)[pp_rank])
    on_cpu = hardware.is_processor
    kinds = rank_units(model, plan, mesh, optimizer=optimizer, on_cpu=on_cpu)
    counted = count_alike(model, batch, plan, mesh, expert_load=expert_load, converted=converted, on_cpu=on_cpu)
    programs = (kind.program(plan, its) for kind, its in zip(kinds, counted, strict=True))
    return Foreseen(counted[pp_rank], tuple(programs))


def expert_load_of(given: float | None) -> float:
    """Which multiple of an even share of the tokens a rank's experts compute: what `--expert-load` says, or the usual
    one. Raises `ConfigError` for less than an even share."""
    if given is not None and not 1 <= given < math.inf:
        raise ConfigError(f"--expert-load is {given}; give a multiple of an even share, at least 1.")
    return EXPERT_LOAD if given is None else given


def clock_here() -> OperatorClock:
    """Runs operators on the device on which a job on this machine would compute."""
    return OperatorClock(device_here())


def stage_times(
    model: nn.Module, source: str, plan: Plan, mesh: Mesh, converted: Converted, on: Sequence[Hardware | OperatorClock]
) -> str:
    """How long each stage of a pipeline computes, one line each, by the first of `on` that can say it for all of the
    model's operators; empty without a pipeline."""
    if not mesh.has_stages:
        return ""
    stages, batch = stage_layout(model, plan, mesh), batch_from(source)
    for one in on:
        with suppress(ConfigError, ModelError):  # it is advice, and other plans are rehearsed for it
            return str(stage_balance(model, stages, batch, plan, mesh, one, converted))
    return ""


def fastest_of(
    smaller: SmallerMeshes,
    model: nn.Module,
    source: str,
    plan: Plan,
    mesh: Mesh,
    converted: Converted,
    optimizer: str | None,
    *,
    hardware: Hardware,
) -> tuple[Smaller, dict[int, float], str]:
    """Those of the `smaller` meshes on which an elastic job goes on, and the seconds of a step on each of them that has
    fewer ranks than a group, by their ranks and in words. The batch of `source` is one of `mesh`."""
    whole = joined(batch_from(source), mesh.degree(SEQUENCE_AXIS))
    plain = PlainModel(model, updates_of(model, optimizer) if optimizer else None, converted)
    every = plain.seconds(whole, plan, mesh, smaller, hardware, on_cpu=hardware.is_processor)
    of_each_size, seconds = fastest_of_each_size(smaller.every, every)
    found = fastest(of_each_size, seconds)
    return found, seconds, in_words(smaller.every[1:], found, every)


def batch_from(source: str) -> object:
    """What `FILE:CALLABLE` returns: a micro-batch."""
    make = _loaded("--batch", source, "train.py:sample_batch")
    try:
        return make()
    except Exception as error:
        raise ModelError(
            f"{source} failed to make a batch: {type(error).__name__}: {error}. It is called here without arguments, "
            f"and has to return what the model is called with."
        ) from error


def build_model(source: str) -> nn.Module:
    """Call `FILE:CALLABLE` on the meta device, where parameters take no memory."""
    build = _loaded("--model", source, "train.py:build_model")
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:
        file, _, name = source.rpartition(":")
        raise ModelError(
            f"{name} in {file} failed on the meta device, where tensors have shapes but no values: "
            f"{type(error).__name__}: {error}. Build the model without reading values or loading weights."
        ) from error
    return _a_module(model, source)


def real_model(source: str) -> nn.Module:
    """Call `FILE:CALLABLE`, whose errors are its own."""
    return _a_module(_loaded("--model", source, "train.py:build_model")(), source)


def _a_module(model: object, source: str) -> nn.Module:
    if not isinstance(model, nn.Module):
        file, _, name = source.rpartition(":")
        raise ModelError(f"{name} in {file} returns {type(model).__name__}; it must return a torch.nn.Module.")
    return model


def _loaded(option: str, source: str, example: str) -> Callable[[], Any]:
    """The callable of `FILE:CALLABLE`, the value of `option`."""
    file, colon, name = source.rpartition(":")
    if not (colon and file and name):
        raise ModelError(f"{option} is {source!r}; write FILE:CALLABLE, such as {example}.")
    return _callable(_imported(Path(file)), file, name)


def _imported(path: Path) -> ModuleType:
    """`path` as a module. It can import files beside it, as if it were run."""
    if not path.is_file():
        folder = path.parent
        files = [file.name for file in folder.glob("*.py")] if folder.is_dir() else []
        hint = nearest(path.name, files) if files else "There is no Python file in that folder."
        raise ModelError(f"There is no file {str(path)!r}. {hint}")
    spec = importlib.util.spec_from_file_location(f"_explained_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} is not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their own module up there
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"{path} could not be imported: {type(error).__name__}: {error}. "
            f"Put what must not run on import under `if __name__ == '__main__':`."
        ) from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    return module


def _callable(module: ModuleType, file: str, name: str) -> Callable[[], Any]:
    build = getattr(module, name, None)
    if not callable(build):
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        hint = nearest(name, names) if names else "The file defines none."
        raise ModelError(f"{file} has no callable {name!r}. {hint}")
    needed = _needed(build)
    if needed:
        raise ModelError(
            f"{name} in {file} has the required arguments {' and '.join(needed)}. Give a callable "
            f"without required arguments, such as `def build(): return {name}(...)`."
        )
    found: Callable[[], Any] = build
    return found


def _needed(build: Callable[..., Any]) -> list[str]:
    """The required arguments of `build`, as far as its signature is known."""
    try:
        parameters = inspect.signature(build).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [one.name for one in parameters if one.default is one.empty and one.kind not in optional]


def _size(choice: UnitChoice, spec: UnitSpec) -> UnitSize:
    frozen = sum(param.numel() for param in choice.params.values() if not param.requires_grad)
    numel = sum(param.numel() for param in choice.params.values())
    return UnitSize(choice.name, numel, frozen, describe_offload(spec.flats))
