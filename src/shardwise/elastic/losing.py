"""Which jobs can lose a rank, said when they begin."""

from __future__ import annotations

import logging

from shardwise.comm.generation import Membership
from shardwise.errors import ConfigError
from shardwise.optim import Cooperative
from shardwise.sharded_model import ShardedModel

_log = logging.getLogger("shardwise")
_OTHERWISE = "If a rank is lost, this job starts again from its last checkpoint instead."


def survives(sharded: ShardedModel, membership: Membership | None) -> bool:
    """Whether the others go on when a rank of this job is lost. Rank 0 says so where they cannot.

    Raises `ConfigError` for a plan that asks for what cannot be had.
    """
    wish = sharded.plan.survive
    if sharded.plan.bad_batch == "skip" and (membership is None or wish == "checkpoint" or not membership.folder):
        raise ConfigError(
            "bad_batch: skip is for ranks that can go on by themselves, in memory that outlives one of them "
            "(/dev/shm). Start them with `shardwise launch --elastic`, without survive: checkpoint, or leave it out."
        )
    if membership is None:
        if wish in ("host", "buddy"):
            raise ConfigError(
                f"survive: {wish} is for ranks that can go on by themselves. Start them with "
                f"`shardwise launch --elastic`, or leave it out."
            )
        return False
    if wish == "checkpoint":
        return False
    why = _why_not(sharded, membership)
    if why and (wish is not None or sharded.plan.bad_batch == "skip"):
        asked = "bad_batch: skip" if wish is None else f"survive: {wish}"
        raise ConfigError(f"{asked} cannot be: {why}. Leave it out: {_OTHERWISE.lower()}")
    if why and sharded.world.rank == 0:
        _log.warning("%s: %s", why[0].upper() + why[1:], _OTHERWISE)
    return not why


def _why_not(sharded: ShardedModel, membership: Membership) -> str:
    """In words; empty if the others can go on."""
    axes = [axis for axis in sharded.mesh.model_axes if sharded.mesh.size(axis) > 1]
    specs = [flat.spec for flat in sharded.flats]
    shards = any((spec.table.optim if spec.trainable else spec.table.param).shard for spec in specs)
    tiers = {spec.tier_of(row) for spec in specs for row in ("param", "master")}
    if axes:
        return f"the mesh splits the model along {', '.join(axes)}, and what one rank has of it nobody else has"
    if sharded.sharding.device.type != "cpu":
        return "parameters lie on an accelerator, whose memory goes with its process"
    if tiers != {"device"}:
        return f"parameters or states are kept on the {', '.join(sorted(tiers - {'device'}))}"
    if sharded.disk is not None:
        return "something is kept on a disk"
    if sharded.plan.survive == "buddy":
        return "copies on another host are not made in this version"
    if shards and membership.folder is None:
        return "there is no memory that outlives a rank (/dev/shm)"
    if shards and sharded.world.local_size != sharded.world.size:
        return "ranks are on several hosts, which do not see each other's memory"
    return _of_optimizer(sharded)


def _of_optimizer(sharded: ShardedModel) -> str:
    if sharded.optimizer is None:
        return "there is no optimizer"
    for member in sharded.optimizer.members:
        narrow = {group.get("state_dtype", "fp32") for group in member.param_groups} - {"fp32"}
        if isinstance(member, Cooperative) and narrow:
            return f"the optimizer keeps its states in {', '.join(sorted(narrow))}"
    return ""
