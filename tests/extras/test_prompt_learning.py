"""Prompt tuning, P-tuning and prefix tuning by peft on a frozen Llama: trained as on the unsplit model, or refused."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
]

VOCAB, NUM_RANKS = 53, 2
LANGUAGE: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
CONFIGS = {
    "prompt": peft.PromptTuningConfig(**LANGUAGE),
    "p-tuning": peft.PromptEncoderConfig(**LANGUAGE, encoder_hidden_size=16),
    "prefix": peft.PrefixTuningConfig(**LANGUAGE),
}


def prompted(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=32,
    )  # fmt: skip
    model: nn.Module = peft.get_peft_model(transformers.LlamaForCausalLM(config), CONFIGS[kind])
    return model.train()


def batches() -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (4, 8), generator=numbers) for _ in range(3)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2, eps=1e-5)


def train(world: sw.World, model: nn.Module, plan: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
        losses = []
        place, num_shares = engine.data_ranks
        for ids in batches():
            own = ids.chunk(num_shares)[place]
            loss = model(input_ids=own, labels=own).loss
            engine.backward(loss)
            engine.step()
            losses.append(engine.mean(loss.item()))
        return losses, engine.state_dict()


def trained(kind: str, plan: dict[str, Any]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    model = prompted(kind)
    replicas = [copy.deepcopy(model) for _ in range(NUM_RANKS)]
    return run_ranks(NUM_RANKS, lambda world: train(world, replicas[world.rank], plan))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("plan", [{"preset": "zero2"}, {"preset": "zero3"}, {"preset": "zero1", "mesh": {"tp": 2}}])
def test_virtual_tokens_train_like_those_of_the_plain_model(kind: str, plan: dict[str, Any]) -> None:
    if kind == "prefix" and "mesh" in plan:
        with pytest.raises(ModelError, match="trained by prefix tuning, whose keys and values are those of all heads"):
            trained(kind, plan)
        return
    model, expected = prompted(kind), []
    optimizer = adamw(model)
    for ids in batches():
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    wanted = model.state_dict() | dict(model.named_parameters())
    for losses, params in trained(kind, plan):
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, value in params.items():
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"pp": 2}, "word_embeddings are one module, which a pipeline cannot have in two places"),
        ({"sp": 2}, "Only attention of the batch's tokens to each other can be split over 'sp'"),
    ],
)
def test_virtual_tokens_are_refused_in_stages_and_over_sequences(kind: str, mesh: dict[str, int], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        trained(kind, {"preset": "zero1", "mesh": mesh, "accumulate": 2})
