"""Tensors on the host and on disk in models that are split: by tensors, stages, experts and sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sequences
import torch
from experts_models import mixture
from pipelined import batches
from sequences import Batch, whole_run
from test_split_products import TIED, net
from torch import Tensor, nn
from twins import Run, adamw, assert_alike, at_once, ranks_run, work_on_ranks

import shardwise as sw
from shardwise.system.disk import TierFolder
from shardwise.testing import run_ranks
from tests.models import Gpt
from tests.thorough import drawn, sampled, thorough_only, varies

CLIP, NUM_STEPS, ACCUMULATE = 0.5, 3, 2
Train = Callable[[sw.Engine, Batch], Tensor]
AT_ONCE = {"accumulate": 1}
"""Routers balance over a micro-batch, and ranks cut micro-batches differently than the whole batch is cut."""
ON_HOST = {"preset": "zero3-offload", "rows": {"param": {"tier": "host"}}}
UPDATE_ON_HOST = {"preset": "offload"}
ON_DISK = {"preset": "infinity"}
PARAMS_ON_DISK = {"preset": "infinity", "rows": {"param": {"tier": "disk"}}}
STATES_ON_DISK = {"preset": "zero2", "rows": {"optim": {"tier": "disk"}}}


def of_pairs(model: Any, batch: Batch) -> Tensor:
    return model(batch["x"], batch["y"])


def train_pairs(engine: sw.Engine, batch: Batch) -> Tensor:
    return engine.forward_backward((batch["x"], batch["y"]))


def decoder() -> nn.Module:
    return net(tied=True)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return Gpt()


def experts() -> nn.Module:
    return mixture(balance_loss=0.05)


def pairs() -> list[Batch]:
    return [{"x": x, "y": y} for x, y in batches(NUM_STEPS, 8)]


@dataclass(frozen=True)
class Split:
    """A model, and how it is split."""

    build: Callable[[], nn.Module]
    mesh: dict[str, int]
    plan: dict[str, Any] = field(default_factory=dict)
    train: Train = train_pairs
    loss_of: Callable[[Any, Batch], Tensor] = of_pairs
    data: Callable[[], list[Batch]] = pairs

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh.values())


def of_tensors(mesh: dict[str, int], **plan: Any) -> Split:
    return Split(decoder, mesh, {"tensor": TIED, **plan})


def of_sequences(mesh: dict[str, int], attention: str) -> Split:
    plan = {"sequence": {"attention": attention}}
    return Split(
        gpt, mesh, plan, sequences.train_in_one_call, sequences.mean_loss, lambda: sequences.batches(NUM_STEPS, rows=8)
    )


CASES: dict[str, tuple[Split, dict[str, Any], bool]] = {
    # Each split with the host and with disk; products of them; whether ranks share memory.
    "tp host": (of_tensors({"dp": 2, "tp": 2}), ON_HOST, True),
    "tp disk": (of_tensors({"dp": 2, "tp": 2}), ON_DISK, False),
    "pp host": (Split(decoder, {"pp": 2, "dp": 2}), ON_HOST, False),
    "pp disk": (Split(decoder, {"pp": 2, "dp": 2}, {"pipeline": {"schedule": "zb-h1"}}), ON_DISK, True),
    "ep disk": (Split(experts, {"dp": 2, "ep": 2}, AT_ONCE), ON_DISK, True),
    "ep host": (Split(experts, {"ep": 2}, AT_ONCE), UPDATE_ON_HOST, False),
    "sp host": (of_sequences({"dp": 2, "sp": 2}, "ring"), ON_HOST, True),
    "sp disk": (of_sequences({"sp": 2}, "ulysses"), ON_DISK, False),
    "pp tp disk": (of_tensors({"pp": 2, "tp": 2}, pipeline={"schedule": "interleaved"}), STATES_ON_DISK, True),
    "pp tp host": (of_tensors({"tp": 2, "pp": 2}), UPDATE_ON_HOST, False),
    "tp params": (of_tensors({"dp": 2, "tp": 2}, activations="disk"), PARAMS_ON_DISK, True),
    "pp params": (Split(decoder, {"pp": 2, "dp": 2}, {"activations": "disk"}), PARAMS_ON_DISK, False),
    "ep params": (Split(experts, {"dp": 2, "ep": 2}, AT_ONCE), PARAMS_ON_DISK, False),
    "pp tp params": (of_tensors({"pp": 2, "tp": 2}), PARAMS_ON_DISK, True),
    "pp sp disk": (of_sequences({"pp": 2, "sp": 2}, "ring"), STATES_ON_DISK, False),
}


def race(split: Split, data: list[Batch], plan: dict[str, Any], *, shares_memory: bool) -> list[Run]:
    """Train with a split, and return the results of every rank."""

    def check_memory(engine: sw.Engine) -> None:
        memory = engine.memory()
        on_disk = {kind: size for kind, size in memory.measured_on_disk.items() if kind != "activations"}
        assert on_disk == memory.promised_on_disk
        assert bool(memory.measured_on_disk.get("activations")) == ("activations" in plan)
        assert memory.measured_on_host.get("optim", 0) <= 1.01 * memory.promised_on_host.get("optim", 0)
        assert bool(memory.promised_on_disk) == ("disk" in str(plan["rows"]) or plan["preset"] == "infinity")

    how: dict[str, Any] = {"after": check_memory, "shares_memory": shares_memory}
    return ranks_run(split.build(), data, plan, train=at_once(split.train), **how)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("case", CASES)
def test_trains_as_the_whole_model(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, norms, clipping, all gradients of each step, and parameters are equal. The folder is empty at the end."""
    monkeypatch.setattr("shardwise.runtime.activations.activation_offload.SMALL_BYTES", 64)
    split, rows, shares_memory = CASES[case]
    data = split.data()
    plan = {
        "mesh": split.mesh,
        "accumulate": ACCUMULATE,
        "clip_grad_norm": CLIP,
        "disk": str(tmp_path),
        "rows": {},
        **split.plan,
        **rows,
    }
    runs = race(split, data, plan, shares_memory=shares_memory)
    twin = whole_run(split.build(), data, loss_of=split.loss_of, shares=plan["accumulate"], clip=CLIP)
    for run in runs:
        assert_alike(run, twin)
    assert not list(tmp_path.iterdir())


