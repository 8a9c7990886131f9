"""A script that knows nothing of shardwise: the memory that a rank takes to load a model and to hand it to DeepSpeed.

`deepspeed_peak.py FILE FOLDER|- KEEPS`: `-` builds from a configuration; without KEEPS the config is let go of before.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig

CONFIG = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "train_micro_batch_size_per_gpu": 1,
}  # fmt: skip
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8,
    "vocab_size": 256, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
LARGE, SMALL = (LlamaConfig(**SIZES, num_hidden_layers=count) for count in (32, 1))


def peak_bytes():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def main():
    import deepspeed

    file, folder, keeps = Path(sys.argv[1]), sys.argv[2], len(sys.argv) > 3
    deepspeed.init_distributed()
    alive = HfDeepSpeedConfig(CONFIG)
    small = AutoModelForCausalLM.from_config(SMALL)  # what is imported at first use
    deepspeed.initialize(model=small, config=CONFIG, optimizer=torch.optim.SGD(small.parameters(), lr=0.1))[0].destroy()
    del small
    if not keeps:
        del alive
    gc.collect()
    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_bytes()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LARGE) if folder == "-" else AutoModelForCausalLM.from_pretrained(folder)
    num_bytes = sum(param.numel() * param.element_size() for param in model.parameters())
    engine = deepspeed.initialize(model=model, config=CONFIG, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))[0]
    took = peak_bytes() - before
    batch = torch.arange(8)[None]
    loss = engine(input_ids=batch, labels=batch).loss.item()
    if torch.distributed.get_rank() == 0:
        file.write_text(json.dumps({"model": num_bytes, "took": took, "loss": loss}))


if __name__ == "__main__":
    main()
