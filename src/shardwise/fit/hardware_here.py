"""The description of the hardware on which a job runs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from shardwise.comm import World
from shardwise.fit.calibrate.speed import calibrated_hardware, this_machine
from shardwise.fit.hardware import Hardware, hardware, profiles
from shardwise.system.calibration import readable_calibration

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


def _nearest(names: Sequence[str], world: World) -> Hardware:
    """The profile whose memory is nearest to that of this rank's device."""
    memory = world.rank_device.memory_bytes or 0
    return min(map(hardware, names), key=lambda one: abs(one.memory_bytes - memory))


def _device_name(world: World) -> str:
    return torch.cuda.get_device_name(world.device).lower() if world.device.type == "cuda" else ""