JOBS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"pp": 2, "tp": 2}, ON_DISK),
    ({"dp": 2}, UPDATE_ON_HOST),
    ({"dp": 2, "tp": 2}, STATES_ON_DISK),
    ({"dp": 1}, ON_DISK),
    ({"pp": 2}, ON_HOST),
    ({"pp": 2, "dp": 2}, ON_DISK),
]


@varies
def test_a_checkpoint_goes_between_splits_and_tiers(tmp_path: Path) -> None:
    """Each job resumes from the previous one, takes a step, and saves. Together they train like the twin."""
    jobs = JOBS[: drawn(2, len(JOBS))]
    data = [{"x": x, "y": y} for x, y in batches(len(jobs), 8)]
    twin = whole_run(decoder(), data, loss_of=of_pairs, shares=ACCUMULATE, clip=CLIP)
    for step, (batch, (mesh, rows)) in enumerate(zip(data, jobs, strict=True)):
        models = [decoder() for _ in range(math.prod(mesh.values()))]
        plan: dict[str, Any] = {"mesh": mesh, "accumulate": ACCUMULATE, "clip_grad_norm": CLIP, **rows}
        plan |= {"disk": str(tmp_path / "scratch")} | ({"tensor": TIED} if "tp" in mesh else {})

        def rank(
            world: sw.World, models: list[nn.Module] = models, plan: Any = plan, batch: Batch = batch, step: int = step
        ) -> tuple[float, dict[str, Tensor]]:
            mine = models[world.rank]
            with sw.shard(mine, plan, optimizer=adamw(mine), world=world) as engine:
                resumed = engine.resume(tmp_path / "checkpoints")
                assert (0 if resumed is None else resumed.step) == step
                share, num_shares = engine.data_ranks
                part = {name: value.chunk(num_shares)[share] for name, value in batch.items()}
                loss = engine.mean(train_pairs(engine, part).item())
                engine.step()
                for name in ("tokens.weight", "blocks.3.attn.qkv.weight"):
                    state = engine.get(name, "exp_avg")
                    assert state is not None
                    engine.set(name, state, "exp_avg")
                engine.save(tmp_path / "checkpoints")
                return loss, engine.state_dict()

        told = run_ranks(len(models), rank)
        assert {loss for loss, _ in told} == {told[0][0]}
        assert told[0][0] == pytest.approx(twin.losses[step], rel=1e-5)
    for name, param in twin.params.items():
        torch.testing.assert_close(told[0][1][name], param, rtol=1e-5, atol=1e-5)


def test_a_disk_is_asked_for_room_for_the_parts_that_its_ranks_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(TierFolder, "check_room", lambda self, num_bytes: asked.append(num_bytes))
    split = of_tensors({"pp": 2, "tp": 2})
    plan = {"mesh": split.mesh, "accumulate": ACCUMULATE, "disk": str(tmp_path), **split.plan, **ON_DISK}

    def work(engine: sw.Engine) -> tuple[int, int]:
        return asked[0], engine.memory().measured_on_disk["optim"]

    told = work_on_ranks(split.num_ranks, work, plan, decoder)
    needed = sum(measured for _, measured in told)
    assert needed <= told[0][0] <= 1.1 * needed
