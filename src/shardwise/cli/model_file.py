"""A model from a Python file, built without memory: its units, and what it holds on a batch."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.cli.explanation import UnitSize, describe_offload
from shardwise.comm import Group, Line
from shardwise.errors import ModelError, nearest
from shardwise.fit.budget import (
    Fitted,
    Ranks,
    choices_by_pp_rank,
    of_params,
    params_by_pp_rank,
    within_budget,
)
from shardwise.fit.stage_rehearsal import StageRehearsal
from shardwise.memory import (
    LabelledTable,
    Unit,
    UnitChoice,
    choose_units,
    in_own_precision,
    make_unit,
    unit_specs,
)
from shardwise.optim import hidden_matrices
from shardwise.parallel.conversions import Converted, check_plan, convert
from shardwise.parallel.experts import AXIS as EXPERTS
from shardwise.parallel.experts import EXPERT_LOAD, expert_split, loaded
from shardwise.parallel.model_axes import boxes_for, rows_for, sequence_parts, split_of
from shardwise.parallel.pipeline import AXIS as PIPELINE
from shardwise.parallel.pipeline import StagedModel, StageLayout, has_pipeline, stage_layout
from shardwise.parallel.sequence import rehearsed_by
from shardwise.parallel.tensor import AXIS, Regions
from shardwise.plan import Plan
from shardwise.plan.mesh import SEQUENCE_AXIS, Mesh
from shardwise.plan.placement import WIDTH, Table
from shardwise.program import Activations, UnitSpec, Update, update_by
from shardwise.runtime.activations import treatments_for
from shardwise.runtime.rehearsal import Around, nothing_around, rehearse
from shardwise.system.devices import TorchAccelerator
from shardwise.system.telemetry import ByteMeter, Ledger


def units_of(
    source: str, model: nn.Module, plan: Plan, mesh: Mesh, optimizer: str | None = None
) -> tuple[tuple[UnitSpec, ...], tuple[UnitSize, ...]]:
    """The units that `plan` makes of `model`, which was built from `source`, and their sizes."""
    choices, rows = _choices(model, plan, mesh), _rows(model, plan, mesh)
    updates = _updates(model, optimizer) if optimizer else None
    on_cpu = _device().type == "cpu"
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
    updates = _updates(model, optimizer) if optimizer else None
    ranks = Ranks(on_cpu=_device().type == "cpu", num_local=per_host)
    return within_budget(model, in_own_precision(plan, model), mesh, ranks, updates, num_states)


def converted(model: nn.Module, plan: Plan) -> Converted:
    """Convert the modules of `model` in place, as `shard` does first."""
    found = convert(model)
    check_plan(found, plan)
    return found


def stages_of(model: nn.Module, plan: Plan, mesh: Mesh) -> str:
    """Which rank along the pipeline has which modules, one line each; "" without a pipeline."""
    return str(stage_layout(model, plan, mesh)) if has_pipeline(mesh) else ""


def stages_by_unit(model: nn.Module, plan: Plan, mesh: Mesh) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """The pipeline rank that has the units of `units_of`, and for each unit the stages that use it; (0, ()) without a
    pipeline."""
    if not has_pipeline(mesh):
        return 0, ()
    layout = stage_layout(model, plan, mesh)
    pp_rank = _largest(model, layout)
    own = {stage: layout.params_of(model, stage) for stage in layout.at(pp_rank)}
    rows = _rows(model, plan, mesh)
    every = _choices(model, plan, mesh)
    choices = [choice for choice, spec in zip(every, unit_specs(every, rows, mesh), strict=True) if spec.flats]
    return pp_rank, tuple(
        tuple(stage for stage, params in own.items() if any(param in params for param in choice.params.values()))
        for choice in choices
    )


def _choices(model: nn.Module, plan: Plan, mesh: Mesh) -> list[UnitChoice]:
    """The units of rank 0, which has the most; with a pipeline, of the pipeline rank with the most parameters."""
    by_rank, _ = choices_by_pp_rank(model, plan, mesh)
    return by_rank[_largest(model, stage_layout(model, plan, mesh))] if has_pipeline(mesh) else by_rank[0]


def _rows(model: nn.Module, plan: Plan, mesh: Mesh) -> dict[nn.Parameter, LabelledTable]:
    return rows_for(model, plan, mesh, expert_split(model, plan, mesh, 0))


def experts_of(model: nn.Module, plan: Plan, mesh: Mesh) -> tuple[str, int]:
    """Which rank along `ep` has which experts, one line each, and the elements that all expert modules send for one
    choice of a token, one way; ("", 0) without expert parallelism."""
    experts = expert_split(model, plan, mesh, 0)
    return ("", 0) if experts is None else (str(experts), sum(found.hidden_size for found in experts.modules))


def _largest(model: nn.Module, layout: StageLayout) -> int:
    """The pipeline rank with the most parameters."""
    sizes = [sum(param.numel() for param in params) for params in params_by_pp_rank(model, layout)]
    return sizes.index(max(sizes))


def activations_of(
    model: nn.Module,
    source: str,
    plan: Plan,
    table: Table,
    mesh: Mesh,
    converted: Converted,
    expert_load: float = EXPERT_LOAD,
) -> Counted:
    """What `model`, with its `converted` modules, holds and sends in a forward and backward on the batch that
    `FILE:CALLABLE` returns; with a pipeline, for the rank with the most parameters.

    Runs the file and the callable, and the model's forward on tensors without values, which claim to be on a GPU if
    this machine has one. With sequence parallelism the batch is a rank's part. Experts get `expert_load` times an even
    share of the tokens, or the most that their capacity lets all ranks send.
    """
    make = _loaded("--batch", source, "train.py:sample_batch")
    try:
        batch = make()
    except Exception as error:
        raise ModelError(f"{source} failed to make a batch: {type(error).__name__}: {error}.") from error
    parts = _Parts(plan, table, mesh, _device(), expert_load, converted)
    if has_pipeline(mesh):
        return parts.of_stages(model, batch)
    ledger = Ledger()
    around = parts.around(model, ledger)
    units = parts.split(model, ledger)
    treatments = treatments_for(model, choose_units(model, plan), plan)
    activations = rehearse(
        model, units, batch, device=parts.device, compute=table.compute, around=around, treatments=treatments
    )
    return Counted(activations, _by_axis(ledger))


class Counted(NamedTuple):
    """What a rank holds, and what it sends by mesh axis, in the forward and backward of one micro-batch; and what it
    sends once per step for tied parameters."""

    activations: Activations
    sent_bytes: dict[str, int]
    tied_bytes: int = 0


@dataclass(frozen=True)
class _Parts:
    """The first rank's part of a model under a plan, to be rehearsed."""

    plan: Plan
    table: Table
    mesh: Mesh
    device: torch.device
    expert_load: float
    converted: Converted

    def of_stages(self, model: nn.Module, batch: object) -> Counted:
        """For the rank with the most parameters. Stages of other ranks are rehearsed for their outputs."""
        layout = stage_layout(model, self.plan, self.mesh)
        rehearsals, ledgers = [], [Ledger() for _ in range(layout.num_ranks)]
        for pp_rank, ledger in enumerate(ledgers):
            own = copy.deepcopy(model)
            treatments = treatments_for(own, choose_units(own, self.plan), self.plan)
            treatments.check_stages(own, layout.pieces)
            around, params = self.around(own, ledger), params_by_pp_rank(own, layout)[pp_rank]
            split = split_of(own, self.plan, self.mesh, 0, expert_split(own, self.plan, self.mesh, 0))
            parts = sequence_parts(split, self.mesh, layout)
            units = self.split(own, ledger, params)
            staged = StagedModel(own, layout, pp_rank, parts)
            present = set(own.modules())
            for unit in units:
                unit.sites = [site for site in unit.sites if site in present]
            left = treatments.within(own)
            rehearsals.append(
                StageRehearsal(staged, units, batch, self.device, self.table.compute, treatments=left, around=around)
            )
        arrived, largest = None, _largest(model, layout)
        sent_bytes: Counter[str] = Counter()
        for stage in range(len(layout.stages)):
            pp_rank = layout.pp_rank_of(stage)
            arrived = rehearsals[pp_rank].rehearse(stage, arrived)
            sent_bytes.update(_by_axis(ledgers[pp_rank]) if pp_rank == largest else {})
        sent_bytes[PIPELINE] += rehearsals[largest].sent_bytes
        return Counted(rehearsals[largest].together(), dict(sent_bytes), _tied_bytes(rehearsals[largest]))

    def split(self, model: nn.Module, ledger: Ledger, params: set[torch.Tensor] | None = None) -> list[Unit]:
        """The units of `model`, or of some `params` of it. Changes the model in place so that `ledger` counts what it
        sends."""
        plan, mesh = self.plan, self.mesh
        experts = expert_split(model, plan, mesh, 0)
        split = split_of(model, plan, mesh, 0, experts)
        boxes = boxes_for(model, mesh, 0, split, experts)
        rows, first = rows_for(model, plan, mesh, experts), dict.fromkeys(mesh.axes, 0)
        choices = [replace(choice, boxes=boxes) for choice in choose_units(model, plan)]
        choices = choices if params is None else of_params(choices, params)
        on_cpu = self.device.type == "cpu"
        specs = unit_specs(choices, rows, mesh, on_cpu=on_cpu)
        units = [
            make_unit(choice, spec, rows, first, ByteMeter(), self.device)
            for choice, spec in zip(choices, specs, strict=True)
        ]
        if experts is not None:
            experts.carry_out(self._line(EXPERTS, ledger))
        if split is not None:
            line = self._line(AXIS, ledger)
            split.carry_out(line, Regions(line))
        self.converted.of_copy(model).connect(mesh, lambda axis: self._line(axis, ledger))
        return [unit for unit in units if unit.flats]

    def around(self, model: nn.Module, ledger: Ledger) -> Around:
        """The context of a twin of `model` while it computes; `model` itself is still whole."""
        has_sequences = SEQUENCE_AXIS in self.mesh.axes and self.mesh.size(SEQUENCE_AXIS) > 1
        over_sequences = rehearsed_by(model, self.plan, self.mesh, ledger) if has_sequences else nothing_around

        @contextmanager
        def around(twin: nn.Module) -> Iterator[None]:
            ledger.clear()  # a repeated rehearsal counts once
            if AXIS in self.mesh.axes and self.device.type == "cpu":
                self._line(AXIS, ledger).all_same(b"")  # each forward in training compares its batch
            with loaded(twin, self.expert_load), over_sequences(twin):
                yield

        return around

    def _line(self, axis: str, ledger: Ledger) -> Line:
        return Line(None, Group(axis, self.mesh.group(0, axis), 0), ledger)


