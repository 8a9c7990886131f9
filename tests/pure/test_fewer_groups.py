"""What ranks keep off their devices when replica groups have left."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.fit.fewer_groups import FewerGroups, fewer_groups
from shardwise.parallel.outline import OffDevice, SmallerMeshes
from shardwise.plan import Offload, Plan, load_plan
from shardwise.plan.mesh import Mesh

BUDGET = {"budget": {"device": 1000, "host": 1000}}


class Fitting:
    """A search that keeps off the devices what one rank of `first` has too much, and has room down to `least`."""

    def __init__(self, least: int = 1) -> None:
        self.least, self.asked = least, list[int]()

    def __call__(self, plan: Plan, mesh: Mesh) -> Plan:
        assert plan.mesh == mesh.named_sizes
        self.asked.append(mesh.world_size)
        if mesh.world_size < self.least:
            raise ConfigError(f"{mesh.world_size} ranks have no room.")
        return plan.with_offload(Offload(optim=1 / mesh.world_size))


def found(fit: Fitting, least: int = 1, *, budget: bool = True, **sizes: int) -> FewerGroups:
    plan = load_plan({"preset": "zero1", "mesh": sizes, **(BUDGET if budget else {})})
    size = 1
    for one in sizes.values():
        size *= one
    return fewer_groups(plan, Mesh.of(sizes, size), fit, least)


def shares(groups: FewerGroups) -> dict[int, float]:
    return {size: there.offload.optim for size, there in groups.off_device.items()}


def test_few_are_searched_for_one_by_one_and_many_by_thirds() -> None:
    assert shares(found(Fitting(), dp=4)) == {3: 1 / 3, 2: 1 / 2, 1: 1}
    assert shares(found(Fitting(), dp=3, tp=2)) == {4: 1 / 4, 2: 1 / 2}
    many = Fitting()
    every = found(many, dp=64)
    assert many.asked == [63, 42, 28, 19, 13, 9, 6, 4, 3, 2, 1]
    assert shares(every)[63] == 1 / 63
    assert all(shares(every)[size] == 1 / max(one for one in many.asked if one <= size) for size in range(1, 64))
    assert (every.least, every.why) == (0, "")


def test_fewer_than_the_job_goes_on_with_are_not_searched_for() -> None:
    few = Fitting()
    assert shares(found(few, least=3, dp=4)) == {3: 1 / 3, 2: 1 / 3, 1: 1 / 3}
    assert few.asked == [3]
    for none in (found(few, least=4, dp=4), found(few, tp=4), found(few, island=2, dp=2)):
        assert none == FewerGroups()


def test_the_fewest_that_have_room_are_found() -> None:
    for least in range(2, 17):
        groups = found(Fitting(least), dp=16)
        assert (groups.least, groups.why) == (least, f"{least - 1} ranks have no room")
        assert all(1 / least >= share >= 1 / size for size, share in shares(groups).items() if size >= least)
    assert found(Fitting(5), dp=4, tp=2).least == 6
    assert shares(found(Fitting(16), dp=16)) == {}, "the first has no room either"


def test_without_a_budget_only_the_fewest_are_asked_about_unless_they_have_no_room() -> None:
    fit = Fitting()
    assert found(fit, budget=False, dp=16) == FewerGroups()
    assert fit.asked == [1]
    assert found(Fitting(7), budget=False, dp=16) == FewerGroups({}, 7, "6 ranks have no room")


def test_smaller_meshes_keep_what_was_found_for_them() -> None:
    of_one = OffDevice(Offload(optim=0.9), None)
    smaller = SmallerMeshes(({"dp": 1, "tp": 2}, {"dp": 1, "tp": 1}), "", {1: of_one})
    both = found(Fitting(4), dp=3, tp=2).beside(smaller, has_budget=True)
    assert (both.off_device[1], both.off_device[4].offload.optim, both.least) == (of_one, 1 / 4, 4)
    assert both.of_smaller_meshes() == smaller
    assert SmallerMeshes.heard(both.told()) == both
