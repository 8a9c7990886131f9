"""LoRA by peft on a frozen Llama or Mixtral, over every split and products of them: losses, norms, the gradients of all
adapters in every step, and parameters are those of the unsplit model."""

from __future__ import annotations

import copy
import math
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import shardwise as sw
from shardwise.testing import run_ranks
from tests.thorough import sampled

pytestmark = [sampled, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")]

NUM_STEPS, ROWS, TOKENS, VOCAB, CLIP = 4, 8, 12, 53, 0.5
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16}
TOLERANCE = 1e-5
Batch = dict[str, torch.Tensor]

DENSE: list[tuple[str, dict[str, int]]] = [
    ("zero2", {"pp": 2}),
    ("zero3", {"sp": 2}),
    ("zero3", {"pp": 2, "dp": 2}),
    ("zero2", {"pp": 2, "dp": 2}),
    ("zero1", {"pp": 2, "tp": 2}),
    ("zero3", {"pp": 2, "tp": 2}),
    ("zero2", {"tp": 2, "sp": 2}),
    ("ddp", {"pp": 2, "sp": 2}),
    ("zero3", {"pp": 2, "dp": 2, "tp": 2}),
    ("zero2", {"pp": 2, "tp": 2, "sp": 2}),
]
WITH_EXPERTS: list[tuple[str, dict[str, int]]] = [
    ("zero3", {"ep": 2}),
    ("zero2", {"pp": 2, "ep": 2}),
    ("zero1", {"sp": 2, "ep": 2}),
    ("zero3", {"pp": 2, "dp": 2, "ep": 2}),
]


def adapted(model: nn.Module, targets: list[str]) -> nn.Module:
    """With adapters whose second matrix is not zero, so that all of them have gradients from the first step on."""
    made: nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0))
    with torch.no_grad():
        for name, param in made.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param, std=0.05)
    return made.train()


def llama() -> nn.Module:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))
    return adapted(model, ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])


def mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SIZES, **HEADS, **experts}))
    return adapted(model, ["q_proj", "v_proj", "o_proj"])


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model).values(), lr=0.1, momentum=0.9)


def batches() -> list[Batch]:
    numbers = torch.Generator().manual_seed(3)
    drawn = [torch.randint(0, VOCAB, (ROWS, TOKENS), generator=numbers) for _ in range(NUM_STEPS)]
    return [{"input_ids": one, "labels": one.clone()} for one in drawn]


def unsplit(model: nn.Module, accumulate: int) -> list[dict[str, Any]]:
    model, steps = copy.deepcopy(model), []
    optimizer = sgd(model)
    for batch in batches():
        losses = []
        for part in zip(*(value.chunk(accumulate) for value in batch.values()), strict=True):
            loss = model(**dict(zip(batch, part, strict=True))).loss
            (loss / accumulate).backward()
            losses.append(loss.item())
        grads = {name: param.grad.clone() for name, param in trainable(model).items() if param.grad is not None}
        norm = float(nn.utils.clip_grad_norm_(trainable(model).values(), CLIP))
        optimizer.step()
        optimizer.zero_grad()
        params = {name: param.detach().clone() for name, param in model.named_parameters()}
        steps.append({"loss": sum(losses) / accumulate, "norm": norm, "grads": grads, "params": params})
    return steps


def over_ranks(
    model: nn.Module, preset: str, mesh: dict[str, int], accumulate: int, **more: Any
) -> list[list[dict[str, Any]]]:
    num_ranks = math.prod(mesh.values())
    models = [copy.deepcopy(model) for _ in range(num_ranks)]
    plan: dict[str, Any] = {"preset": preset, "mesh": mesh, "accumulate": accumulate, "clip_grad_norm": CLIP}
    plan |= more
    names = list(trainable(model))

    def rank(world: sw.World) -> list[dict[str, Any]]:
        mine, steps = models[world.rank], []
        with sw.shard(mine, plan, optimizer=sgd(mine), world=world) as engine:
            share, num_shares = engine.data_ranks
            for batch in batches():
                rows = {name: value.chunk(num_shares)[share] for name, value in batch.items()}
                loss = engine.mean(engine.forward_backward(rows).item())
                grads = {name: engine.get(name, "grad") for name in names}
                norm = float(engine.step() or 0.0)
                steps.append({"loss": loss, "norm": norm, "grads": grads, "params": engine.state_dict()})
        return steps

    return run_ranks(num_ranks, rank)


def race(model: nn.Module, preset: str, mesh: dict[str, int], **more: Any) -> None:
    accumulate = max(2, mesh.get("pp", 1))
    expected = unsplit(model, accumulate)
    for steps in over_ranks(model, preset, mesh, accumulate, **more):
        for mine, plain in zip(steps, expected, strict=True):
            assert mine["loss"] == pytest.approx(plain["loss"], rel=TOLERANCE)
            assert mine["norm"] == pytest.approx(plain["norm"], rel=1e-4)
            for kind in ("grads", "params"):
                for name, value in plain[kind].items():
                    torch.testing.assert_close(mine[kind][name], value, rtol=1e-4, atol=TOLERANCE, msg=f"{kind} {name}")


def name_of(one: Any) -> str:
    return "x".join(f"{axis}{size}" for axis, size in one.items()) if isinstance(one, dict) else str(one)


@pytest.mark.parametrize(("preset", "mesh"), DENSE, ids=name_of)
def test_adapters_of_a_dense_model(preset: str, mesh: dict[str, int]) -> None:
    race(llama(), preset, mesh)


@pytest.mark.parametrize(
    ("preset", "mesh"), [("zero3", {"dp": 2}), ("zero1", {"tp": 2}), ("zero3", {"pp": 2})], ids=name_of
)
def test_adapters_on_a_head_of_logits_in_chunks(preset: str, mesh: dict[str, int]) -> None:
    model = adapted(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS)), ["q_proj", "lm_head"])
    race(model, preset, mesh, loss={"logits": "chunked", "chunk": 4 * VOCAB * 5})


@pytest.mark.parametrize(("preset", "mesh"), WITH_EXPERTS, ids=name_of)
def test_adapters_of_a_model_with_experts(preset: str, mesh: dict[str, int]) -> None:
    race(mixtral(), preset, mesh)
