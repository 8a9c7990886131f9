"""Pipelined models compared with the unsplit one: every schedule and preset, on two and four stages."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from pipelined import batches, rows_of, some_names, unsplit
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import Run, adamw, assert_alike, at_once, ranks_run, work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.parallel.pipeline.placeholder_values import TensorFacts
from shardwise.parallel.pipeline.staged_model import StagedModel
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Decoder
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
NUM_STEPS, MICRO_BATCHES, CLIP = 3, 4, 0.5
PRESETS = ("ddp", "zero1", "zero2", "zero3", "zero3-kept")


def pipelined(
    model: nn.Module,
    mesh: dict[str, int],
    data: list[tuple[Tensor, Tensor]],
    *,
    shares_memory: bool = True,
    hosts: str | None = None,
    optimizer: Any = adamw,
    **plan: Any,
) -> list[Run]:
    """Train on `data`, divided along data axes; returns the results of every rank, which are the programs that were
    recorded until the end of each step, and the names of its own parameters."""
    names = some_names(model)
    return ranks_run(
        model,
        data,
        {"mesh": mesh, "accumulate": MICRO_BATCHES, "clip_grad_norm": CLIP, **plan},
        optimizer,
        train=at_once(),
        grads_of=lambda engine: {name: engine.get(name, "grad") for name in names},
        after_step=lambda engine: inside.programs(engine).num_recordings,
        after=lambda engine: sorted(name for name, _ in engine.module.named_parameters()),
        shares_memory=shares_memory,
        hosts=hosts,
    )


def assert_same(runs: list[Run], twin: Run, tolerance: float = 1e-5) -> None:
    for run in runs:
        assert list(run.params) == list(twin.params)
        assert_alike(run, twin, tolerance, of_all=False)


def race(model: nn.Module, mesh: dict[str, int], data: list[tuple[Tensor, Tensor]], **plan: Any) -> list[Run]:
    """In stages, with the unsplit model."""
    runs = pipelined(model, mesh, data, **plan)
    assert_same(runs, unsplit(model, data, clip=CLIP))
    return runs


def test_a_forward_may_write_to_what_stands_in_for_other_stages() -> None:
    class InPlace(Decoder):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            hidden = self.tokens(x)
            hidden += torch.linspace(-1, 1, x.shape[1])[:, None]
            for block in self.blocks:
                hidden = block(hidden)
            logits: Tensor = self.head(self.norm(hidden))
            return logits if y is None else nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    torch.manual_seed(0)
    model, data = InPlace(), batches(2, 8)
    race(model, {"pp": 2}, data, preset="zero1")


def logits_or_loss(model: Decoder, hidden: Tensor, y: Tensor | None) -> Tensor:
    logits: Tensor = model.head(model.norm(hidden))
    return logits if y is None else nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


class Skips(Decoder):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden = first = self.tokens(x)
        for block in self.blocks:
            hidden = block(hidden) + first / 2
        return logits_or_loss(self, hidden, y)


class Sums(Decoder):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden = total = self.tokens(x)
        for block in self.blocks:
            hidden = block(hidden)
            total = total + hidden
        return logits_or_loss(self, total, y)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("kind", [Skips, Sums])
def test_results_of_other_stages_are_carried(kind: type[Decoder], schedule: str) -> None:
    model, data = kind(), batches(3, 8)
    race(model, {"pp": 2}, data, preset="zero1", pipeline={"schedule": schedule})


class Recomputed(Decoder):
    """By checkpointing that calls a block without gradients, and again in the backward."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=True)
        return logits_or_loss(self, hidden, y)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of a forward on fake tensors
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_results_of_other_stages_are_carried_through_reentrant_checkpoints(preset: str) -> None:
    model, data = Recomputed(), batches(2, 8)
    race(model, {"pp": 2}, data, preset=preset)


class Twice(Decoder):
    """Two layers for each block, as in ALBERT."""

    is_reentrant: bool | None = None
    """How blocks are checkpointed, if they are."""

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden = self.tokens(x)
        for block in [one for one in self.blocks for _ in range(2)]:
            if self.is_reentrant is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.is_reentrant)
        return logits_or_loss(self, hidden, y)


class Auxiliary(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.loss = block, 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.block(hidden)
        self.loss = output.square().mean()  # type: ignore[assignment]
        return output


class AuxiliaryLosses(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Auxiliary(block) for block in self.blocks)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.tokens(x)
        for block in self.blocks:
            hidden = block(hidden)
        losses: list[Any] = [block.loss for block in self.blocks]
        return logits_or_loss(self, hidden, y) + torch.stack(losses).sum()


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (AuxiliaryLosses, "blocks.0 keeps loss, a loss with gradients"),
    ],
)
def test_forwards_that_use_other_stages_results_are_refused(kind: type[Decoder], words: str, schedule: str) -> None:
    """Each of these would train on zeros in place of the results of other stages."""
    with pytest.raises(ModelError, match=words):
        pipelined(kind(), {"pp": 2}, batches(1, 8), preset="zero1", pipeline={"schedule": schedule})


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("is_reentrant", [None, False])
def test_a_block_that_is_called_several_times_has_all_calls_in_its_stage(
    is_reentrant: bool | None, schedule: str
) -> None:
    model, data = Twice(), batches(2, 8)
    model.is_reentrant = is_reentrant
    race(model, {"pp": 2}, data, preset="zero3", pipeline={"schedule": schedule})


