"""Every feature combined with every other one; each pair is compared with its twin. See `docs/compatibility.md`."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import twins
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import Batch, Run, adamw, assert_as_near, assert_same, batches, full_params

import shardwise as sw
from shardwise.testing import run_ranks
from tests import models
from tests.drawing import drawing
from tests.models import VOCAB, WIDTH, Transformer
from tests.thorough import sampled

pytestmark = sampled

Tensor = torch.Tensor
NUM_STEPS, NUM_RANKS, ROWS = 4, 2, 8

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class Block(models.Block):
    """A block that on request has two experts, of which each rank uses one."""

    def __init__(self, *, experts: bool) -> None:
        super().__init__(WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2 if experts else 0))
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = super().forward(x)
        return hidden + torch.tanh(self.experts[self.chosen](hidden)) if self.experts else hidden


class Subject(Transformer):
    """The trained model, with parts that features can switch on."""

    def __init__(self, *, tied: bool, recompute: bool, experts: bool) -> None:
        super().__init__(tied=tied, num_blocks=0)
        self.recompute = recompute
        self.blocks.extend(Block(experts=experts) for _ in range(2))

    def choose(self, expert: int) -> None:
        for block in self.blocks:
            block.chosen = expert

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).float().view(-1, VOCAB), y.flatten())


@dataclass(frozen=True)
class Feature:
    """What a feature changes: the plan, the model, the optimizer or the loop. Also its tolerances in fp32."""

    plan: dict[str, Any] = field(default_factory=dict)
    model: dict[str, bool] = field(default_factory=dict)
    optimizer: MakeOptimizer | None = None
    loop: str = ""
    frozen: bool = False
    deferred: bool = False
    dtype: torch.dtype | None = None
    excludes: tuple[str, ...] = ()
    rel: float = 2e-6
    atol: float = 2e-5


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Lamb(model.parameters(), lr=3e-3, eps=1e-5)


def adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Adafactor(model.parameters(), lr=3e-3, weight_decay=0.1)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    """Muon for the blocks' matrices, in fp32 so that rounding does not make ranks differ; AdamW for everything else."""
    matrices = [param for param in model.blocks.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if all(param is not matrix for matrix in matrices)]
    groups = [{"params": matrices, "lr": 2e-2}, {"params": others, "lr": 3e-3, "use_muon": False, "adamw_eps": 1e-5}]
    return sw.optim.Muon(groups, iterate_in="fp32")


FEATURES: dict[str, Feature] = {
    "bf16": Feature(plan={"precision": "bf16"}, dtype=torch.bfloat16, excludes=("fp16",)),
    "fp16": Feature(plan={"precision": "fp16"}, dtype=torch.float16),
    "rules": Feature(
        plan={
            "rules": {"norms": {"classes": ["LayerNorm"], "rows": {"param": {"shard": []}, "held": {"shard": []}}}},
            "resident_below": 100,
        }
    ),
    "units together": Feature(plan={"units": {"class": "Block", "together": 2}}),
    "late sums": Feature(plan={"rows": {"grad": {"shard": [], "partial": ["dp"]}}}),
    "clipping": Feature(plan={"clip_grad_norm": 0.3}),
    "accumulation": Feature(plan={"accumulate": 2}, excludes=("no_sync",)),
    "no_sync": Feature(loop="no_sync"),
    "recomputing": Feature(model={"recompute": True}),
    "tied weights": Feature(model={"tied": True}),
    "frozen parts": Feature(frozen=True),
    "experts by rank": Feature(model={"experts": True}),
    "evaluation between": Feature(loop="evaluate"),
    "scheduler": Feature(loop="schedule"),
    "save and resume": Feature(loop="resume"),
    "whole states": Feature(loop="state_dict"),
    "compile": Feature(plan={"compile": "aot_eager"}),
    "LAMB": Feature(optimizer=lamb, excludes=("Muon",)),
    "Muon": Feature(optimizer=muon, rel=1e-5, atol=1e-4),
    "Adafactor": Feature(optimizer=adafactor, excludes=("LAMB", "Muon")),
    "another plan": Feature(loop="reshard"),
    "deferred birth": Feature(deferred=True),
    "inference between": Feature(loop="infer"),
}
PAIRS = [
    (one, other)
    for one, other in itertools.combinations(FEATURES, 2)
    if other not in FEATURES[one].excludes and one not in FEATURES[other].excludes
]


@dataclass
class Race:
    """Two features combined."""

    one: Feature
    other: Feature

    @property
    def both(self) -> tuple[Feature, Feature]:
        return self.one, self.other

    def plan(self) -> dict[str, Any]:
        return {"preset": "zero3", **self.one.plan, **self.other.plan}

    def loops(self) -> set[str]:
        return {feature.loop for feature in self.both}

    def model(self, *, sharded: bool = False) -> Subject:
        """The model, with the same initial values in every call."""
        flags = dict.fromkeys(("tied", "recompute", "experts"), False)
        deferred = sharded and any(feature.deferred for feature in self.both)
        with drawing(), sw.deferred_init() if deferred else contextlib.nullcontext():
            torch.manual_seed(0)
            model = Subject(**{**flags, **self.one.model, **self.other.model})
        if any(feature.frozen for feature in self.both):
            model.blocks[0].requires_grad_(False)
            model.positions.requires_grad_(False)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        make = next((feature.optimizer for feature in self.both if feature.optimizer is not None), adamw)
        return make(model)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of computations, unless it is fp32."""
        return next((feature.dtype for feature in self.both if feature.dtype is not None), None)

    @property
    def num_micro_batches(self) -> int:
        return 2 if "accumulate" in self.plan() or "no_sync" in self.loops() else 1


def micro_batches(batch: Batch, rank: int, num: int) -> list[Batch]:
    """This rank's rows of a batch, in `num` micro-batches."""
    x, y = (tensor.chunk(NUM_RANKS)[rank] for tensor in batch)
    return list(zip(x.chunk(num), y.chunk(num), strict=True))