def _tied_bytes(rehearsal: StageRehearsal) -> int:
    """Bytes that a rank sends in one step to add up gradients of parameters that other stages have too."""
    holders, total = rehearsal.staged.holders, 0
    for flat in (flat for unit in rehearsal.units for flat in unit.flats if flat.spec.trainable):
        others = len(holders[flat.slots[0].name]) - 1
        table = flat.spec.table
        first = dict.fromkeys(table.axes, 0)
        total += others * flat.spec.layout.span(table.optim.shard, first).numel * WIDTH[table.due.dtype]
    return total


def _by_axis(ledger: Ledger) -> dict[str, int]:
    """Bytes sent, by mesh axis."""
    found: Counter[str] = Counter()
    for (_, axis), num_bytes in ledger.sent_bytes.items():
        found[axis] += num_bytes
    return dict(found)


def _device() -> torch.device:
    """The device on which a job on this machine would compute."""
    found = TorchAccelerator.found()
    return torch.device(found.kind if found is not None else "cpu")


def _updates(model: nn.Module, optimizer: str) -> dict[nn.Parameter, Update]:
    """How the optimizer with that name updates each parameter."""
    hidden = set(hidden_matrices(model))
    trained = [param for param in model.parameters() if param.requires_grad]
    return {param: update_by(optimizer, tuple(param.shape), is_hidden=param in hidden) for param in trained}


def build_model(source: str) -> nn.Module:
    """Call `FILE:CALLABLE` on the meta device, where parameters take no memory."""
    build = _loaded("--model", source, "train.py:build_model")
    file, _, name = source.rpartition(":")
    try:
        with torch.device("meta"):
            model = build()
    except Exception as error:
        raise ModelError(
            f"{name} in {file} failed on the meta device, where tensors have shapes but no values: "
            f"{type(error).__name__}: {error}. Build the model without reading values or loading weights."
        ) from error
    if not isinstance(model, nn.Module):
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
