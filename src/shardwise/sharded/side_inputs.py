"""Whether micro-batches have cut a tensor that is every sample's, such as a mask `[tokens, tokens]` in a batch that has
as many samples: asked of the model, by rehearsals with another number of samples."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Any

from shardwise.errors import ConfigError, ModelError
from shardwise.parallel.experts import EXPERT_LOAD
from shardwise.runtime.micro_batches import MicroBatch, called_with, side_inputs

if TYPE_CHECKING:
    from shardwise.sharded.sharded_model import ShardedModel


def require_by_samples(sharded: ShardedModel, batch: Any, rows: int, part_rows: int) -> None:
    """Raise `ConfigError` if the model takes a tensor of `batch` in whole, which is split along its `rows`. All ranks
    of a pipeline call."""
    whole = replace(called_with(batch), names=tuple(signature(sharded.model.forward).parameters))
    candidates = side_inputs(whole, rows, part_rows)
    if not candidates:
        return
    from shardwise.runtime.rehearsal import resized, unlikely_size  # few jobs need it
    from shardwise.sharded.rehearsed_step import rehearse_step

    given = whole.args, whole.kwargs

    def is_taken(*kept: Any) -> bool:
        args, kwargs = resized(given, 0, rows, unlikely_size(given), kept=set(map(id, kept)))
        try:
            rehearse_step(sharded, MicroBatch(args, kwargs), None, EXPERT_LOAD, sharded.parts.sharding.treatments)
        except ModelError:
            return False
        return True

    if is_taken():
        return
    for name, tensor in candidates.items():
        if is_taken(tensor):
            raise ConfigError(
                f"{name}, {list(tensor.shape)}, has as many rows as the batch has samples, and would be cut with them "
                f"into micro-batches (the plan's accumulate), but the model takes it whole for any number of samples. "
                f"Give a list of micro-batches, each with all of {name}."
            )
