"""Codes under plans and models that are drawn, with parameters of all sizes. The twin rounds tensor by tensor."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from twins import assert_same, batches, sharded_run
from wires import Reduced, assert_same_but_for_flips, places_of, twin_run

from tests.models import Transformer
from tests.thorough import drawn, varies

Tensor = torch.Tensor
TWO = {"node": 2, "local": 2}
SENDS_NO_FROZEN = ("ddp", "zero1", "zero2", "offload")
PRESETS = ("ddp", "hsdp", "zero1", "zero2", "zero3", "zero3-kept", "hpz", "offload", "zero3-offload", "infinity")
ON_HOST = ("offload", "zero3-offload", "infinity")
BLOCKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, None)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"activations": "recompute"},
    {"resident_below": 200},
    {"resident_below": 2000},
    {"prefetch_bytes": 0},
)


class OddSizes(Transformer):
    """Beside a Transformer: parameters without dimensions, without elements, with one, with 91, and frozen ones."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__(num_blocks=2, tied=tied)
        self.gain = nn.Parameter(torch.tensor(1.1))
        self.none, self.no_rows = nn.Parameter(torch.zeros(0)), nn.Parameter(torch.zeros(0, 5))
        self.one, self.odd = nn.Parameter(torch.full((1, 1), 0.7)), nn.Parameter(torch.randn(7, 13) * 0.1)
        self.still = nn.Parameter(torch.randn(5, 3) * 0.1, requires_grad=False)
        self.blocks[1].requires_grad_(False)

    def forward(self, *batch: Tensor) -> Tensor:
        beside = self.odd.square().mean() * self.still.square().mean() * self.one.sum()
        return super().forward(*batch) * self.gain + beside + self.none.sum() + self.no_rows.sum()


@varies
def test_drawn_plans_train_like_their_twins(tmp_path: Path) -> None:
    draw = random.Random(0)
    torch.manual_seed(0)
    models, data = [Transformer(num_blocks=2), OddSizes(tied=False), OddSizes(tied=True)], batches(2, rows=12)
    for number in range(drawn(1, 200)):
        preset, settings = draw.choice(PRESETS), draw.choice(SETTINGS)
        mesh = TWO if preset in ("hsdp", "hpz") or draw.random() < 0.2 else None
        num_ranks = 4 if mesh else draw.choice((1, 2, 3, 4))
        wire = drawn_wire(draw, preset)
        disk = {"disk": str(tmp_path / str(number))} if preset == "infinity" else {}
        model = draw.choice(models)
        run = sharded_run(model, data, preset, num_ranks, mesh, after=places_of, wire=wire, **settings, **disk)
        twin = twin_run(
            model,
            data,
            num_ranks,
            wire if num_ranks > 1 else {},  # one rank sends nothing, so that nothing is rounded
            num_near=2 if mesh else 1,
            sends_frozen=preset not in SENDS_NO_FROZEN,
            resident_below=settings.get("resident_below", 0),
            reduced=Reduced(run.extra, waits=preset == "zero1", num_whole={"ddp": 2, "hsdp": 1}.get(preset, 0)),
        )
        try:
            (assert_same_but_for_flips if preset in ON_HOST else assert_same)(run, twin)
        except AssertionError as error:
            raise AssertionError(f"{preset}, {num_ranks} ranks, {mesh}, {wire}, {settings}: {error}") from error


def drawn_wire(draw: random.Random, preset: str) -> dict[str, Any]:
    """At least one kind of what the preset sends."""
    sent = ["grad", *(() if preset == "ddp" else ("param",)), *(() if preset in SENDS_NO_FROZEN else ("frozen",))]
    kinds = draw.choice([some for num in range(1, len(sent) + 1) for some in itertools.combinations(sent, num)])
    wire: dict[str, Any] = {}
    for kind in kinds:
        if kind != "frozen" and draw.random() < 0.25:
            wire[kind] = "bf16"
            continue
        wire[kind] = {"dtype": draw.choice(("int8", "int4", "fp8")), "block": draw.choice(BLOCKS)}
        if draw.random() < 0.25:
            wire[kind]["rest"] = "bf16"
        if kind != "grad" and (preset == "hsdp" or draw.random() < 0.25):  # which shards parameters along `local` only
            wire[kind]["axes"] = "everywhere"
    if isinstance(wire.get("grad"), dict) and draw.random() < 0.25:
        wire["feedback"] = {"beta": draw.choice((0.0, 0.8)), "reset": 2}
    return wire
