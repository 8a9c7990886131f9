"""What is restored when an iteration is repeated: random numbers, buffers, what routers have counted, the loss scale,
learning rates."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from shardwise.checkpoint import encode
from shardwise.checkpoint.json_codec import decode
from shardwise.elastic.optimizer_attributes import Attributes, ChangedAttributes, Told
from shardwise.errors import ConfigError
from shardwise.parallel.experts.loads import Counted, Loads
from shardwise.sharded.sharded_model import ShardedModel

Tensor = torch.Tensor
_COUNTED = {
    *("last_epoch", "_step_count", "_last_lr", "_is_initial", "_get_lr_called_within_step"),
    *("T_cur", "T_i", "best", "num_bad_epochs", "cooldown_counter"),
}
"""Keys of a scheduler's state that change as it runs; the others are its settings."""
_MT19937_BYTES = 2500
"""624 words, and how many of them have been used."""
_log = logging.getLogger("shardwise")


@dataclass
class _Snapshot:
    """The state when an iteration began."""

    iteration: int
    random: Any
    buffers: list[tuple[Tensor, Tensor]]
    scale: dict[str, Any] | None
    loads: Counted
    settings: _Settings | None
    """`None` where iterations are never undone after their end."""
    attributes: list[Attributes]
    """Empty there."""


@dataclass
class _Settings:
    """Settings of the optimizers' parameter groups, and states of their schedulers."""

    groups: list[tuple[dict[str, Any], dict[str, Any]]]
    schedules: list[tuple[Any, dict[str, Any]]]

    def restore(self) -> None:
        for group, settings in self.groups:
            group.update(settings)
        for scheduler, state in self.schedules:
            scheduler.load_state_dict(state)


class NumbersOfNumpy:
    """The state of numpy's generator. To ask for it takes 70 to 90 us, so that is done only where it may have changed:
    its memory has, or it has a second normal number in store, which is elsewhere."""

    def __init__(self) -> None:
        self._last: Any = None
        self._memory = b""

    def now(self) -> Any:
        generator: Any = np.random.get_bit_generator() if hasattr(np.random, "get_bit_generator") else None
        is_known = isinstance(generator, np.random.MT19937)
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES) if is_known else b""
        if not memory or memory != self._memory or self._last[3]:
            self._last, self._memory = np.random.get_state(), memory
        return self._last


