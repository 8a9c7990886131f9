"""The program of verified steps: which checksums are taken when, and compared with whom. See docs/verify.md.

[Note: what a checksum can show] Two things show that bits have changed. *Copies differ*: ranks that hold the same part
of a row, because nothing shards it over an axis, have other sums. That lasts: each rank updates its copy by itself, and
never gets another one. *A rank's own sums differ*: what an update has written is summed after it, and again before the
next one; in between nothing may write it. This shows also what only one rank has, and which of two copies is the wrong
one, but only changes between these two moments.

So a verified step sums and compares before its update, when all that can be found is still there: an update overwrites
what it gathers, and spreads what it computes from wrong bits. The step before a verified one ends with taking the sums.

What is gathered in a pass is summed when it has come, in forward and in backward: it must be the same on all ranks, and
the same each time. So messages with parameters are verified too. Those with gradients are, where several ranks get the
same sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.plan.mesh import EXPERT_AXIS, Mesh
from shardwise.plan.placement import Axes
from shardwise.program.action import AFTER_STEP, ALL_FLATS, BEFORE_STEP, Action, Block, Moment, Program
from shardwise.program.effects import Phase, Subject
from shardwise.program.spec import FlatSpec, UnitSpec

_PASS: tuple[Phase, Phase] = ("forward", "backward")
FLAG_BYTES, RECORD_BYTES = 1, 16
"""Of the message of a comparison: whether anything has changed here, and for each kind of part which it is and its
sum."""


def build_verification(units: Sequence[UnitSpec]) -> Program:
    """What is added to a verified step, behind the actions of these moments: where a unit has been gathered, before the
    update, and at the end of the step before."""
    flats = [flat for unit in units for flat in unit.flats]
    if not flats:
        return ()
    rest = [Action("checksum", flat.name, row) for flat in flats for row in resting_rows(flat)]
    due = [Action("checksum", flat.name, "due") for flat in flats if has_copied_gradients(flat)]
    mesh, kinds = flats[0].mesh, {parting_axes(flat, row) for flat in flats for row in verified_rows(flat)}
    sent = (mesh.world_size - 1) * (FLAG_BYTES + RECORD_BYTES * len(kinds))
    compare = Action("compare", ALL_FLATS, "checksums", "world", "-", sent)
    forward, backward = (
        [Block(Moment("before", phase, unit.name), gathered) for unit in units if (gathered := _gathered(unit))]
        for phase in _PASS
    )
    return (
        *forward,
        *reversed(backward),
        Block(BEFORE_STEP, (*rest, *due, compare)),
        Block(AFTER_STEP, tuple(rest)),
    )


def _gathered(unit: UnitSpec) -> tuple[Action, ...]:
    return tuple(Action("checksum", flat.name, "full") for flat in unit.flats if is_gathered(flat))


def is_gathered(flat: FlatSpec) -> bool:
    """Whether a pass gathers it from several ranks."""
    return not flat.resident and bool(flat.table.param.shard)


def verified_rows(flat: FlatSpec) -> tuple[Subject, ...]:
    due: tuple[Subject, ...] = ("due",) if has_copied_gradients(flat) else ()
    full: tuple[Subject, ...] = ("full",) if is_gathered(flat) else ()
    return (*resting_rows(flat), *due, *full)


def resting_rows(flat: FlatSpec) -> tuple[Subject, ...]:
    """What lies in memory between two steps. Rows on a disk have checksums of their own (`disk_checksums`).
    Codes are compared as `full`, where they are gathered."""
    rows: list[Subject] = [] if flat.rests_on_disk or flat.table.rests_as is not None else ["param"]
    if flat.trainable and not flat.updates_from_disk:
        rows += ["states"] if rests_as_master(flat) else ["master", "states"]
    return tuple(rows)


def rests_as_master(flat: FlatSpec) -> bool:
    """Whether what rests on a rank is all, and only, what it updates."""
    return flat.master_is_param and set(flat.table.param.shard) == set(flat.table.optim.shard)


def has_copied_gradients(flat: FlatSpec) -> bool:
    """Whether several ranks have the same gradients when they update."""
    due = flat.table.due
    return flat.trainable and set(due.shard) != set(flat.table.axes) and not due.partial


def parting_axes(flat: FlatSpec, row: Subject) -> Axes:
    """The axes along which ranks have different parts of a row, or values of their own (islands), or compute their
    copies separately: ranks that differ only along others have the same bits.

    Along `tp`, copies of what is not split follow from the same values, by the same operations on each rank. They are
    not compared, because only the same kernels on the same hardware make the same bits of them.
    """
    places = {"param": flat.table.param, "due": flat.table.due, "full": flat.table.full}
    place = places.get(row, flat.table.optim)
    parting = {*place.shard, *flat.split_axes, *flat.mesh.model_axes, *flat.mesh.island_axes}
    return tuple(axis for axis in flat.mesh.axes if axis in parting)


def num_copies(flat: FlatSpec, row: Subject) -> int:
    """How many ranks have the same bits of a row."""
    return num_alike(flat.mesh, parting_axes(flat, row))


def num_alike(mesh: Mesh, parting: Axes) -> int:
    """How many ranks differ from one only along axes other than `parting`."""
    size = mesh.world_size
    for axis in parting:
        size //= mesh.size(axis)
    return size


def why_not_recomputed(mesh: Mesh, *, is_elastic: bool, is_deterministic: bool) -> str:
    """Why gradients of a micro-batch cannot be computed again on another rank; empty if they can be."""
    others = [axis for axis in mesh.axes if mesh.size(axis) > 1 and (axis not in mesh.data_axes or axis == EXPERT_AXIS)]
    if others:
        return f"ranks along {' and '.join(others)} compute a micro-batch together"
    if mesh.world_size == 1 and not is_elastic:  # there others may come
        return "there is no other rank"
    if not is_deterministic:
        return "kernels of a device may add in any order; call torch.use_deterministic_algorithms(True) before"
    return ""


def in_words(units: Sequence[UnitSpec], every: int) -> list[str]:
    """What is compared with whom, and what only its own rank can tell, for `explain`."""
    copies: dict[Subject, set[int]] = {}
    for flat in (flat for unit in units for flat in unit.flats):
        for row in verified_rows(flat):
            copies.setdefault(row, set()).add(num_copies(flat, row))
    names: dict[Subject, str] = {
        "param": "parameters at rest",
        "full": "gathered parameters",
        "master": "master weights",
        "states": "optimizer states",
        "due": "reduced gradients",
    }
    lines = []
    for row, what in names.items():
        if row in copies:
            of = " or ".join("one copy" if num == 1 else f"{num} copies" for num in sorted(copies[row]))
            lines.append(f"{what}: {of}")
    if "due" not in copies:
        lines.append("gradients: not compared, because each rank has other ones when it updates")
    before = "the update before" if every == 1 else f"the update of the step before each {every}th"
    lines.append(f"what is at rest, also with itself after {before}")
    return lines
