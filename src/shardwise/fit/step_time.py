"""How long a step takes on some hardware, in words and figures. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.fit.clock import RankProgram, Timeline, time_ranks
from shardwise.fit.hardware import Hardware
from shardwise.fit.tier_time import updated_numel
from shardwise.plan.mesh import Mesh
from shardwise.system.units import format_count, format_seconds

TIERS = {"host": "for copies to and from the host", "disk": "for the disk"}


@dataclass(frozen=True)
class StateCopies:
    """What an elastic job copies of a rank's state while the next forward and backward compute, in bytes: to another
    host, and then within this one's memory. An update waits for both (`elastic/survival.py`)."""

    sent: int
    copied: int

    def seconds(self, hardware: Hardware) -> float:
        """Where every rank of a node does the same. Raises `ConfigError` if no rates of a host are known."""
        sending = hardware.collective_seconds("send", self.sent, (0, hardware.ranks_per_node)) if self.sent else 0.0
        return sending + hardware.host_memory_seconds(self.copied)


@dataclass(frozen=True)
class StepTime:
    """The prediction for one step, on `hardware`, beside which `copies` are made."""

    timeline: Timeline
    hardware: Hardware
    copies: StateCopies | None = None
    updated_on_host: int = 0
    """Elements of a rank."""

    @property
    def step_seconds(self) -> float:
        return self.timeline.step_seconds + self.waiting_for_copies

    @property
    def waiting_for_copies(self) -> float:
        """Seconds that the update waits for copies of the state before it, which take longer than what computes."""
        if self.copies is None:
            return 0.0
        beside = self.timeline.step_seconds - self.timeline.update_seconds
        return max(0.0, self.copies.seconds(self.hardware) - beside)

    @property
    def mfu(self) -> float:
        return self.timeline.mfu * self.timeline.step_seconds / self.step_seconds

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds of the average rank that add up to a step: what it computes, and what it waits for, by axis or
        tier."""
        timeline = self.timeline
        computing = timeline.computing_seconds
        parts = {"computing": computing - timeline.recompute_seconds, "recomputing": timeline.recompute_seconds}
        parts |= {f"waiting along {axis}": seconds for axis, seconds in timeline.exposed.items() if axis not in TIERS}
        parts |= {f"waiting {words}": timeline.exposed.get(tier, 0.0) for tier, words in TIERS.items()}
        parts["waiting for copies of states"] = self.waiting_for_copies
        return {what: seconds for what, seconds in parts.items() if seconds > 0}

    @property
    def lines(self) -> Iterator[str]:
        timeline, step = self.timeline, self.step_seconds
        yield f"{format_seconds(step)} predicted on {self.hardware.name}; MFU {self.mfu:.1%}"
        for what, seconds in sorted(self.breakdown.items(), key=lambda part: -part[1]):
            yield f"{seconds / step:>6.1%}  {format_seconds(seconds)} {what}"
        if timeline.bubble:
            yield f"{timeline.bubble:.0%} of the time is spent waiting for other stages, messages included"
        if self.updated_on_host:
            yield self._host_line()
        busy = (f"{stream} {share:.0%}" for stream, share in timeline.busy.items() if share > 0)
        yield f"streams are busy: {', '.join(busy)}"
        if self.copies is not None:
            yield f"{format_seconds(self.copies.seconds(self.hardware))} of copies of states, beside the next step"

    def _host_line(self) -> str:
        """What a device's profile assumes of its host, which may be another one in a job."""
        host = self.hardware.host
        assert host is not None, "an update on a host without rates has no price"
        seconds = self.hardware.host_update_seconds(self.updated_on_host)
        rate = format_count(round(host.adam_elements_per_second))
        of = f"the {host.cores} cores of a node, and fewer take longer" if host.cores is not None else "a node"
        return f"{format_seconds(seconds)} of updates on the host, at {rate} elements a second for {of}"

    def as_json(self) -> dict[str, Any]:
        timeline = self.timeline
        return {
            "hardware": self.hardware.name,
            "step_seconds": self.step_seconds,
            "mfu": self.mfu,
            "bubble": timeline.bubble,
            "update_seconds": timeline.update_seconds,
            "seconds": self.breakdown,
            "busy": timeline.busy,
            **({} if self.copies is None else {"copying_seconds": self.copies.seconds(self.hardware)}),
        }


def step_time(
    programs: Sequence[RankProgram],
    hardware: Hardware,
    mesh: Mesh,
    *,
    num_micro_batches: int,
    num_states: int = 2,
    keeps_events: bool = True,
) -> StepTime:
    """`time_ranks`, to be read."""
    timeline = time_ranks(
        programs,
        hardware,
        mesh,
        num_micro_batches=num_micro_batches,
        num_states=num_states,
        keeps_events=keeps_events,
    )
    return StepTime(timeline, hardware, updated_on_host=max(updated_numel(program.step) for program in programs))
