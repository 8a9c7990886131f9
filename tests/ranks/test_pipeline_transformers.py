"""Unchanged decoders of the transformers library in pipeline stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_transformers import VOCAB, library
from torch import nn
from twins import Run, assert_alike, chunked, plain_run, ranks_run, sgd, work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}
ROTARY = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 16}
EXPERTS = {**ROTARY, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**ROTARY, "tie_word_embeddings": True},
    "qwen3": {**ROTARY, "head_dim": 8},
    "gemma2": {**ROTARY, "head_dim": 8, "sliding_window": 4},
    "mixtral": {**ROTARY, "num_local_experts": 2},
    "phi3": ROTARY,
    "gpt2": {
        "vocab_size": VOCAB,
        "n_positions": 16,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "opt": {**SIZES, "ffn_dim": 48, "max_position_embeddings": 16, "word_embed_proj_dim": 32, "dropout": 0.0},
    "bloom": {**SIZES, "n_layer": 4, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "falcon": {**SIZES, "num_kv_heads": 2, "new_decoder_architecture": True, "hidden_dropout": 0.0},
    "bert": {**SIZES, "is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "llama4_text": {**ROTARY, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "head_dim": 8, "decoder_sparse_step": 1},
    "olmoe": {**EXPERTS, "num_experts": 4},
    "granitemoe": {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2},
    "jetmoe": {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8},
    "gpt_oss": {**ROTARY, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "deepseek_v2": {**EXPERTS, **DEEPSEEK},
    "deepseek_v3": {**EXPERTS, **DEEPSEEK},
    "apertus": ROTARY,
    "roberta": {
        **SIZES,
        "is_decoder": True,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 20,
    },
    "jamba": {
        **ROTARY,
        "num_experts": 4,
        "use_mamba_kernels": False,
        "mamba_d_state": 4,
        "mamba_d_conv": 2,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
}
NUM_STEPS, MICRO_BATCHES = 3, 4


def build(kind: str, **changes: Any) -> nn.Module:
    config = library().AutoConfig.for_model(kind, **{**MODELS[kind], **changes})
    return library().AutoModelForCausalLM.from_config(config)


def padded(num_steps: int = NUM_STEPS) -> list[dict[str, Tensor]]:
    """Batches with rows of several lengths, and their masks."""
    numbers = torch.Generator().manual_seed(1)
    drawn = []
    for _ in range(num_steps):
        tokens = torch.randint(1, VOCAB, (8, 12), generator=numbers)
        mask = torch.arange(12) < torch.randint(6, 13, (8, 1), generator=numbers)
        labels = tokens.masked_fill(~mask, -100)
        drawn.append({"input_ids": tokens.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels})
    return drawn


def twin_of(model: nn.Module, data: list[dict[str, Tensor]]) -> Run:
    def own_loss(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        return model(**part).loss

    return plain_run(model, data, sgd, forward=own_loss, shares=MICRO_BATCHES, clip=1.0, whole_state=True)


@pytest.mark.parametrize(
    ("kind", "preset", "mesh", "schedule", "recomputes"),
    [
        ("llama", "zero1", {"pp": 4}, "1f1b", False),
        ("llama", "zero3", {"pp": 2}, "interleaved", True),
        ("qwen3", "zero1", {"pp": 2}, "1f1b", True),
        ("gemma2", "zero3", {"pp": 3}, "gpipe", False),
        ("mixtral", "ddp", {"pp": 2}, "1f1b", False),
        ("phi3", "zero2", {"pp": 2}, "interleaved", False),
        ("gpt2", "zero3", {"pp": 2}, "1f1b", False),
        ("llama", "zero3", {"pp": 2}, "zb-h1", False),
        ("opt", "zero1", {"pp": 2}, "interleaved", False),
        ("bert", "zero1", {"pp": 3}, "1f1b", False),
        ("bloom", "zero1", {"pp": 2}, "interleaved", False),
        ("falcon", "zero3", {"pp": 2}, "1f1b", False),
        ("llama4_text", "zero1", {"pp": 2}, "1f1b", False),
        ("llama4_text", "zero3", {"pp": 2}, "interleaved", True),
        ("qwen2_moe", "zero1", {"pp": 2}, "1f1b", False),
        ("qwen3_moe", "zero3", {"pp": 2}, "interleaved", False),
        ("olmoe", "zero1", {"pp": 2}, "1f1b", False),
        ("granitemoe", "zero1", {"pp": 2}, "interleaved", False),
        ("jetmoe", "zero1", {"pp": 2}, "1f1b", False),
        ("gpt_oss", "zero3", {"pp": 2}, "1f1b", False),
        ("deepseek_v2", "zero1", {"pp": 2}, "1f1b", False),
        ("deepseek_v3", "zero3", {"pp": 2}, "interleaved", False),
        ("apertus", "zero1", {"pp": 2}, "1f1b", False),
        ("roberta", "zero1", {"pp": 2}, "interleaved", False),
        ("jamba", "zero1", {"pp": 2}, "1f1b", False),
    ],
)
def test_a_decoder_in_stages_trains_like_the_whole(
    kind: str, preset: str, mesh: dict[str, int], schedule: str, recomputes: bool
) -> None:
    model = build(kind)
    model.train()
    if recomputes:
        model.activation_checkpointing_enable()
    race(model, {"preset": preset, "mesh": mesh, "pipeline": {"schedule": schedule}})


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize(("num_ranks", "schedule"), [(2, "1f1b"), (4, "gpipe"), (2, "interleaved")])
def test_a_vision_transformer_in_stages(num_ranks: int, schedule: str) -> None:
    """Its forward reads the dtype of a weight of the first stage."""
    sizes = {"image_size": 16, "patch_size": 4, "num_labels": 5, "attention_probs_dropout_prob": 0.0}
    config = library().ViTConfig(**{**SIZES, "pad_token_id": None}, **sizes, hidden_dropout_prob=0.0)
    torch.manual_seed(0)
    model = library().ViTForImageClassification(config).train()
    numbers = torch.Generator().manual_seed(1)
    data = [
        {
            "pixel_values": torch.randn(8, 3, 16, 16, generator=numbers),
            "labels": torch.randint(5, (8,), generator=numbers),
        }
        for _ in range(NUM_STEPS)
    ]
    race(model, {"preset": "zero1", "mesh": {"pp": num_ranks}, "pipeline": {"schedule": schedule}}, data=data)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "qwen3", "opt", "falcon", "bert"])
def test_sequences_are_cut_between_blocks_of_stages(kind: str, schedule: str) -> None:
    """A stage receives a part of each sequence; masks and positions are those of whole sequences."""
    plan = {"mesh": {"pp": 2, "tp": 2}, "tensor": {"sequence": True}, "pipeline": {"schedule": schedule}}
    race(build(kind).train(), {"preset": "zero1", **plan})


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("mesh", [{"pp": 2, "sp": 2}, {"pp": 2, "tp": 2, "sp": 2}], ids=["pp sp", "pp tp sp"])
def test_sequences_are_split_by_the_model_or_micro_batch_by_micro_batch(mesh: dict[str, int]) -> None:
    model = build("llama").train()
    for splits in (False, True):
        race(model, {"preset": "zero1", "mesh": mesh}, splits=splits)


def race(
    model: nn.Module, plan: dict[str, Any], *, splits: bool = False, data: list[dict[str, Tensor]] | None = None
) -> None:
    """Train on the ranks of the plan's mesh: losses, norms and parameters equal those of one process."""

    def train(engine: sw.Engine, batch: dict[str, Tensor]) -> float:
        parts = [engine.split_sequence(part) for part in chunked(batch, MICRO_BATCHES)] if splits else batch
        return engine.forward_backward(parts).item()

    data, asked = data or padded(), {"accumulate": MICRO_BATCHES, "clip_grad_norm": 1.0, **plan}
    twin = twin_of(model, data)
    for run in ranks_run(model, data, asked, sgd, train=train, grads_of=lambda _: {}):
        assert list(run.params) == list(twin.params)
        assert_alike(run, twin, of_all=False)


