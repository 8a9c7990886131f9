"""Opens the folder on a disk, and reserves room there, before anything changes for a plan with rows on a disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from shardwise.comm import World
from shardwise.errors import ConfigError, TierError
from shardwise.memory.disk_memory import DiskMemory
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.program import UnitSpec, disk_bytes, resting_disk_bytes
from shardwise.system.calibration import default_path, read_calibration
from shardwise.system.disk import IoQueue, folder_of, job_of_process


def open_disk(
    specs: Sequence[UnitSpec],
    plan: Plan,
    mesh: Mesh,
    world: World,
    device: torch.device,
    known: DiskMemory | None = None,
    *,
    makes_files: bool = True,
) -> DiskMemory | None:
    """The disk memory for the rows of this rank's `specs` that are on a disk. All ranks call, if any table has such a
    row.

    `known` is that of the previous plan; it is used again if it is in the same folder. With `makes_files` the files for
    `specs` are made at once, while nothing has been changed yet. Raises `ConfigError` for a plan that names no folder,
    and `TierError` on all ranks if the folder cannot be opened, has too little room on any, or no file can be made
    there.
    """
    flats = [flat for spec in specs for flat in spec.flats if flat.lies_on_disk]
    named = _required_folder(plan)
    coordinate = mesh.coordinate(world.rank)
    wanted = sum(disk_bytes(flat, coordinate) for flat in flats)
    mine = {"wanted": wanted, "job": job_of_process()}
    of_ranks = [json.loads(message) for message in world.exchange(json.dumps(mine).encode(), "disk")]
    disk = known

    def open_with_room() -> None:
        nonlocal disk
        if disk is None or not disk.is_in(named):
            own = world.rank_device if device.type == world.rank_device.device.type else None
            folder = folder_of(named)
            job, clock = of_ranks[0]["job"], world.journal.clock
            disk = DiskMemory(folder, world.rank, own, _queue_for(folder), job=job, named=named, clock=clock)
        disk.has_checksums = plan.disk_checksums
        disk.folder.check_room(_on_a_host(world, [each["wanted"] for each in of_ranks]))

    try:
        _agree(world, open_with_room)
        assert disk is not None
        _agree(world, disk.folder.tidy_after_others)
        if makes_files:
            sizes = [(disk_bytes(flat, coordinate), resting_disk_bytes(flat)) for flat in flats]
            _agree(world, partial(disk.prepare, sizes))
    except TierError:
        if disk is not None and disk is known:
            disk.drop_prepared()
        elif disk is not None:
            disk.close()
        raise
    return disk


def require_room(disk: DiskMemory, world: World, num_bytes: int) -> None:
    """Ask for room for `num_bytes` of this rank. All ranks call; all raise `TierError` if the disk of any has too
    little."""
    wanted = [int(message) for message in world.exchange(str(num_bytes).encode(), "disk")]
    _agree(world, lambda: disk.folder.check_room(_on_a_host(world, wanted)))


def _on_a_host(world: World, wanted: Sequence[int]) -> int:
    """The bytes of as many ranks as share a host, assuming that those that want most do."""
    num_local = min(world.size, world.local_size or world.size)
    return sum(sorted(wanted)[-num_local:])


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
