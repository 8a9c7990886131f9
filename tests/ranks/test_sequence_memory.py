"""Predicted memory with split sequences, compared with what a step allocates and keeps."""

from __future__ import annotations

import pytest
import small_transformers
import torch
from torch import nn
from twins import peak_of_third_step, work_on_ranks

import shardwise as sw
from shardwise.program import Footprint
from tests.models import VOCAB, Gpt
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
ROWS, TOKENS, NUM_RANKS = 4, 128, 2


def loss_of(logits: Tensor) -> Tensor:
    return logits.float().square().mean()


def promised_and_made(model: nn.Module, attention: str, batch: dict[str, Tensor]) -> list[tuple[Footprint, int]]:
    """For each rank, the prediction and the peak of what its third step allocated."""
    plan = {"preset": "zero1", "mesh": {"sp": NUM_RANKS}, "sequence": {"attention": attention}}

    def work(engine: sw.Engine) -> tuple[Footprint, int]:
        part = engine.split_sequence(batch)

        def step() -> None:
            output = engine(**part)
            engine.backward(loss_of(output) if isinstance(output, Tensor) else output.loss)
            del output
            engine.step()

        promised = engine.rehearse(part, loss=None if "labels" in batch else loss_of)
        return promised, peak_of_third_step(engine, step)

    return work_on_ranks(NUM_RANKS, work, plan, model)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_what_a_rank_holds_of_its_tokens_is_promised(attention: str, recomputes: bool) -> None:
    model = Gpt(recomputes=recomputes, tokens=TOKENS)
    tokens = torch.randint(0, VOCAB, (ROWS, TOKENS))
    batch = {"input_ids": tokens, "position_ids": torch.arange(TOKENS).expand(ROWS, -1)}
    for promised, made in promised_and_made(model, attention, batch):
        held = promised.total - promised.process - promised.param - promised.optim
        assert 0.85 * held <= made <= 1.05 * held


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
def test_a_model_of_transformers_is_rehearsed_without_a_message(attention: str) -> None:
    model = small_transformers.llama()
    tokens = torch.randint(0, model.config.vocab_size, (ROWS, 32))
    for promised, made in promised_and_made(model, attention, {"input_ids": tokens, "labels": tokens}):
        held = promised.total - promised.process - promised.param - promised.optim
        assert 0.7 * held <= made <= 1.1 * held
