"""Run by `test_larger_than_memory.py`: `larger_than_memory.py WAY FOLDER TIER ALLOWED_MIB`.

A model comes to be, and computes, in a process whose resident memory grows by less than the model's size. Prints MiB:
of the model, and by which the peak grew at birth and in what followed.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise as sw

MIB = 2**20
NUM_BLOCKS, WIDTH = 16, 1536
LAYERS = [f"model.layers.{index}" for index in range(16)]
CONFIG = LlamaConfig(
    vocab_size=4000,
    hidden_size=512,
    intermediate_size=2048,
    num_hidden_layers=16,
    num_attention_heads=8,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)


def resident(key: str) -> float:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def reset_peak() -> float:
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmHWM")


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS)))


def size_of(model: nn.Module) -> float:
    return sum(param.numel() * 4 for param in model.parameters()) / MIB


def plan(home: Path, tier: str, units: list[str]) -> dict[str, object]:
    rows = {"param": {"tier": tier}, "optim": {"tier": tier}, "grad": {"tier": "host"}}
    return {"preset": "zero3", "rows": rows, "disk": str(home / "scratch"), "units": units}


def built(home: Path, tier: str) -> None:
    """From its constructor; its values and what it computes are the plain model's."""
    torch.manual_seed(0)
    x = torch.randn(2, WIDTH)
    start = reset_peak()
    torch.manual_seed(1)
    with sw.deferred_init():
        model = blocks()
    engine = sw.shard(model, plan(home, tier, [str(index) for index in range(NUM_BLOCKS)]))
    born = resident("VmHWM") - start
    with engine.inference():
        results = [engine.module(x) for _ in range(3)]
    used = resident("VmHWM") - start
    torch.manual_seed(1)
    expected = blocks()(x)
    assert all(torch.equal(result, expected) for result in results)
    print(size_of(model), born, used)


def from_files(home: Path, tier: str) -> None:
    """From a folder of Hugging Face; what it generates is what the plain model does."""
    torch.manual_seed(0)
    plain = LlamaForCausalLM(CONFIG).eval()
    prompt = torch.randint(0, 4000, (2, 5))
    expected = plain.generate(prompt, max_new_tokens=3, do_sample=False)
    plain.save_pretrained(home / "model", max_shard_size="30MB")
    del plain
    start = reset_peak()
    with sw.deferred_init():
        model = LlamaForCausalLM(CONFIG)
    engine = sw.shard(model.requires_grad_(False), plan(home, tier, LAYERS), weights=home / "model")
    born = resident("VmHWM") - start
    with engine.inference():
        tokens = engine.module.generate(prompt, max_new_tokens=3, do_sample=False)
    assert torch.equal(tokens, expected)
    print(size_of(model), born, resident("VmHWM") - start)


def main(way: str, home: str, tier: str) -> None:
    ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: what is freed is the system's again at once
    torch.set_num_threads(1)
    with sw.deferred_init():
        small = nn.Linear(4, 4)  # torch imports its rules for shapes at first use
    with sw.shard(small, "zero3") as engine, engine.inference():
        engine.module(torch.ones(1, 4))
    {"built": built, "files": from_files}[way](Path(home), tier)


if __name__ == "__main__":
    main(*sys.argv[1:])
