"""Pictures of what a plan means, computed by the functions that training uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import nn

import shardwise as sw
from benchmarks.pictures.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    LINE,
    MONO,
    ORANGE,
    PALE,
    VIOLET,
    area,
    bare,
    box,
    card,
)
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import KINDS, table_for
from shardwise.program import parse
from shardwise.program.schedule import SCHEDULES, Op, schedule_for, timed
from shardwise.testing import run_ranks

ROWS = {"param": BLUE, "held": VIOLET, "grad": ORANGE, "optim": GREEN}
"""The colour of a row of the table, and of the actions that follow from it."""
SUBJECTS = {"param": "param", "updated": "param", "held": "held", "grad": "grad", "due": "grad", "master": "optim"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.linear(x).relu()
        return out


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return x


def table_to_program() -> Figure:
    """Two plans: the rows of each, and what an engine on two ranks then does for one block."""
    figure = card(
        9.6,
        4.75,
        "A plan is a table; the table becomes the program of a step",
        "One of two blocks on two ranks, in bf16: the table of each preset, and what engine.program() has for h.0",
    )
    for preset, left in (("zero3", 0.25), ("zero1", 4.95)):
        axes = bare(area(figure, left, -0.4, 4.4, 4.35))
        axes.set_xlim(0, 4.4)
        axes.set_ylim(0, 4.35)
        _draw_table(axes, preset)
        _draw_program(axes, preset)
    return figure


def _draw_table(axes: Axes, preset: str) -> None:
    table = table_for(Plan(preset=preset, precision="bf16"), Mesh.of({"dp": 2}, 2))
    axes.text(0, 4.12, f'"{preset}"', fontsize=11, fontweight="bold", color=INK, family=MONO)
    for number, kind in enumerate(KINDS):
        place, y = table.place(kind), 3.72 - 0.26 * number
        said = "shard over dp" if place.shard else "partial (own sum)" if place.partial else "copy"
        box(axes, (0, y - 0.07), (4.3, 0.23), ROWS[kind], rounding=0.03)
        axes.text(0.08, y, kind, fontsize=8.5, color=ROWS[kind], family=MONO, fontweight="bold")
        axes.text(1.0, y, said, fontsize=8.5, color=INK, family=MONO)
        axes.text(3.5, y, place.dtype, fontsize=8.5, color=FAINT, family=MONO)
    axes.annotate("", (0.5, 2.5), (0.5, 2.8), arrowprops={"arrowstyle": "-|>", "color": FAINT, "linewidth": 1.4})
    axes.text(0.66, 2.6, "a pure function", fontsize=8.5, color=FAINT)


def _draw_program(axes: Axes, preset: str) -> None:
    y = 2.3
    for moment, actions in _actions_of(preset):
        for number, (verb, subject, over, row, more) in enumerate(actions):
            axes.text(0, y, "" if number else moment, fontsize=8, color=FAINT)
            axes.text(
                1.32,
                y,
                verb,
                fontsize=8,
                color=ROWS[row] if row else FAINT,
                family=MONO,
                fontweight="bold" if row else "normal",
            )
            axes.text(2.5, y, subject, fontsize=8, color=INK if row else FAINT, family=MONO)
            axes.text(3.12, y, over, fontsize=8, color=FAINT, family=MONO)
            axes.text(4.3, y, more, fontsize=8, color=FAINT, family=MONO, ha="right")
            y -= 0.195
    axes.set_clip_on(False)


def _actions_of(preset: str) -> list[tuple[str, list[tuple[str, str, str, str, str]]]]:
    """By moment, in the order in which they happen: verb, subject, axis, the row that it follows from, bytes."""
    rows: list[tuple[str, list[tuple[str, str, str, str, str]]]] = []
    for block in parse(_program_of(preset)):
        actions: list[tuple[str, str, str, str, str]] = [
            (
                one.verb,
                one.subject,
                one.over if one.over != "-" else "",
                SUBJECTS.get(one.subject, "") if one.verb not in ("wait", "free") else "",
                f"{one.sent_bytes / 1024:.0f} KiB" if one.communicates else "",
            )
            for one in block.actions
            if one.flat == "h.0"
        ]
        if actions:
            rows.append((str(block.moment), actions))
    return rows


def _program_of(preset: str) -> str:
    def rank(world: sw.World) -> str:
        model = Blocks()
        optimizer = torch.optim.AdamW(model.parameters())
        plan = {"preset": preset, "precision": "bf16", "units": ["h.*"]}
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            for _ in range(2):
                engine.backward(engine(torch.ones(4, 256)).square().mean())
                engine.step()
            return engine.program()

    programs = run_ranks(2, rank)
    return str(programs[0])


def ranks_in_a_mesh() -> Figure:
    """Eight ranks as pp x dp x tp: who has what, and which ranks talk to each other."""
    mesh = Mesh.of({"pp": 2, "dp": 2, "tp": 2}, 8)
    figure = card(
        9.6,
        4.2,
        'Eight ranks as {"pp": 2, "dp": 2, "tp": 2}',
        "The innermost axis has neighbouring ranks, which should have the fastest links",
    )
    axes = bare(area(figure, 0.2, 0.25, 9.2, 3.15))
    axes.set_xlim(0, 9.2)
    axes.set_ylim(0, 3.15)
    size, places = (1.45, 0.72), {}
    for rank in range(8):
        at = mesh.coordinate(rank)
        places[rank] = (0.35 + 5.1 * at["pp"] + 1.95 * at["tp"], 1.72 - 1.27 * at["dp"])
    for pp in range(2):
        left = 0.12 + 5.1 * pp
        box(axes, (left, 0.22), (3.86, 2.5), FAINT, rounding=0.1)
        blocks = "blocks 0, 1" if pp == 0 else "blocks 2, 3, head"
        axes.text(left + 1.93, 2.84, f"pp {pp}:  {blocks}", fontsize=9.5, color=INK, ha="center", fontweight="bold")
    for rank, (x, y) in places.items():
        at = mesh.coordinate(rank)
        box(axes, (x, y), size, BLUE if at["tp"] == 0 else VIOLET)
        axes.text(x + size[0] / 2, y + 0.43, f"rank {rank}", fontsize=10, color=INK, ha="center", fontweight="bold")
        half = ("left", "right")[at["tp"]]
        axes.text(
            x + size[0] / 2, y + 0.16, f"{half} half, batch {'AB'[at['dp']]}", fontsize=8, color=FAINT, ha="center"
        )
    for axis, colour in (("tp", GREEN), ("dp", ORANGE), ("pp", BLUE)):
        for first, second in mesh.groups(axis):
            (ax, ay), (bx, by) = places[first], places[second]
            if axis == "dp":
                start, stop = (ax + size[0] / 2, ay), (bx + size[0] / 2, by + size[1])
            elif axis == "tp":
                start, stop = (ax + size[0], ay + size[1] / 2), (bx, by + size[1] / 2)
            elif mesh.coordinate(first)["tp"] == 0:  # for both: from the one stage to the other
                start, stop = (ax + 3.63, ay + size[1] / 2), (bx - 0.23, by + size[1] / 2)
            else:
                continue
            axes.annotate(
                "",
                stop,
                start,
                arrowprops={"arrowstyle": "<|-|>", "color": colour, "linewidth": 1.5, "shrinkA": 0, "shrinkB": 0},
            )
    said = (
        ("tp", GREEN, "sums inside each layer"),
        ("dp", ORANGE, "shards and gradients, by the preset"),
        ("pp", BLUE, "activations and their gradients, to the same rank of the next stage"),
    )
    x = 0.12
    for axis, colour, what in said:
        axes.text(x, -0.02, axis, fontsize=9, color=colour, fontweight="bold", family=MONO)
        axes.text(x + 0.28, -0.02, what, fontsize=8.5, color=FAINT)
        x += 0.6 + 0.064 * len(what)
    return figure


OPS = {
    "F": (BLUE, "forward"),
    "B": (GREEN, "backward"),
    "I": (VIOLET, "backward: input"),
    "W": (ORANGE, "backward: weights"),
}


def stage_schedules() -> Figure:
    """Every schedule on four ranks with eight micro-batches, by the simulation that checks them."""
    figure = card(
        9.6,
        6.7,
        "Four stages, eight micro-batches: what each rank does when",
        "By the simulation that checks them: a backward takes twice its forward. Darker: a rank's second stage",
    )
    timings = {name: timed(schedule_for(name, 4, 8, kind.usual_chunks)) for name, kind in SCHEDULES.items()}
    lengths = {name: timing.length / SCHEDULES[name].usual_chunks for name, timing in timings.items()}
    longest = max(lengths.values())
    for number, (name, timing) in enumerate(timings.items()):
        axes = area(figure, 0.72, 4.85 - 1.42 * number, 8.55, 0.88)
        scale = lengths[name] / timing.length
        for rank, spans in enumerate(timing.spans):
            axes.broken_barh(
                [(0, lengths[name])], (rank - 0.42, 0.84), facecolor="#f9fafb", edgecolor=LINE, linewidth=0.4
            )
            for op, start, stop in spans:
                colour = OPS[op.kind][0]
                second = op.stage >= 4
                axes.broken_barh(
                    [(start * scale, (stop - start) * scale)],
                    (rank - 0.42, 0.84),
                    facecolor=colour if second else PALE[colour],
                    edgecolor=colour,
                    linewidth=0.5,
                )
                axes.text(
                    (start + stop) / 2 * scale,
                    rank,
                    str(op.micro_batch),
                    fontsize=6.5,
                    ha="center",
                    va="center_baseline",
                    color="white" if second else INK,
                )
        axes.set_xlim(0, longest)
        axes.set_ylim(3.5, -0.5)
        axes.set_yticks(range(4), [f"rank {rank}" for rank in range(4)], fontsize=7.5, color=FAINT)
        axes.set_xticks([])
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        at_once = max(_in_flight(spans) for spans in timing.spans) / (2 if name == "interleaved" else 1)
        axes.set_title(name, loc="left", fontsize=9.5, color=INK, fontweight="bold", family=MONO, pad=5)
        said = f"waiting {timing.bubble:.0%} of the time  ·  activations of {at_once:g} micro-batches at most"
        axes.set_title(said, loc="right", fontsize=8.5, color=FAINT, pad=5)
    for number, (colour, what) in enumerate(OPS.values()):
        legend = bare(area(figure, 0.72 + 2.05 * number, 0.17, 2, 0.2))
        legend.set_xlim(0, 2)
        legend.set_ylim(0, 0.2)
        box(legend, (0, 0.02), (0.2, 0.14), colour, rounding=0.02)
        legend.text(0.28, 0.04, what, fontsize=8.5, color=FAINT)
    return figure


def _in_flight(spans: Sequence[tuple[Op, float, float]]) -> int:
    """How many forwards a rank has done, at most, whose activations no backward has used up."""
    most = held = 0
    for op, _, _ in spans:
        held += {"F": 1, "I": 0}.get(op.kind, -1)
        most = max(most, held)
    return most
