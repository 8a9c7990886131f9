"""Calls and generation of models with `tensor.sequence`, inside `engine.inference()`: what the unsplit model gives, for
any number of tokens; and a step of training afterwards."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from twins import sgd, work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks
from tests.thorough import sampled, thorough_only

transformers = pytest.importorskip("transformers")
pytestmark = sampled

VOCAB, TOKENS, NEW_TOKENS = 53, 7, 5
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32}
MESHES: list[tuple[str, dict[str, int]]] = [
    ("ddp", {"tp": 2}),
    ("zero3", {"dp": 2, "tp": 2}),
    ("zero1", {"pp": 2, "tp": 2}),
]
Found = dict[str, Any]


def llama() -> nn.Module:
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS, **special))


def prompts(count: int) -> torch.Tensor:
    return torch.randint(1, VOCAB, (2, count), generator=torch.Generator().manual_seed(4))


def batch() -> dict[str, torch.Tensor]:
    rows = torch.randint(1, VOCAB, (4, 8), generator=torch.Generator().manual_seed(5))
    return {"input_ids": rows, "labels": rows.clone()}


def answers(model: Any) -> Found:
    model.eval()
    with torch.no_grad():
        found: Found = {
            f"logits of {count}": model(input_ids=prompts(count)).logits for count in (1, TOKENS, TOKENS + 1)
        }
        for cached in (True, False):
            found[f"tokens {cached}"] = model.generate(
                prompts(TOKENS), max_new_tokens=NEW_TOKENS, do_sample=False, use_cache=cached
            )
    model.train()
    return found


def unsplit(model: nn.Module) -> Found:
    found = answers(model)
    optimizer = sgd(model)
    model(**batch()).loss.backward()
    optimizer.step()
    return found | {"params": {name: param.detach().clone() for name, param in model.named_parameters()}}


def split(model: nn.Module, preset: str, mesh: dict[str, int]) -> list[Found]:
    models = [copy.deepcopy(model) for _ in range(math.prod(mesh.values()))]
    accumulate = mesh.get("pp", 1)
    plan = {"preset": preset, "mesh": mesh, "tensor": {"sequence": True}, "accumulate": accumulate}

    def rank(world: sw.World) -> Found:
        mine = models[world.rank]
        with sw.shard(mine, plan, optimizer=sgd(mine), world=world) as engine:
            with engine.inference():
                found = answers(mine)
            share, num_shares = engine.data_ranks
            engine.forward_backward({name: value.chunk(num_shares)[share] for name, value in batch().items()})
            engine.step()
            return found | {"params": engine.state_dict()}

    return run_ranks(len(models), rank)


@pytest.mark.parametrize(("preset", "mesh"), MESHES)
def test_calls_and_generation_are_those_of_the_unsplit_model(preset: str, mesh: dict[str, int]) -> None:
    model = llama()
    for found in split(model, preset, mesh):
        expected = unsplit(copy.deepcopy(model))
        for name, value in expected.pop("params").items():
            torch.testing.assert_close(found["params"][name], value, rtol=1e-4, atol=1e-5, msg=name)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("is_split", [False, True], ids=["tensor", "sequence"])
def test_verify_compares_a_call_of_generate_and_leaves_its_cache_alone(is_split: bool) -> None:
    model = llama()
    expected = unsplit(copy.deepcopy(model))
    plan = {"preset": "zero3", "mesh": {"tp": 2}, "tensor": {"sequence": is_split, "verify": True}}

    def work(engine: sw.Engine) -> Found:
        mine = engine.module
        with engine.inference(), torch.no_grad():
            found = mine.generate(prompts(TOKENS), max_new_tokens=NEW_TOKENS, do_sample=False)
        engine.backward(engine(**batch()).loss)
        engine.step()
        return {"tokens": found, "params": engine.state_dict()}

    for found in work_on_ranks(2, work, plan, model, sgd):
        assert torch.equal(found["tokens"], expected["tokens True"])
        for name, value in expected["params"].items():
            torch.testing.assert_close(found["params"][name], value, rtol=1e-4, atol=1e-5, msg=name)


class Centred(nn.Module):
    """Reads the whole sequence outside of column modules, so it is wrong where sequences are split."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(-2, keepdim=True)


class CentredBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centred, self.up, self.down = Centred(), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.centred(x))))
        return out


class CentredModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, 16), nn.ModuleList(CentredBlock() for _ in range(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(rows)
        for block in self.blocks:
            x = block(x)
        return x


def test_verify_compares_split_sequences_after_a_call_in_inference() -> None:
    model = CentredModel()
    models = [copy.deepcopy(model) for _ in range(2)]
    tensor = {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}, "sequence": True, "verify": True}
    plan = {"preset": "ddp", "mesh": {"tp": 2}, "tensor": tensor}

    def rank(world: sw.World) -> tuple[list[torch.Tensor], str]:
        with sw.shard(models[world.rank], plan, world=world) as engine:
            with engine.inference(), torch.no_grad():
                found = [models[world.rank](prompts(count)) for count in (TOKENS, 1)]
            with pytest.raises(ModelError) as error:
                engine(prompts(TOKENS + 1))
            return found, str(error.value)

    for found, text in run_ranks(2, rank):
        for value, count in zip(found, (TOKENS, 1), strict=True):
            torch.testing.assert_close(value, model(prompts(count)).detach(), rtol=1e-4, atol=1e-5)
        assert "The first module that differs is blocks.0.centred (Centred)" in text


def test_outside_of_inference_a_length_that_does_not_divide_is_refused() -> None:
    model = llama()

    def rank(world: sw.World) -> str:
        mine = copy.deepcopy(model)
        plan = {"preset": "ddp", "mesh": {"tp": 2}, "tensor": {"sequence": True}}
        with sw.shard(mine, plan, optimizer=sgd(mine), world=world), pytest.raises(ModelError) as error:
            mine(input_ids=prompts(TOKENS))
        return str(error.value)

    assert all("Pad batches to a multiple of 2" in text for text in run_ranks(2, rank))
