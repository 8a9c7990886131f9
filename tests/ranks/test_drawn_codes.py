"""Codes under plans and models that are drawn, with parameters of all sizes: trained, resumed, and changed while they
run. The twin rounds tensor by tensor."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_codes import accumulating
from test_setting_triples import SPLIT
from torch import nn
from twins import Batch, Run, assert_same, batches, plan_of, rounded_by, sharded_run, work_on_ranks
from wires import (
    Reduced,
    Sent,
    assert_same_but_for_flips,
    is_coded,
    of_parts,
    parts_of,
    places_of,
    resuming,
    saving_to,
    twin_run,
)

import shardwise as sw
from shardwise.plan import Islands
from shardwise.plan.load import load_plan
from tests.models import Decoder, Mixture, Transformer
from tests.thorough import drawn, thorough_only, varies

Tensor = torch.Tensor
TWO = {"node": 2, "local": 2}
SENDS_NO_FROZEN = ("ddp", "zero1", "zero2", "offload")
TWO_AXES = ("hsdp", "hpz")
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
MORE_SETTINGS: tuple[dict[str, Any], ...] = (
    *SETTINGS,
    {"accumulate": 2},
    {"clip_grad_norm": 0.2},
    {"accumulate": 2, "clip_grad_norm": 0.2, "activations": "recompute"},
)
"""Of replicas."""
SHARES: tuple[dict[str, float], ...] = (
    {"optim": 0.3},
    {"optim": 1.0},
    {"optim": 1.0, "optim_disk": 0.5},
    {"optim": 1.0, "optim_disk": 1.0},
)
"""Of states that are on the host or a disk."""


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


@dataclass
class Drawn:
    """A plan on some ranks, for one of the models."""

    preset: str
    num_ranks: int
    mesh: dict[str, int] | None
    wire: dict[str, Any]
    settings: dict[str, Any]

    @classmethod
    def by(cls, draw: random.Random, disk: Path, num_ranks: int | None = None, **settings: Any) -> Drawn:
        """On any number of ranks, or on `num_ranks`."""
        preset = draw.choice(PRESETS if num_ranks in (None, 4) else [name for name in PRESETS if name not in TWO_AXES])
        mesh = TWO if preset in TWO_AXES or (num_ranks in (None, 4) and draw.random() < 0.2) else None
        own = num_ranks or (4 if mesh else draw.choice((1, 2, 3, 4)))
        more: dict[str, Any] = {}
        if preset not in ON_HOST and draw.random() < 0.2:
            more["offload"] = draw.choice(SHARES)
        if preset == "infinity" or "disk" in str(more):
            more["disk"] = str(disk)
        return cls(preset, own, mesh, drawn_wire(draw, preset), {**settings, **more})

    @property
    def flips_codes(self) -> bool:
        """Whether it may round a last bit otherwise than its twin does."""
        return self.preset in ON_HOST or "offload" in self.settings or "clip_grad_norm" in self.settings

    @property
    def plan(self) -> dict[str, Any]:
        return plan_of(self.preset, self.mesh, wire=self.wire, **self.settings)

    def run(self, model: nn.Module, data: Sequence[Batch], **more: Any) -> Run:
        more = {"after": places_of, "step": accumulating, **more}
        return sharded_run(model, data, self.preset, self.num_ranks, self.mesh, wire=self.wire, **self.settings, **more)

    def twin(self, model: nn.Module, data: Sequence[Batch], places: dict[str, Any], **more: Any) -> Run:
        num_whole = {"ddp": 2, "hsdp": 1}.get(self.preset, 0)
        if "optimizer" not in more:
            model = copy.deepcopy(model)
            more["optimizer"] = Clipped(model, self.settings.get("clip_grad_norm", math.inf))
        return twin_run(
            model,
            data,
            self.num_ranks,
            self.wire if self.num_ranks > 1 else {},  # one rank sends nothing, so that nothing is rounded
            num_near=2 if self.mesh else 1,
            accumulate=self.settings.get("accumulate", 1),
            waits_whole=self.preset == "zero1",
            sends_frozen=self.preset not in SENDS_NO_FROZEN,
            resident_below=self.settings.get("resident_below", 0),
            reduced=Reduced(places, waits=self.preset == "zero1", num_whole=num_whole),
            **more,
        )


class Clipped(torch.optim.AdamW):
    """That of `twins.adamw`, after it has clipped the norm of all gradients."""

    def __init__(self, model: nn.Module, norm: float) -> None:
        super().__init__(model.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-5)
        self._norm = norm

    def step(self, closure: Any = None) -> Any:
        if math.isfinite(self._norm):
            torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], self._norm)
        return super().step(closure)


def drawn_models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Transformer(num_blocks=2), OddSizes(tied=False), OddSizes(tied=True)]


def assert_alike(run: Run, twin: Run, *plans: Drawn) -> None:
    try:
        if any(plan.flips_codes for plan in plans):
            assert_same_but_for_flips(run, twin, loss_apart=2e-5, rates_apart=2, most=0.03)
        else:
            assert_same(run, twin)
    except AssertionError as error:
        raise AssertionError(f"{plans}: {error}") from error


@varies
def test_drawn_plans_train_like_their_twins(tmp_path: Path) -> None:
    draw = random.Random(0)
    models, data = drawn_models(), batches(2, rows=24)
    for number in range(drawn(1, 200)):
        plan = Drawn.by(draw, tmp_path / str(number), **draw.choice(MORE_SETTINGS))
        model = draw.choice(models)
        run = plan.run(model, data)
        assert_alike(run, plan.twin(model, data, run.extra), plan)


@varies
def test_drawn_plans_resume_exactly(tmp_path: Path) -> None:
    """To the bit, with what was not sent yet."""
    draw = random.Random(1)
    models, data = drawn_models(), batches(3, rows=24)
    for number in range(drawn(1, 60)):
        plan = Drawn.by(draw, tmp_path / f"{number}-disk", **draw.choice(MORE_SETTINGS))
        model, folder = draw.choice(models), tmp_path / str(number)
        whole = plan.run(model, data)
        plan.run(model, data[:2], after=saving_to(folder))
        fresh = copy.deepcopy(model)
        with torch.no_grad():
            for param in fresh.parameters():
                param.zero_()
        run = plan.run(fresh, data[2:], step=resuming(folder, accumulating))
        assert run.losses == whole.losses[2:], plan
        assert all(torch.equal(run.params[name], param) for name, param in whole.params.items()), plan


@varies
def test_drawn_changes_of_plan_train_like_their_twins(tmp_path: Path) -> None:
    """Live, from any wire to any other; what gradients have lost is forgotten."""
    draw = random.Random(2)
    models, data = drawn_models(), batches(4, rows=24)
    for number in range(drawn(1, 60)):
        settings = draw.choice(MORE_SETTINGS)
        first = Drawn.by(draw, tmp_path / f"{number}-first", **settings)
        then = Drawn.by(draw, tmp_path / f"{number}-then", first.num_ranks, **settings)
        model, places = draw.choice(models), {}

        def step(
            engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch, then: Drawn = then, places: Any = places
        ) -> Tensor:
            if engine.num_steps == 2:
                if engine.world.rank == 0:
                    places.update(places_of(engine))
                engine.reshard(then.plan)
            return accumulating(engine, optimizer, batch)

        run = first.run(model, data, step=step)
        twin = first.twin(model, data[:2], places)
        rest = then.twin(data=data[2:], places=run.extra, **twin.extra)
        whole = Run(twin.losses + rest.losses, twin.norms + rest.norms, rest.params)
        assert_alike(run, whole, first, then)


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1")


@dataclass
class Within:
    """A plan on a mesh that has a model axis, or two, and the model that it trains."""

    plan: dict[str, Any]
    model: nn.Module

    @classmethod
    def by(cls, draw: random.Random, axis: str, disk: Path, seed: int) -> Within:
        """Hosts have two ranks along `axis`, or with `hsdp` and `hpz` two along `local`, too; along `pp+tp` four."""
        axes = axis.split("+")
        preset = draw.choice(PRESETS if len(axes) == 1 else [name for name in PRESETS if name not in TWO_AXES])
        data_axes = TWO if preset in TWO_AXES else {"dp": 2}
        own_axes = dict.fromkeys(axes, 2)
        mesh = {**data_axes, **own_axes} if axis in ("ep", "dp") else {**own_axes, **data_axes}
        plan = plan_of(preset, mesh, wire=drawn_wire(draw, preset), **draw.choice(SETTINGS))
        if "pp" in axes:
            plan |= {"accumulate": draw.choice((2, 4)), "pipeline": {"schedule": draw.choice(SCHEDULES)}}
        if "tp" in axes:
            plan |= {"tensor": SPLIT}
        if "ep" in axes:
            plan.pop("activations", None)  # its two blocks differ, so that all of it is one unit
        plan |= {"disk": str(disk)} if preset == "infinity" else {}
        torch.manual_seed(seed)
        model: nn.Module = Mixture(num_blocks=2) if axis == "ep" else Decoder()
        model.blocks[1].requires_grad_(draw.random() < 0.7)
        return cls(plan, model)

    def run(self, data: Sequence[Batch]) -> list[Run]:
        def on_rank(engine: sw.Engine) -> Run:
            run = Run(extra={"places": places_of(engine), "parts": parts_of(engine)})
            for x, y in data:
                place, num = engine.data_ranks
                loss = engine.train_step((x.chunk(num)[place], y.chunk(num)[place]))
                run.losses.append(engine.mean(loss.item()))
                run.norms.append(engine.gradient_norm or 0.0)
            run.extra["memory"] = engine.memory()
            run.params = {name: value.clone() for name, value in engine.state_dict().items()}
            return run

        num_ranks = math.prod(self.plan["mesh"].values())
        return work_on_ranks(num_ranks, on_rank, self.plan, partial(copy.deepcopy, self.model))

    def parts(self, runs: Sequence[Run]) -> dict[str, list[Tensor]]:
        """Of each parameter that model axes split: those of all ranks."""
        split = {name for run in runs for name in run.extra["parts"]}
        return {name: [run.extra["parts"][name] for run in runs if name in run.extra["parts"]] for name in split}

    def twin(self, data: Sequence[Batch], runs: Sequence[Run], **more: Any) -> Run:
        """In pipelines `ddp` and `zero1` send what micro-batches have added up, once in a step; the others each one's
        gradients. Codes are of the part that a rank has. Ranks along `ep` have tokens of their own, and sum what is not
        experts among themselves before it becomes codes, with `hpz` afterwards."""
        preset, mesh = self.plan["preset"], self.plan["mesh"]
        num_dealt, has_ep = mesh.get("ep", 1), "ep" in mesh
        more.setdefault("model", self.model)
        return twin_run(
            data=data,
            num_ranks=math.prod(size for axis, size in mesh.items() if axis not in ("pp", "tp")),
            wire=self.plan["wire"],
            num_near=mesh.get("local", 1),
            num_dealt=num_dealt,
            dealt_last=preset == "hpz",  # its rows are sharded along the others
            accumulate=self.plan.get("accumulate", 1),
            waits_whole=preset in ("ddp", "zero1"),
            sends_frozen=preset not in SENDS_NO_FROZEN,
            resident_below=self.plan.get("resident_below", 0),
            reduced=Reduced(
                {name: place for run in runs for name, place in run.extra["places"].items()},
                waits=preset == "zero1" or (preset == "ddp" and "pp" in mesh),
                num_whole={"ddp": 3, "hsdp": 1 + has_ep, "hpz": has_ep}.get(preset, 0),
            ),
            parts=self.parts(runs),
            **more,
        )


def race_within(axis: str, within: Within, data: Sequence[Batch]) -> None:
    """Along `tp` and `ep` sums of the split model differ in last bits."""
    runs = within.run(data)
    twin = within.twin(data, runs)
    for run in runs:
        try:
            if axis != "pp" or within.plan["preset"] in ON_HOST:
                assert_same_but_for_flips(run, twin)
            else:
                assert_same(run, twin)
        except AssertionError as error:
            raise AssertionError(f"{within.plan}: {error}") from error


SLOW = thorough_only("slow; the others have its parts")


@varies
@pytest.mark.parametrize("axis", ["pp", "tp", "ep", pytest.param("pp+tp", marks=SLOW)])
def test_drawn_plans_within_model_axes_train_like_their_twins(axis: str, tmp_path: Path) -> None:
    draw, data = random.Random(axis), batches(2, rows=16)
    for number in range(drawn(1, 60)):
        race_within(axis, Within.by(draw, axis, tmp_path / str(number), number), data)


def test_micro_batches_of_a_pipeline_are_added_before_they_are_rounded() -> None:
    """Eight of them, with `ddp`: the sum is rounded once, where it is sent. It takes the memory that was promised."""
    plan = {"preset": "ddp", "mesh": {"pp": 2, "dp": 2}, "accumulate": 8, "wire": {"grad": "bf16"}}
    within, data = Within(plan, Decoder(num_blocks=2)), batches(2, rows=16)
    race_within("pp", within, data)
    for run in within.run(data):
        memory = run.extra["memory"]
        assert all(memory.measured[kind] == memory.promised[kind] for kind in ("param", "grad", "working"))


@dataclass
class OfIslands:
    """A plan in islands of two ranks along `dp`, or of four with a model axis inside, and outer steps every two."""

    within: Within
    settings: Islands

    @classmethod
    def by(cls, draw: random.Random, axis: str, disk: Path, seed: int) -> OfIslands:
        within = Within.by(draw, axis or "dp", disk, seed)
        preset = draw.choice([name for name in PRESETS if name not in (*TWO_AXES, "infinity")])
        outer: dict[str, Any] = {"every": 2, "mix": draw.choice((0.0, 0.5))}
        outer |= draw.choice(({}, {"wire": {"dtype": draw.choice(("int8", "int4")), "block": draw.choice(BLOCKS)}}))
        inside = {"dp": 2, axis: 2} if axis == "ep" else {axis: 2, "dp": 2} if axis else {"dp": 2}
        mesh = {"island": 2, **inside}
        within.plan |= {"preset": preset, "mesh": mesh, "wire": drawn_wire(draw, preset), "islands": outer}
        within.plan.pop("disk", None)
        return cls(within, load_plan(within.plan).islands)

    def twins(self, data: Sequence[Batch], runs: Sequence[Run]) -> list[Run]:
        """One of each island. Its gradients of the common model are made codes tensor by tensor."""
        whole, island = self.within, dict(self.within.plan["mesh"])
        del island["island"]
        within = Within({**whole.plan, "mesh": island}, copy.deepcopy(whole.model))
        common = {name: param for name, param in whole.model.named_parameters() if param.requires_grad}
        common = {name: param.detach().clone() for name, param in common.items()}
        by = self.settings.optimizer
        outer = torch.optim.SGD(common.values(), lr=by.lr, momentum=by.momentum, nesterov=by.nesterov)
        wire, found, ended = whole.plan["islands"].get("wire"), [Run(), Run()], [{}, {}]
        parts = within.parts(runs)
        kept = [Sent(within.plan["wire"], parts) for _ in found]
        for first in range(0, len(data), 2):
            for place, run in enumerate(found):
                own = [tuple(part.chunk(2)[place] for part in batch) for batch in data[first : first + 2]]
                twin = within.twin(own, runs, sent=kept[place], **ended[place])
                run.losses += twin.losses
                run.norms += twin.norms
                ended[place] = twin.extra
            models = [one["model"] for one in ended]
            for name, anchor in common.items():
                changed = [anchor - model.get_parameter(name).detach() for model in models]
                if wire is not None and is_coded(name, anchor):
                    changed = [of_parts(rounded_by(wire), parts.get(name))(one) for one in changed]
                anchor.grad = sum(changed) / 2
            outer.step()
            for model in models:
                for name, anchor in common.items():
                    model.get_parameter(name).data.lerp_(anchor, 1 - self.settings.mix)
        losses = [sum(of_islands) / 2 for of_islands in zip(*(run.losses for run in found), strict=True)]
        return [Run(losses, run.norms, common) for run in found]


@varies
@pytest.mark.parametrize("axis", ["", *(pytest.param(axis, marks=SLOW) for axis in ("pp", "tp", "ep"))])
def test_drawn_islands_train_like_their_twins(axis: str, tmp_path: Path) -> None:
    """With codes of gradients and parameters inside of islands, and of what these change between them. In four steps
    more codes flip: of seven elements one where a split model sends int8. Were outer gradients not rounded alike,
    nearly all would be away."""
    draw, data = random.Random(f"islands {axis}"), batches(4, rows=32)
    for number in range(drawn(1, 40)):
        islands = OfIslands.by(draw, axis, tmp_path / str(number), number)
        runs = islands.within.run(data)
        twins = islands.twins(data, runs)
        for rank, run in enumerate(runs):
            try:
                twin = twins[2 * rank // len(runs)]
                assert_same_but_for_flips(run, twin, loss_apart=1e-4, rates_apart=2, most=0.3)
            except AssertionError as error:
                raise AssertionError(f"{islands.within.plan}: {error}") from error


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
        wire["feedback"] = {"beta": draw.choice((0.0, 0.8)), "reset": draw.choice((2, 3))}
    return wire
