"""Asking for a folder on a disk, and for room there, before anything is changed for a plan with rows on one."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from shardwise.comm import World
from shardwise.config import Plan
from shardwise.errors import ConfigError, TierError
from shardwise.mesh import MODEL_AXES, SEQUENCE_AXIS, Mesh
from shardwise.placement import Table
from shardwise.program import UnitSpec, disk_bytes
from shardwise.storage.disk_memory import DiskMemory


def open_disk(
    specs: Sequence[UnitSpec],
    plan: Plan,
    mesh: Mesh,
    world: World,
    device: torch.device,
    known: DiskMemory | None = None,
) -> DiskMemory | None:
    """What keeps the rows of `specs` that are on a disk; `None` if there are none. All ranks call.

    `known` is what has those of the plan before, and goes on if it is in the same folder. Raises `ConfigError` for a
    plan that names no folder, and on all ranks `TierError` for one that cannot be had or is too small.
    """
    flats = [flat for spec in specs for flat in spec.flats if flat.lies_on_disk]
    if not any("disk" in (table.optim.tier, table.param.tier) for table in _tables(specs)):
        return None
    folder = _required_folder(plan, mesh)
    coordinate = mesh.coordinate(world.rank)
    wanted = sum(disk_bytes(flat, coordinate) for flat in flats)
    disk, why = known, ""
    try:
        if known is None or not known.is_in(folder):
            own = world.rank_device if device.type == world.rank_device.device.type != "cpu" else None
            disk = DiskMemory(folder, world.rank, own)
        assert disk is not None
        disk.folder.check_room(wanted * min(world.size, world.local_size or world.size))
    except TierError as error:
        why = str(error)
    failed = [said for said in map(json.loads, world.exchange(json.dumps(why).encode(), "disk")) if said]
    if failed:
        if disk is not None and disk is not known:
            disk.close()
        raise TierError(failed[0])
    return disk


def _tables(specs: Sequence[UnitSpec]) -> set[Table]:
    return {flat.table for spec in specs for flat in spec.flats}


def _required_folder(plan: Plan, mesh: Mesh) -> str:
    """That of a plan with rows on a disk."""
    if plan.disk is None:
        raise ConfigError(
            "The plan has rows on tier 'disk' and names no folder for them. Give it one on a local disk, such as "
            "disk: /scratch/run."
        )
    split = [axis for axis in mesh.axes if axis in MODEL_AXES and axis != SEQUENCE_AXIS and mesh.size(axis) > 1]
    if split:
        raise ConfigError(
            f"Rows on tier 'disk' are for models that are not split, in this version, and the mesh has "
            f"{' and '.join(split)}. Put them on the host: rows.optim.tier: host."
        )
    return plan.disk
