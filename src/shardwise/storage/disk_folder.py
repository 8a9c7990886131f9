"""Opens the folder on a disk, and reserves room there, before anything changes for a plan with rows on a disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from shardwise.calibration import default_path, read_calibration
from shardwise.comm import World
from shardwise.config import Plan
from shardwise.errors import ConfigError, TierError
from shardwise.mesh import Mesh
from shardwise.program import UnitSpec, disk_bytes
from shardwise.storage.disk_memory import DiskMemory
from shardwise.tiers import IoQueue, folder_of, job_of_process


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
    named = _required_folder(plan)
    coordinate = mesh.coordinate(world.rank)
    wanted = sum(disk_bytes(flat, coordinate) for flat in flats)
    mine = {"wanted": wanted, "job": job_of_process()}
    of_ranks = [json.loads(message) for message in world.exchange(json.dumps(mine).encode(), "disk")]
    num_local = min(world.size, world.local_size or world.size)
    disk = known

    def open_with_room() -> None:
        nonlocal disk
        if disk is None or not disk.is_in(named):
            own = world.rank_device if device.type == world.rank_device.device.type else None
            folder = folder_of(named)
            disk = DiskMemory(folder, world.rank, own, _queue_for(folder), job=of_ranks[0]["job"], named=named)
        disk.has_checksums = plan.disk_checksums
        most = sorted(each["wanted"] for each in of_ranks)[-num_local:]
        disk.folder.check_room(sum(most))  # assume the ranks that want most share a host

    try:
        _agree(world, open_with_room)
        assert disk is not None
        _agree(world, disk.folder.tidy_after_others)
    except TierError:
        if disk is not None and disk is not known:
            disk.close()
        raise
    return disk


def _agree(world: World, work: Callable[[], None]) -> None:
    """Do `work` on all ranks; if it fails on any, all raise the `TierError` of the first."""
    why = ""
    try:
        work()
    except (ConfigError, TierError) as error:
        why = str(error)
    failed = [text for text in map(json.loads, world.exchange(json.dumps(why).encode(), "disk")) if text]
    if failed:
        raise TierError(failed[0])


def _queue_for(folder: Path) -> IoQueue:
    """A queue with the depth and request size that `shardwise bench disk` found best for the folder or one above it."""
    figures = read_calibration().disk_at(folder)
    try:
        return IoQueue() if figures is None else IoQueue(figures.depth, figures.block_bytes)
    except ConfigError as error:
        raise ConfigError(
            f"{default_path()} has settings for {folder} that cannot be used ({error}) Remove it, and run shardwise "
            f"bench disk {folder} again."
        ) from error


def _required_folder(plan: Plan) -> str:
    """The folder of a plan with rows on a disk."""
    if plan.disk is None:
        raise ConfigError(
            "The plan has rows on tier 'disk' and names no folder for them. Give it one on a local disk, such as "
            "disk: /scratch/run."
        )
    return plan.disk
