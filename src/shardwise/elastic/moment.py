"""What is put back when an iteration is taken again: random numbers, buffers, the loss scale, learning rates."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.checkpoint import encode
from shardwise.checkpoint.codec import decode
from shardwise.errors import ConfigError
from shardwise.sharded_model import ShardedModel

Tensor = torch.Tensor
_COUNTED = {
    *("last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"),
    *("T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"),
}
"""What a scheduler's state has besides its settings."""
_log = logging.getLogger("shardwise")


class Moment:
    """What a rank has besides parameters and states, as it was when an iteration began."""

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._random: Any = None
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._scale: dict[str, Any] | None = None
        self._schedules: list[tuple[Any, dict[str, Any]]] = []
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def follow(self, sharded: ShardedModel) -> None:
        self._sharded = sharded

    def take(self) -> None:
        self._random = (random.getstate(), np.random.get_state(), torch.get_rng_state())
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._sharded.model.buffers()]
        scaler = self._sharded.progress.scaler
        self._scale = scaler.state_dict() if scaler is not None else None

    def restore(self) -> None:
        if self._random is not None:
            random.setstate(self._random[0])
            np.random.set_state(self._random[1])
            torch.set_rng_state(self._random[2])
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        scaler = self._sharded.progress.scaler
        if scaler is not None and self._scale is not None:
            scaler.load_state_dict(self._scale)

    def groups(self) -> list[dict[str, Any]]:
        """The settings of the optimizers' groups at the beginning of a step that is taken again, or now."""
        if self._groups:
            return [settings for _, settings in self._groups]
        optimizer = self._sharded.optimizer
        return [] if optimizer is None else [_settings(group) for group in optimizer.groups]

    # -- learning rates, which a loop changes after a step that it takes for one ---------------------------

    def take_schedules(self) -> None:
        """Note what schedulers of our optimizers say, unless that is noted already."""
        optimizer = self._sharded.optimizer
        if optimizer is None or self._groups:
            return
        self._groups = [(group, _settings(group)) for group in optimizer.groups]
        for member in optimizer.members:
            if hasattr(member.step, "_wrapped_by_lr_sched"):
                self._schedules += [(one, copy.deepcopy(one.state_dict())) for one in _schedulers_of(member)]

    @staticmethod
    def settings_of(group: dict[str, Any]) -> dict[str, Any]:
        """Those that can be told: no functions."""
        said = {}
        for key, value in group.items():
            with contextlib.suppress(ConfigError):
                said[key] = encode(value, key)
        return said

    def schedules(self) -> list[list[Any]]:
        """Of each optimizer what its schedulers say, by class, as it can be told."""
        optimizer = self._sharded.optimizer
        noted = {id(one): state for one, state in self._schedules}
        told = []
        for member in optimizer.members if optimizer is not None else ():
            found = _outermost(member)
            told.append(
                [[type(one).__name__, encode(noted.get(id(one), one.state_dict()), "scheduler")] for one in found]
            )
        return told

    def bring(self, groups: list[dict[str, Any]], schedules: list[list[Any]]) -> None:
        """Let groups and schedulers say what those of the others do, to whom this rank has come."""
        optimizer = self._sharded.optimizer
        if optimizer is None:
            return
        for member, told in zip(optimizer.members, schedules, strict=True):
            for scheduler, state in matched(_outermost(member), [(name, decode(state)) for name, state in told]):
                scheduler.load_state_dict(state)
        for group, settings in zip(optimizer.groups, groups, strict=True):
            group.update(settings)

    def restore_schedules(self) -> None:
        for group, settings in self._groups:
            group.update(settings)
        for scheduler, state in self._schedules:
            scheduler.load_state_dict(state)
        self._groups, self._schedules = [], []


def _schedulers_of(optimizer: torch.optim.Optimizer) -> Iterator[LRScheduler]:
    """They know their optimizer, and it does not know them: so whoever refers to it is looked at, in milliseconds."""
    seen: set[int] = set()
    for one in gc.get_referrers(optimizer):
        for found in (one, *(gc.get_referrers(one) if isinstance(one, dict) and "last_epoch" in one else ())):
            if issubclass(type(found), LRScheduler) and id(found) not in seen:
                seen.add(id(found))
                yield found


def _outermost(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    """Those that no other one has, by class."""
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return []
    found = list(_schedulers_of(optimizer))
    inner = {id(one) for outer in found for one in getattr(outer, "_schedulers", ())}
    return sorted((one for one in found if id(one) not in inner), key=lambda one: type(one).__name__)


def matched(
    schedulers: Sequence[LRScheduler], told: Sequence[tuple[str, dict[str, Any]]]
) -> list[tuple[LRScheduler, dict[str, Any]]]:
    """Which of the `told` states, with the names of their classes, is for which of this rank's schedulers.

    Nothing numbers the schedulers of an optimizer. Of several of one class that one is meant whose settings are the
    same, such as its period: what is counted differs, since these here are new. Who cannot be told from another is left
    out, with a word in the log.
    """
    found: list[tuple[LRScheduler, dict[str, Any]]] = []
    for name in sorted({type(one).__name__ for one in schedulers} | {name for name, _ in told}):
        mine = [one for one in schedulers if type(one).__name__ == name]
        theirs = [state for of, state in told if of == name]
        if len(mine) == len(theirs) == 1:
            found.append((mine[0], theirs[0]))
            continue
        by_settings = [
            [state for state in theirs if _without_counts(state) == _without_counts(one.state_dict())] for one in mine
        ]
        clear = len(mine) == len(theirs) and all(
            states and all(state == states[0] for state in states) for states in by_settings
        )
        if clear:
            found += [(one, states[0]) for one, states in zip(mine, by_settings, strict=True)]
        else:
            _log.warning(
                "The others have %d schedulers of class %s for an optimizer, this rank, which has come, has %d, and "
                "which is which cannot be told by their settings. Give each to engine.remember(name=scheduler).",
                len(theirs),
                name,
                len(mine),
            )
    return found


def _without_counts(state: Any) -> Any:
    """Of a scheduler's state, and of those of schedulers in it, what does not change."""
    if isinstance(state, dict):
        return {key: _without_counts(value) for key, value in state.items() if key not in _COUNTED}
    return [_without_counts(value) for value in state] if isinstance(state, list | tuple) else state


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }
