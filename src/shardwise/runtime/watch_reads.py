"""Finds parameters that other modules read, while a pass is recorded: see `foreign_reads.py`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from shardwise.errors import ModelError
from shardwise.init import is_distributed
from shardwise.memory import Unit
from shardwise.runtime.foreign_reads import Callers, Reach, Writes
from shardwise.runtime.gathering import Gathering
from shardwise.runtime.hooks import Hooks, changed_inside
from shardwise.runtime.passes import Passes
from shardwise.runtime.paths import Paths

_log = logging.getLogger("shardwise")


class Watching:
    """Watches every operation of a forward until all that it reads is known."""

    def __init__(
        self,
        model: nn.Module,
        gathering: Gathering,
        hooks: Hooks,
        passes: Passes,
        paths: Paths,
        if_forward_communicates: str,
    ) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._if_forward_communicates = if_forward_communicates
        self._units: Sequence[Unit] = gathering.units
        self._gathering = gathering
        self._hooks = hooks
        self._passes = passes
        self._paths = paths
        self._callers: Callers | None = None
        self._has_seen = {True: False, False: False}
        """By whether a pass is a training pass: whether everything that it reads is known."""
        self._alone: tuple[Unit, Writes] | None = None
        """The unit whose module a loop has called by itself, and what looks for writes there."""

    def has_seen(self, *, training: bool) -> bool:
        """Whether passes of this kind need not be watched."""
        return self._has_seen[training]

    def note_seen(self, *, training: bool) -> None:
        """A pass of this kind was watched from end to end and found nothing new."""
        self._has_seen[training] = True

    def start(self) -> None:
        """Watch every operation until the root is left."""
        if self._callers is None:
            self._callers = Callers(self._model)
        if self._gathering.watcher is None:
            self._require_own_params()
            heard = self._hear_collective if self._if_forward_communicates else None
            Reach.end_interrupted()
            watcher = Reach(self._units, self.gather_reached, heard, of=self._model)
            watcher.__enter__()  # type: ignore[no-untyped-call]  # torch's own
            self._gathering.watcher = watcher
            self._hooks.look_for_kept_views(True)

    def pause(self) -> None:
        self._end_alone()
        if self._gathering.watcher is not None:
            self._gathering.watcher.end()
            self._gathering.watcher = None
            self._hooks.look_for_kept_views(False)

    def forget(self) -> None:
        """What was watched has raised, or was left: nothing runs."""
        self.pause()
        if self._callers is not None:
            self._callers.forget()

    def require_in_place(self) -> None:
        """Raise `ModelError` if the forward that was watched has given a parameter other memory (`param.data = ...`),
        as no operation shows; the parameter has its own again then."""
        if self._gathering.watcher is not None:
            self._require_own_memory()

    def _require_own_memory(self) -> None:
        moved = [unit.name for unit in self._units for flat in unit.flats if flat.put_back()]
        if moved:
            raise changed_inside(moved[0])

    def enter_alone(self, unit: Unit, *, training: bool) -> None:
        """A module of `unit` is about to run that a loop, or a schedule of stages, calls by itself, and not the model:
        look for writes to parameters until `leave_alone`, unless passes of this kind are known."""
        if self._alone is None and not self._has_seen[training] and not is_dynamo_compiling():
            self._alone = unit, Writes(self._units, self.gather_reached)
            self._alone[1].__enter__()  # type: ignore[no-untyped-call]  # torch's own

    def leave_alone(self, unit: Unit, *, raised: bool) -> None:
        """The outermost call of a module of `unit` has ended. Raises `ModelError` if it was looked at, and has given a
        parameter other memory."""
        if self._alone is None or self._alone[0] is not unit:
            return
        self._end_alone()
        if not raised:
            self._require_own_memory()

    def _end_alone(self) -> None:
        if self._alone is not None:
            self._alone[1].end()
            self._alone = None

    def stop(self) -> None:
        """Stop watching for good. Call it only while no module runs."""
        self.pause()
        if self._callers is not None:
            self._callers.remove()
            self._callers = None

    def gather_reached(self, unit: Unit) -> None:
        """A module reads `unit` without calling it: gather it now, and from the next pass on before that module runs.

        If it is unknown which module that is, the next pass is watched.
        """
        self._passes.current.keep(unit)
        if self._callers is None:
            self._has_seen = {True: False, False: False}
        else:
            self._add_site(unit, self._callers)
        self._paths.need(unit, training=torch.is_grad_enabled())
        self._gathering.open(unit)

    def _require_own_params(self) -> None:
        """`fully_shard` and `parallelize_module` put their parameters where modules keep them, past what `nn.Module`
        asks; those of the former are plain ones while it has gathered them."""
        fsdp = sys.modules.get("torch.distributed.fsdp")
        spread = []
        for name, module in self._modules.items():
            # Those of another pipeline stage would make stand-ins for their parameters, if they were asked otherwise.
            params = [param for param in dict.values(module._parameters) if param is not None]
            is_of_fsdp = fsdp is not None and isinstance(module, fsdp.FSDPModule)
            if is_of_fsdp or any(map(is_distributed, params)):
                spread.append(name)
        if spread:
            raise ModelError(
                f"Another library has spread {spread[0] or 'the model'} over ranks after shard() (fully_shard, "
                f"parallelize_module), and the engine would train what the model does not use. Leave that call out."
            )

    def _hear_collective(self) -> None:
        if self._if_forward_communicates:
            _log.warning("%s", self._if_forward_communicates)
            self._if_forward_communicates = ""

    def _add_site(self, unit: Unit, callers: Callers) -> None:
        caller = callers.innermost()
        site = caller if caller is not None else self._model
        if all(site is not known for known in unit.sites):
            unit.sites.append(site)
            self._hooks.add_site(unit, site, num_running=callers.num_running(site))
