"""The processes of an elastic job, as its launcher sees them, without processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from shardwise.launch.elastic.job_notes import FolderNotes
from shardwise.launch.elastic.slots import Slot
from shardwise.launch.elastic.workers import Ended, Event
from shardwise.launch.environment import Attempt
from shardwise.launch.outcome import Outcome


class SimulatedWorkers:
    """`Workers` whose processes have ended when `codes` has their exit codes. What happens in a second that the
    launcher waits is up to `second`."""

    def __init__(self, second: Callable[[], object], codes: dict[int, int] | None = None) -> None:
        self.now = 0.0
        self.notes = FolderNotes(None)
        self.codes = {} if codes is None else codes
        self._second = second
        self._sent: dict[int, signal.Signals] = {}
        self._lives: set[int] = set()

    @property
    def living(self) -> list[int]:
        return sorted(self._lives)

    def start(self, number: int, slot: Slot, attempt: Attempt, settings: dict[str, str]) -> None:
        self._lives.add(number)

    def wait(self, milliseconds: int) -> None:
        self.now += 1
        self._second()

    def events(self) -> Sequence[Event]:
        ended = [number for number in self.living if number in self.codes]
        self._lives -= set(ended)
        return [Ended(number, self.outcome(number)) for number in ended]

    def outcome(self, number: int) -> Outcome:
        return Outcome(number, self.codes.get(number, -signal.SIGTERM), self._sent.get(number), self.now)

    def is_stopped(self, number: int, pid: int) -> bool:
        return False

    def end_one(self, number: int) -> None:
        self.codes.setdefault(number, -signal.SIGKILL)
        self._sent[number] = signal.SIGKILL

    def wait_for_end(self, seconds: float, hurry: Callable[[], bool]) -> None:
        for number in self._lives:
            self.codes[number], self._sent[number] = -signal.SIGTERM, signal.SIGTERM
        self._lives.clear()

    def kill(self) -> int:
        return 0

    def send(self, number: signal.Signals) -> None: ...
    def end_job(self) -> None: ...
    def begin(self) -> None: ...
    def close(self) -> None: ...
    def leave(self, host: str) -> None: ...
