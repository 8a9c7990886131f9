"""Every split alone, and products of them on 4 and 8 ranks, over ten steps: losses, gradient norms and all gradients of
each step are those of the unsplit model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sequences import Batch, whole_run
from test_sequence_transformers import own_loss
from torch import nn
from twins import Run, assert_alike, at_once, ranks_run

from tests.thorough import sampled, thorough_only

pytestmark = [thorough_only("ten steps of many products"), sampled]

NUM_STEPS, ROWS, TOKENS, VOCAB, CLIP = 10, 8, 12, 53, 0.5
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16}

DENSE: list[tuple[str, dict[str, int]]] = [
    ("zero3", {"tp": 2}),
    ("zero1", {"pp": 2}),
    ("zero2", {"sp": 2}),
    ("zero1", {"dp": 2, "tp": 2}),
    ("zero3", {"dp": 2, "tp": 2}),
    ("zero2", {"pp": 2, "dp": 2}),
    ("zero3", {"pp": 2, "tp": 2}),
    ("zero1", {"pp": 4}),
    ("zero3-kept", {"dp": 2, "sp": 2}),
    ("zero3", {"tp": 2, "sp": 2}),
    ("ddp", {"pp": 2, "sp": 2}),
    ("hsdp", {"node": 2, "local": 2, "tp": 2}),
    ("hpz", {"node": 2, "local": 2, "sp": 2}),
    ("zero1", {"pp": 2, "dp": 2, "tp": 2}),
    ("zero3", {"pp": 2, "dp": 2, "tp": 2}),
    ("zero3", {"dp": 2, "tp": 2, "sp": 2}),
    ("zero2", {"pp": 2, "tp": 2, "sp": 2}),
    ("zero1", {"pp": 4, "tp": 2}),
    ("zero2", {"pp": 2, "dp": 2, "sp": 2}),
    ("zero1", {"tp": 4, "dp": 2}),
]
WITH_EXPERTS: list[tuple[str, dict[str, int]]] = [
    ("zero3", {"ep": 2}),
    ("zero2", {"dp": 2, "ep": 2}),
    ("zero3", {"tp": 2, "ep": 2}),
    ("zero3", {"pp": 2, "ep": 2}),
    ("zero1", {"sp": 2, "ep": 2}),
    ("zero3", {"dp": 2, "tp": 2, "ep": 2}),
    ("zero2", {"pp": 2, "tp": 2, "ep": 2}),
    ("zero1", {"pp": 2, "dp": 2, "ep": 2}),
    ("zero1", {"pp": 2, "sp": 2, "ep": 2}),
    ("zero2", {"tp": 2, "sp": 2, "ep": 2}),
]


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **HEADS))


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SIZES, **HEADS, **experts}))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Its steps are linear in the gradients. Adam's divide by them, and so over ten steps blow up rounding where a
    gradient is almost 0."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches() -> list[Batch]:
    numbers = torch.Generator().manual_seed(3)
    drawn = [torch.randint(0, VOCAB, (ROWS, TOKENS), generator=numbers) for _ in range(NUM_STEPS)]
    return [{"input_ids": one, "labels": one.clone()} for one in drawn]


def micro_batches(mesh: dict[str, int]) -> int:
    return max(2, mesh.get("pp", 1))


def run_over(model: nn.Module, mesh: dict[str, int], preset: str, **more: Any) -> list[Run]:
    plan = {"preset": preset, "mesh": mesh, "accumulate": micro_batches(mesh), "clip_grad_norm": CLIP, **more}
    return ranks_run(model, batches(), plan, sgd, train=at_once())


def race(model: nn.Module, preset: str, mesh: dict[str, int], **more: Any) -> None:
    model.train()
    twin = whole_run(model, batches(), loss_of=own_loss, shares=micro_batches(mesh), clip=CLIP, make_optimizer=sgd)
    for run in run_over(model, mesh, preset, **more):
        assert_alike(run, twin)


def name_of(one: Any) -> str:
    return "x".join(f"{axis}{size}" for axis, size in one.items()) if isinstance(one, dict) else str(one)


@pytest.mark.parametrize(("preset", "mesh"), DENSE, ids=name_of)
def test_a_dense_model_trains_as_the_unsplit_one(preset: str, mesh: dict[str, int]) -> None:
    race(llama(), preset, mesh)


@pytest.mark.parametrize(("preset", "mesh"), WITH_EXPERTS, ids=name_of)
def test_a_model_with_experts_trains_as_the_unsplit_one(preset: str, mesh: dict[str, int]) -> None:
    race(mixtral(), preset, mesh)


@pytest.mark.parametrize("mesh", [one for _, one in DENSE if "tp" in one], ids=name_of)
def test_logits_may_be_split_in_every_product(mesh: dict[str, int]) -> None:
    race(llama(), "zero1" if "pp" in mesh else "zero3", mesh, tensor={"cut_logits": True})
