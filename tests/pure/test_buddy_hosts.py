"""Which rank keeps whose copies: always on another host, as evenly as possible, and none where copies exist anyway."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.plan import Plan
from shardwise.plan.mesh import MODEL_AXES, Mesh
from shardwise.plan.placement import table_for
from shardwise.program import FlatSpec
from shardwise.program.buddies import Kept, buddies, copy_bytes, keepers

HOSTS = st.lists(st.sampled_from("abcd"), min_size=2, max_size=14).filter(lambda hosts: len(set(hosts)) > 1)


@given(HOSTS)
def test_buddies_are_on_other_hosts_and_share_evenly(hosts: list[str]) -> None:
    found = buddies(hosts)
    assert all(hosts[rank] != hosts[buddy] for rank, buddy in enumerate(found))
    largest = max(Counter(hosts).values())
    most = max(Counter(found).values())
    assert most == max(1, -(-largest // (len(hosts) - largest)))


def test_a_host_with_most_of_the_ranks_is_shared_by_all_others() -> None:
    assert buddies("aaab") == (3, 3, 3, 0)
    assert buddies("aabb") == (2, 3, 0, 1)
    assert buddies("abab") == (1, 0, 3, 2)
    assert buddies("aabc") == (2, 3, 0, 1)
    with pytest.raises(ValueError, match="no other host"):
        buddies("aa")


def spec(preset: str, mesh: dict[str, int]) -> FlatSpec:
    plan = Plan(preset=preset, mesh=mesh)
    known = Mesh.of(mesh, math.prod(mesh.values()))
    return FlatSpec("w", 1024, 1, table_for(plan, known).on(known), known, True)


@pytest.mark.parametrize(
    ("preset", "mesh", "hosts", "expected"),
    [
        ("ddp", {"dp": 4}, "aabb", (None,) * 4),
        ("zero1", {"dp": 4}, "aabb", (2, 3, 0, 1)),
        ("zero3", {"dp": 4}, "aaaa", (None,) * 4),
        ("hsdp", {"node": 2, "local": 2}, "aabb", (None,) * 4),
        ("hsdp", {"node": 2, "local": 2}, "abab", (1, 0, 3, 2)),
        ("hsdp", {"node": 2, "local": 2}, "aaab", (3, None, 3, None)),
        ("hpz", {"node": 2, "local": 2}, "aabb", (2, 3, 0, 1)),
    ],
)
def test_there_are_no_copies_of_what_another_host_has(
    preset: str, mesh: dict[str, int], hosts: str, expected: tuple[int | None, ...]
) -> None:
    assert keepers([spec(preset, mesh)], hosts) == expected
    assert (copy_bytes([spec(preset, mesh)], 2, hosts).sent > 0) == any(one is not None for one in expected)


@pytest.mark.parametrize(
    ("preset", "mesh", "hosts", "expected"),
    [
        ("zero1", {"dp": 2, "tp": 2}, "aabb", (2, 3, 0, 1)),
        ("zero1", {"dp": 2, "tp": 2}, "abab", (None,) * 4),  # with a host all groups are lost
        ("zero1", {"dp": 2, "tp": 2}, "abba", (2, 3, 0, 1)),
        ("zero3", {"dp": 2, "tp": 2}, "abcd", (2, 3, 0, 1)),
        ("zero2", {"dp": 4, "tp": 2}, "aaaabbbb", (4, 5, 6, 7, 0, 1, 2, 3)),
        ("ddp", {"dp": 2, "tp": 2}, "abcd", (None,) * 4),
        ("hsdp", {"node": 2, "local": 2, "tp": 2}, "aaaabbbb", (None,) * 8),
        ("hsdp", {"node": 2, "local": 2, "tp": 2}, "aabbaabb", (2, 3, 0, 1, 6, 7, 4, 5)),
        ("ddp", {"dp": 2, "sp": 2}, "aabb", (None,) * 4),
        ("zero1", {"island": 2, "dp": 2}, "aabb", (None,) * 4),  # nobody restores what an island had
        ("zero3", {"island": 2, "dp": 2}, "abcd", (None,) * 4),
    ],
)
def test_copies_are_outside_of_the_replica_group(
    preset: str, mesh: dict[str, int], hosts: str, expected: tuple[int | None, ...]
) -> None:
    found = keepers([spec(preset, mesh)], hosts)
    assert found == expected
    at = Mesh.of(mesh, len(hosts))
    for rank, keeper in enumerate(found):
        if keeper is not None:
            assert hosts[keeper] != hosts[rank]
            where = (at.coordinate(rank), at.coordinate(keeper))
            assert any(where[0][axis] != where[1][axis] for axis in mesh if axis not in MODEL_AXES), "of another group"
            assert all(where[0][axis] == where[1][axis] for axis in mesh if axis in MODEL_AXES), "with the same part"


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("mesh", [{"tp": 4}, {"dp": 1, "tp": 4}, {"pp": 4}], ids=str)
def test_in_a_group_alone_every_rank_has_a_copy_on_another_host(preset: str, mesh: dict[str, int]) -> None:
    assert keepers([spec(preset, mesh)], "aabb") == (2, 3, 0, 1)
    assert keepers([spec(preset, mesh)], "aaab") == (3, 3, 3, 0)
    assert keepers([spec(preset, mesh)], "aaaa") == (None,) * 4
    frozen = replace(spec(preset, mesh), trainable=False)
    assert copy_bytes([frozen], 2, "aabb").sent_once == 4 * 1024


@pytest.mark.parametrize(
    ("preset", "mesh", "hosts", "expected"),
    [
        ("ddp", {"sp": 4}, "aabb", (None,) * 4),
        ("zero1", {"sp": 4}, "aabb", (2, 3, 0, 1)),
        ("zero3", {"dp": 1, "sp": 4}, "abab", (1, 0, 3, 2)),
        ("ddp", {"sp": 2, "ep": 2}, "aabb", (2, 3, 0, 1)),  # but not the same experts
        ("ddp", {"tp": 2, "sp": 2}, "abab", (1, 0, 3, 2)),  # nor the same layers
    ],
)
def test_ranks_of_a_group_alone_that_share_samples_have_the_same_parameters(
    preset: str, mesh: dict[str, int], hosts: str, expected: tuple[int | None, ...]
) -> None:
    assert keepers([spec(preset, mesh)], hosts) == expected


STAGES = {"dp": 2, "pp": 2}


def test_stages_that_are_sharded_differently_have_the_keepers_that_each_needs() -> None:
    """Whichever stage a rank has itself, it finds the same."""
    kept = [{Kept.of(spec(preset, STAGES))} for preset in ("ddp", "zero1", "ddp", "zero1")]
    for preset in ("ddp", "zero1"):
        assert keepers([spec(preset, STAGES)], "aabb", kept) == (None, 3, None, 1)
    assert [{Kept.from_json(json.loads(json.dumps(one.as_json()))) for one in of_rank} for of_rank in kept] == kept
