"""Reports of an engine: its bytes, promised and measured, what a step will hold, its program and its times."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.engine_state import EngineState
from shardwise.errors import ConfigError, StateError
from shardwise.experts import EXPERT_LOAD
from shardwise.fitting import Limits, fit_activations
from shardwise.program import Footprint, render
from shardwise.report import MemoryReport, describe, memory_of, rehearsed, write_timeline
from shardwise.units import bytes_of

if TYPE_CHECKING:
    from shardwise.rehearsal import Loss


class EngineReports(EngineState):
    """Part of `Engine`."""

    def memory(self) -> MemoryReport:
        """Promised and measured bytes of this rank; see `MemoryReport`."""
        report = memory_of(self._sharded)
        if self._session is None:
            return report
        image_bytes, kept_bytes = self._session.bytes_for_survival
        return replace(report, image_bytes=image_bytes, kept_bytes=kept_bytes)

    @property
    def copies(self) -> dict[str, float]:
        """What copies of this rank's state on another host have cost so far, in an elastic job with `survive: buddy`.

        `num_copies`; `sent_bytes` and `received_bytes`, of other ranks; `seconds` that they took, behind forwards and
        backwards, and `waited_seconds` that updates waited for them. Empty where there are none. Asks nobody.
        """
        meter = self._session.copy_meter if self._session is not None else None
        return {} if meter is None or not meter.num_copies else asdict(meter)

    def rehearse(self, batch: object, loss: Loss | None = None, *, expert_load: float = EXPERT_LOAD) -> Footprint:
        """What a step on `batch` will hold on this rank at its peak, activations included: see `Footprint`.

        Runs a copy of the model on fake tensors, without memory or arithmetic. Nothing is changed and nothing is sent;
        but under a pipeline all its ranks call, with a micro-batch, and those in flight are counted. If sequences are
        split, pass this rank's part of a batch, from `split_sequence`. `batch` is a tensor, a tuple of arguments, or a
        dict of keyword arguments, of which only shapes and dtypes matter. `loss` maps the model's output to the loss,
        and must be given if a loop computes the loss itself; by default it is the output, or its `loss`.

        How many tokens the experts of this rank will get is not known in advance. If experts have a capacity, the count
        is as many as all ranks along `ep` may send; otherwise `expert_load` times an even share, at least 1.

        Raises `ModelError` for a model that asks for the values of tensors; `ConfigError` for an `expert_load` below 1,
        or a plan with zb-h1 and sharded gradients; and `TierError` if activations go to a disk with too little room for
        those of this host's ranks.
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
        """Choose a treatment of activations with which a step on `batch` fits, and continue with that plan. All ranks
        call.

        `device` (bytes, or such as "10GiB") is how much each rank may hold there, everything of a step included, and
        `host` how much the ranks of a host may hold in its memory besides. They default to the plan's `budget`.

        If activations fit, they are kept. Otherwise each choice is rehearsed: recomputed selectively or completely, on
        the host, and on a disk if the plan names a folder. Of those that fit the cheapest is taken, by the operations
        that are recomputed and by what `shardwise bench` has measured on this machine; without measurements, the first.
        Returns a sentence that says what was chosen and why. `batch`, `loss` and `expert_load` are those of `rehearse`.

        Under a pipeline `batch` is a micro-batch, those in flight are counted, and all stages take the same choice; it
        is for an engine that has not computed yet, and for plans whose rules say nothing of activations.

        Raises `ConfigError`, with figures, if nothing fits; nothing has been changed then.
        """
        self._require_open()
        pipeline = self._sharded.pipeline
        is_staged = pipeline is not None
        if pipeline is not None and pipeline.has_computed:
            raise StateError(
                "fit_activations() in a pipeline is for an engine that has not computed yet; call it before the first "
                "step."
            )
        allowed = self._sharded.sharding.budget
        limit = allowed.device if device is None else bytes_of("device of fit_activations()", device)
        limit_of_host = allowed.host if host is None else bytes_of("host of fit_activations()", host)
        if limit is None:
            raise ConfigError("Say how much each device may hold: fit_activations(batch, '10GiB'), or budget.device.")
        limits = Limits(limit, limit_of_host)
        fitted = fit_activations(self._sharded, batch, loss, limits, expert_load)
        if fitted.plan.activations != self._sharded.plan.activations:
            if is_staged:
                self._sharded.treat(fitted.plan, fitted.treatments)
            else:
                self.reshard(fitted.plan)
        return fitted.summary

    def timeline(self, path: str | Path) -> AbstractContextManager[None]:
        """Inside `with`, record what every rank does, unit by unit and action by action, and write it to `path`. All
        ranks enter and leave.

        The file is a Chrome trace, for ui.perfetto.dev. Times are those of the host. For GPU kernels run
        `torch.profiler` as well; actions have the same names there.
        """
        self._require_open()
        return write_timeline(self._sharded, Path(path))

    def program(self) -> str:
        """The program of one step as text: as planned before the first step, as recorded after it."""
        program = self._sharded.runner.programs.program
        return render(program.micro_batch) + render(program.step)

    def __str__(self) -> str:
        """The table, the units, and the bytes of this rank."""
        return describe(self._sharded)
