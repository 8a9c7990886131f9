"""A model and its engine may be dropped without `close()`, as where one is trained for each fold of the data."""

from __future__ import annotations

import gc
import weakref

import pytest
from twins import adamw, batches

import shardwise as sw
from shardwise.testing import run_ranks
from tests.models import Transformer


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_what_is_dropped_is_freed(preset: str, num_steps: int) -> None:
    """The collector of garbage finds it, although hooks and a list of all sharded models know of it."""

    def rank(world: sw.World) -> list[weakref.ref[object]]:
        model = Transformer()
        optimizer = adamw(model)
        engine = sw.shard(model, preset, optimizer=optimizer, world=world)
        for x, y in batches(num_steps):
            engine.backward(engine(x, y))
            engine.step()
        return [weakref.ref(one) for one in (model, optimizer, engine, model.head.weight)]

    known = run_ranks(2, rank)
    gc.collect()
    assert [[one() for one in mine] for mine in known] == [[None] * 4] * 2
