"""What tests see of an engine that its users do not. The one place that knows where in an engine it is."""

from __future__ import annotations

from typing import Any

import torch

import shardwise as sw
from shardwise.memory import Flat, Unit
from shardwise.optim import AdoptedOptimizer
from shardwise.runtime import Runner
from shardwise.sharded.sharded_model import ShardedModel
from shardwise.sharded.state import content
from shardwise.system.telemetry import ByteMeter, Ledger


def sharded(engine: sw.Engine) -> ShardedModel:
    """The model under its present plan: another one after `reshard`, or after a rank was lost."""
    return engine._sharded


def sharding(engine: sw.Engine) -> Any:
    """Units, groups and memory of the model."""
    return sharded(engine).parts.sharding


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
