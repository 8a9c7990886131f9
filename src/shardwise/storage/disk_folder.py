"""Opens the folder on a disk, and reserves room there, before anything changes for a plan with rows on a disk."""

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
    """The disk memory for the rows of this rank's `specs` that are on a disk. All ranks call, if any table has such a
    row.

    `known` is that of the previous plan; it is used again if it is in the same folder. Raises `ConfigError` for a plan
    that names no folder, and `TierError` on all ranks if the folder cannot be opened or has too little room on any.
    """
    flats = [flat for spec in specs for flat in spec.flats if flat.lies_on_disk]
    folder = _required_folder(plan)
    coordinate = mesh.coordinate(world.rank)
    wanted = sum(disk_bytes(flat, coordinate) for flat in flats)
    of_ranks = sorted(json.loads(message) for message in world.exchange(json.dumps(wanted).encode(), "disk"))
    num_local = min(world.size, world.local_size or world.size)
    disk, why = known, ""
    try:
        if known is None or not known.is_in(folder):
            own = world.rank_device if device.type == world.rank_device.device.type != "cpu" else None
            disk = DiskMemory(folder, world.rank, own, _queue_for(folder))
        assert disk is not None
        disk.has_checksums = plan.disk_checksums
        disk.folder.check_room(sum(of_ranks[-num_local:]))  # assume the ranks that want most share a host
    except (ConfigError, TierError) as error:
        why = str(error)
    failed = [text for text in map(json.loads, world.exchange(json.dumps(why).encode(), "disk")) if text]
    if failed:
        if disk is not None and disk is not known:
            disk.close()
        raise TierError(failed[0])
    assert disk is not None
    disk.folder.tidy_after_others()
    return disk


def _queue_for(folder: str) -> IoQueue:
    """A queue with the depth and request size that `shardwise bench disk` found best for the folder or one above it."""
    figures = read_calibration().disk_at(folder)
    return IoQueue() if figures is None else IoQueue(figures.depth, figures.block_bytes)


def _required_folder(plan: Plan) -> str:
    """The folder of a plan with rows on a disk."""
    if plan.disk is None:
        raise ConfigError(
            "The plan has rows on tier 'disk' and names no folder for them. Give it one on a local disk, such as "
            "disk: /scratch/run."
        )
    return plan.disk
