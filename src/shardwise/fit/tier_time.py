"""What tiers cost a step, in seconds: what a program moves and updates off the device, by what a machine was measured
to give. Pure.

Ranks of one host share its memory's bandwidth and its disk, and each device has a link of its own. What the model
computes is not known here: these are seconds that a step takes at least if that takes less.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.program import Footprint, StepProgram, actions_of
from shardwise.system.calibration import Calibration
from shardwise.system.units import format_bytes, format_count

HOST, LINKS = "shardwise bench host", "shardwise bench links"


@dataclass(frozen=True)
class TierWork:
    """One kind of work in a step of one rank: bytes moved, or elements updated.

    `seconds` are `None` where the machine has not been measured; `measure` is the command that does it. Work of the
    same `resource` is done one after the other.
    """

    what: str
    resource: str
    amount: int
    unit: str
    seconds: float | None
    measure: str

    def __str__(self) -> str:
        amount = format_bytes(self.amount) if self.unit == "bytes" else f"{format_count(self.amount)} {self.unit}"
        return f"{self.what}: {amount}" + ("" if self.seconds is None else f", {self.seconds:.3g} s")


@dataclass(frozen=True)
class TierTime:
    """All work of a step's tiers, on a rank that shares its host with `num_local - 1` others."""

    work: tuple[TierWork, ...]
    num_local: int
    host: str
    """The machine that was measured."""

    @property
    def missing(self) -> tuple[str, ...]:
        """The commands that would measure what is not known."""
        return tuple(dict.fromkeys(one.measure for one in self.work if one.seconds is None))

    @property
    def longest(self) -> tuple[str, float] | None:
        """The resource that is busy longest in a step, and for how many seconds: no step takes less. `None` if nothing
        is known. Reading, updating and writing of different units go on at once."""
        busy: dict[str, float] = {}
        for one in self.work:
            if one.seconds is not None:
                busy[one.resource] = busy.get(one.resource, 0.0) + one.seconds
        return max(busy.items(), key=lambda item: item[1]) if busy else None

    @property
    def least_seconds(self) -> float:
        """How long `longest` is busy; 0 if nothing is known."""
        return self.longest[1] if self.longest is not None else 0.0

    @property
    def lines(self) -> list[str]:
        """A line for each kind of work, and `bounds`."""
        return [str(one) for one in self.work] + self.bounds

    @property
    def bounds(self) -> list[str]:
        """The lower bound of a step's time, and how to measure what is missing."""
        lines = []
        longest = self.longest
        if longest is not None:
            shared = f", which {self.num_local} ranks share," if self.num_local > 1 and longest[0] != "link" else ""
            lines.append(
                f"A step takes at least {longest[1]:.3g} s, because the {longest[0]}{shared} is busy for that time "
                f"(measured on {self.host}). Computation is not included."
            )
        if self.missing:
            what = "all times" if longest else "times"
            lines.append(f"To estimate {what}, run {' and '.join(self.missing)} on this machine.")
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "work": [{"what": one.what, one.unit: one.amount, "seconds": one.seconds} for one in self.work],
            "longest": None if self.longest is None else {"what": self.longest[0], "seconds": self.longest[1]},
            "missing": list(self.missing),
        }


def tier_time(
    step: StepProgram,
    held: Footprint,
    calibration: Calibration,
    *,
    num_micro_batches: int,
    num_local: int,
    folder: str | None,
) -> TierTime | None:
    """What tiers cost a rank in one step; `None` where all is on the device. `folder` is that of rows on a disk.

    On a machine without a device that and the host are both the CPU's memory, and what goes between is copied there.
    """
    updated = updated_numel(step)
    if not updated and held.host is None:
        return None
    memory = calibration.memory
    adam = None if memory is None else memory.adam_elements_per_second / num_local
    copied = step.copied_bytes(num_micro_batches)
    work = [*_copies(copied.get("evict", 0), copied.get("fetch", 0), calibration, num_local)]
    work.append(TierWork("updated on the host", "update", updated, "elements", _over(updated, adam), HOST))
    if held.disk is not None:
        disk = None if folder is None else calibration.disk_at(folder)
        bench = f"shardwise bench disk {folder or 'FOLDER'}"
        num_bytes = held.disk.total
        in_passes = num_micro_batches * _read_in_passes(step)
        read = None if disk is None else disk.read_bytes_per_second / num_local
        write = None if disk is None else disk.write_bytes_per_second / num_local
        all_read = num_bytes + in_passes
        work.append(TierWork("read from the disk", "disk", all_read, "bytes", _over(all_read, read), bench))
        work.append(TierWork("written to the disk", "disk", num_bytes, "bytes", _over(num_bytes, write), bench))
    return TierTime(tuple(one for one in work if one.amount), num_local, calibration.host)


def _copies(evicted: int, fetched: int, calibration: Calibration, num_local: int) -> tuple[TierWork, TierWork]:
    links, memory = calibration.links, calibration.memory
    if links is not None and links.to_device_bytes_per_second:
        to, of = links.from_device_bytes_per_second, links.to_device_bytes_per_second
        resource, measure = "link", LINKS
    else:
        to = of = 0.0 if memory is None else memory.copy_bytes_per_second / num_local
        resource, measure = "memory", HOST
    return (
        TierWork("to the host", resource, evicted, "bytes", _over(evicted, to), measure),
        TierWork("from the host", resource, fetched, "bytes", _over(fetched, of), measure),
    )


def _read_in_passes(step: StepProgram) -> int:
    """Bytes of parameters that one rank reads from a disk in a forward and backward."""
    there = {flat.name for unit in step.units for flat in unit.flats if flat.rests_on_disk}
    actions = actions_of(step.micro_batch)
    return sum(one.sent_bytes for one in actions if (one.verb, one.subject) == ("fetch", "param") and one.flat in there)


def updated_numel(step: StepProgram) -> int:
    """Elements that one rank updates off its device."""
    flats = (flat for unit in step.units for flat in unit.flats if flat.updates_below)
    return sum(flat.num_elements(flat.table.optim.shard) for flat in flats)


def _over(amount: int, rate: float | None) -> float | None:
    return amount / rate if rate else None
