"""Whether a job can survive a lost rank, checked and logged when it starts."""

from __future__ import annotations

import logging

from shardwise.comm import World
from shardwise.comm.regrouping import Membership
from shardwise.errors import CommError, ConfigError, FaultError, TurnedAwayError
from shardwise.fit.loss_price import loss_prices
from shardwise.program import FlatSpec
from shardwise.program.buddies import copy_bytes, kept_axes
from shardwise.program.image_bytes import ON_ACCELERATOR, image_bytes, why_no_images
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.system.units import format_bytes, format_seconds

_log = logging.getLogger("shardwise")
_RESTART = "If a rank is lost, this job restarts from its last checkpoint instead."


IN_SHARD = "while ranks sharded their model"


def give_up(error: CommError, world: World, when: str = "") -> None:
    """A rank was lost, of which `error` tells, where nobody goes on, as models are half in one form and half in
    another: the launcher may start all ranks again."""
    is_of_code = isinstance(error, FaultError) and error.is_of_code
    has_others = world.is_newcomer or isinstance(error, TurnedAwayError)  # which go on without this rank
    if world.membership is not None and not (is_of_code or has_others):
        world.membership.gives_up(when)


def survives(sharded: ShardedModel, membership: Membership[World] | None) -> bool:
    """Whether the others continue when a rank of this job is lost. Rank 0 logs why if they cannot, and what copies on
    other hosts cost if there are any.

    Raises `ConfigError` if the plan asks for survival and this job cannot have it.
    """
    goes_on = False
    try:
        goes_on = _goes_on(sharded, membership)
    finally:
        if not goes_on and sharded.disk is not None:
            sharded.disk.keep_no_versions()
    return goes_on


def _goes_on(sharded: ShardedModel, membership: Membership[World] | None) -> bool:
    wish = sharded.plan.survive
    if membership is not None and membership.num_engines:
        membership.has_several = True
    if sharded.plan.bad_batch == "skip" and (membership is None or wish == "checkpoint" or not membership.folder):
        raise ConfigError(
            "bad_batch: skip needs a job whose ranks survive a lost one, and memory that outlives a rank (/dev/shm). "
            "Start it with `shardwise launch --elastic`, without survive: checkpoint, or remove bad_batch."
        )
    if membership is None:
        if wish in ("host", "buddy"):
            raise ConfigError(
                f"survive: {wish} needs an elastic job. Start it with `shardwise launch --elastic`, or remove survive."
            )
        return False
    if wish == "checkpoint":
        membership.needs_all()
        return False
    why = _why_not(sharded, membership)
    if sharded.parts.pipeline is not None and not sharded.world.is_newcomer:
        why = _why_not_any(sharded, why)
    if why and (wish is not None or sharded.plan.bad_batch == "skip"):
        asked = "bad_batch: skip" if wish is None else f"survive: {wish}"
        raise ConfigError(f"{asked} is not possible: {why}. Remove it: {_RESTART.lower()}")
    if wish == "buddy" and len(set(sharded.world.hosts)) < 2 and not sharded.world.is_newcomer:
        raise ConfigError(
            "survive: buddy is not possible: all ranks are on one host, and copies go to another. Choose survive: "
            "host, or remove it: then copies are made as soon as a second host joins."
        )
    if sharded.world.rank == 0:
        _log_survival(sharded, why)
    if why:
        membership.needs_all()
    return not why


def _log_survival(sharded: ShardedModel, why: str) -> None:
    if why:
        _log.warning("%s: %s %s", why[0].upper() + why[1:], _RESTART, _cost_of_restart(sharded, why))
        return
    second = image_bytes(_specs(sharded), _num_states(sharded)).on_disk
    if second:
        _log.info(
            "If a rank is lost, the others go on from what it has on its host's disk. So there are two versions of "
            "that, one from before each update: %s more per rank.",
            format_bytes(second),
        )
    costs = copy_bytes(_specs(sharded), _num_states(sharded), sharded.world.hosts)
    if not costs.sent:
        return
    if sharded.plan.survive == "host":
        _log.warning(
            "survive: host: the loss of a whole host is not survived, since parts of the state have no copy on another "
            "one. %s survive: buddy makes copies.",
            _RESTART,
        )
        return
    on_disk = f" and {format_bytes(costs.kept_on_disk)} on its disk" if costs.kept_on_disk else ""
    _log.info(
        "State that only one rank holds is copied to another host during the next step: about %s per rank and step, "
        "and %s of host memory%s per rank for copies of others.",
        format_bytes(costs.sent),
        format_bytes(costs.kept),
        on_disk,
    )


def _cost_of_restart(sharded: ShardedModel, why: str) -> str:
    """As `explain` prices it."""
    size = sharded.world.size
    price = loss_prices(
        sharded.mesh, _specs(sharded), _num_states(sharded), per_host=size, survive=None, why_restarted=why
    )[0]
    read = format_bytes(price.read_bytes)
    return f"That takes about {format_seconds(price.seconds)}, and the steps since then; each rank reads {read}."


def _specs(sharded: ShardedModel) -> list[FlatSpec]:
    return [flat.spec for flat in sharded.parts.flats]


def _num_states(sharded: ShardedModel) -> int:
    """States per parameter, of its size: the optimizer's present ones, or two, as Adam has, before its first step."""
    optimizer = sharded.parts.optimizer
    found = [len(optimizer.raw_state_of(piece)) for piece in optimizer.pieces] if optimizer is not None else []
    return max(found, default=0) or 2


def _why_not(sharded: ShardedModel, membership: Membership[World]) -> str:
    """Why the others could not continue; empty if they can."""
    if membership.has_several:
        return (
            "this process has several engines, or a split model of load_for_inference, and each would have to go on "
            "from the same step"
        )
    smaller = sharded.parts.sharding.smaller
    if why := why_no_images(sharded.mesh, smaller.meshes, smaller.why_none):
        return why
    shards = any(kept_axes(spec) for spec in _specs(sharded))
    if sharded.parts.sharding.device.type != "cpu":
        return ON_ACCELERATOR
    several = len(set(sharded.world.hosts)) > 1
    if shards and membership.folder is None and (not several or sharded.plan.survive == "host"):
        return "there is no memory that outlives a rank (/dev/shm)"
    if sharded.parts.optimizer is None:
        return "there is no optimizer"
    return ""


def _why_not_any(sharded: ShardedModel, why: str) -> str:
    """The first reason that any pipeline stage has: they have different parameters. All ranks call."""
    return next((reason.decode() for reason in sharded.world.exchange(why.encode(), "survival") if reason), "")
