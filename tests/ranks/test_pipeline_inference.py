"""Inside `engine.inference()`, a model in pipeline stages is called and generates like the unsplit one, on every rank."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelined import VOCAB as SMALL_VOCAB
from pipelined import Decoder, batches
from small_transformers import VOCAB, library
from test_pipeline_transformers import build
from torch import nn

import shardwise as sw
from shardwise.errors import DataError, ModelError, StateError
from shardwise.testing import run_ranks
from tests.thorough import one_in, thorough_only

Tensor = torch.Tensor
Plan = dict[str, Any]
NEW = 7
SLOW = thorough_only("slow; smaller tests beside it cover the same code")


def plan_of(mesh: dict[str, int], preset: str = "zero1", **changes: Any) -> Plan:
    return {"preset": preset, "mesh": mesh, "accumulate": 2, **changes}


def left_padded(rows: int = 2, length: int = 5) -> dict[str, Tensor]:
    """Prompts of several lengths, which end together."""
    numbers = torch.Generator().manual_seed(2)
    tokens = torch.randint(1, VOCAB, (rows, length), generator=numbers)
    mask = torch.arange(length) >= torch.arange(rows)[:, None]
    return {"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long()}


def race(model: nn.Module, plan: Plan, use: Callable[[nn.Module, int], Any]) -> None:
    """What `use` returns of the model in stages, given a data rank's place, equals what it returns of the model."""
    model.eval()
    num_ranks = math.prod(plan["mesh"].values())
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    expected = [use(model, place) for place in range(plan["mesh"].get("dp", 1))]

    def rank(world: sw.World) -> tuple[int, Any]:
        with sw.shard(models[world.rank], plan, world=world) as engine:
            with torch.no_grad(), engine.inference():
                found = use(engine.module, engine.data_ranks[0])
            return engine.data_ranks[0], found

    for place, found in run_ranks(num_ranks, rank):
        torch.testing.assert_close(found, expected[place], rtol=1e-5, atol=1e-5)


def generate(model: Any, place: int = 0, **changes: Any) -> Tensor:
    prompt = left_padded(2 + place, 4 + place)
    found: Tensor = model.generate(**prompt, **{"max_new_tokens": NEW - place, "do_sample": False, **changes})
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generation(kind: str) -> None:
    torch.manual_seed(0)
    race(build(kind), plan_of({"pp": 2}), generate)