def test_calls_of_a_block_that_cannot_be_told_apart_are_refused() -> None:
    """Reentrant checkpointing computes again with copies of what a block was called with."""
    model = Twice()
    model.is_reentrant = True
    with pytest.raises(ModelError, match=r"is called several times in the forward.*use_reentrant=False"):
        pipelined(model, {"pp": 2}, batches(1, 8), preset="zero1")


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_may_checkpoint_its_own_blocks(reentrant: bool, schedule: str) -> None:
    class Checkpoints(Decoder):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            hidden = self.tokens(x)
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=reentrant)
            return logits_or_loss(self, hidden, y)

    torch.manual_seed(0)
    model, data = Checkpoints(), batches(2, 8)
    plan: dict[str, Any] = {"preset": "zero1", "pipeline": {"schedule": schedule}}
    race(model, {"pp": 2}, data, **plan)
    full = {"mesh": {"pp": 2}, "accumulate": MICRO_BATCHES, **plan}

    def work(engine: sw.Engine) -> int:
        return engine.rehearse(tuple(tensor[:2] for tensor in data[0])).by_kind["activations"]

    assert all(work_on_ranks(2, work, full, model))


def test_nothing_stands_in_for_parameters_of_other_stages_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first forwards, which are looked through: a large model has thousands of them."""
    stand_in_for, made = StagedModel.stand_in_for, list[str]()

    def noted(self: StagedModel, facts: TensorFacts) -> torch.Tensor:
        made.append(facts.name)
        return stand_in_for(self, facts)

    monkeypatch.setattr(StagedModel, "stand_in_for", noted)
    ranks_run(Decoder(), batches(2, 8), {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 2}, train=at_once())
    assert not made


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize("preset", PRESETS)
def test_two_stages_with_every_preset_inside(preset: str, schedule: str) -> None:
    model = Decoder(tied=True)
    data = batches(NUM_STEPS, 16)
    runs = race(model, {"pp": 2, "dp": 2}, data, preset=preset, pipeline={"schedule": schedule})
    for run in runs:  # from the second step on, the record of the first is followed
        assert run.each[1:] == run.each[1:2] * (NUM_STEPS - 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
@pytest.mark.parametrize(("preset", "count"), [("zero1", 1), ("zero3", 1), ("zero1", 2), ("zero2", 2)])
def test_fewer_micro_batches_than_stages(
    preset: str, count: int, schedule: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = Decoder(tied=True, num_blocks=5), batches(NUM_STEPS, 4)
    race(model, {"pp": 3}, data, preset=preset, accumulate=count, pipeline={"schedule": schedule})
    [said] = {record.message for record in caplog.records if "pipeline ranks" in record.message}
    assert f"A step runs {count} micro-batch{'es' * (count > 1)} for 3 pipeline ranks, which wait" in said


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("tied", [False, True])
def test_four_stages(schedule: str, tied: bool) -> None:
    model = Decoder(tied=tied)
    data = batches(NUM_STEPS, 8)
    runs = race(model, {"pp": 4}, data, preset="zero1", pipeline={"schedule": schedule}, shares_memory=False)
    held = [set(run.extra) for run in runs]
    shared = held[0] & held[3]
    assert shared == ({"tokens.weight"} if tied else set())
    assert set.union(*held) == {name for name, _ in model.named_parameters()}
    assert sum(map(len, held)) == len(set.union(*held)) + tied


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_checkpoint_goes_from_stages_to_other_stages_and_to_one_process_and_back(tmp_path: Any) -> None:
    """Each job resumes from the previous one, takes a step, and saves. Together they train like the twin."""
    model = Decoder(tied=True)
    meshes: list[dict[str, int]] = [{"pp": 2, "dp": 2}, {"dp": 1}, {"pp": 4}, {"pp": 2}, {"dp": 2}, {"pp": 1, "dp": 2}]
    presets = ["zero1", "zero3", "zero3", "ddp", "zero2", "zero1"]
    data = batches(len(meshes), 8)
    twin = unsplit(model, data, clip=CLIP)
    losses = []
    for (x, y), mesh, preset in zip(data, meshes, presets, strict=True):
        num_ranks = math.prod(mesh.values())
        models = [Decoder(tied=True) for _ in range(num_ranks)]

        def rank(world: sw.World) -> tuple[float, dict[str, Tensor]]:
            mine = models[world.rank]  # noqa: B023
            plan = {"preset": preset, "mesh": mesh, "accumulate": MICRO_BATCHES, "clip_grad_norm": CLIP}  # noqa: B023
            with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
                if losses:
                    assert engine.resume(tmp_path) is not None
                else:
                    engine.load_state_dict(model.state_dict())
                share = rows_of(engine, x), rows_of(engine, y)  # noqa: B023
                loss = engine.mean(engine.train_step(share).item())
                engine.save(tmp_path, wait=False)
                return loss, engine.state_dict()

        told = run_ranks(num_ranks, rank)
        losses.append(told[0][0])
        for _, params in told:
            assert list(params) == list(twin.params)
    assert losses == pytest.approx(twin.losses, rel=1e-5)
    for name, expected in twin.params.items():
        torch.testing.assert_close(params[name], expected, rtol=1e-5, atol=1e-5, msg=name)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_resuming_the_same_stages_is_exact(tmp_path: Any) -> None:
    model = Decoder()
    data = batches(4, 8)

    def run(first: int, last: int, *, resumes: bool) -> list[Run]:
        models = [copy.deepcopy(model) for _ in range(2)]

        def rank(world: sw.World) -> Run:
            mine, told = models[world.rank], Run()
            plan = {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": MICRO_BATCHES}
            with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
                if resumes:
                    engine.resume(tmp_path)
                for batch in data[first:last]:
                    told.losses.append(engine.train_step(batch).item())
                if not resumes and last == 2:
                    engine.save(tmp_path)
                told.params = engine.state_dict()
            return told

        return run_ranks(2, rank)

    through, _, resumed = run(0, 4, resumes=False), run(0, 2, resumes=False), run(2, 4, resumes=True)
    for one, other in zip(through, resumed, strict=True):
        assert one.losses[2:] == other.losses
        assert all(torch.equal(one.params[name], other.params[name]) for name in one.params)


def test_evaluation_and_shapes_that_change_from_batch_to_batch() -> None:
    model = Decoder()
    data = batches(6, 8, lengths=(6, 3, 5))
    expected = [model(x, y).item() for x, y in data[:3]]
    twin = unsplit(model, data, clip=CLIP)
    models = [copy.deepcopy(model) for _ in range(4)]

    def rank(world: sw.World) -> Run:
        mine, told = models[world.rank], Run()
        plan = {
            "preset": "zero3",
            "mesh": {"dp": 2, "pp": 2},
            "accumulate": 2,
            "clip_grad_norm": CLIP,
            "pipeline": {"schedule": "interleaved"},
        }
        with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
            told.extra["evaluated"] = [
                engine.mean(engine.eval_step((rows_of(engine, x), rows_of(engine, y))).item()) for x, y in data[:3]
            ]
            for x, y in data:
                told.losses.append(engine.mean(engine.train_step((rows_of(engine, x), rows_of(engine, y))).item()))
            told.params = engine.state_dict()
        return told

    for told in run_ranks(4, rank):
        assert told.extra["evaluated"] == pytest.approx(expected, rel=1e-5)
        assert told.losses == pytest.approx(twin.losses, rel=1e-5)
        for name, value in twin.params.items():
            torch.testing.assert_close(told.params[name], value, rtol=1e-5, atol=1e-5, msg=name)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize(("kind", "tolerance"), [("Lamb", 1e-4), ("Muon", 3e-3)])
def test_optimizers_that_look_at_whole_parameters(kind: str, tolerance: float) -> None:
    """Muon orthogonalizes matrices in bf16, which enlarges rounding differences."""
    model = Decoder(tied=True)
    data = batches(NUM_STEPS, 8)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        if kind == "Lamb":
            return sw.optim.Lamb(model.parameters(), lr=1e-2)
        inner = [param for block in model.blocks for param in block.parameters() if param.dim() == 2]
        others = [param for param in model.parameters() if all(param is not one for one in inner)]
        return sw.optim.Muon([{"params": inner}, {"params": others, "use_muon": False}], lr=1e-2)

    runs = pipelined(model, {"pp": 2, "dp": 2}, data, preset="zero2", optimizer=make)
    assert_same(runs, unsplit(model, data, clip=CLIP, make_optimizer=make), tolerance)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_rules_late_sums_and_units_of_two_go_with_stages() -> None:
    model = Decoder()
    data = batches(NUM_STEPS, 8)
    twin = unsplit(model, data, clip=CLIP)
    rules = {"norms": {"classes": ["LayerNorm"], "rows": {"param": {"shard": []}, "held": {"shard": []}}}}
    rows = {"grad": {"shard": [], "partial": ["dp"]}}
    for plan in ({"rules": rules}, {"rows": rows}, {"units": {"class": "Block", "together": 2}}):
        assert_same(pipelined(model, {"dp": 2, "pp": 2}, data, preset="zero3", **plan), twin)
