"""What ranks keep off their devices when replica groups have left: each of the others holds more of what is sharded
over data axes, and a budget holds for them too. Found before the first step, since nobody is to wait for it when a rank
is lost, and what has no room then can be said in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardwise.errors import ConfigError
from shardwise.parallel.outline import Fit, OffDevice, SmallerMeshes
from shardwise.plan import Budget, Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.replica_groups import mesh_over, num_groups


@dataclass(frozen=True)
class FewerGroups:
    """For a job that has lost replica groups."""

    off_device: Mapping[int, OffDevice] = field(default_factory=dict)
    """By the number of ranks, if the plan has a budget: what they keep off their devices."""
    least: int = 0
    """The fewest ranks for which there is room, if it is known that not all fewer ones have it."""
    why: str = ""
    """Why those have none, in words that follow a colon."""

    def beside(self, smaller: SmallerMeshes, *, has_budget: bool) -> SmallerMeshes:
        """`smaller`, with what the ranks of whole groups keep off their devices, and how many a budget needs."""
        off_device = {**self.off_device, **smaller.off_device}
        return replace(smaller, off_device=off_device, least=self.least if has_budget else 0)


def fewer_groups(plan: Plan, mesh: Mesh, fit: Fit, least: int = 1) -> FewerGroups:
    """For all numbers of groups with at least `least` ranks. `plan` still has its budget.

    A search takes seconds for a large model. So without the first group it is searched for exactly, and for numbers
    from there on so far apart that each is about two thirds of the one before. Those between two have what the
    smaller one needs, which is enough. (On islands every number has the same.)
    """
    first, of_group = num_groups(mesh), mesh.world_size // num_groups(mesh)
    fewest = max(1, -(-least // of_group))
    if fewest >= first or mesh.island_axes:
        return FewerGroups()
    has_budget = plan.budget != Budget()
    axes = mesh.named_sizes
    whys: dict[int, str] = {}

    def fitted(number: int) -> Plan | None:
        on = mesh_over(axes, number * of_group)
        try:
            return fit(plan.model_copy(update={"mesh": on.named_sizes}), on)
        except ConfigError as error:
            whys[number] = str(error).removesuffix(".")
            return None

    found: dict[int, Plan] = {}
    fits, fails = first, fewest - 1
    numbers = _fewer_and_fewer(first, fewest) if has_budget else iter([fewest])
    while fits - fails > 1:
        number = (fits + fails) // 2 if whys else next(numbers)
        there = fitted(number)
        if there is None:
            fails = number
        else:
            fits, found[number] = number, there
    off_device = {}
    for number in range(first - 1, 0, -1) if has_budget and found else ():
        there = found[max((one for one in found if one <= number), default=min(found))]
        off_device[number * of_group] = OffDevice(there.offload, there.disk)
    return FewerGroups(off_device, fits * of_group if whys else 0, whys.get(fails, ""))


def _fewer_and_fewer(first: int, fewest: int) -> Iterator[int]:
    number = first - 1
    while number > fewest:
        yield number
        number -= max(1, number // 3)
    yield fewest
