"""Evaluation with different numbers of batches per rank.

[Note: uneven evaluations] With sharded parameters a forward needs all ranks. Lightning gives ranks equally many batches
for validation and test, but not for `predict`, nor for loaders that it does not change. So ranks exchange their numbers
of batches at the start. If these differ or are unknown, the ranks run independently inside `engine.inference`. A rank
that has finished its last batch continues to take part in the others' gathers until all have finished. This is before
Lightning reduces any results over ranks.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import shardwise as sw

_COUNTS = {"predict": "num_predict_batches", "test": "num_test_batches", "validate": "num_val_batches"}
_SANITY = "num_sanity_val_batches"


class UnevenEvaluation:
    """Lets ranks run the current evaluation independently if their numbers of batches differ."""

    def __init__(self) -> None:
        self._is_uneven = False
        self._inside = ExitStack()

    def begin(self, engine: sw.Engine, trainer: Any, stage: str) -> None:
        """Compare the numbers of batches. Collective. `stage` is `validate`, `test` or `predict`."""
        self._is_uneven = False
        if engine.world.size == 1 or not engine.table.param.shard:
            return
        counts = getattr(trainer, _SANITY if trainer.sanity_checking else _COUNTS[stage])
        own = json.dumps([str(count) for count in counts]).encode()
        everywhere = engine.world.exchange(own, "batches")
        self._is_uneven = len(set(everywhere)) > 1 or b"inf" in own

    def enter(self, engine: sw.Engine) -> None:
        """Call it before the first batch, not earlier: callbacks may communicate until then."""
        if self._is_uneven:
            self._is_uneven = False
            self._inside.enter_context(engine.inference(keep_bytes=0))

    def leave(self) -> None:
        """Call it after the last batch. Idempotent."""
        self._inside.close()

    def join_without_batches(self, engine: sw.Engine) -> None:
        """At the end of the evaluation: a rank without any batch takes part in the gathers of the others."""
        self.enter(engine)
        self.leave()
