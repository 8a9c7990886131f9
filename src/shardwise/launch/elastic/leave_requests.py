"""Members that ask to leave: which of them may leave at the next step boundary, and whether the whole job must end."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwise.launch.elastic.processes import Process


class LeaveRequests:
    """Requests of the members of one attempt."""

    def __init__(self) -> None:
        self.needs_end = False
        """Whether members that must leave cannot be spared, so that the whole job should be asked to end."""
        self.is_stopping = False
        """Whether the whole job was asked to end: no rank joins or leaves any more."""

    def stop_together(self) -> None:
        """The whole job was asked to end. Members that have asked to leave stay until it does, so that all can save."""
        self.is_stopping = True

    def add(self, process: Process, *, must_go: bool, may_go: bool) -> None:
        """A member asks to leave. One that `must_go`, and cannot be spared, means the end of the job: alone, it could
        not hand its state over."""
        if self.is_stopping or process.is_leaving:
            return
        process.asks_to_leave = True
        self.needs_end = self.needs_end or (must_go and process.is_member and not may_go)

    def decide(self, living: Iterable[Process], may_go: Callable[[Process], bool]) -> None:
        """Decide which `living` members leave at the next step boundary. If the job ends, none does: those that were
        allowed to may be ready for the next generation already, which is to have all."""
        for process in living:  # one by one: each may be the last that can be spared
            if self.needs_end or self.is_stopping:
                process.is_leaving = False
            elif process.asks_to_leave and not process.is_leaving:
                process.is_leaving = may_go(process)
