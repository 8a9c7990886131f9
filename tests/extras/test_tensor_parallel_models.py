"""Models of transformers, split by their own tensor-parallel plan or by ours, against the unsplit models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks

# peft asks transformers by a name that will go.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

Tensor = torch.Tensor
NUM_STEPS = 3
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
NO_DROPOUT = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "dropout_rate", "attention_dropout", "dropout")
NO_DROPOUT += ("hidden_dropout_prob", "attention_probs_dropout_prob")
THREE_GROUPS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
T5 = {"d_kv": 16, "d_ff": 128, "d_model": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BLOOM = {"n_layer": 2, "n_head": 4, "hidden_size": 64}
FALCON = {"alibi": False, "bias": True}
EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
DEEPSEEK = {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK |= {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
JAMBA = {"num_experts": 4, "use_mamba_kernels": False, "mamba_d_state": 4, "mamba_d_conv": 2, "mamba_dt_rank": 4}
JAMBA |= {
    f"{kind}_layer_{what}": value for kind in ("attn", "expert") for what, value in (("period", 2), ("offset", 1))
}
THREE_HEADS = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
SEQUENCE, LOGITS = {"sequence": True}, {"cut_logits": True}
MODELS: dict[str, tuple[Any, ...]] = {
    "llama": ("llama", {}, 2),
    "llama, tied": ("llama", {"tie_word_embeddings": True}, 2),
    "llama, a key head for two ranks": ("llama", {}, 4),
    "llama, one key head": ("llama", {"num_key_value_heads": 1}, 2),
    "llama, three key heads for two ranks": ("llama", THREE_GROUPS, 2),
    "qwen3": ("qwen3", {"head_dim": 16}, 2),
    "gemma2": ("gemma2", {"head_dim": 16}, 2),
    "phi3": ("phi3", {"num_key_value_heads": 4}, 2),
    "gpt2": ("gpt2", {"n_positions": 64}, 2),
    "gpt2, uneven": ("gpt2", {"n_positions": 64, "hidden_size": 48, "num_attention_heads": 3}, 2),
    "opt": ("opt", {"ffn_dim": 128, "max_position_embeddings": 64, "word_embed_proj_dim": 64}, 2),
    "bert": ("bert", {"max_position_embeddings": 64}, 2),
    "llama, sequences": ("llama", {}, 2, SEQUENCE),
    "llama, logits in parts": ("llama", {"tie_word_embeddings": True}, 2, LOGITS),
    "qwen3, both": ("qwen3", {"head_dim": 16}, 2, SEQUENCE | LOGITS),
    "gemma2, both": ("gemma2", {"head_dim": 16}, 2, SEQUENCE | LOGITS),
    "gpt2, both": ("gpt2", {"n_positions": 64}, 2, SEQUENCE | LOGITS),
    "opt, sequences": (
        "opt",
        {"ffn_dim": 128, "max_position_embeddings": 64, "word_embed_proj_dim": 64},
        2,
        SEQUENCE,
    ),
    "bert, sequences": ("bert", {"max_position_embeddings": 64}, 2, SEQUENCE),
    "bloom": ("bloom", BLOOM, 2),
    "bloom, uneven": ("bloom", {**BLOOM, "hidden_size": 48, "n_head": 3}, 2),
    "bloom, logits in parts": ("bloom", BLOOM, 2, LOGITS),
    "falcon, two groups of heads": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}, 2),
    "falcon, a key head for each query": ("falcon", FALCON | {"multi_query": False}, 2),
    "falcon, sequences": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}, 2, SEQUENCE),
    "vit": ("vit", {"image_size": 16, "patch_size": 4, "num_labels": 5}, 2),
    "t5": ("t5", {**T5, "tie_word_embeddings": True}, 2),
    "mixtral": ("mixtral", EXPERTS | {"num_local_experts": 4}, 2),
    "mixtral, uneven": ("mixtral", EXPERTS | {"num_local_experts": 4, "intermediate_size": 104}, 2),
    "mixtral, four ranks": ("mixtral", EXPERTS | {"num_local_experts": 4, "num_key_value_heads": 4}, 4),
    "qwen3-moe": ("qwen3_moe", EXPERTS | {"head_dim": 16, "num_experts": 4, "decoder_sparse_step": 1}, 2),
    "apertus": ("apertus", {}, 2),
    "deepseek-v2": ("deepseek_v2", EXPERTS | DEEPSEEK, 2),
    "deepseek-v2, uneven": ("deepseek_v2", EXPERTS | DEEPSEEK | THREE_HEADS, 2),
    "deepseek-v3": ("deepseek_v3", EXPERTS | DEEPSEEK, 2),
    "qwen2-moe": (
        "qwen2_moe",
        EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1},
        2,
    ),
    "olmoe": ("olmoe", EXPERTS | {"num_experts": 4}, 2),
    "granite-moe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, 2),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}, 2),
    "jamba": ("jamba", JAMBA, 2),
    "roberta": ("roberta", {"is_decoder": True, "max_position_embeddings": 64}, 2),
    "llama4": ("llama4_text", {"head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 96}, 2),
}


def built(kind: str, sizes: dict[str, Any]) -> nn.Module:
    config = AutoConfig.for_model(kind, **{**SIZES, **sizes})
    for name in NO_DROPOUT:
        if hasattr(config, name):
            setattr(config, name, 0.0)
    auto = {
        "bert": AutoModelForMaskedLM,
        "t5": AutoModelForSeq2SeqLM,
        "vit": AutoModelForImageClassification,
    }.get(kind, AutoModelForCausalLM)
    torch.manual_seed(0)
    model: nn.Module = auto.from_config(config)
    for param in model.parameters():
        if param.dim() == 1:
            nn.init.normal_(param, 1.0, 0.1)
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def batch(kind: str) -> dict[str, Tensor]:
    if kind == "vit":
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        return {"pixel_values": pixels, "labels": torch.tensor([1, 3])}
    tokens = torch.randint(3, 127, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_split_by_its_plan_trains_like_the_unsplit_one(name: str) -> None:
    kind, sizes, tp, *asked = MODELS[name]
    twin = built(kind, sizes)
    models = [copy.deepcopy(twin) for _ in range(tp)]
    optimizer = optimizer_of(twin)
    expected = []
    grads: dict[str, Tensor] = {}
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = twin(**batch(kind)).loss
        loss.backward()
        grads = {key: param.grad.clone() for key, param in twin.named_parameters() if param.grad is not None}
        norm = nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        expected += [loss.item(), float(norm)]
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": tp}, "clip_grad_norm": 1.0, "tensor": asked[0] if asked else {}}

    def rank(world: sw.World) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        model, said = models[world.rank], []
        found: dict[str, Tensor] = {}
        with sw.shard(model, plan, optimizer=optimizer_of(model), world=world) as engine:
            assert sum(param.numel() for param in model.parameters()) < sum(one.numel() for one in twin.parameters())
            for _ in range(NUM_STEPS):
                loss = engine(**batch(kind)).loss
                engine.backward(loss)
                every = {key: engine.get(key, "grad") for key, _ in model.named_parameters()}
                found = {key: grad for key, grad in every.items() if grad is not None}
                said += [loss.item(), float(engine.step() or 0.0)]
            return said, found, engine.state_dict()

    for said, found, state in run_ranks(tp, rank):
        assert said == pytest.approx(expected, rel=1e-5)
        assert found.keys() == grads.keys()
        for key, grad in grads.items():
            assert torch.allclose(found[key], grad, rtol=1e-3, atol=1e-5), key
        for key, value in twin.state_dict().items():
            assert torch.allclose(state[key], value, rtol=1e-4, atol=1e-5), key


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
def test_it_generates_and_is_saved_as_the_unsplit_model(kind: str, tmp_path: Path) -> None:
    model = built(kind, {}).eval()
    models = [copy.deepcopy(model) for _ in range(4)]
    prompt = torch.tensor([[5, 6, 7]])
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    plan = {"preset": "zero3", "mesh": {"dp": 2, "tp": 2}}

    def rank(world: sw.World) -> list[Tensor]:
        own = models[world.rank]
        with sw.shard(own, plan, world=world) as engine:
            engine.save_pretrained(tmp_path / "saved")
            found = []
            for keep_bytes in (None, 0):
                with engine.inference(keep_bytes):
                    found.append(own.generate(prompt, max_new_tokens=6, do_sample=False))
            return found

    for found in run_ranks(4, rank):
        assert all(torch.equal(one, expected) for one in found)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, value in back.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


ADAPTED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("llama", {}, ()),
    "with a head that is trained": ("llama", {}, ("lm_head",)),
    "with both ends trained": ("llama", {}, ("lm_head", "embed_tokens")),
    "with experts": ("mixtral", EXPERTS | {"num_local_experts": 4}, ()),
}


def adapted(what: str) -> nn.Module:
    kind, sizes, trained = ADAPTED[what]
    names = ["q_proj", "k_proj", "o_proj", "down_proj", "gate_proj"]
    config = LoraConfig(r=4, target_modules=names, modules_to_save=list(trained) or None)
    torch.manual_seed(0)
    model: nn.Module = get_peft_model(built(kind, sizes), config)
    for name, param in model.named_parameters():
        if "lora_B" in name:  # not zero, so that what is before it has gradients at once
            nn.init.normal_(param, 0.0, 0.02)
    return model


def trained_adapters(models: list[nn.Module], preset: str, tp: int) -> list[tuple[list[float], dict[str, Tensor]]]:
    def rank(world: sw.World) -> tuple[list[float], dict[str, Tensor]]:
        model, said = models[world.rank], []
        trainable = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=1e-2, eps=1e-4)
        plan = {"preset": preset, "mesh": {"dp": 1, "tp": tp}, "clip_grad_norm": 1.0}
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            for _ in range(NUM_STEPS):
                loss = engine(**batch("llama")).loss
                engine.backward(loss)
                said += [loss.item(), float(engine.step() or 0.0)]
            return said, {name: engine.get(name) for name, param in model.named_parameters() if param.requires_grad}

    return run_ranks(tp, rank)


@pytest.mark.parametrize(
    ("what", "preset", "tp"),
    [("llama", "zero1", 2), ("llama", "zero3", 2), ("llama", "zero1", 4)]
    + [(what, preset, 2) for what in ADAPTED if what != "llama" for preset in ("zero1", "zero3")],
)
def test_adapters_of_peft_are_split_with_their_layers(what: str, preset: str, tp: int) -> None:
    """Four ranks share two key heads, and so two of them share one half of the second matrix of an adapter."""
    twin = adapted(what)
    models = [copy.deepcopy(twin) for _ in range(tp)]
    trainable = {name: param for name, param in twin.named_parameters() if param.requires_grad}
    optimizer = torch.optim.AdamW(list(trainable.values()), lr=1e-2, eps=1e-4)
    expected = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = twin(**batch("llama")).loss
        loss.backward()
        expected += [loss.item(), float(nn.utils.clip_grad_norm_(list(trainable.values()), 1.0))]
        optimizer.step()
    for said, found in trained_adapters(models, preset, tp):
        assert said == pytest.approx(expected, rel=1e-5)
        assert found.keys() == trainable.keys()
        for name, param in trainable.items():
            assert torch.allclose(found[name], param, rtol=1e-4, atol=1e-5), name


def assert_refused(build: Callable[[], nn.Module], words: str) -> None:
    models = [build() for _ in range(2)]
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}}
    with pytest.raises(ModelError, match=words):
        run_ranks(2, lambda world: sw.shard(models[world.rank], plan, world=world))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            LoraConfig(r=4, target_modules=["q_proj"], use_dora=True),
            r"layers.0.self_attn.q_proj has a variant of LoRA .* needs whole weights",
        ),
        (
            LoHaConfig(r=4, target_modules=["q_proj"]),
            r"self_attn.q_proj is a peft.tuners.loha.layer.Linear, but the style column",
        ),
    ],
    ids=["dora", "loha"],
)
def test_adapters_that_look_at_whole_weights_are_refused(config: Any, words: str) -> None:
    """Those of other kinds by their class, which has the name of torch's."""
    assert_refused(lambda: get_peft_model(built("llama", {}), config), words)


