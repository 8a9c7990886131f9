"""What a loop of Accelerate logs, in the record of the run and its trackers."""

from __future__ import annotations

from typing import Any

from accelerate.accelerator import Accelerator

from shardwise.integrations.together import Together


class LoggingAccelerator(Accelerator):
    """Accelerate's own, as far as it logs."""

    _together: Together
    keeps_engines: bool

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """See accelerate. All ranks may call, or the main process alone.

        With `run` in the plan its numbers stand in the record and its trackers too, at the steps that were taken: as
        `step` what is logged first after a step of the first model, as `validation` names that begin with `eval_` or
        `val_`, as `log` the rest.
        """
        super().log(values, step, {} if log_kwargs is None else log_kwargs)
        logged = self._together.logged
        if logged is not None and not self.keeps_engines and logged.engine.world.rank == 0:
            logged.take(values)
