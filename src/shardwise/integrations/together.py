"""What ranks of a loop of Accelerate do together although one of them has asked alone.

[Note: asked alone] Scripts for DDP save on the main process alone: `if accelerator.is_main_process:
accelerator.save_state(...)`. Where every rank has a part, all have to take part. So ranks meet once before each step,
at the entry of `accumulate`, and say what they want: who is inside of `save_state` says so, and the others join before
they go on. It is one small message a step.

[Note: read alone] At their end such scripts write the model on the main process, after `wait_for_everyone`. A sharded
model cannot be read by one rank, so under an unmodified script it is made whole on each rank where `is_main_process` is
asked for after `wait_for_everyone`, until ranks next do something together. What is written to it there is that rank's
own and is dropped with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.integrations.logged import Logged
from shardwise.integrations.preparing import engine_folder

Save = Callable[[], Any]


class Together:
    """The meetings of one Accelerator. `engines` are those of its models."""

    def __init__(self, engines: dict[nn.Module, sw.Engine]) -> None:
        self._engines = engines
        self._whole = ExitStack()
        self._may_read = False
        self.nothing: dict[str, torch.Tensor] = {}
        """Stands for the weights of a sharded model while accelerate saves."""
        self.is_saving = False
        self.folder = ""
        """Where accelerate saves to."""
        self.logged: Logged | None = None
        """What is logged, if a plan has a `run`."""

    # -- see [Note: read alone] -------------------------------------------------------------------------

    def allow_reading(self) -> None:
        """Everybody has waited for everybody."""
        self._may_read = bool(self._engines)

    def read(self) -> None:
        """A rank asks whether it is the main one, as all do."""
        if self._may_read:
            self._may_read = False
            self._make_whole(self._whole)

    def leave(self) -> None:
        """Ranks are about to do something together. May be called twice."""
        self._may_read = False
        self._whole.close()

    def leave_before_training(self, _model: nn.Module, _args: object) -> None:
        """A hook before a forward."""
        if torch.is_grad_enabled():
            self.leave()

    def follow(self, model: nn.Module, *, reads_alone: bool, records: bool) -> None:
        """`model` has an engine now. If that `records`, and is the first, it writes down what is logged."""
        if records and self.logged is None:
            self.logged = Logged(self._engines[model])
            model.register_forward_pre_hook(self._tell_before_training, prepend=True)
        if reads_alone:
            model.register_forward_pre_hook(self.leave_before_training, prepend=True)

    def _tell_before_training(self, _model: nn.Module, _args: object) -> None:
        logged = self.logged
        if logged is not None and torch.is_grad_enabled() and logged.asked_at != logged.engine.num_steps:
            logged.ask()

    def _make_whole(self, inside: ExitStack) -> None:
        for engine in self._engines.values():
            if engine.table.param.shard:
                inside.enter_context(engine.inference())

    # -- see [Note: asked alone] ------------------------------------------------------------------------

    def meet(self, save: Save | None = None, *, has_hooks: bool = False) -> Any:
        """Go on when all ranks want to; before, take part in what others save. All ranks call.

        With `save`, which is accelerate's part of it, return what it returns. With `has_hooks` models are whole inside.
        """
        self.leave()
        world = next((engine.world for engine in self._engines.values()), None)
        if world is None:
            return None if save is None else save()
        while True:
            has_logged = self.logged is not None and self.logged.is_waiting
            said = world.exchange(json.dumps([save is not None, has_hooks, has_logged]).encode(), "meeting")
            wishes = [json.loads(one) for one in said]
            if self.logged is not None:
                self.logged.hear(has_any=any(logged for _, _, logged in wishes))
            if not any(wants for wants, _, _ in wishes):
                return None
            result = self._save(world, save, is_whole=any(hooks for _, hooks, _ in wishes))
            if save is not None:
                return result

    def forget(self, model: nn.Module) -> None:
        """The engine of `model` is about to be closed."""
        if self.logged is not None and self.logged.engine is self._engines[model]:
            self.logged = None

    def _save(self, world: sw.World, save: Save | None, *, is_whole: bool) -> Any:
        result, self.folder = None, ""
        with ExitStack() as inside:
            if is_whole:
                self._make_whole(inside)
            if save is not None:
                self.is_saving = True
                try:
                    result = save()
                finally:
                    self.is_saving = False
        folder = next(filter(None, world.exchange(self.folder.encode(), "folder"))).decode()
        for number, engine in enumerate(self._engines.values()):
            engine.save(engine_folder(folder, number), without_gradients=True)  # as DDP's
        return result

    def take_out(self, _models: object, weights: list[Any], folder: str) -> None:
        """The last of the hooks before accelerate writes: what stands for weights goes."""
        self.folder = folder
        weights[:] = [one for one in weights if one is not self.nothing]
