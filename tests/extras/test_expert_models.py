"""Models of transformers whose experts are dealt out by their own plan, against themselves in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks

Tensor = torch.Tensor
NUM_STEPS = 4
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
QWEN = {"num_experts": 6, "moe_intermediate_size": 16}
DEEPSEEK = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_group": 2,
    "topk_group": 1,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mixtral, with its loss": ("mixtral", {"num_local_experts": 5, **ROUTED}),
    "qwen2_moe": ("qwen2_moe", {**QWEN, "shared_expert_intermediate_size": 16}),
    "qwen3_moe, with its loss": ("qwen3_moe", {**QWEN, "head_dim": 8, **ROUTED}),
    "deepseek_v2": ("deepseek_v2", {**DEEPSEEK, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
}
MESHES: list[tuple[str, dict[str, int]]] = [("zero3", {"dp": 2, "ep": 2}), ("zero1", {"ep": 4})]


def built(kind: str, sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **sizes}))
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.1)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def rows(step: int) -> list[Tensor]:
    """One for each rank."""
    tokens = torch.randint(3, 96, (4, 12), generator=torch.Generator().manual_seed(step))
    return list(tokens.chunk(4))


@pytest.mark.parametrize(("preset", "mesh"), MESHES, ids=["zero3 dp2 ep2", "zero1 ep4"])
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_as_itself(name: str, preset: str, mesh: dict[str, int]) -> None:
    """The loss that balances experts is that of each rank's own tokens, as it is under data parallelism."""
    twin = built(*MODELS[name])
    models = [copy.deepcopy(twin) for _ in range(4)]
    optimizer = optimizer_of(twin)
    expected = []
    grads: dict[str, Tensor] = {}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = [twin(input_ids=own, labels=own).loss for own in rows(step)]
        (torch.stack(losses).sum() / 4).backward()
        grads = {key: param.grad.clone() for key, param in twin.named_parameters() if param.grad is not None}
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        expected += [sum(loss.item() for loss in losses) / 4, float(norm)]
    plan = {"preset": preset, "mesh": mesh, "clip_grad_norm": 1.0}

    def rank(world: sw.World) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        model, said = models[world.rank], []
        found: dict[str, Tensor] = {}
        with sw.shard(model, plan, optimizer=optimizer_of(model), world=world) as engine:
            for step in range(NUM_STEPS):
                own = rows(step)[engine.data_ranks[0]]
                loss = engine(input_ids=own, labels=own).loss
                engine.backward(loss)
                every = {key: engine.get(key, "grad") for key, _ in model.named_parameters()}
                found = {key: grad for key, grad in every.items() if grad is not None}
                said += [engine.mean(loss.item()), float(engine.step() or 0.0)]
            return said, found, engine.state_dict()

    for said, found, state in run_ranks(4, rank):
        assert said == pytest.approx(expected, rel=1e-5)
        assert found.keys() == grads.keys()
        for key, grad in grads.items():
            torch.testing.assert_close(found[key], grad, rtol=1e-4, atol=1e-5, msg=key)
        for key, value in twin.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_it_is_saved_and_loaded_as_the_whole_model(tmp_path: Path) -> None:
    model = built("mixtral", {"num_local_experts": 4}).eval()
    models = [copy.deepcopy(model) for _ in range(2)]
    tokens = rows(0)[0]
    expected = model(input_ids=tokens).logits

    def rank(world: sw.World) -> Tensor:
        own = models[world.rank]
        with sw.shard(own, {"preset": "zero3", "mesh": {"ep": 2}}, world=world) as engine, torch.no_grad():
            engine.save_pretrained(tmp_path / "saved")
            return own(input_ids=tokens).logits

    for found in run_ranks(2, rank):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, value in back.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


def test_a_model_without_experts_is_refused() -> None:
    models = [built("llama", {}) for _ in range(2)]
    with pytest.raises(ModelError, match="LlamaForCausalLM has none that are known"):
        run_ranks(2, lambda world: sw.shard(models[world.rank], {"mesh": {"ep": 2}}, world=world))
