"""The slots that a job with `--autoscale` uses of those in its list of hosts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from shardwise.launch.places.hosts import Host


class ChosenHosts:
    """The first slots of a list, of which hosts that were lost are the last: the job is asked to use them by being told
    that its list is these. Read by the thread of a `HostList`."""

    def __init__(self, read: Callable[[], list[Host]], num_slots: int, slots_per_host: int | None) -> None:
        """`read` returns all hosts, and raises `ConfigError`. `slots_per_host` applies to all of them, if given."""
        self._read_all, self._num_slots, self._slots_per_host = read, num_slots, slots_per_host
        self._order: list[str] = []
        self._lock = threading.Lock()
        self.unit, self.room = 1, 0
        self.lost: Callable[[], Collection[str]] = tuple

    def ask(self, num_slots: int, hosts: Collection[str]) -> None:
        """See `Place`."""
        del hosts
        with self._lock:
            self._num_slots = num_slots

    def read(self) -> list[Host]:
        """The hosts to use, with the number of slots on each. Raises `ConfigError`."""
        known = {host.name: host for host in self._read_all()}
        with self._lock:
            self.room = sum(self._slots_of(host) for host in known.values())
            lost = set(self.lost())
            order = [
                *(name for name in self._order if name in known),
                *(name for name in known if name not in self._order),
            ]
            # stays so when it answers again: the job would otherwise go to and fro between two hosts
            self._order = [*(one for one in order if one not in lost), *(one for one in order if one in lost)]
            return first_slots([known[name] for name in self._order], self._num_slots, self._slots_per_host)

    def release(self, host: str) -> None:
        """Nothing to do: it stays in the list."""

    def close(self) -> None:
        """Nothing to do."""

    def _slots_of(self, host: Host) -> int:
        return slots_of(host, self._slots_per_host)


def slots_of(host: Host, slots_per_host: int | None) -> int:
    """As `shares` counts them."""
    return len(host.devices) or slots_per_host or host.slots or 1


def first_slots(hosts: Sequence[Host], num_slots: int, slots_per_host: int | None) -> list[Host]:
    """`hosts` with the first `num_slots` of their slots."""
    chosen, left = [], num_slots
    for host in hosts:
        many = min(left, slots_of(host, slots_per_host))
        if many > 0:
            chosen.append(replace(host, slots=many, devices=host.devices[:many]))
        left -= many
    return chosen
