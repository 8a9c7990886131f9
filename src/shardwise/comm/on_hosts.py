"""How the ranks of a group are spread over hosts, and which of them carries what between hosts. Pure.

[Note: one copy between hosts] What all ranks of a host need is sent to it once, and what they have summed leaves it
once. Rank `p` of a group has one partner on every other host, the one at the same place there (places wrap around if a
host has fewer ranks): chunk `p` goes to the partner, which gives it to its neighbours, and the partner sends its host's
sum of chunk `p`. So all ranks of a host share the work and the link evenly, no rank leads, and of a whole of N bytes,
over H hosts with the same number of ranks each,

    all_gather       N / H x (H - 1)    leaves each host and arrives at it
    reduce_scatter   N / H x (H - 1)
    all_reduce       twice that

however many ranks the hosts have. A ring over n ranks sends N / n x (n - 1), which is more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from shardwise.program import lines_on_hosts

Places = tuple[int, ...]


class Hosts(NamedTuple):
    """By rank: the number of its host, which is the first rank there, and the host's name.

    Ranks that share no memory count as being on different hosts.
    """

    numbers: tuple[int, ...]
    names: tuple[str, ...]

    def ranks_beside(self, rank: int) -> tuple[int, ...]:
        """All ranks of its host, including itself."""
        return tuple(other for other, number in enumerate(self.numbers) if number == self.numbers[rank])


class OnHosts:
    """The places of one group by host, as seen from the rank at `own`."""

    def __init__(self, ranks: Sequence[int], own: int, host_of: Sequence[int]) -> None:
        """`host_of` is the number of each rank's host, by rank of the world."""
        self.own = own
        self.hosts: tuple[Places, ...] = lines_on_hosts([host_of[rank] for rank in ranks])
        """In the order in which they appear in the group."""
        self.number = next(number for number, places in enumerate(self.hosts) if own in places)
        self.near: Places = self.hosts[self.number]
        """The places on this host, including this rank's own."""
        self._index = {place: index for places in self.hosts for index, place in enumerate(places)}

    @property
    def is_crowded(self) -> bool:
        """Whether there are several hosts, and several ranks on one of them."""
        return 1 < len(self.hosts) < len(self._index)

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    def partner(self, place: int, host: int) -> int:
        """The place on `host` that carries what `place` sends and receives there."""
        places = self.hosts[host]
        return places[self._index[place] % len(places)]

    @cached_property
    def neighbours(self) -> Places:
        """The other places on this host."""
        return tuple(place for place in self.near if place != self.own)

    @cached_property
    def far(self) -> Places:
        """All places on other hosts."""
        return tuple(place for number, places in enumerate(self.hosts) if number != self.number for place in places)

    @cached_property
    def partners(self) -> Places:
        """This rank's partners on every other host, in the order of hosts."""
        return tuple(self.partner(self.own, host) for host in range(self.num_hosts) if host != self.number)

    @cached_property
    def carried(self) -> Places:
        """The far places whose partner on this host is this rank."""
        return tuple(place for place in self.far if self.carrier(place) == self.own)

    def carrier(self, place: int) -> int:
        """The place on this host that is the partner of a far one."""
        return self.partner(place, self.number)


def even_local_size(hosts: Sequence[str]) -> int:
    """How many ranks each host has, by the name of each rank's host; 0 if they have different numbers of them, or not
    in a row. The same on all ranks, since meshes are made by it."""
    size = hosts.count(hosts[0])
    rows = [set(hosts[start : start + size]) for start in range(0, len(hosts), size)]
    is_even = len(hosts) % size == 0 and len(set(hosts)) == len(rows)
    return size if is_even and all(len(row) == 1 for row in rows) else 0