@pytest.mark.parametrize("sizes", [{"alibi": True}, {"alibi": False, "multi_query": True}])
def test_a_falcon_that_cannot_be_split_is_refused(sizes: dict[str, Any]) -> None:
    assert_refused(lambda: built("falcon", sizes), r"This Falcon has (ALiBi|one key and value head)")


def test_experts_with_parameters_that_the_plan_does_not_name_are_refused() -> None:
    models = [built("mixtral", {"num_local_experts": 4}) for _ in range(2)]
    for model in models:
        model.get_submodule("model.layers.1.mlp.experts").register_parameter("bias", nn.Parameter(torch.zeros(4, 8)))
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}}
    with pytest.raises(ModelError, match=r"does not split model.layers.1.mlp.experts.bias .* Add an axis ep"):
        run_ranks(2, lambda world: sw.shard(models[world.rank], plan, world=world))


def test_experts_whose_sequences_would_be_split_are_refused() -> None:
    models = [built("mixtral", {"num_local_experts": 4}) for _ in range(2)]
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 2}, "tensor": SEQUENCE}
    with pytest.raises(ModelError, match=r"mlp.experts has experts, .* Leave tensor.sequence out"):
        run_ranks(2, lambda world: sw.shard(models[world.rank], plan, world=world))


def test_key_heads_that_ranks_cannot_share_are_refused_by_name() -> None:
    models = [built("llama", THREE_GROUPS) for _ in range(4)]
    plan = {"preset": "zero1", "mesh": {"dp": 1, "tp": 4}}
    with pytest.raises(
        ModelError, match=r"layers.0.self_attn.q_proj has 6 query heads and 3 key and value heads for 4 ranks"
    ):
        run_ranks(4, lambda world: sw.shard(models[world.rank], plan, world=world))
