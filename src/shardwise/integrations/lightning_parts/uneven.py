"""Evaluations in which ranks have different numbers of batches.

[Note: uneven evaluations] Where parameters are sharded a forward needs all ranks. Lightning makes the numbers of
batches even for validation and test, but not for `predict`, and not for loaders that it leaves as they are. So ranks
tell each other at the start how many they have; if these differ, or nobody knows, each runs at its own pace
(`engine.inference`), and takes part in the others' gathers from its last batch on until all are through. That is before
Lightning sums anything over ranks at the end.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

import shardwise as sw

_COUNTS = {"predict": "num_predict_batches", "test": "num_test_batches", "validate": "num_val_batches"}
_SANITY = "num_sanity_val_batches"


class Pace:
    """Whether the evaluation that runs is each rank's own, and until when."""

    def __init__(self) -> None:
        self._is_own = False
        self._inside = ExitStack()

    def begin(self, engine: sw.Engine, trainer: Any, stage: str) -> None:
        """All ranks call. `stage` is `validate`, `test` or `predict`."""
        self._is_own = False
        if engine.world.size == 1 or not engine.table.param.shard:
            return
        counts = getattr(trainer, _SANITY if trainer.sanity_checking else _COUNTS[stage])
        told = json.dumps([str(count) for count in counts]).encode()
        everybody = engine.world.exchange(told, "batches")
        self._is_own = len(set(everybody)) > 1 or b"inf" in told

    def enter(self, engine: sw.Engine) -> None:
        """Before the first batch; not earlier, since callbacks may do things together until then."""
        if self._is_own:
            self._is_own = False
            self._inside.enter_context(engine.inference(keep_bytes=0))

    def leave(self) -> None:
        """After the last batch. May be called twice."""
        self._inside.close()

    def begin_late(self, engine: sw.Engine) -> None:
        """At the end: a rank that had no batch at all takes part in those of others."""
        self.enter(engine)
        self.leave()
