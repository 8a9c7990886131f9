"""What the loss of one rank, of one host or of the launcher costs an elastic job, before it runs. Pure.

What happens then follows from the plan, as in `elastic/`; seconds that no plan determines are those of `shardwise
simulate`, whose options change them there, but for how long ranks regroup, which was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwise.fit.simulate import Job
from shardwise.plan.mesh import Mesh
from shardwise.plan.replica_groups import Smaller, axes_of_group, copy_axes, is_lone, num_groups, num_leaving
from shardwise.program import FlatSpec
from shardwise.program.buddies import kept_axes
from shardwise.program.footprint import optim_bytes_of
from shardwise.program.image_bytes import image_bytes, rows_bytes
from shardwise.system.units import format_bytes, format_seconds

Survive = Literal["host", "buddy", "checkpoint"] | None
LAUNCHER_LOST = "it has the job's store, and hosts go on without it only over ssh and in pods, with --launcher-timeout"
ONE_HOST = "all ranks are on that host"
NO_COPIES = "survive: host keeps parts of the state on one host only"
_REGROUP_SECONDS_ON_ONE_HOST = 0.1
"""Of four ranks, from a death to the repeated step, it takes 0.10 to 0.27 s on an idle machine and up to 0.46 s beside
other work (docs/elastic-reasons.md), with 0.03 to 0.1 s until it is known."""
_REGROUP_SECONDS_BETWEEN_HOSTS = 0.3
"""Of four ranks on two hosts, with links of 1 Gbit/s, it takes 0.42 to 0.72 s beside other work, 0.1 s of which are the
step."""
NO_GROUP = "every replica group has ranks on that host"


@dataclass(frozen=True)
class LossPrice:
    """What a loss costs. `num_lost` ranks are gone, or leave together with those that are; if it is 0, nobody notices.

    `seconds` is how long all others stand, steps that are made again not counted. `num_steps` are those, on average;
    `None` if nobody knows how often the script saves. `read_bytes` is what a rank reads at most, from memory or from
    the checkpoint, and `disk_bytes` from a disk and writes there again. `why_restarted` is empty if the others go on.
    """

    what: Literal["rank", "host", "launcher"]
    num_lost: int
    why_restarted: str
    seconds: float
    num_steps: float | None
    read_bytes: int
    step_seconds: float | None = None
    disk_bytes: int = 0

    def __str__(self) -> str:
        """Such as `one rank: the others stand for 400 ms, and 1 step again; each reads up to 16 MiB from memory; 1 rank
        is missing until as many join`."""
        what = f"{'the' if self.what == 'launcher' else 'one'} {self.what}"
        if not self.num_lost:
            return f"{what}: the ranks train on, and another process takes over"
        stands = f"{format_seconds(self.seconds)}, {self._again()}"
        if self.why_restarted:
            read = f"each reads {format_bytes(self.read_bytes)} of the checkpoint"
            return f"{what}: all ranks restart, because {self.why_restarted}: {stands}; {read}"
        places = {"memory": self.read_bytes, "a disk": self.disk_bytes}
        parts = [f"{format_bytes(num_bytes)} from {place}" for place, num_bytes in places.items() if num_bytes]
        read = f"each reads up to {' and '.join(parts)}" if parts else "nothing is read"
        missing = f"{self.num_lost} rank{'s are' if self.num_lost > 1 else ' is'} missing until as many join"
        return f"{what}: the others stand for {stands}; {read}; {missing}"

    def _again(self) -> str:
        if self.num_steps is None:
            return "and the steps since the last checkpoint (--checkpoint-every says how many)"
        number = f"and {self.num_steps:,.0f} step{'s' * (self.num_steps != 1)} again"
        if self.step_seconds is None:
            return number
        return f"{number} ({format_seconds(self.num_steps * self.step_seconds)})"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Rates:
    """What is known of the machine and the job; `None` where it is not. Seconds of a step, seconds between two
    checkpoints, bytes that a rank copies in a second in memory, and those that it moves on a disk, read and
    written."""

    step_seconds: float | None = None
    checkpoint_every: float | None = None
    memory: float | None = None
    disk: float | None = None


def loss_prices(
    mesh: Mesh,
    flats: Sequence[FlatSpec],
    num_states: int,
    *,
    per_host: int,
    survive: Survive,
    why_restarted: str,
    smaller: Smaller = (),
    rates: Rates | None = None,
) -> list[LossPrice]:
    """Of one rank, one host with `per_host` ranks, and the launcher. `why_restarted` as `why_no_images` says it; if
    `mesh` is one replica group, the others go on on a `smaller` mesh."""
    size, num_of_group = mesh.world_size, num_leaving(mesh, smaller)
    regroup_seconds = _REGROUP_SECONDS_ON_ONE_HOST if per_host >= size else _REGROUP_SECONDS_BETWEEN_HOSTS
    job = _Losses(mesh, flats, num_states, rates or Rates(), regroup_seconds)
    why = why_restarted or ("no other rank is left" if num_of_group == size else "")
    is_one_group = num_groups(mesh) == 1 and bool(smaller)
    of_host = num_leaving(mesh, smaller, min(per_host, size)) if is_one_group else _leaving_with_host(mesh, per_host)
    if per_host >= size:
        why_host = ONE_HOST
    elif of_host == size:
        why_host = NO_GROUP
    else:
        is_alone = survive == "host" and _is_on_one_host(mesh, flats, per_host)
        why_host = why or (NO_COPIES if is_alone else "")
    return [
        job.price("rank", num_of_group, why, Job.exit_seconds),
        job.price("host", of_host, why_host, Job.silence_seconds),
        LossPrice("launcher", 0, "", 0.0, 0.0, 0)
        if per_host >= size
        else job.price("launcher", size, LAUNCHER_LOST, 0.0),
    ]


@dataclass(frozen=True)
class _Losses:
    mesh: Mesh
    flats: Sequence[FlatSpec]
    num_states: int
    rates: Rates
    regroup_seconds: float

    def price(
        self, what: Literal["rank", "host", "launcher"], num_lost: int, why: str, found_seconds: float
    ) -> LossPrice:
        step = self.rates.step_seconds
        if why:
            every = self.rates.checkpoint_every
            num_steps = None if every is None or step is None else every / 2 / step
            seconds = found_seconds + Job.restart_seconds
            return LossPrice(what, self.mesh.world_size, why, seconds, num_steps, self._of_checkpoint(), step)
        kept = [flat for flat in self.flats if is_lone(self.mesh) or kept_axes(flat)]
        read_bytes = self._taken_over(image_bytes(kept, self.num_states).copy, num_lost)
        disk_bytes = self._taken_over(rows_bytes(kept, self.num_states), num_lost)
        copying = sum(
            num_bytes / rate
            for num_bytes, rate in ((read_bytes, self.rates.memory), (disk_bytes, self.rates.disk))
            if rate
        )
        seconds = found_seconds + self.regroup_seconds + copying
        return LossPrice(what, num_lost, "", seconds, 1.0, read_bytes, step, disk_bytes)

    def _taken_over(self, num_bytes: int, num_lost: int) -> int:
        """What a rank has once the others have taken over the sharded state, of which it had `num_bytes`."""
        size = self.mesh.world_size
        return -(-num_bytes * size // (size - num_lost))

    def _of_checkpoint(self) -> int:
        """Master weights and states of what a rank updates, and what is frozen."""
        total = 0
        for flat in self.flats:
            table = flat.table
            if flat.trainable:
                total += optim_bytes_of(flat, self.num_states, None)
                total += flat.num_bytes(table.optim.shard, table.optim.dtype) if flat.master_is_param else 0
            else:
                total += flat.num_bytes(table.param.shard, table.param.dtype)
        return total


def _leaving_with_host(mesh: Mesh, per_host: int) -> int:
    """Ranks of all replica groups that have ranks on one host, of the host with the most."""
    groups = [_group(mesh.coordinate(rank)) for rank in range(mesh.world_size)]
    hosts = [set(groups[first : first + per_host]) for first in range(0, mesh.world_size, per_host)]
    return max(map(len, hosts)) * (mesh.world_size // num_groups(mesh))


def _group(coordinate: Mapping[str, int]) -> tuple[int, ...]:
    of_group = axes_of_group(coordinate)
    return tuple(place for axis, place in coordinate.items() if axis not in of_group)


def _is_on_one_host(mesh: Mesh, flats: Sequence[FlatSpec], per_host: int) -> bool:
    """Whether a host has all copies of some part of the state."""
    for shard in {(*kept_axes(flat), *flat.split_axes) for flat in flats}:
        same = copy_axes(mesh, shard)
        if any(len({one // per_host for one in mesh.among(rank, same)}) == 1 for rank in range(mesh.world_size)):
            return True
    return False
