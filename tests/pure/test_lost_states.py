"""Which version of the state survivors go on from, and which of them reads what lost ranks had."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.elastic.layouts import Layout, Source, Sources
from shardwise.elastic.state_image import TORN, copy_bytes
from shardwise.errors import StateError
from shardwise.plan import Plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import table_for
from shardwise.program import FlatSpec
from shardwise.program.buddies import Kept
from shardwise.system.disk import Removals

WHOLE = Source(live_version=5, shadow_version=4, is_live_whole=True, sees_update=False, is_all=False)
ONLY_ITS_SHARDS = Source(live_version=5, shadow_version=4, is_live_whole=False, sees_update=False, is_all=False)
SHARDS_OF_A_SEEN_UPDATE = Source(live_version=5, shadow_version=4, is_live_whole=False, sees_update=True, is_all=False)
IN_AN_UPDATE = Source(live_version=TORN, shadow_version=4, is_live_whole=True, sees_update=True, is_all=False)


def layout(preset: str, left: tuple[int, ...], mesh: dict[str, int]) -> Layout:
    """Of four ranks, of which those in `left` survive."""
    known = Mesh.of(mesh, 4)
    table = table_for(Plan(preset=preset, mesh=mesh), known).on(known)
    return Layout(0, 4, [(FlatSpec("w", 1024, 1, table, known, True), ())], left, folder=None, removals=Removals())


def newest(left: tuple[int, ...], seen: list[Sources], preset: str = "zero1") -> tuple[int, dict[int, int]]:
    mesh = {"node": 2, "local": 2} if preset == "hsdp" else {"dp": 4}
    return layout(preset, left, mesh).newest([{4, 5}] * len(left), seen)


@pytest.mark.parametrize(
    ("source", "step"), [(WHOLE, 5), (ONLY_ITS_SHARDS, 4), (SHARDS_OF_A_SEEN_UPDATE, 5), (IN_AN_UPDATE, 4)]
)
def test_the_newest_version_that_a_lost_rank_left_whole_is_gone_on_from(source: Source, step: int) -> None:
    assert newest((0, 1, 3), [{}, {2: [source]}, {}]) == (step, {2: 1})


def test_a_part_that_nobody_can_read_is_lost_unless_another_rank_has_it_too() -> None:
    with pytest.raises(StateError, match="Rank 2 is gone, and no whole state is left"):
        newest((0, 1, 3), [{}, {}, {}])
    assert newest((0, 1, 3), [{}, {}, {}], "hsdp") == (5, {})


@pytest.mark.parametrize(
    ("is_all", "source", "step"), [(True, WHOLE, 5), (True, ONLY_ITS_SHARDS, 4), (False, WHOLE, 0)]
)
def test_a_part_of_the_model_that_nobody_left_had_is_read_from_images_with_all_of_it(
    is_all: bool, source: Source, step: int
) -> None:
    both = {rank: [replace(source, is_all=is_all)] for rank in (1, 3)}
    left = layout("zero1", (0, 2), {"dp": 2, "tp": 2})
    if step:
        assert left.newest([{4, 5}] * 2, [both, both]) == (step, {1: 1, 3: 1})
    else:
        with pytest.raises(StateError, match="no whole state is left"):
            left.newest([{4, 5}] * 2, [both, both])


def test_who_can_read_divides_what_there_is_to_read() -> None:
    both = {2: [WHOLE], 3: [WHOLE]}
    assert newest((0, 1), [both, both]) == (5, {2: 0, 3: 1})


@pytest.mark.parametrize("seen_by", ["ddp", "zero1"])
def test_what_ranks_of_other_stages_keep_is_known_to_all(seen_by: str) -> None:
    """Ranks 0 and 2 have copies of the first stage, and 1 and 3 have a half each of the other."""
    mesh = {"dp": 2, "pp": 2}

    def of(preset: str) -> Kept:
        return Kept.of(layout(preset, (), mesh).specs[0][0])

    def left(*ranks: int) -> Layout:
        return replace(layout(seen_by, ranks, mesh), kept=[{of("ddp")}, {of("zero1")}] * 2)

    assert left(0, 1, 3).newest([{4, 5}] * 3, [{}] * 3) == (5, {}), "rank 0 has all that was lost"
    with pytest.raises(StateError, match="Rank 3 is gone, and no whole state is left"):
        left(0, 1, 2).newest([{4, 5}] * 3, [{}] * 3)
    assert left(0, 1, 2).newest([{4, 5}] * 3, [{}, {3: [WHOLE]}, {}]) == (5, {3: 1})


@pytest.mark.parametrize("by_rows", [True, False, None])
@pytest.mark.parametrize("num_bytes", [0, 1, 2**20 - 1, 2**20, 2**20 + 64, 5 * 2**19 + 3])
def test_bytes_are_all_copied_by_rows_and_at_once(num_bytes: int, by_rows: bool | None) -> None:
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    target = np.zeros(num_bytes + 64, np.uint8)
    copy_bytes(target[:num_bytes], source, by_rows=by_rows)
    assert (target[:num_bytes] == source).all()
    assert not target[num_bytes:].any()
