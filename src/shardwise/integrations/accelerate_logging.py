"""`accelerator.log` also writes to the run record of the engine and its trackers."""

from __future__ import annotations

from typing import Any

from accelerate.accelerator import Accelerator

from shardwise.integrations.accelerate_coordination import Coordination


class LoggingAccelerator(Accelerator):
    """The part of our `Accelerator` that logs."""

    _coordination: Coordination
    keeps_engines: bool

    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """See accelerate. Called by all ranks, or by the main process alone.

        If the plan has `run`, the numbers also go to its record and trackers, at the engine's step: as kind `step` for
        the first call after a step of the first model, as `validation` if the names begin with `eval_` or `val_`, and
        as `log` otherwise.
        """
        super().log(values, step, {} if log_kwargs is None else log_kwargs)
        logging = self._coordination.logging
        if logging is not None and not self.keeps_engines and logging.engine.world.rank == 0:
            logging.add(values)