def plain(race: Race, data: list[Batch], dtype: torch.dtype | None = None) -> Run:
    """Train the twin on the ranks' micro-batches, one after the other; in a narrow `dtype` with fp32 master weights."""
    masters = race.model()
    model = masters if dtype is None else twins.narrowed(masters, dtype)
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    optimizer = race.optimizer(masters)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) if "schedule" in race.loops() else None
    run = Run()
    for step, batch in enumerate(data):
        optimizer.zero_grad()
        total = 0.0
        for rank in range(NUM_RANKS):
            model.choose((rank + step) % 2)
            for x, y in micro_batches(batch, rank, race.num_micro_batches):
                model.zero_grad() if model is not masters else None
                loss = model(x, y) / (NUM_RANKS * race.num_micro_batches)
                (loss * scale if scale != 1 else loss).backward()
                _widen(model, masters, scale)
                total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), race.plan().get("clip_grad_norm", math.inf))
        optimizer.step()
        twins.copy_params(masters, model)
        if scheduler is not None:
            scheduler.step()
        run.losses.append(total)
        run.norms.append(norm.item())
    run.params = {name: param.detach().clone() for name, param in masters.named_parameters()}
    return run


def _widen(model: nn.Module, masters: nn.Module, scale: float) -> None:
    """Add the gradients of a narrow model to those of its master weights."""
    if model is masters:
        return
    for param, master in zip(model.parameters(), masters.parameters(), strict=True):
        if param.grad is not None:
            wide = param.grad.float() / scale
            master.grad = wide if master.grad is None else master.grad + wide


class Runner:
    """One rank of the sharded run."""

    def __init__(self, race: Race, world: sw.World, model: Subject, folder: Path) -> None:
        self.race, self.world, self.folder = race, world, folder
        self.begin(model)

    def begin(self, model: Subject) -> None:
        self.model = model
        self.optimizer = self.race.optimizer(model)
        self.engine = sw.shard(model, self.race.plan(), optimizer=self.optimizer, world=self.world)
        schedule = "schedule" in self.race.loops()
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8) if schedule else None

    def step(self, step: int, batch: Batch) -> float:
        self.model.choose((self.world.rank + step) % 2)
        num = self.race.num_micro_batches
        total = 0.0
        for number, (x, y) in enumerate(micro_batches(batch, self.world.rank, num)):
            waits = "no_sync" in self.race.loops() and number < num - 1
            with self.engine.no_sync() if waits else contextlib.nullcontext():
                loss = self.engine(x, y)
                self.engine.backward(loss / num if "no_sync" in self.race.loops() else loss)
            self.engine.step() if "accumulate" in self.race.plan() else None
            total += loss.item() / num
        if "accumulate" not in self.race.plan():
            self.engine.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return self.world.mean(total)

    def between(self, step: int, batch: Batch) -> None:
        loops = self.race.loops()
        if "evaluate" in loops:
            with torch.no_grad():
                self.engine(*batch)
        if "infer" in loops:
            with self.engine.inference(0):
                self.engine(*batch)
        if "reshard" in loops and step in (1, 2):
            changed = {"preset": ("zero1", "zero3-kept")[step - 1]}
            self.engine.reshard({**self.race.plan(), **changed})
        if "state_dict" in loops and step == 1:
            self.engine.load_state_dict(self.engine.state_dict())
        if "resume" in loops and step == 1:
            state = {"scheduler": self.scheduler.state_dict()} if self.scheduler is not None else {}
            self.engine.save(self.folder, state=state)
            self.engine.close()
            self.begin(self.race.model(sharded=True))
            loaded = self.engine.resume(self.folder)
            assert loaded is not None
            if self.scheduler is not None:
                self.scheduler.load_state_dict(loaded.state["scheduler"])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads .grad of an input that is no leaf
@pytest.mark.parametrize(("one", "other"), PAIRS, ids=[f"{one} + {other}" for one, other in PAIRS])
def test_every_pair_of_features_races_its_twin(one: str, other: str, tmp_path: Path) -> None:
    race = Race(FEATURES[one], FEATURES[other])
    data = batches(NUM_STEPS, rows=ROWS)
    replicas = [race.model(sharded=True) for _ in range(NUM_RANKS)]

    def rank(world: sw.World) -> tuple[list[float], dict[str, Tensor]]:
        runner = Runner(race, world, replicas[world.rank], tmp_path)
        seen = []
        for step, batch in enumerate(data):
            seen.append(runner.step(step, batch))
            runner.between(step, batch)
        whole = full_params(runner.engine)
        runner.engine.close()
        return seen, whole

    wide = plain(race, data)
    for seen, whole in run_ranks(NUM_RANKS, rank):
        run = Run(losses=seen, params={name: value.float() for name, value in whole.items()})
        if race.dtype is None:
            rel, atol = max(f.rel for f in race.both), max(f.atol for f in race.both)
            assert_same(run, replace(wide, norms=[]), loss=rel, param=atol)
        else:
            narrow = plain(race, data, race.dtype)
            assert_as_near(run, replace(narrow, norms=[]), replace(wide, norms=[]))
