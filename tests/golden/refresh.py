"""The golden programs: one text per preset, and the step of each optimizer that looks at whole parameters.

`python tests/golden/refresh.py` writes them anew. A refactoring leaves them as they are; a change of a scheme
shows here as the lines that changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwise.plan import Plan, PowerSGD, Wire, WireFormat
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import PRESETS, mesh_for, pack, padded_numel, table_for
from shardwise.program import (
    FactoredMatrix,
    FlatSpec,
    PlacedUpdate,
    StepProgram,
    UnitSpec,
    plan_step,
    render,
    schedule_trace,
    straight_passes,
    straight_trace,
    update_by,
)
from shardwise.program.schedule import schedule_of

FOLDER = Path(__file__).parent
REFRESH = "python tests/golden/refresh.py"
BLOCK, EMBEDDING = 12 * 256**2, 1000 * 256
"""Elements: a transformer block of width 256, and an embedding of 1000 words."""


@dataclass(frozen=True)
class Golden:
    """A program, on which mesh it runs, and what is shown of it, below a comment."""

    comment: str
    step: StepProgram
    mesh: Mesh
    shows_micro_batch: bool = True
    shows_step: bool = True

    @property
    def text(self) -> str:
        shown = (self.step.micro_batch, self.shows_micro_batch), (self.step.step, self.shows_step)
        return self.comment + "".join(render(program) for program, is_shown in shown if is_shown)


def texts() -> dict[str, str]:
    """By file name."""
    return {name: one.text for name, one in programs().items()}


def programs() -> dict[str, Golden]:
    """The program of every preset by file name."""
    steps = {f"step-{name}.txt": _step(name, "zero3") for name in ("lamb", "muon")}
    steps["step-muon-offload.txt"] = _step("muon", "offload")
    steps["step-onebit-adam.txt"] = _step("onebit-adam", "ddp")
    presets = {f"{name}.txt": _text(Plan(preset=name, precision="bf16")) for name in PRESETS}
    factors = Plan(preset="ddp", precision="bf16", powersgd=PowerSGD(rank=4, start_step=0))
    wires = {"codes-hpz.txt": _codes(), "ddp-powersgd.txt": _text(factors)}
    return presets | steps | wires | {"schedule-1f1b-zero3.txt": _schedule()}


def _codes() -> Golden:
    """Parameters and gradients sent as codes between hosts."""
    plan = Plan(
        preset="hpz",
        precision="bf16",
        mesh={"node": 2, "local": 2},
        wire=Wire(param=WireFormat(dtype="int8"), grad=WireFormat(dtype="int4")),
    )
    mesh = mesh_for(plan, 4)
    units = _units(plan, mesh)
    planned = plan_step(units, straight_trace(units))
    comment = f"# hpz in bf16 on {mesh} with int8 parameters and int4 gradients along node. Refresh: {REFRESH}\n"
    return Golden(comment, planned, mesh)


def _schedule() -> Golden:
    """All micro-batches of a step on the first of two pipeline ranks, each with two ranks of data parallelism."""
    plan = Plan(preset="zero3", precision="bf16", mesh={"pp": 2, "dp": 2}, accumulate=4)
    mesh = mesh_for(plan, 4)
    units, schedule = _units(plan, mesh)[:3], schedule_of(plan, 2)
    row = schedule.rows[0]
    planned = plan_step(units, schedule_trace(row, straight_passes(row, {0: units})))
    header = f"# zero3 in bf16 on {mesh}: the first stage. Refresh: {REFRESH}\n"
    grid = "".join(f"# {line}\n" for line in str(schedule).splitlines())
    return Golden(header + grid, planned, mesh, shows_step=False)


def _step(optimizer: str, preset: str) -> Golden:
    plan = Plan(preset=preset, precision="bf16")
    mesh = mesh_for(plan, 4)
    units = _units(plan, mesh, optimizer)
    planned = plan_step(units, straight_trace(units))
    comment = f"# a step of {optimizer} in {preset} in bf16 on {mesh}. Refresh: {REFRESH}\n"
    return Golden(comment, planned, mesh, shows_micro_batch=False)


def _text(plan: Plan) -> Golden:
    name = plan.preset
    if len(PRESETS[name].axes) == 2:
        plan = plan.model_copy(update={"mesh": {"node": 2, "local": 2}})
    mesh = mesh_for(plan, 4)
    units = _units(plan, mesh)
    planned = plan_step(units, straight_trace(units), buffers_bytes=1024)
    comment = f"# {name} in bf16 on {mesh}; h.1 also has a frozen buffer. Refresh: {REFRESH}\n"
    return Golden(comment, planned, mesh)


def _units(plan: Plan, mesh: Mesh, optimizer: str | None = None) -> tuple[UnitSpec, ...]:
    table = table_for(plan, mesh).on(mesh)

    def flat(name: str, num_elements: int, *, trainable: bool = True) -> FlatSpec:
        slots = pack([(name, (num_elements,))])
        numel = padded_numel(slots, mesh.world_size, table.align)
        shape, is_hidden = (num_elements // 256, 256), name.startswith("h.")
        update = update_by(optimizer, shape, is_hidden=is_hidden) if optimizer else None
        updates = (PlacedUpdate(slots[0].span, update),) if update else ()
        own = table.with_summands() if trainable and update is not None and update.summands else table
        matrix = table.low_rank.matrix_of(shape) if trainable and table.low_rank is not None else None
        factored = (FactoredMatrix(0, slots[0].span, *matrix),) if matrix is not None else ()
        return FlatSpec(name, numel, 1, own, mesh, trainable, updates, factored=factored)

    return (
        UnitSpec("wte", (flat("wte", EMBEDDING),)),
        UnitSpec("h.0", (flat("h.0", BLOCK),)),
        UnitSpec("h.1", (flat("h.1", BLOCK), flat("h.1:frozen", 256 * 16, trainable=False))),
        UnitSpec("head", (flat("head", EMBEDDING),)),
    )


if __name__ == "__main__":
    for file_name, text in texts().items():
        (FOLDER / file_name).write_text(text, encoding="utf-8")
        print(f"wrote {FOLDER / file_name}")