class LoopState:
    """What a rank has besides parameters and optimizer states, as it was when an iteration began."""

    def __init__(self, sharded: ShardedModel, heard: Sequence[Told] = ()) -> None:
        """`heard` is what this rank has received of its optimizers' attributes when it joined."""
        self.follow(sharded)
        self.attributes = ChangedAttributes(self._optimizers, heard)
        self._numbers_of_numpy = NumbersOfNumpy()
        self._snapshots: list[_Snapshot] = []
        self._noted: _Settings | None = None
        """What the next iteration begins with, whatever the loop sets before it."""
        self._before_update: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Settings of the optimizers' groups before the update of this iteration, if that has begun."""
        self._attributes_before: list[Attributes] = []
        self._schedulers: dict[int, tuple[int, list[LRScheduler]]] = {}
        """By optimizer: its schedulers, and its reference count when they were looked for."""

    def follow(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self.loads = Loads(sharded.model)
        """What routers have counted."""
        self._optimizers = sharded.optimizers
        """They have their settings also while the model is not sharded, between two attempts to recover."""

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def iteration(self) -> int:
        """The last iteration with a snapshot; -1 if there is none."""
        return self._snapshots[-1].iteration if self._snapshots else -1

    def take(self, iteration: int, *, keeps_last: bool) -> None:
        """Take a snapshot, at the beginning of `iteration`. `keeps_last`: the iteration before may still be undone."""
        scaler = self._sharded.progress.scaler
        taken = _Snapshot(
            iteration,
            (random.getstate(), self._numbers_of_numpy.now(), torch.get_rng_state()),
            self._buffers(),
            scaler.state_dict() if scaler is not None else None,
            self.loads.now(),
            self.settings() if keeps_last else None,
            self.attributes.note() if keeps_last else [],
        )
        self._snapshots = [*(self._snapshots[-1:] if keeps_last else ()), taken]
        self.begin()

    def update_begins(self) -> None:
        """Some optimizers count their steps in the settings of a group (schedule-free ones), or keep there what they
        estimate (Prodigy's `d`)."""
        if not self._before_update:  # else another optimizer has begun the same update
            self._before_update = [(group, _settings(group)) for group in self._groups()]
            self._attributes_before = self.attributes.note()

    def begin(self) -> None:
        """An iteration begins. The update of the one before counts, or has been undone. What has changed since, such as
        learning rates, is of this one."""
        self._before_update, self._attributes_before = [], []

    def undo_update(self) -> None:
        """The update of this iteration, if it has begun, does not count. Raises `LostStateError` where it has changed
        what was not noted."""
        for attributes in self._attributes_before:
            attributes.restore()
        for group, settings in self._before_update:
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)

    def go_back(self, iteration: int) -> bool:
        """Make `restore` return to the beginning of `iteration`, which has ended. False if there is no snapshot. Raises
        `LostStateError` as `undo_update` does."""
        known = [one for one in self._snapshots if one.iteration <= iteration]
        if not known or known[-1].iteration != iteration:
            return False
        self._snapshots = known
        self._noted = known[-1].settings or self._noted
        for attributes in known[-1].attributes:
            attributes.restore()
        return True

    def come_back(self, iteration: int) -> None:
        """This rank has the state of others, whose snapshots it does not know."""
        self._snapshots, self._noted = [], None
        self.take(iteration, keeps_last=False)

    def restore(self) -> None:
        """Restore the last snapshot."""
        if not self._snapshots:
            return
        taken = self._snapshots[-1]
        random.setstate(taken.random[0])
        np.random.set_state(taken.random[1])
        torch.set_rng_state(taken.random[2])
        self._put_back(taken)
        scaler = self._sharded.progress.scaler
        if scaler is not None and taken.scale is not None:
            scaler.load_state_dict(taken.scale)

    def return_to(self, void_after: int) -> None:
        """Buffers, and what routers have counted, as they were when the first iteration after that one began."""
        taken = next((one for one in self._snapshots if one.iteration > void_after), None)
        if taken is not None:
            self._put_back(taken)

    def note_again(self, void_after: int) -> None:
        """The present ones are those with which the iterations after that one began: some are of stages that this rank
        did not have."""
        for taken in self._snapshots:
            if taken.iteration > void_after:
                taken.buffers, taken.loads = self._buffers(), self.loads.now()

    def _buffers(self) -> list[tuple[Tensor, Tensor]]:
        return [(buffer, buffer.detach().clone()) for buffer in self._sharded.model.buffers()]

    def _put_back(self, taken: _Snapshot) -> None:
        with torch.no_grad():
            for buffer, value in taken.buffers:
                buffer.copy_(value)
        self.loads.restore(taken.loads)

    def groups(self) -> list[dict[str, Any]]:
        """The settings of the optimizers' groups: as noted for a repeated iteration, else the present ones."""
        if self._noted is not None:
            return [settings for _, settings in self._noted.groups]
        return [_settings(group) for group in self._groups()]

    # -- learning rates, which a loop also changes after a void step ---------------------------------------

    def note_settings(self) -> None:
        """Let the next iteration begin with the present learning rates and schedulers, unless others are noted."""
        self._noted = self._noted or self.settings()

    def settings(self) -> _Settings | None:
        if not self._optimizers:
            return None
        groups = [(group, _settings(group)) for group in self._groups()]
        schedulers = [one for optimizer in self._optimizers for one in self._schedulers_of(optimizer)]
        return _Settings(groups, [(one, copy.deepcopy(one.state_dict())) for one in schedulers])

    def _schedulers_of(self, optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
        """Searched again only when the optimizer's reference count has changed."""
        if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            return []
        count = sys.getrefcount(optimizer)
        known = self._schedulers.get(id(optimizer))
        if known is None or known[0] != count:
            found = list(_schedulers_of(optimizer))
            known = self._schedulers[id(optimizer)] = sys.getrefcount(optimizer), found
        return known[1]

    @staticmethod
    def settings_of(group: dict[str, Any]) -> dict[str, Any]:
        """The settings of a group that can be sent to other ranks: no functions."""
        encoded = {}
        for key, value in group.items():
            with contextlib.suppress(ConfigError):
                encoded[key] = encode(value, key)
        return encoded

    def schedules(self) -> list[list[Any]]:
        """For each optimizer, class name and encoded state of its schedulers."""
        noted = {id(one): state for one, state in (self._noted.schedules if self._noted is not None else ())}
        encoded = []
        for optimizer in self._optimizers:
            found = _outermost(optimizer)
            encoded.append(
                [[type(one).__name__, encode(noted.get(id(one), one.state_dict()), "scheduler")] for one in found]
            )
        return encoded

    def load(self, groups: list[dict[str, Any]], schedules: list[list[Any]]) -> None:
        """On a rank that has joined: give groups and schedulers the others' settings and states."""
        if not self._optimizers:
            return
        for optimizer, theirs in zip(self._optimizers, schedules, strict=True):
            for scheduler, state in matched(_outermost(optimizer), [(name, decode(state)) for name, state in theirs]):
                scheduler.load_state_dict(state)
        added = self._sharded.parts.optimizer.added.keys() if self._sharded.parts.optimizer is not None else set()
        known = (group for group in self._groups() if not added & set(group["params"]))
        for group, settings in zip(known, groups, strict=True):  # a group that its loop has added just now is its own
            group.update(settings)

    def restore_settings(self) -> None:
        """Restore what was noted, if anything."""
        noted, self._noted = self._noted, None
        if noted is not None:
            noted.restore()


def seed_all(number: int) -> None:
    """Let each generator that a void iteration restores begin anew."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def _schedulers_of(optimizer: torch.optim.Optimizer) -> Iterator[LRScheduler]:
    """Found among the optimizer's referrers, since it has no reference to its schedulers; this takes milliseconds."""
    seen: set[int] = set()
    for one in gc.get_referrers(optimizer):
        for found in (one, *(gc.get_referrers(one) if isinstance(one, dict) and "last_epoch" in one else ())):
            if issubclass(type(found), LRScheduler) and id(found) not in seen:
                seen.add(id(found))
                yield found


def _outermost(optimizer: torch.optim.Optimizer) -> list[LRScheduler]:
    """The schedulers that are not part of another one, sorted by class."""
    if not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        return []
    found = list(_schedulers_of(optimizer))
    inner = {id(one) for outer in found for one in getattr(outer, "_schedulers", ())}
    return sorted((one for one in found if id(one) not in inner), key=lambda one: type(one).__name__)


def matched(
    schedulers: Sequence[LRScheduler], received: Sequence[tuple[str, dict[str, Any]]]
) -> list[tuple[LRScheduler, dict[str, Any]]]:
    """Which of the `received` states, each with its class name, is for which of this rank's schedulers.

    An optimizer's schedulers have no order. Several of one class are matched by their settings, such as the period;
    counters differ, since this rank's are new. Those that cannot be distinguished are left out, with a warning.
    """
    found: list[tuple[LRScheduler, dict[str, Any]]] = []
    for name in sorted({type(one).__name__ for one in schedulers} | {name for name, _ in received}):
        mine = [one for one in schedulers if type(one).__name__ == name]
        theirs = [state for of, state in received if of == name]
        if len(mine) == len(theirs) == 1:
            found.append((mine[0], theirs[0]))
            continue
        by_settings = [
            [state for state in theirs if _without_counts(state) == _without_counts(one.state_dict())] for one in mine
        ]
        is_unique = len(mine) == len(theirs) and all(
            states and all(state == states[0] for state in states) for states in by_settings
        )
        if is_unique:
            found += [(one, states[0]) for one, states in zip(mine, by_settings, strict=True)]
        else:
            _log.warning(
                "The other ranks have %d schedulers of class %s for an optimizer, this newly joined rank has %d, and "
                "their settings do not tell which is which. Give each to engine.remember(name=scheduler).",
                len(theirs),
                name,
                len(mine),
            )
    return found


def _without_counts(state: Any) -> Any:
    """The settings in a scheduler's state, and in the states of schedulers inside it."""
    if isinstance(state, dict):
        return {key: _without_counts(value) for key, value in state.items() if key not in _COUNTED}
    return [_without_counts(value) for value in state] if isinstance(state, list | tuple) else state


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }
