"""Models of transformers whose experts are dealt out by their own plan, against themselves in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks

# peft asks transformers by a name that will go.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

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
SHALLOW = {
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
ATTENDING = ["full_attention", "full_attention"]
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("afmoe", {"num_experts": 5, "moe_intermediate_size": 16, "head_dim": 8, "num_dense_layers": 1}),
    "dots1": ("dots1", {**SHALLOW, "n_routed_experts": 6, "head_dim": 8}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    ),
    "exaone_moe": ("exaone_moe", {**SHALLOW, "num_experts": 5, "num_shared_experts": 1, "head_dim": 8}),
    "flex_olmo": ("flex_olmo", {"num_experts": 4}),
    "glm4_moe": ("glm4_moe", {**SHALLOW, "n_routed_experts": 6, "head_dim": 8}),
    "gpt_oss, with its loss": ("gpt_oss", {"num_local_experts": 5, "head_dim": 8, "sliding_window": 8, **ROUTED}),
    "granitemoe, with its loss": ("granitemoe", {"num_local_experts": 6, **ROUTED}),
    "granitemoeshared": ("granitemoeshared", {"num_local_experts": 6, "shared_intermediate_size": 16}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 8}),
    "jamba": (
        "jamba",
        {
            "num_experts": 5,
            "use_mamba_kernels": False,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {"num_experts": 4, "moe_intermediate_size": 16, "num_dense_layers": 1, "layer_types": ATTENDING},
    ),
    "minimax": ("minimax", {"num_local_experts": 4, "head_dim": 8, "layer_types": ATTENDING}),
    "nemotron_h": (
        "nemotron_h",
        {
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "layers_block_type": ["attention", "moe"],
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "olmoe, with its loss": ("olmoe", {"num_experts": 6, **ROUTED}),
    "phimoe": ("phimoe", {"num_local_experts": 4}),
    "qwen3_next": (
        "qwen3_next",
        {**QWEN, "shared_expert_intermediate_size": 16, "head_dim": 8, "layer_types": ATTENDING},
    ),
}
DBRX = {
    "d_model": 32,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 32,
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
    "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
}
STRANGERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "dbrx": ("dbrx", DBRX, "DbrxExperts"),
    "jetmoe": ("jetmoe", {"num_local_experts": 4, "kv_channels": 8}, "JetMoeParallelExperts"),
    "llama4_text": (
        "llama4_text",
        {"num_local_experts": 4, "head_dim": 8, "intermediate_size_mlp": 48},
        "Llama4TextExperts",
    ),
}
MESHES: list[tuple[str, dict[str, int]]] = [("zero3", {"dp": 2, "ep": 2}), ("zero1", {"ep": 4})]


def built(kind: str, sizes: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **sizes}))
    for param in model.parameters():
        if param.dim() > 1:
            nn.init.normal_(param, std=0.1)
    return model.eval() if kind == "phimoe" else model  # in training its router draws lots


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, eps=1e-4)


def rows(step: int) -> list[Tensor]:
    """One for each rank."""
    tokens = torch.randint(3, 96, (4, 12), generator=torch.Generator().manual_seed(step))
    return list(tokens.chunk(4))


CASES = [(name, *mesh) for name in MODELS for mesh in MESHES]
CASES += [(name, *MESHES[place % 2]) for place, name in enumerate(OTHERS)]


@pytest.mark.parametrize(("name", "preset", "mesh"), CASES, ids=[f"{name}-{preset}" for name, preset, _ in CASES])
def test_it_trains_as_itself(name: str, preset: str, mesh: dict[str, int]) -> None:
    """The loss that balances experts is that of each rank's own tokens, as it is under data parallelism."""
    race(built(*{**MODELS, **OTHERS}[name]), preset, mesh)


def race(twin: nn.Module, preset: str, mesh: dict[str, int]) -> None:
    """Four ranks beside one process."""
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


@pytest.mark.parametrize("name", STRANGERS)
def test_experts_of_other_shapes_are_refused_by_their_names(name: str) -> None:
    kind, sizes, said = STRANGERS[name]
    models = [built(kind, sizes) for _ in range(2)]
    with pytest.raises(ModelError, match=rf"\({said}\) has no ep_plan that says which of its parameters are stacked"):
        run_ranks(2, lambda world: sw.shard(models[world.rank], {"mesh": {"ep": 2}}, world=world))


SHARED = ["q_proj", "v_proj", "shared_expert.up_proj", "shared_expert.down_proj"]
ADAPTED: list[tuple[str, list[str], str, dict[str, int]]] = [
    ("mixtral, with its loss", ["q_proj", "o_proj"], "zero3", {"dp": 2, "ep": 2}),
    ("mixtral", ["k_proj", "lm_head"], "zero1", {"ep": 4}),
    ("qwen2_moe", SHARED, "zero3", {"dp": 2, "ep": 2}),
    ("deepseek_v3", ["kv_b_proj", "o_proj"], "zero2", {"ep": 2, "dp": 2}),
]


def adapted(name: str, **lora: Any) -> nn.Module:
    """Adapters that add something, as `lora_B` does after some steps; `r` of 4."""
    model: nn.Module = get_peft_model(built(*MODELS[name]), LoraConfig(r=4, **lora))
    for key, param in model.named_parameters():
        if "lora_B" in key:
            nn.init.normal_(param, std=0.1)
    return model


@pytest.mark.parametrize(("name", "targets", "preset", "mesh"), ADAPTED, ids=[one[0] for one in ADAPTED])
def test_adapters_beside_experts_train_as_by_themselves(
    name: str, targets: list[str], preset: str, mesh: dict[str, int]
) -> None:
    """The experts are frozen, and their tokens travel all the same."""
    race(adapted(name, target_modules=targets), preset, mesh)


def test_adapters_beside_experts_that_are_trained() -> None:
    """In full, beside adapters on attention."""
    model = adapted("mixtral", target_modules=["q_proj", "v_proj"])
    for key, param in model.named_parameters():
        if "experts" in key:
            param.requires_grad_(True)
    race(model, "zero3", {"dp": 2, "ep": 2})


def test_adapters_on_the_parameters_of_experts_are_refused() -> None:
    target = "mlp.experts.gate_up_proj"
    models = [adapted("mixtral", target_modules=["q_proj"], target_parameters=[target]) for _ in range(2)]
    with pytest.raises(ModelError, match=r"mlp.experts has adapters on the parameters of its experts"):
        run_ranks(2, lambda world: sw.shard(models[world.rank], {"mesh": {"ep": 2}}, world=world))
