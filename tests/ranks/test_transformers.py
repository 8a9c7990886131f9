"""Unchanged models of the transformers library train."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_transformers import gpt2, llama
from torch import nn
from twins import adamw

import shardwise as sw
from shardwise.testing import run_ranks
from tests import inside
from tests.thorough import sampled

pytestmark = sampled


def losses_of(model: nn.Module, tokens: torch.Tensor) -> list[float]:
    optimizer = adamw(model)
    losses = []
    for batch in tokens:
        optimizer.zero_grad()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize(("preset", "num_ranks"), [("zero3", 2), ("zero3", 4), ("zero2", 2), ("zero3-kept", 2)])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_trains_unchanged(build: Any, preset: str, num_ranks: int, checkpointing: bool) -> None:
    model = build()
    model.train()
    if checkpointing:
        model.activation_checkpointing_enable()
    tokens = torch.randint(0, 97, (2, 8, 12)).repeat(5, 1, 1)
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]
    expected = losses_of(model, tokens)

    def rank(world: sw.World) -> tuple[list[float], int]:
        replica = replicas[world.rank]
        engine = sw.shard(replica, preset, optimizer=adamw(replica), world=world)
        losses = []
        for batch in tokens:
            mine = batch.chunk(world.size)[world.rank]
            loss = engine(input_ids=mine, labels=mine).loss
            engine.backward(loss)
            engine.step()
            losses.append(world.mean(loss.item()))
        with torch.no_grad():
            replica.eval()
            text = replica.generate(tokens[0, :1, :4], max_new_tokens=4, do_sample=False, use_cache=True)
        assert text.shape == (1, 8)
        return losses, len(inside.units(engine))

    for losses, num_units in run_ranks(num_ranks, rank):
        assert losses == pytest.approx(expected, rel=2e-6)
        assert num_units >= 4
    assert losses[-1] < losses[0]
