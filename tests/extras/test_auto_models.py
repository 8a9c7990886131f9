"""`preset: auto` on ten models of docs/models.md, under three limits of memory: what it chooses trains at the first
try, never holds more than is allowed, and ends with the bits of a plain loop.

The first limit is roomy. Each further one is a byte less than what the plan before it was promised to hold, so that
another must be found that holds less, or the refusal must say that there is none. Ranks are threads; the plain loop
goes through both half batches in turn and steps on their mean gradient, as in `test_zoo.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.testing import run_ranks

NUM_STEPS, NUM_RANKS, NUM_LIMITS, ROOMY = 2, 2, 3, 2**32
VOCAB, LENGTH, IMAGE = 99, 8, 32
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries
Half = Mapping[str, torch.Tensor]

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "use_cache": False,
}
"""Of models of text and images; those that call them otherwise say so."""
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "num_key_value_heads": 4,
    "v_head_dim": 16,
}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
WHISPER = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    "decoder_start_token_id": 3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
    "gemma2": {},
    "qwen3_moe": EXPERTS,
    "deepseek_v3": LATENT,
    "mamba": {"state_size": 4},
    "bert": {},
    "t5": T5,
    "vit": {"image_size": IMAGE, "patch_size": 8, "num_labels": 5},
    "whisper": WHISPER,
}
AUTO = {
    "bert": transformers.AutoModelForMaskedLM,
    "t5": transformers.AutoModelForSeq2SeqLM,
    "vit": transformers.AutoModelForImageClassification,
    "whisper": transformers.AutoModelForSpeechSeq2Seq,
}


def made(name: str) -> nn.Module:
    """With random weights, in training mode, without dropout."""
    sizes = {key: value for key, value in SIZES.items() if (name, key) != ("deepseek_v3", "head_dim")}
    config = transformers.AutoConfig.for_model(name, **{**sizes, **SETTINGS[name]})
    for key, value in list(vars(config).items()):
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    torch.manual_seed(0)
    return AUTO.get(name, transformers.AutoModelForCausalLM).from_config(config).float().train()


def halves(name: str) -> list[list[Half]]:
    """By step, each rank's half batch."""
    numbers = torch.Generator().manual_seed(1)

    def half() -> Half:
        ids = torch.randint(3, VOCAB, (2, LENGTH), generator=numbers)
        if name == "vit":
            images = torch.randn(2, 3, IMAGE, IMAGE, generator=numbers)
            return {"pixel_values": images, "labels": torch.randint(0, 5, (2,), generator=numbers)}
        if name == "whisper":
            return {"input_features": torch.randn(2, 8, 32, generator=numbers), "labels": ids}
        return {"input_ids": ids, "labels": ids}

    return [[half() for _ in range(NUM_RANKS)] for _ in range(NUM_STEPS)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The kernel that also updates on the host, so that every plan has its bits."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


def plain(model: nn.Module, data: list[list[Half]]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses by step and half, and the parameters at the end."""
    optimizer, losses = adamw(model), []
    for step in data:
        found = [model(**half).loss for half in step]
        losses.append([loss.item() for loss in found])
        for loss in found:
            (loss / NUM_RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


@dataclass(frozen=True)
class Outcome:
    """The plan that was chosen, bytes of the fullest rank (promised before the first step, and held in the end), losses
    by step and rank, and the parameters."""

    plan: sw.Plan
    promised: int
    held: int
    losses: list[list[float]]
    params: dict[str, torch.Tensor]


def train(start: nn.Module, data: list[list[Half]], device_bytes: int) -> Outcome | str:
    """What came of it, or why nothing fits."""
    replicas = [copy.deepcopy(start) for _ in range(NUM_RANKS)]

    def rank(world: sw.World) -> tuple[sw.Plan, int, int, list[float], dict[str, torch.Tensor]]:
        replica, mine = replicas[world.rank], [step[world.rank] for step in data]
        plan = {"preset": "auto", "budget": {"device": device_bytes}}
        with sw.shard(replica, plan, optimizer=adamw(replica), world=world, batch=mine[0]) as engine:
            promised, losses = engine.rehearse(mine[0]).total, []
            for half in mine:
                loss = replica(**half).loss
                loss.backward()
                losses.append(loss.item())
                engine.step()
            return engine.plan, promised, engine.memory().measured_total, losses, engine.state_dict()

    try:
        ranks = run_ranks(NUM_RANKS, rank, timeout_seconds=300)
    except ConfigError as error:
        return str(error)
    plans, promised, held, losses, params = zip(*ranks, strict=True)
    assert plans[0] == plans[1]
    return Outcome(plans[0], max(promised), max(held), [list(step) for step in zip(*losses, strict=True)], params[0])


@pytest.mark.parametrize("name", SETTINGS)
def test_what_auto_chooses_trains_within_the_limit_as_the_plain_loop(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # not as this machine was measured
    start, data = made(name), halves(name)
    losses, params = plain(copy.deepcopy(start), data)
    limit, plans = ROOMY, []
    while len(plans) < NUM_LIMITS:
        found = train(start, data, limit)
        if isinstance(found, str):
            assert found.startswith("No plan fits on 2 ranks. The smallest is ")
            break
        assert found.plan not in plans
        assert max(found.promised, found.held) <= limit, found.plan
        assert found.losses == losses, found.plan
        different = [key for key, value in params.items() if not torch.equal(found.params[key], value)]
        assert not different, f"{found.plan}: {different[:5]} differ"
        plans.append(found.plan)
        print(f"{name}: within {limit:,}: {found.plan.model_dump(exclude_unset=True)}, holds {found.held:,}")
        limit = found.promised - 1
    assert len(plans) > 1, "there is always a plan that holds less than the fastest one"
