"""`deepspeed_generation.py FOLDER`: under a config of stage 3, ranks generate for different numbers of prompts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61,
    "num_key_value_heads": 1, "pad_token_id": 0,
}  # fmt: skip
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}


def tokens_of(model, count):
    settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    return [model.generate(torch.tensor([[5, 7 + one]]), **settings).tolist() for one in range(count)]


def main():
    alive = HfDeepSpeedConfig(CONFIG)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    rank = torch.distributed.get_rank()
    assert torch.distributed.get_world_size() == 2
    assert is_deepspeed_zero3_enabled()
    with deepspeed.runtime.zero.unwrap_model_for_generation(engine) as unwrapped:
        told = tokens_of(unwrapped.module, 1 + 2 * rank)
    assert alive.is_zero3()
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
