"""The count of one rank's iterations: which of them have become void, and which version of the state each has made.
See [Note: iterations] in `session.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.elastic.arrival import Arrival
from shardwise.elastic.regroup_reports import Report


@dataclass
class Iterations:
    """Where one rank is in its loop, and what of that counts."""

    made: dict[int, int]
    """The iteration that made each of the last two versions of the state."""
    num_steps: dict[int, int]
    """The steps taken until each of these versions."""
    version: int = 0
    """The present one."""
    begun: int = 0
    """How many iterations this rank has begun."""
    is_open: bool = False
    """Whether the last of them has not ended."""
    is_prepared: bool = False
    """Whether the batch of the next one has been split over the ranks of this world, so that it is void with them."""
    void_after: int = 0
    void_until: int = 0
    """Iterations after the first and up to the second are void."""
    ended_anywhere: int = 0
    """The last iteration that any rank had ended when ranks regrouped."""
    is_alone: bool = False
    """Whether the iteration begun last is this rank's alone: as a spare it came back in the middle of it."""

    @classmethod
    def of(cls, num_steps: int, arrival: Arrival | None) -> Iterations:
        """Of a rank that begins after `num_steps` steps, with others or, with `arrival`, among them."""
        if arrival is None:
            return cls({0: 0}, {0: num_steps})
        return cls(
            {arrival.version: arrival.void_after},
            {arrival.version: num_steps},
            version=arrival.version,
            begun=arrival.void_until - 1,  # the others are about to begin the last void iteration
            void_after=arrival.void_after,
            void_until=arrival.void_until,
        )

    @property
    def ended(self) -> int:
        """The last iteration that has ended here."""
        return self.begun - self.is_open

    def is_void(self) -> bool:
        """Whether the open iteration is void."""
        return self.is_open and self.was_void()

    def was_void(self) -> bool:
        """Whether the iteration begun last is void, also after its end."""
        return self.is_alone or self.is_undone(self.begun)

    def is_undone(self, iteration: int) -> bool:
        """Whether an iteration is void, also if it was complete before: see [Note: the commit] in `session.py`."""
        return self.void_after < iteration <= self.void_until

    def come_back(self, num_steps: int, arrival: Arrival) -> None:
        """This rank was a spare, and counts from now on as one that joins. An open iteration is one before the next
        that the others begin."""
        is_inside = self.is_open
        for field, value in vars(Iterations.of(num_steps, arrival)).items():
            setattr(self, field, value)
        self.is_open = self.is_alone = is_inside

    def begin(self) -> None:
        self.is_alone = self.is_prepared = False
        self.begun += 1
        self.is_open = True

    def end(self) -> None:
        self.is_open = False

    def next_version(self, iteration: int, num_steps: int) -> None:
        """Count a new version of the state, made by `iteration`; only the version before can be returned to."""
        before, self.version = self.version, self.version + 1
        self.made = {before: self.made[before], self.version: iteration}
        self.num_steps = {before: self.num_steps[before], self.version: num_steps}

    def return_to(self, version: int, reports: Sequence[Report]) -> None:
        """All ranks return to `version`: note which iterations that makes void. `reports` are those of all of them."""
        self.void_after = next(one.made[version] for one in reports)
        begun = max(one.begun for one in reports)
        self.void_until = begun if begun > self.void_after else 0
        self.ended_anywhere = max(one.ended for one in reports)

    def ended_and_undone(self) -> int | None:
        """The first iteration that had changed something here when it became void, if it had ended; void ones before
        it changed nothing."""
        first = self.void_after + 1
        undone = min((one for one in self.made.values() if one >= first), default=first)
        return undone if first <= self.void_until and (first < self.begun or not self.is_open) else None
