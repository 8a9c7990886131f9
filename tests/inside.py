"""What tests see of an engine that its users do not. The one place that knows where in an engine it is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

import shardwise as sw
from shardwise.comm.watch.fault import Fault
from shardwise.memory import Flat, Unit
from shardwise.optim import AdoptedOptimizer
from shardwise.runtime import Runner
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.state import content
from shardwise.system.telemetry import ByteMeter, Ledger
from tests.patience import PATIENCE, wait_until


def sharded(engine: sw.Engine) -> ShardedModel:
    """The model under its present plan: another one after `reshard`, or after a rank was lost."""
    return engine._sharded


def sharding(engine: sw.Engine) -> Any:
    """Units, groups and memory of the model."""
    return sharded(engine).parts.sharding


def session(engine: sw.Engine) -> Any:
    """What the loop's calls go through."""
    return engine._session


def run_log(engine: sw.Engine) -> Any:
    """What writes its steps down."""
    return engine._run_log


def recovery(engine: sw.Engine) -> Any:
    """This rank's way from one world to the next, in a job whose ranks may be lost."""
    return session(engine).recovery


def survival(engine: sw.Engine) -> Any:
    """What keeps the images of this rank's state, in such a job."""
    return recovery(engine).survival


def saver(engine: sw.Engine) -> Any:
    """What writes checkpoints."""
    return engine._state.saver


def disk(engine: sw.Engine) -> Any:
    """What is on a disk; `None` if nothing is."""
    return sharded(engine).disk


def units(engine: sw.Engine) -> list[Unit]:
    return sharding(engine).units


def flats(engine: sw.Engine) -> list[Flat]:
    return sharded(engine).parts.flats


def runner(engine: sw.Engine) -> Runner:
    return sharded(engine).parts.runner


def programs(engine: sw.Engine) -> Any:
    return runner(engine).programs


def program(engine: sw.Engine) -> Any:
    """The step that has been planned: of a micro-batch, and of the optimizer."""
    return programs(engine).program


def adopted(engine: sw.Engine) -> AdoptedOptimizer:
    """The optimizer on this rank's pieces."""
    return sharded(engine).require_optimizer()


def member(engine: sw.Engine) -> torch.optim.Optimizer:
    """The optimizer that updates the pieces, where it is a single one."""
    return adopted(engine).members[0]


def meter(engine: sw.Engine) -> ByteMeter:
    """Bytes by what they are for, now and at most."""
    return sharding(engine).meter


def ledger(engine: sw.Engine) -> Ledger:
    """What this rank has sent, and how often."""
    return sharded(engine).parts.ledger


def entries(engine: sw.Engine) -> list[Any]:
    """What a checkpoint would have of this rank."""
    return content(sharded(engine)).entries


# -- ranks that wait for each other -------------------------------------------------------------------------


def await_fault(world: sw.World) -> Fault:
    """The fault that this rank is told of, once it is."""
    assert world._watch is not None
    assert world._watch._is_delivered.wait(PATIENCE)
    assert world.fault is not None
    return world.fault


def await_waiting(late: sw.World, worlds: Collection[sw.World]) -> None:
    """Return when all other ranks wait for what `late` has not begun to send."""
    wait_until(lambda: all(world is late or _waits_for(late, world) for world in tuple(worlds)))


def _waits_for(late: sw.World, world: sw.World) -> bool:
    entry = world.journal.waiting
    line = late.journal._lines.get(entry.line.name) if entry is not None else None
    return entry is not None and late.rank in entry.line.ranks and (line is None or line.count < entry.number)


def stall(late: sw.World, worlds: Collection[sw.World], timeout_seconds: float) -> None:
    """Keep the other ranks waiting until that is a fault: for longer than `timeout_seconds`, all of them at once."""
    await_waiting(late, worlds)
    time_out(worlds, timeout_seconds)
    await_fault(late)


def time_out(worlds: Collection[sw.World], timeout_seconds: float) -> None:
    """From now on ranks that wait for longer than `timeout_seconds` raise."""
    for world in worlds:
        assert world._watch is not None
        world._watch._timeout_seconds = timeout_seconds
