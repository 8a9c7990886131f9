"""Opens the folder on a disk, and reserves room there, before anything changes for a plan with rows on a disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from shardwise.comm import World
from shardwise.comm.world import num_ranks_per_host
from shardwise.errors import CommError, ConfigError, TierError
from shardwise.memory.disk_memory import DiskMemory
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.program import UnitSpec, disk_bytes, resting_disk_bytes
from shardwise.program.buddies import copy_bytes
from shardwise.system.calibration import default_path, read_calibration
from shardwise.system.disk import IoQueue, Patience, job_of_process
from shardwise.system.named_folder import folder_of

_SHARE_OF_TIMEOUT = 0.9
"""Of the time that a rank may keep the others waiting, how long it waits for a disk that answers nothing."""


def open_disk(
    specs: Sequence[UnitSpec],
    plan: Plan,
    mesh: Mesh,
    world: World,
    device: torch.device,
    known: DiskMemory | None = None,
    *,
    makes_files: bool = True,
    recovers: bool = False,
) -> DiskMemory | None:
    """The disk memory for the rows of this rank's `specs` that are on a disk. All ranks call, if any table has such a
    row.

    `known` is that of the previous plan; it is used again if it is in the same folder. With `makes_files` the files for
    `specs` are made at once, while nothing has been changed yet. Raises `ConfigError` for a plan that names no folder,
    and `TierError` on all ranks if the folder cannot be opened, has too little room on any, or no file can be made
    there. Where ranks that were lost or join change the layout (`recovers`), a rank that has no room is lost: it raises
    `TierError`, and the others `FaultError`, if not all have none.
    """
    flats = [flat for spec in specs for flat in spec.flats if flat.lies_on_disk]
    named = _required_folder(plan)
    coordinate = mesh.coordinate(world.rank)
    has_versions = known.keeps_versions if known is not None else _keeps_versions(plan, world)
    sizes = [
        (disk_bytes(flat, coordinate), resting_disk_bytes(flat))
        for flat in flats
        for _ in range(2 if has_versions and flat.updates_from_disk else 1)
    ]
    wanted = sum(num_bytes for num_bytes, _ in sizes)
    if has_versions and plan.survive != "host":
        wanted += copy_bytes(flats, 0, world.hosts, coordinate).kept_on_disk
    mine = {"wanted": wanted, "job": _job_known_to(world, known)}
    of_ranks = [json.loads(message) for message in world.exchange(json.dumps(mine).encode(), "disk")]
    disk, losing = known, known if recovers else None

    def open_folder() -> None:
        nonlocal disk
        if disk is None or not disk.is_in(named):
            own = world.rank_device if device.type == world.rank_device.device.type else None
            folder = folder_of(named)
            disk = DiskMemory(
                folder,
                world.rank if world.membership is None else world.membership.member,
                own,
                _queue_for(folder, world),
                job=next(each["job"] for each in of_ranks if each["job"]),
                named=named,
                clock=world.journal.clock,
                keeps_versions=has_versions,
            )
        disk.has_checksums = plan.disk_checksums

    def make_room() -> None:
        assert disk is not None
        if disk is not known and not world.is_newcomer:  # else the others may need what a lost rank has left
            disk.folder.tidy_after_others()
        disk.folder.check_room(_on_a_host(world, [each["wanted"] for each in of_ranks]))

    try:
        _agree(world, open_folder, losing)
        assert disk is not None
        _agree(world, make_room, losing)
        if makes_files:
            _agree(world, partial(disk.prepare, sizes), losing)
    except (TierError, CommError):
        if disk is not None and disk is known:
            disk.drop_prepared()
        elif disk is not None:
            disk.close()
        raise
    return disk


def require_room(disk: DiskMemory, world: World, num_bytes: int) -> None:
    """Ask for room for `num_bytes` of this rank's activations. All ranks call; all raise `TierError` if the disk of any
    has too little. Where a lost rank is survived, those without room are lost: see `open_disk`."""
    wanted = [int(message) for message in world.exchange(str(num_bytes).encode(), "disk")]
    when = "when room for activations was asked for"
    _agree(world, lambda: disk.folder.check_room(_on_a_host(world, wanted)), disk, when)


def _on_a_host(world: World, wanted: Sequence[int]) -> int:
    """The bytes of as many ranks as share a host, assuming that those that want most do."""
    return sum(sorted(wanted)[-num_ranks_per_host(world) :])


def _keeps_versions(plan: Plan, world: World) -> bool:
    """Whether others may go on from what a lost rank had; `elastic/survivable.py` knows later whether they can."""
    return world.membership is not None and plan.survive != "checkpoint"


def _job_known_to(world: World, known: DiskMemory | None) -> str:
    """The number of this job's folders; empty on a rank that has joined it, and is told."""
    if known is not None:
        return known.folder.job
    return "" if world.is_newcomer else job_of_process()


def _agree(
    world: World,
    work: Callable[[], None],
    losing: DiskMemory | None = None,
    when: str = "while ranks were lost or joined",
) -> None:
    """Do `work` on all ranks; if it fails on any, all raise the `TierError` of the first; with `losing`, ranks where it
    fails are lost (`DiskMemory.leave_if_lost`)."""
    why = ""
    try:
        work()
    except (ConfigError, TierError) as error:
        why = str(error)
    told = map(json.loads, world.exchange(json.dumps(why).encode(), "disk"))
    failed = {rank: text for rank, text in enumerate(told) if text}
    if failed:
        if losing is not None:
            losing.leave_if_lost(world.rank, failed, range(world.size), when)
        raise TierError(next(iter(failed.values())))


def _queue_for(folder: Path, world: World) -> IoQueue:
    """A queue with the depth and request size that `shardwise bench disk` found best for the folder or one above it. It
    gives a disk up before the other ranks give this one up, so that the error names the disk."""
    figures = read_calibration().disk_at(folder)
    patience = Patience(str(folder), _SHARE_OF_TIMEOUT * world.timeout_seconds)
    try:
        if figures is None:
            return IoQueue(patience=patience)
        return IoQueue(figures.depth, figures.block_bytes, patience)
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
