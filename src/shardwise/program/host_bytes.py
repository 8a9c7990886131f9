"""The bytes of a program's messages that leave each host: one copy of what a host sends for every other host.

`comm/host_layout.py` decides how ranks carry it; the byte counts agree exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import SumOfCodes
from shardwise.program.action import Action

Indices = tuple[int, ...]
_ONCE, _TWICE = ("gather", "reduce_scatter"), ("all_reduce", "agree", "project", "restore")


def lines_on_hosts(hosts: Sequence[int]) -> tuple[Indices, ...]:
    """The indices of a line's ranks, grouped by host in the order in which the hosts appear. `hosts` has the host of
    each rank."""
    by_host: dict[int, list[int]] = {}
    for index, host in enumerate(hosts):
        by_host.setdefault(host, []).append(index)
    return tuple(tuple(indices) for indices in by_host.values())


def crossing_bytes(verb: str, chunk_bytes: int, num_near: int, num_ranks: int, num_hosts: int) -> int:
    """Bytes that all ranks of one host together send to other hosts, for one collective of a line.

    `chunk_bytes` is what each of the line's `num_ranks` contributes (`gather`) or receives (`reduce_scatter`), or a
    rank's share of an `all_reduce`. `num_near` of the ranks are on that host.
    """
    gathered = num_near * (num_hosts - 1) * chunk_bytes
    summed = (num_ranks - num_near) * chunk_bytes
    return {"gather": gathered, "reduce_scatter": summed}.get(verb, gathered + summed)


def _crossing_codes(way: SumOfCodes, sent_bytes: int, num_near: int, num_ranks: int, num_hosts: int) -> int:
    """`crossing_bytes` of a sum of codes, for which each rank sends `sent_bytes` in all: what it adds goes to every
    rank that sums it, and is not summed on the way; what all get leaves the host once for each other host."""
    to_each = sent_bytes // (num_ranks - 1)
    if way.gathers_codes:
        return num_near * (num_hosts - 1) * to_each
    block = way.codes.block * num_ranks
    codes, sums = way.bytes_to_each(block, num_ranks)
    codes, sums = (to_each * part // (codes + sums) for part in (codes, sums))
    return num_near * (num_ranks - num_near) * codes + num_near * (num_hosts - 1) * sums


def sent_by_hosts(actions: Iterable[Action], mesh: Mesh, local_size: int) -> list[int]:
    """Bytes that leave each host for `actions`, which every rank runs; each host has `local_size` consecutive ranks.

    Gathers, sums, signs of momenta and what is agreed on are counted. Broadcast buffers, whole matrices, activations
    and messages outside of a program are not.
    """
    num_ranks = mesh.world_size
    sent = [0] * -(-num_ranks // local_size)
    for action in actions:
        if action.subject == "momentum" and action.sent_bytes:
            _add_direct(action, mesh, local_size, sent)
            continue
        rounds = 1 if action.verb in _ONCE else 2 if action.verb in _TWICE else 0
        if not rounds or not action.sent_bytes:
            continue
        chunk_bytes = action.sent_bytes // (rounds * (mesh.size(action.over) - 1))
        way = SumOfCodes.parse(action.verb, action.codes) if action.codes and action.verb != "gather" else None
        for ranks in {mesh.group(rank, action.over) for rank in range(num_ranks)}:
            hosts = lines_on_hosts([rank // local_size for rank in ranks])
            for indices in hosts:
                if way is None:
                    left = crossing_bytes(action.verb, chunk_bytes, len(indices), len(ranks), len(hosts))
                else:
                    left = _crossing_codes(way, action.sent_bytes, len(indices), len(ranks), len(hosts))
                sent[ranks[indices[0]] // local_size] += left
    return sent


def _add_direct(action: Action, mesh: Mesh, local_size: int, sent: list[int]) -> None:
    """Add to `sent` messages of equal size that go straight from each rank to each other one."""
    axes = action.over.split("+")
    for ranks in {mesh.among(rank, axes) for rank in range(mesh.world_size)}:
        for indices in lines_on_hosts([rank // local_size for rank in ranks]):
            far = len(ranks) - len(indices)
            sent[ranks[indices[0]] // local_size] += len(indices) * far * action.sent_bytes // (len(ranks) - 1)
