"""Coordinates collective work that only the main process of an Accelerate script has requested.

[Note: saving alone] Scripts for DDP save on the main process alone: `if accelerator.is_main_process:
accelerator.save_state(...)`. With sharded models all ranks must take part. So before each step, when `accumulate` is
entered, ranks exchange one small message that says whether they are in `save_state`; if any rank is, the others join it
before they continue.

[Note: reading alone] At the end such scripts write the model on the main process, after `wait_for_everyone`. One rank
cannot read a sharded model. So under an unmodified script, each rank gathers the model when it reads `is_main_process`
after `wait_for_everyone`, until the next collective call. Changes made to the gathered model stay on that rank, and are
dropped with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.integrations.deferred_logging import DeferredLogging
from shardwise.integrations.model_patches import before_calls, engine_folder

Save = Callable[[], Any]


class Coordination:
    """Coordinates the ranks of one Accelerator. `engines` are those of its models."""

    def __init__(self, engines: dict[nn.Module, sw.Engine]) -> None:
        self._engines = engines
        self._patched: dict[nn.Module, ExitStack] = {}
        self._whole = ExitStack()
        self._may_read = False
        self.placeholder: dict[str, torch.Tensor] = {}
        """Replaces the weights of a sharded model while accelerate saves."""
        self.is_saving = False
        self.folder = ""
        """The folder to which accelerate saves."""
        self.logging: DeferredLogging | None = None
        """Set if a plan has `run`."""

    # -- see [Note: reading alone] ----------------------------------------------------------------------

    def allow_reading_alone(self) -> None:
        """Called after `wait_for_everyone`."""
        self._may_read = bool(self._engines)

    def read(self) -> None:
        """Called when a rank reads `is_main_process`; all ranks do."""
        if self._may_read:
            self._may_read = False
            self._make_whole(self._whole)

    def release(self) -> None:
        """Free the gathered models before a collective call. Idempotent."""
        self._may_read = False
        self._whole.close()

    def _release_before_training(self) -> None:
        if torch.is_grad_enabled():
            self.release()

    def register(self, model: nn.Module, *, main_process_reads_alone: bool, records: bool) -> None:
        """Register a model with an engine. The first one that `records` also receives logged values."""
        engine, patched = self._engines[model], self._patched.setdefault(model, ExitStack())
        if records and self.logging is None:
            self.logging = DeferredLogging(engine)
            patched.callback(before_calls(model, engine, self._log_before_training))
        if main_process_reads_alone:
            patched.callback(before_calls(model, engine, self._release_before_training))

    def _log_before_training(self) -> None:
        logging = self.logging
        if logging is not None and torch.is_grad_enabled() and logging.exchanged_at != logging.engine.num_steps:
            logging.exchange()

    def _make_whole(self, inside: ExitStack) -> None:
        for engine in dict.fromkeys(self._engines.values()):  # models may share one
            if engine.table.param.shard:
                inside.enter_context(engine.inference())

    # -- see [Note: saving alone] -----------------------------------------------------------------------

    def synchronize(self, save: Save | None = None, *, has_hooks: bool = False) -> Any:
        """Take part in saving until no rank saves any more. Collective.

        `save` is accelerate's part of saving on this rank, and its result is returned. With `has_hooks`, models are
        gathered while it runs.
        """
        self.release()
        world = next((engine.world for engine in self._engines.values()), None)
        if world is None:
            return None if save is None else save()
        while True:
            has_logged = self.logging is not None and self.logging.is_waiting
            messages = world.exchange(json.dumps([save is not None, has_hooks, has_logged]).encode(), "meeting")
            requests = [json.loads(one) for one in messages]
            if self.logging is not None:
                self.logging.write(has_any=any(logged for _, _, logged in requests))
            if not any(saves for saves, _, _ in requests):
                return None
            result = self._save(world, save, is_whole=any(hooks for _, hooks, _ in requests))
            if save is not None:
                return result

    def unregister(self, model: nn.Module) -> None:
        """Called before the engine of `model` is closed."""
        self._patched.pop(model).close()
        if self.logging is not None and self.logging.engine is self._engines[model]:
            self.logging = None

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
        for number, engine in enumerate(dict.fromkeys(self._engines.values())):
            engine.save(engine_folder(folder, number), without_gradients=True)  # DDP saves none either
        return result

    def remove_placeholders(self, _models: object, weights: list[Any], folder: str) -> None:
        """The last pre-hook of saving: removes placeholders, so that accelerate does not write them."""
        self.folder = folder
        weights[:] = [one for one in weights if one is not self.placeholder]