def hides_nothing_at_times() -> list[dict[str, Tensor]]:
    """Batches in which the masks of some micro-batches have no padding, and models of transformers drop those masks."""
    data = padded(4)
    for number, batch in enumerate(data):
        for row in range(8) if number in (0, 3) else range(2, 4):
            batch["attention_mask"][row] = 1
            batch["input_ids"][row].clamp_(min=1)
            batch["labels"][row] = batch["input_ids"][row]
    return data


def packed_at_times() -> list[dict[str, Tensor]]:
    """Batches of which every other one has two documents in a row."""
    data = []
    for number, batch in enumerate(padded(4)):
        positions = torch.arange(12) if number % 2 else torch.arange(12) % 7
        data.append(
            {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions.repeat(8, 1)}
        )
    return data


@pytest.mark.parametrize("make", [hides_nothing_at_times, packed_at_times])
@pytest.mark.parametrize(
    ("kind", "schedule"), [("llama", "1f1b"), ("gpt2", "1f1b"), ("qwen3", "interleaved"), ("gemma2", "1f1b")]
)
def test_a_stage_is_called_with_a_mask_in_some_micro_batches_only(kind: str, schedule: str, make: Any) -> None:
    race(build(kind), {"preset": "zero1", "mesh": {"pp": 2}, "pipeline": {"schedule": schedule}}, data=make())


def test_a_loss_over_the_routers_of_all_layers_is_refused() -> None:
    models = [build("mixtral", output_router_logits=True) for _ in range(2)]

    def rank(world: sw.World) -> None:
        with pytest.raises(ModelError, match=r"config has output_router_logits.* Set it to False"):
            sw.shard(models[world.rank], {"mesh": {"pp": 2}, "accumulate": 2}, world=world)

    run_ranks(2, rank)


def test_a_call_that_asks_for_the_routers_of_all_layers_is_refused_on_every_stage() -> None:
    """As TRL's trainers of preferences ask: no stage waits for one that has raised, and the next call computes."""
    tokens = torch.randint(3, VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))

    def work(engine: sw.Engine) -> float:
        with pytest.raises(ModelError, match=r"The call has output_router_logits.*router_aux_loss_coef=0\.0"):
            engine(input_ids=tokens, labels=tokens, output_router_logits=True)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        return float(loss.detach())

    one, other = work_on_ranks(2, work, {"mesh": {"pp": 2}, "accumulate": 2}, lambda: build("mixtral"), None)
    assert one == other > 0
