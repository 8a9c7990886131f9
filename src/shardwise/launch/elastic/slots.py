"""Where and when the processes of an elastic job are started. Pure.

A *slot* holds one process of a host, with its device and cores. A process may be started at the beginning of an
attempt; as a replacement for a dead one, within the budget; on another host when a host is lost; and on a host that
joins. Each such permission waits for a free slot on a host that answers and is not excluded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from shardwise.launch.elastic.budget import Budget
from shardwise.launch.job import Elastic


@dataclass(frozen=True)
class Slot:
    """The slot of the `local`-th process of a host."""

    host: str
    local: int


@dataclass
class HostSlots:
    """The slots of one host."""

    num_slots: int
    is_ready: bool = True
    """Whether it answers, and may be used."""
    excluded_until: float = 0.0
    closed: set[int] = field(default_factory=set)
    """Slots whose process has left, or has died too often: it is not replaced."""


class Slots:
    """All slots of a job with at most `most` processes.

    `patience_seconds` is how long a job with too few ranks waits for a lost host to return, or for a host to be added.
    """

    def __init__(self, most: int, budget: Budget, *, patience_seconds: float = 600.0, can_add: bool = False) -> None:
        self.hosts: dict[str, HostSlots] = {}
        self.budget = budget
        self._most = most
        self._patience_seconds = patience_seconds
        self._can_add = can_add
        self._taken: dict[int, Slot] = {}
        self._leaving: set[int] = set()
        """Processes that are about to leave; their replacements may be started before they have left."""
        self._permitted: list[tuple[float, Slot | None]] = []
        self._waits_until = 0.0

    @classmethod
    def of(cls, elastic: Elastic, *, can_add: bool = False) -> Slots:
        budget = Budget(elastic.retries, elastic.retry_seconds)
        return cls(elastic.most, budget, patience_seconds=elastic.retry_seconds, can_add=can_add)

    # -- what happens -----------------------------------------------------------------------------------

    def ready(self, host: str, num_slots: int, now: float) -> str:
        """A host answers, for the first time or again, or its number of slots has changed. Returns a report of that."""
        is_new, s = host not in self.hosts, "" if num_slots == 1 else "s"
        known = self.hosts.setdefault(host, HostSlots(0))
        known.num_slots, known.is_ready, known.closed = num_slots, True, set()
        room = min(self._most, self.num_usable(now)) - self._num_staying() - len(self._permitted)
        self._permitted += [(now, None)] * min(num_slots, max(0, room))
        if is_new:
            return f"host {host} joins, with {num_slots} slot{s}."
        excluded = f", and is excluded for another {known.excluded_until - now:.0f} s"
        return f"host {host} answers, with {num_slots} slot{s}{excluded if known.excluded_until > now else ''}."

    def lost(self, host: str, now: float) -> None:
        """A host is lost with its processes; replacements may be started elsewhere."""
        gone = [number for number, slot in self._taken.items() if slot.host == host]
        for number in gone:
            del self._taken[number]
        self._permitted += [(now, None)] * len(gone)
        self.hosts[host].is_ready = False
        self._waits_until = now + self._patience_seconds

    def leaves(self, host: str, now: float, num_slots: int = 0) -> list[int]:
        """A host loses all but `num_slots` of its slots. Returns the processes that must leave.

        They keep their slots until they have ended. Replacements may be started elsewhere at once.
        """
        known = self.hosts[host]
        known.num_slots, known.is_ready = num_slots, known.is_ready and num_slots > 0
        leaving = [number for number, slot in self._taken.items() if slot.host == host and slot.local >= num_slots]
        spare = sum(self._is_free(slot, now) for slot in self._all())
        self._permitted += [(now, None)] * min(len(leaving), spare)
        self._leaving.update(leaving)
        self._waits_until = now + self._patience_seconds
        return leaving

    def sort_hosts(self, key: Callable[[str], int]) -> None:
        """Processes are started on hosts in the order of `key`, as far as they have none yet."""
        self.hosts = dict(sorted(self.hosts.items(), key=lambda known: key(known[0])))

    def exclude(self, host: str, until: float) -> None:
        """Start nothing on a host before the time `until`."""
        if host in self.hosts:
            self.hosts[host].excluded_until = until
        if not self._can_add and not any(not known.is_ready and known.num_slots for known in self._others(host)):
            self._waits_until = 0.0

    def started(self, number: int, slot: Slot) -> None:
        """A process was started in a slot."""
        self._taken[number] = slot

    def died(self, number: int, now: float, *, is_replaced: bool = True) -> None:
        """A process has died. It may be replaced if `is_replaced`, at the time that the budget allows."""
        slot = self._taken.pop(number, None)
        if slot is None or not is_replaced:
            return
        if (moment := self.budget.ask(slot, now)) is not None:
            self._permitted.append((moment, slot))
        elif slot.host in self.hosts:
            self.hosts[slot.host].closed.add(slot.local)

    def left(self, number: int) -> None:
        """A process has ended successfully, and is not replaced."""
        slot = self._taken.pop(number, None)
        if slot is not None and slot.host in self.hosts:
            self.hosts[slot.host].closed.add(slot.local)

    def stop(self) -> None:
        """Start no more processes."""
        self._permitted.clear()

    def begin(self, now: float) -> None:
        """Begin a new attempt, without processes."""
        self._taken.clear()
        self._leaving.clear()
        for known in self.hosts.values():
            known.closed = set()
        self._permitted = [(now, None)] * min(self._most, self.num_usable(now))

    # -- what follows -----------------------------------------------------------------------------------

    def next(self, now: float) -> Slot | None:
        """A slot in which to start a process now. Call it until it returns `None`."""
        if self._num_staying() >= self._most:
            return None
        for number, (moment, preferred) in enumerate(self._permitted):
            slot = self._find(preferred, now) if moment <= now else None
            if slot is not None:
                del self._permitted[number]
                return slot
        return None

    def num_coming(self, now: float) -> int:
        """The number of processes that will be started on hosts that answer."""
        free = sum(self._is_free(slot, now) for slot in self._all())
        return min(len(self._permitted), free, max(0, self._most - self._num_staying()))

    def can_come(self, now: float) -> bool:
        """Whether a process will be started, or the job still waits for a host."""
        return self.num_coming(now) > 0 or now < self._waits_until

    def num_usable(self, now: float) -> int:
        """Slots on hosts that answer and are not excluded, taken or not."""
        return sum(self._is_usable(slot, now) for slot in self._all())

    def host_of(self, number: int) -> str:
        """The host of a living process; `""` if it has ended."""
        slot = self._taken.get(number)
        return slot.host if slot is not None else ""

    def numbers_on(self, host: str) -> list[int]:
        """The processes on a host."""
        return [number for number, slot in self._taken.items() if slot.host == host]

    def ready_hosts(self) -> list[str]:
        """Hosts that answer, and may be used."""
        return [name for name, known in self.hosts.items() if known.is_ready]

    def _num_staying(self) -> int:
        return len(self._taken.keys() - self._leaving)

    def _others(self, host: str) -> Collection[HostSlots]:
        return [known for name, known in self.hosts.items() if name != host]

    def _all(self) -> list[Slot]:
        return [Slot(host, local) for host, known in self.hosts.items() for local in range(known.num_slots)]

    def _is_usable(self, slot: Slot, now: float) -> bool:
        known = self.hosts.get(slot.host)
        if known is None or not known.is_ready or known.excluded_until > now:
            return False
        return slot.local < known.num_slots and slot.local not in known.closed

    def _is_free(self, slot: Slot, now: float) -> bool:
        return slot not in self._taken.values() and self._is_usable(slot, now)

    def _find(self, preferred: Slot | None, now: float) -> Slot | None:
        if preferred is not None and self._is_free(preferred, now):
            return preferred
        return next((slot for slot in self._all() if self._is_free(slot, now)), None)
