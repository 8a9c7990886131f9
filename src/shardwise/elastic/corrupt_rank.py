"""A rank with wrong bits (`verify` in the plan) leaves an elastic job; the others repeat the step without it.

[Note: images of a rank with wrong bits] What the others restore must not come from the wrong bits. Copies of what the
rank held are on others, where the table has copies. What only it held is in its image, of which the live region is the
memory in question. The shadow was copied from there after the last step: if it has the sums that were taken then, the
bits changed later, and it is whole. So is then what another host keeps, which is read before the shadow. Otherwise all
of these are marked as torn, and if no other rank has the state, the job restarts from its last checkpoint.

Wrong *gradients* (`verify: {gradients}`) are another matter: that rank computes wrong results, before the step, and
nothing tells that what it has at rest is wrong. All ranks have computed with it, and a checkpoint would have the same.

[Note: a copy that is read] When a rank is lost, the others lay their state out anew, from their shadows, which nothing
compares with others before a step. So before that each compares its own with the sums of the end of the step that made
it. If only the shadow has changed, it is copied again. If the live region has, too, or is being updated, it may be that
code between the steps has written there, but then on all ranks: one whose state has changed, while that of most has
not, leaves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from shardwise.comm import World
from shardwise.elastic.regroup_reports import IMAGES
from shardwise.elastic.state_image import TORN, Image
from shardwise.elastic.survival import Survival
from shardwise.errors import CorruptionError, FaultError
from shardwise.runtime.corruption import GRADIENT
from shardwise.runtime.verification import Verification

_log = logging.getLogger("shardwise")


def fault_for_others(
    error: CorruptionError, verification: Verification | None, survival: Survival, world: World
) -> FaultError:
    """The fault from which the others recover. All ranks call. Raises `error` on the rank that has the wrong bits, and
    on all of them if it is not known which has."""
    if not error.is_certain:
        raise error
    survival.await_copies()
    is_wrong = world.rank in error.ranks
    at_rest = verification if error.row != GRADIENT else None
    is_whole = not is_wrong or at_rest is None or at_rest.are_as_noted(survival.at_rest(is_live=False))
    are_whole = world.exchange(b"1" if is_whole else b"0", IMAGES)
    if is_wrong:
        survival.image.live_version = TORN
        if not is_whole:
            survival.image.tear()
        raise error
    for rank in error.ranks:
        if are_whole[rank] == b"0":
            for image in _copies_of(rank, survival):
                image.tear()
    if world.rank == min(set(range(world.size)) - set(error.ranks)):
        _log.error("%s", str(error).partition("\n")[0])
    return FaultError(str(error), kind="corrupted", ranks=error.ranks, unit=error.unit)


def changed_at_rest(verification: Verification, survival: Survival, num_steps: Mapping[int, int]) -> tuple[str, str]:
    """What of this rank's state has changed since the end of the step that made it, in words; empty if nothing has, or
    only a copy. That one is torn then: the state is copied again, or, if an update has been made since, is gone, and
    the second words say what has changed in it. `num_steps`: those taken, by version.

    See [Note: a copy that is read]. After a fault, before ranks report what they have.
    """
    image = survival.image
    told = ""
    if image.shadow_version != TORN:
        told = verification.first_changed(survival.at_rest(is_live=False), num_steps.get(image.shadow_version, -1))
        if not told:
            return "", ""
    if image.live_version == TORN:  # by an update that was not made on all ranks
        return told, ""
    if in_live := verification.first_changed(survival.at_rest(is_live=True), num_steps.get(image.live_version, -1)):
        return in_live, ""
    is_gone = image.shadow_version != image.live_version
    image.shadow_version = TORN
    return "", told if is_gone else ""


def leave(changed: str, survival: Survival, rank: int, num_steps: int) -> CorruptionError:
    """The error with which this rank ends, whose state has `changed`; nobody is to read that."""
    survival.image.tear()
    return CorruptionError(
        f"Rank {rank} has wrong bits: {changed}, changed since the last update, as nothing of most others has. No "
        f"program has written that: memory or a processor has failed. It was found when ranks recovered after step "
        f"{num_steps}. The others go on without this rank, or from the last checkpoint (docs/verify.md).",
        ranks=(rank,),
        tensor=changed.rpartition(" ")[2],
        step=num_steps + 1,
    )


def _copies_of(rank: int, survival: Survival) -> list[Image]:
    kept = survival.copies.kept.get(rank) if survival.copies is not None else None
    return [] if kept is None else kept.images
