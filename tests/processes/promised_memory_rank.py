"""Run by `test_promised_memory.py`: the memory of training a model, estimated or measured.

`promised_memory_rank.py foresee|measure whisper|mixtral PRECISION` prints a number of bytes. A process does only one of
the two, because a rehearsal leaves Python objects behind. The measurement is the peak of resident memory, less what was
resident before the model was built; by then a step of another model has imported all modules.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM, WhisperConfig, WhisperForConditionalGeneration

import shardwise as sw

VOCAB = 97
NUM_STEPS = 8


def whisper() -> nn.Module:
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    no_lists = {"suppress_tokens": None, "begin_suppress_tokens": None}
    lengths = {"vocab_size": VOCAB, "max_source_positions": 500, "max_target_positions": 32}
    return WhisperForConditionalGeneration(WhisperConfig(**heads, **sizes, **special, **no_lists, **lengths))


def mixtral() -> nn.Module:
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    sizes = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    return MixtralForCausalLM(MixtralConfig(**attention, **sizes, num_local_experts=8, num_experts_per_tok=2))


def batch_of(name: str) -> dict[str, Any]:
    if name == "whisper":
        return {"input_features": torch.randn(8, 80, 1000), "labels": torch.randint(3, VOCAB, (8, 32))}
    tokens = torch.randint(3, VOCAB, (8, 64))
    return {"input_ids": tokens, "labels": tokens}


def resident_bytes(key: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def main(way: str, name: str, precision: str) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with sw.shard(small := nn.Linear(2, 2), "zero3", optimizer=torch.optim.AdamW(small.parameters())) as engine:
        engine.backward(engine(torch.ones(2, 2)).sum())
        engine.step()
    before = resident_bytes("VmRSS")
    model = {"whisper": whisper, "mixtral": mixtral}[name]()
    engine = sw.shard(
        model, {"preset": "zero3", "precision": precision}, optimizer=torch.optim.AdamW(model.parameters())
    )
    if way == "foresee":
        print(engine.rehearse(batch_of(name)).total)
        return
    for _ in range(NUM_STEPS):
        engine.backward(engine(**batch_of(name)).loss)
        engine.step()
    print(resident_bytes("VmHWM") - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
