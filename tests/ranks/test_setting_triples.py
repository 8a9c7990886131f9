"""Every three settings of a plan together, in as few plans as cover them: each trains as the plain model does, or is
refused before the first step."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelined import batches, rows_of, unsplit

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.testing import run_ranks
from tests.covering import covering
from tests.models import Decoder
from tests.thorough import sampled, soak, thorough_only

NUM_RANKS, NUM_STEPS, ROWS, CLIP = 2, 3, 8, 0.5
SPLIT = {"plan": {"blocks.*.up": "column", "blocks.*.down": "row", "tokens": "vocabulary", "head": "vocabulary"}}
NORMS = {"classes": ["LayerNorm"], "rows": {"param": {"shard": []}, "held": {"shard": []}}}
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "preset": [{"preset": name} for name in ("ddp", "zero1", "zero2", "zero3", "zero3-kept")],
    "mesh": [{"mesh": {"dp": 2}}, {"mesh": {"pp": 2, "dp": 1}}, {"mesh": {"dp": 1, "tp": 2}, "tensor": SPLIT}],
    "accumulate": [{"accumulate": 1}, {"accumulate": 4}],
    "activations": [{"activations": name} for name in ("keep", "recompute", "selective", "offload", "disk")],
    "offload": [
        {"offload": shares}
        for shares in (
            {},
            {"optim": 0.3},
            {"optim": 1.0},
            {"optim": 0.6, "param": 0.3},
            {"optim": 1.0, "optim_disk": 0.5},
            {"optim": 1.0, "optim_disk": 1.0, "param": 1.0, "param_disk": 0.5},
        )
    ],
    "schedule": [{"pipeline": {"schedule": name}} for name in ("1f1b", "gpipe", "interleaved", "zb-h1")],
    "units": [
        {"units": {"class": "Block"}},
        {"units": {"class": "Block", "together": 2}},
        {"units": {"min_numel": 5000}},
    ],
    "resident": [{}, {"resident_below": 100}, {"rules": {"norms": NORMS}}],
    "prefetch": [{}, {"prefetch_bytes": 0}],
    "clip": [{}, {"clip_grad_norm": CLIP}],
    "checksums": [{}, {"disk_checksums": True}],
}


ROWS_OF_TABLE = covering({name: range(len(values)) for name, values in SETTINGS.items()}, 3)


def plan_of(row: Mapping[str, int], folder: Path) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for name, number in row.items():
        plan |= SETTINGS[name][number]
    return {**plan, "disk": str(folder)} if "disk" in str(plan) else plan


def name_of(row: Mapping[str, int]) -> str:
    return "-".join(str(number) for number in row.values())


def outcome(plan: Mapping[str, Any]) -> Sequence[Any]:
    """What each rank says: its refusal, or its losses, norms and parameters."""
    torch.manual_seed(0)
    model = Decoder(tied=True)
    replicas = [copy.deepcopy(model) for _ in range(NUM_RANKS)]

    def rank(world: sw.World) -> Any:
        mine = replicas[world.rank]
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
        try:
            engine = sw.shard(mine, plan, optimizer=optimizer, world=world)
        except ConfigError as error:
            return str(error)
        with engine:
            losses, norms = [], []
            for x, y in batches(NUM_STEPS, ROWS):
                losses.append(engine.mean(engine.train_step((rows_of(engine, x), rows_of(engine, y))).item()))
                norms.append(float(engine.gradient_norm or 0.0))
            return losses, norms, engine.state_dict()

    return run_ranks(NUM_RANKS, rank)


def assert_as_unsplit(told: Sequence[Any], plan: Mapping[str, Any]) -> None:
    """What every rank says is what the plain model does."""
    torch.manual_seed(0)
    twin = unsplit(
        Decoder(tied=True),
        batches(NUM_STEPS, ROWS),
        clip=plan.get("clip_grad_norm"),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
    for losses, norms, params in told:
        assert losses == pytest.approx(twin.losses, rel=1e-5)
        assert norms == pytest.approx(twin.norms, rel=1e-4)
        for name, value in twin.params.items():
            torch.testing.assert_close(params[name], value, rtol=1e-4, atol=1e-5, msg=name)


@soak("some 200 plans")
@pytest.mark.parametrize("row", ROWS_OF_TABLE, ids=name_of)
def test_three_settings_train_as_the_plain_model_or_are_refused(row: dict[str, int], tmp_path: Path) -> None:
    plan = plan_of(row, tmp_path)
    told = outcome(plan)
    if isinstance(told[0], str):
        assert told == [told[0]] * NUM_RANKS
        return
    assert_as_unsplit(told, plan)


ON_DISK = {"optim": 1.0, "optim_disk": 1.0, "param": 1.0, "param_disk": 1.0}
WHOLE = pytest.mark.parametrize("whole", [{"resident_below": 100}, {"rules": {"norms": NORMS}}])


@WHOLE
def test_whole_parameters_do_not_lie_on_a_disk_with_their_states(whole: dict[str, Any], tmp_path: Path) -> None:
    """They were not updated on the device."""
    told = outcome({"preset": "zero3", "mesh": {"dp": 2}, "offload": ON_DISK, "disk": str(tmp_path), **whole})
    assert all("on a disk both lie in one file" in one for one in told)


@sampled
@WHOLE
def test_they_do_where_nothing_is_sharded(whole: dict[str, Any], tmp_path: Path) -> None:
    """It was refused, as if the single rank along `dp` had a part of the states."""
    plan = {"preset": "zero3", "mesh": {"pp": 2, "dp": 1}, "offload": ON_DISK, "disk": str(tmp_path), **whole}
    assert_as_unsplit(outcome(plan), plan)


@thorough_only("three settings at once, each of which has tests of its own")
@sampled
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_stages_with_activations_on_a_disk_and_a_share_of_the_update_on_the_host(
    preset: str, share: float, tmp_path: Path
) -> None:
    """In step 2 the stages contradicted each other in a collective along `pp`."""
    plan = {"preset": preset, "mesh": {"pp": 2, "dp": 1}, "accumulate": 2, "units": {"class": "Block"}}
    plan |= {"activations": "disk", "disk": str(tmp_path), "offload": {"optim": share}}
    assert_as_unsplit(outcome(plan), plan)
