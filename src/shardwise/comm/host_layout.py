"""How the ranks of a group are spread over hosts, and which of them carries what between hosts. Pure.

[Note: one copy between hosts] What all ranks of a host need is sent to it once, and what they have summed leaves it
once. Rank `p` of a group has one partner on every other host, the one with the same number there (numbers wrap around
if a host has fewer ranks): chunk `p` goes to the partner, which gives it to its neighbours, and the partner sends its
host's sum of chunk `p`. So all ranks of a host share the work and the link evenly, no rank leads, and of a whole of N
bytes, over H hosts with the same number of ranks each,

    all_gather       N / H x (H - 1)    leaves each host and arrives at it
    reduce_scatter   N / H x (H - 1)
    all_reduce       twice that

however many ranks the hosts have. A ring over n ranks sends N / n x (n - 1), which is more.

A leader on each host would do all of its sums and sending on one core and one connection. One connection between two
ranks is enough: messages striped over several were measured between namespaces, and reached 0.95 of a link of 1 Gbit/s
either way, and no more than the noise at 10 and 25.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from shardwise.program import lines_on_hosts

Indices = tuple[int, ...]


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
    """The indices of one group's ranks by host, as seen from the rank at index `own`."""

    def __init__(self, ranks: Sequence[int], own: int, host_of: Sequence[int]) -> None:
        """`host_of` is the number of each rank's host, by rank of the world."""
        self.own = own
        self.hosts: tuple[Indices, ...] = lines_on_hosts([host_of[rank] for rank in ranks])
        """In the order in which they appear in the group."""
        self.number = next(number for number, indices in enumerate(self.hosts) if own in indices)
        self.near: Indices = self.hosts[self.number]
        """Those of this host, including this rank's own."""
        self._among_neighbours = {index: number for indices in self.hosts for number, index in enumerate(indices)}

    @property
    def is_crowded(self) -> bool:
        """Whether there are several hosts, and several ranks on one of them."""
        return 1 < len(self.hosts) < len(self._among_neighbours)

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    def partner(self, index: int, host: int) -> int:
        """The one on `host` that carries what `index` sends and receives there."""
        indices = self.hosts[host]
        return indices[self._among_neighbours[index] % len(indices)]

    @cached_property
    def neighbours(self) -> Indices:
        """The other ranks of this host."""
        return tuple(index for index in self.near if index != self.own)

    @cached_property
    def far(self) -> Indices:
        """All ranks of other hosts."""
        return tuple(index for number, indices in enumerate(self.hosts) if number != self.number for index in indices)

    @cached_property
    def partners(self) -> Indices:
        """This rank's partners on every other host, in the order of hosts."""
        return tuple(self.partner(self.own, host) for host in range(self.num_hosts) if host != self.number)

    @cached_property
    def carried(self) -> Indices:
        """Those on other hosts whose partner on this host is this rank."""
        return tuple(index for index in self.far if self.carrier(index) == self.own)

    def carrier(self, index: int) -> int:
        """The one on this host that is the partner of one elsewhere."""
        return self.partner(index, self.number)


def even_local_size(hosts: Sequence[str]) -> int:
    """How many ranks each host has, by the name of each rank's host; 0 if they have different numbers of them, or not
    in a row. The same on all ranks, since meshes are made by it."""
    size = hosts.count(hosts[0])
    rows = [set(hosts[start : start + size]) for start in range(0, len(hosts), size)]
    is_even = len(hosts) % size == 0 and len(set(hosts)) == len(rows)
    return size if is_even and all(len(row) == 1 for row in rows) else 0
