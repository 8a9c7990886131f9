"""The description of the hardware on which a job runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from shardwise.comm import World
from shardwise.comm.world import num_ranks_per_host
from shardwise.fit.calibrate.speed import calibrated_hardware, this_machine
from shardwise.fit.hardware import Hardware, hardware, profiles
from shardwise.system.calibration import readable_calibration
from shardwise.system.machine import num_cores

_log = logging.getLogger("shardwise")


def described_hardware(world: World) -> Hardware | None:
    """This machine, if `shardwise calibrate` has measured it; otherwise the profile of this rank's device, if there is
    one by its name."""
    known = readable_calibration()
    if known.hardware is not None and known.machine == this_machine():
        return calibrated_hardware(known, known.machine)
    name = _device_name(world)
    words = name.replace("-", " ").split()
    named = [one for one in profiles() if one.partition("-")[0] in words or (name and one.partition("-")[0] in name)]
    return _nearest(named, world) if named else None


def hardware_here(world: World) -> Hardware:
    """The same; without a description that of processors, or of the device with the nearest memory."""
    found = described_hardware(world)
    if found is not None:
        return found
    if world.device.type == "cpu":
        return hardware("cpu")
    nearest = _nearest([one for one in profiles() if one != "cpu"], world)
    name = _device_name(world) or world.device
    _log.warning("There is no hardware profile for %s; %s is assumed.", name, nearest.name)
    return nearest


def with_ranks_of(machine: Hardware, world: World) -> Hardware:
    """`machine` with the ranks that a host of `world` has now. On processors they run the threads that they were
    started with: where others are lost, their cores are nobody's. A host beside accelerators may be a part of the one
    that a profile has: a virtual machine of 16 cores for one H200 of a DGX with 112."""
    on_cpu = world.device.type == "cpu"
    here = machine.with_ranks(num_ranks_per_host(world), torch.get_num_threads() if on_cpu else None)
    if on_cpu or here.host is None:
        return here
    return here.model_copy(update={"host": here.host.with_cores(num_cores())})


def _nearest(names: Sequence[str], world: World) -> Hardware:
    """The profile whose memory is nearest to that of this rank's device."""
    memory = world.rank_device.memory_bytes or 0
    return min(map(hardware, names), key=lambda one: abs(one.memory_bytes - memory))


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device).lower() if world.device.type == "cuda" else ""
