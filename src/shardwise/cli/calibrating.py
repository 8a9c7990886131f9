"""What `shardwise calibrate` measures and prints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import yaml

from shardwise.cli.console import console_for_output
from shardwise.cli.tier_bench import disk_figures, host_figures, link_figures, require_writable
from shardwise.errors import ConfigError
from shardwise.fit.calibrate import disk, host, links
from shardwise.fit.calibrate.speed import hardware_from, measured_fresh_blocks, measured_speeds, this_machine
from shardwise.fit.calibrate.speeds import Speeds
from shardwise.fit.hardware import Disk, Hardware, fresh_seconds
from shardwise.system.calibration import Calibration, default_path, place_of, read_calibration, write_calibration
from shardwise.system.machine import num_cores
from shardwise.system.neighbours import BUSY_CORES, Neighbours
from shardwise.system.units import format_bytes, format_count, format_seconds

DTYPES = ("fp32", "bf16")


def run(args: argparse.Namespace) -> int:
    """Measure what the calibration file does not know of this machine, and how fast it computes."""
    path = args.calibration or default_path()
    require_writable(path)
    known = read_calibration(path)
    machine = this_machine()
    if known.machine and known.machine != machine:
        known = Calibration(known.host)  # the file came from elsewhere, or the machine has changed
    folder = None if args.disk is None else place_of(args.disk)
    nearest = None if folder is None else next(at for at in (folder, *folder.parents) if at.exists())
    known = _measured(known, folder)
    neighbours = Neighbours()
    rounds, fresh = measured_speeds(DTYPES), measured_fresh_blocks()
    others_cores = neighbours.cores()
    at_disk = known.disk_at(folder) if folder is not None else next(iter(known.disks.values()), None)
    found = hardware_from(
        Speeds.fastest(rounds),
        known,
        f"this machine ({known.host})",
        None
        if at_disk is None
        else Disk(
            read_bytes_per_second=at_disk.read_bytes_per_second, write_bytes_per_second=at_disk.write_bytes_per_second
        ),
        fresh,
    )
    profile = found.model_dump(exclude_none=True)
    try:
        write_calibration(replace(known, machine=machine, hardware=profile), path)
        if args.profile is not None:
            text = yaml.safe_dump(profile, sort_keys=False, default_flow_style=None, width=120)
            args.profile.write_text(f"# Measured by shardwise calibrate on {machine}.\n{text}")
    except OSError as error:
        raise ConfigError(
            f"{error.filename or path} cannot be written ({error}), so the figures are not kept."
        ) from error
    if args.json:
        told = {"machine": machine, "hardware": profile, "others_cores": others_cores, "calibration": str(path)}
        print(json.dumps(told, indent=1))
    else:
        lines = [*_lines(found, machine, path), *_disk_lines(found.disk, folder, nearest), *_busy(others_cores)]
        console_for_output().print("\n".join(lines), markup=False, soft_wrap=True)
    return 0


def _measured(known: Calibration, folder: Path | None) -> Calibration:
    """With the host's memory and links, and the disk at `folder`, where they are not known yet."""
    if known.memory is None:
        _tell("the host's memory")
        known = replace(known, memory=host_figures(host.measure_host([num_cores()], host.QUICK_NUMEL)))
    if known.links is None:
        _tell("links between ranks")
        known = replace(known, links=link_figures(links.measure_links(links.QUICK_BYTES)))
    if folder is not None and known.disk_at(folder) is None:
        _tell(f"the disk with {folder}")
        place = folder.resolve()
        grid = disk.Grid(disk.QUICK_BLOCKS, disk.QUICK_DEPTHS, 2**26, 0.3)
        known = replace(known, disks={**known.disks, str(place): disk_figures(disk.measure_disk(place, grid))})
    _tell("computation")
    return known


def _tell(what: str) -> None:
    if sys.stderr.isatty():
        print(f"Measuring {what} ...", file=sys.stderr)


def _lines(found: Hardware, machine: str, path: Path) -> Iterator[str]:
    yield machine
    ranks = "1 rank" if found.ranks_per_node == 1 else f"{found.ranks_per_node} ranks at once, each of which gets"
    yield f"measured with {ranks}:"
    for dtype, rate in found.peak_flops.items():
        products = found.products_in.get(dtype, found.products)
        attention = found.attention_in.get(dtype, found.attention)
        yield f"  products in {dtype}: {format_count(rate)}FLOP/s"
        yield f"    half of it at {format_count(products.half_area)} elements, or sums of {products.half_depth:.0f}"
        yield f"    attention: {attention.share:.0%} of that, half of it at {attention.half_length:.0f} keys"
        backward = found.attention_backward_in.get(dtype, attention)
        yield f"    its backward: {backward.share:.0%} of that, half of it at {backward.half_length:.0f} keys"
    shares = ", ".join(f"{share:.0%} in {dtype}" for dtype, share in found.memory_share_in.items())
    yield f"  memory: {format_bytes(found.memory_bytes_per_second)}/s copied, of which other operators get {shares}"
    if found.fresh_blocks:
        block = 4 << 20
        yield f"  a new block of {format_bytes(block)} takes {format_seconds(fresh_seconds(found.fresh_blocks, block))}"
    yield f"  an operator takes {found.launch_seconds * 1e6:.1f} us to start"
    if found.ranks_per_node > 1:
        rate, latency = found.local.bytes_per_second, found.local.latency_seconds
        yield f"  from rank to rank: {format_bytes(rate)}/s after {format_seconds(latency)}"
    yield f"Kept in {path}; shardwise explain --time uses it."


def _disk_lines(found: Disk | None, folder: Path | None, nearest: Path | None) -> Iterator[str]:
    if found is not None:
        where = "a disk" if folder is None else f"the disk with {folder}"
        read, written = format_bytes(found.read_bytes_per_second), format_bytes(found.write_bytes_per_second)
        yield f"  {where}: {read}/s read, {written}/s written"
    if folder != nearest:
        yield (
            f"There is no folder {folder} yet, so these are figures of the disk with {nearest}. If it is to be on "
            f"another one, mount that, and run shardwise bench disk {folder}."
        )


def _busy(others_cores: float) -> Iterator[str]:
    if others_cores > BUSY_CORES:
        yield (
            f"Others used {others_cores:.1f} cores meanwhile, so steps may be predicted too long. Run shardwise "
            f"calibrate again when nothing else runs."
        )
