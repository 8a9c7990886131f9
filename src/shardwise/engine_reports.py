"""What an engine says of itself: its bytes, promised and measured, what a step will hold, its program and its times."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from shardwise.engine_state import EngineState
from shardwise.errors import ConfigError
from shardwise.experts import EXPERT_LOAD
from shardwise.fitting import Limits, fit_activations
from shardwise.program import Footprint, render
from shardwise.rehearsal import Loss
from shardwise.report import MemoryReport, describe, memory_of, rehearsed, write_timeline
from shardwise.units import parse_bytes


class EngineReports(EngineState):
    """Part of `Engine`."""

    def memory(self) -> MemoryReport:
        """Promise and measurement for this rank; see `MemoryReport`."""
        report = memory_of(self._sharded)
        return report if self._session is None else replace(report, image_bytes=self._session.image_bytes)

    def rehearse(self, batch: object, loss: Loss | None = None, *, expert_load: float = EXPERT_LOAD) -> Footprint:
        """What a step on `batch` will hold on this rank when it holds most, activations included: see `Footprint`.

        Runs a twin of the model without memory and without arithmetic; nothing is changed, and no other rank is asked,
        but under a pipeline all its ranks call, with a micro-batch, and those in flight are counted. Where sequences
        are split, give it this rank's part of a batch, from `split_sequence`.
        `batch` is a tensor, a tuple of arguments, or a dict of keyword arguments, of which only shapes and dtypes
        count. `loss` makes of the model's output what is sent back, and must be given where a loop computes it itself;
        else it is the output, or its `loss`.

        How many tokens experts on this rank will get is known only when they come. Where experts have a capacity, it is
        as many as all ranks along `ep` may send; else `expert_load` times an even share, at least 1.

        Raises `ModelError` for a model that asks for the values of tensors, `ConfigError` for an `expert_load`
        below 1, or a plan with zb-h1 and sharded gradients, and `TierError` where activations are for a disk that has
        too little room for those of this host's ranks.
        """
        self._require_open()
        if not expert_load >= 1:
            raise ConfigError(f"expert_load is {expert_load}; give how many times an even share, at least 1.")
        return rehearsed(self._sharded, batch, loss, expert_load)

    def fit_activations(
        self,
        batch: object,
        device: int | str | None = None,
        host: int | str | None = None,
        *,
        loss: Loss | None = None,
        expert_load: float = EXPERT_LOAD,
    ) -> str:
        """Choose what becomes of activations, so that a step on `batch` fits, and go on by that plan. All ranks call.

        `device` (bytes, or such as "10GiB") is what each rank may hold there, all of a step counted, and `host` what a
        host's ranks may hold in its memory beside that. Without them the plan's `budget` says so.

        If they fit, activations are kept. Else each choice is rehearsed, recomputed, selectively and wholly, on the
        host, and on a disk if the plan names a folder; of those that fit the cheapest is taken, by the operations that
        are computed again and by what `shardwise bench` has measured of this machine, or the first where it has not.
        Returns in words what was chosen and why. `batch`, `loss` and `expert_load` are those of `rehearse`.

        Raises `ConfigError`, with figures, if nothing fits; nothing has been changed then.
        """
        self._require_open()
        self._sharded.refuse_stages("fit_activations()", "Try activations in the plan with engine.rehearse(batch).")
        allowed = self._sharded.sharding.budget
        limit = allowed.device if device is None else _bytes_of(device)
        limit_of_host = allowed.host if host is None else _bytes_of(host)
        if limit is None:
            raise ConfigError("Say how much each device may hold: fit_activations(batch, '10GiB'), or budget.device.")
        limits = Limits(limit, limit_of_host)
        fitted = fit_activations(self._sharded, batch, loss, limits, expert_load)
        if fitted.plan.activations != self._sharded.plan.activations:
            self.reshard(fitted.plan)
        return fitted.said

    def timeline(self, path: str | Path) -> AbstractContextManager[None]:
        """Write what every rank does inside, unit by unit and action by action, to `path`. All ranks call.

        A Chrome trace, for ui.perfetto.dev. Times are the host's: for kernels of a GPU run `torch.profiler` beside
        it, to which the actions are known by the same names.
        """
        self._require_open()
        return write_timeline(self._sharded, Path(path))

    def program(self) -> str:
        """The program of one step as text: as foreseen before the first step, as recorded after it."""
        program = self._sharded.runner.programs.program
        return render(program.micro_batch) + render(program.step)

    def __str__(self) -> str:
        """The table, the units, and the bytes of this rank."""
        return describe(self._sharded)


def _bytes_of(said: int | str) -> int:
    return parse_bytes(said) if isinstance(said, str) else said
