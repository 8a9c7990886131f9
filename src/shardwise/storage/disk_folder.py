"""Asking for a folder on a disk, and for room there, before anything is changed for a plan with rows on one."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from shardwise.calibration import read_calibration
from shardwise.comm import World
from shardwise.config import Plan
from shardwise.errors import ConfigError, TierError
from shardwise.mesh import Mesh
from shardwise.program import UnitSpec, disk_bytes
from shardwise.storage.disk_memory import DiskMemory
from shardwise.tiers import IoQueue


def open_disk(
    specs: Sequence[UnitSpec],
    plan: Plan,
    mesh: Mesh,
    world: World,
    device: torch.device,
    known: DiskMemory | None = None,
) -> DiskMemory | None:
    """What keeps the rows of this rank's `specs` that are on a disk. All ranks call, if any table has such a row.

    `known` is what has those of the plan before, and goes on if it is in the same folder. Raises `ConfigError` for a
    plan that names no folder, and on all ranks `TierError` for one that cannot be had or is too small.
    """
    flats = [flat for spec in specs for flat in spec.flats if flat.lies_on_disk]
    folder = _required_folder(plan)
    coordinate = mesh.coordinate(world.rank)
    wanted = sum(disk_bytes(flat, coordinate) for flat in flats)
    of_ranks = sorted(json.loads(said) for said in world.exchange(json.dumps(wanted).encode(), "disk"))
    num_local = min(world.size, world.local_size or world.size)
    disk, why = known, ""
    try:
        if known is None or not known.is_in(folder):
            own = world.rank_device if device.type == world.rank_device.device.type != "cpu" else None
            disk = DiskMemory(folder, world.rank, own, _queue_for(folder))
        assert disk is not None
        disk.has_checksums = plan.disk_checksums
        disk.folder.check_room(sum(of_ranks[-num_local:]))  # of as many as a host has, those that want most
    except (ConfigError, TierError) as error:
        why = str(error)
    failed = [said for said in map(json.loads, world.exchange(json.dumps(why).encode(), "disk")) if said]
    if failed:
        if disk is not None and disk is not known:
            disk.close()
        raise TierError(failed[0])
    assert disk is not None
    disk.folder.tidy_after_others()
    return disk


def _queue_for(folder: str) -> IoQueue:
    """With the depth and size of requests that `shardwise bench disk` found best for the folder, or one above it."""
    figures = read_calibration().disk_at(folder)
    return IoQueue() if figures is None else IoQueue(figures.depth, figures.block_bytes)


def _required_folder(plan: Plan) -> str:
    """That of a plan with rows on a disk."""
    if plan.disk is None:
        raise ConfigError(
            "The plan has rows on tier 'disk' and names no folder for them. Give it one on a local disk, such as "
            "disk: /scratch/run."
        )
    return plan.disk
