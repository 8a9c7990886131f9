"""Asks for the disk space of activations before the first step that needs any.

[Note: room is asked first] A plan does not say how large a batch is, so `shard` cannot ask. The first forward that
trains, or the first step of a pipeline, rehearses its own batch, and all ranks ask before any of them makes a file:
otherwise the last one would find what the first have left. A model that cannot be rehearsed is told of a full disk only
when it makes a file.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.comm.world import num_ranks_per_host
from shardwise.errors import ConfigError, ModelError, TierError
from shardwise.memory import require_room
from shardwise.parallel.experts import EXPERT_LOAD
from shardwise.program import Activations
from shardwise.runtime.activations import SAVED
from shardwise.runtime.micro_batches import LossFunction, MicroBatch
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.system.own_hooks import hook

if TYPE_CHECKING:
    from shardwise.runtime.rehearsal import Loss

_log = logging.getLogger("shardwise")


def check_room(sharded: ShardedModel, activations: Activations) -> None:
    """Raise `TierError` if this host's disk has too little room for the activations of its ranks. Asks nobody."""
    if activations.disk_bytes and sharded.disk is not None:
        wanted = num_ranks_per_host(sharded.world) * _missing(sharded, activations.disk_bytes)
        try:
            sharded.disk.folder.check_room(wanted)
        except TierError as error:
            raise _without_room(error) from error


def ask_before_first_forward(sharded: ShardedModel) -> None:
    """Let the first forward that trains ask for room, if any activations go to a disk and there is no pipeline."""
    if not sharded.plan.has_activations_on_disk or sharded.parts.pipeline is not None:
        return

    def ask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            _ask(sharded, MicroBatch(args, kwargs), None)
            handle.remove()

    handle = sharded.model.register_forward_pre_hook(hook(ask), prepend=True, with_kwargs=True)
    sharded.parts.hooks.callback(handle.remove)


def ask_before_first_step(sharded: ShardedModel, micro_batch: MicroBatch, loss_fn: LossFunction | None) -> None:
    """As `ask_before_first_forward`, at the beginning of each step of a pipeline with activations on a disk; all but
    the first ask nothing."""
    if not sharded.has_asked_for_room:
        _ask(sharded, micro_batch, lambda output: micro_batch.loss(output, loss_fn))
        sharded.has_asked_for_room = True


def _ask(sharded: ShardedModel, micro_batch: MicroBatch, loss: Loss | None) -> None:
    """Raise `TierError` on all ranks if the disk of any has too little room. All ranks call."""
    if sharded.disk is None:
        return
    found = sharded.rehearsed or _counted(sharded, micro_batch, loss)
    wanted = _missing(sharded, max((one.disk_bytes for one in found), default=0))
    try:
        require_room(sharded.disk, sharded.world, wanted)
    except TierError as error:
        raise _without_room(error) from error


def _counted(sharded: ShardedModel, micro_batch: MicroBatch, loss: Loss | None) -> tuple[Activations, ...]:
    from shardwise.sharded.rehearsed_step import rehearse_step  # only jobs that ask for it load it

    try:
        found = rehearse_step(sharded, micro_batch, loss, EXPERT_LOAD, sharded.parts.sharding.treatments)
        return (found.activations,)
    except (ConfigError, ModelError) as error:
        _log.info("It is not known in advance how much disk space activations take: %s", error)
        return ()


def _missing(sharded: ShardedModel, num_bytes: int) -> int:
    """Bytes that this rank's files of activations do not have yet."""
    return max(0, num_bytes - sharded.parts.sharding.meter.on("disk").now[SAVED])


def _without_room(error: TierError) -> TierError:
    return TierError(f"Activations have no room on the disk: {error}")
