"""Fine-tuning in the form of DeepSpeed-Chat, unmodified, against the same training in plain PyTorch in one process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, get_scheduler, set_seed

Tensor = torch.Tensor
pytestmark = pytest.mark.timeout(300)
SCRIPT = Path(__file__).with_name("deepspeed_sft.py")
RATE, EPOCHS = 1e-2, 2


class Lora(nn.Module):
    """A linear layer and its low-rank update."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.right = nn.Parameter(torch.zeros(linear.in_features, rank))
        self.left = nn.Parameter(torch.zeros(rank, linear.out_features))
        self.scaling = 1 / rank
        nn.init.kaiming_uniform_(self.right, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.right @ self.left * self.scaling

    def fused(self) -> Tensor:
        return self.linear.weight + self.scaling * (self.left.T @ self.right.T)


def built(folder: Path, lora: int, only_lora: bool) -> nn.Module:
    set_seed(1234)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(64)
    for name, module in list(model.named_modules()) if lora else ():
        if isinstance(module, nn.Linear) and "layers." in name:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Lora(module, lora))
    if only_lora:
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith((".left", ".right")))
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    adapters = [param for name, param in params if name.endswith((".left", ".right"))]
    norms = [param for name, param in params if "norm" in name]
    others = [param for name, param in params if "norm" not in name and not name.endswith((".left", ".right"))]
    groups: list[dict[str, Any]] = [
        {"params": others, "weight_decay": 0.1},
        {"params": adapters, "weight_decay": 0.1, "lr": 5e-4},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=RATE, betas=(0.9, 0.95))


def ids_of(count: int, seed: int) -> Tensor:
    return torch.randint(1, 61, (count, 8), generator=torch.Generator().manual_seed(seed))


def plain(model: nn.Module) -> tuple[list[list[float]], list[float]]:
    """The losses of two ranks, and those of the evaluations."""

    def loss_of(ids: Tensor) -> Tensor:
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss

    def evaluated() -> float:
        model.eval()
        with torch.no_grad():
            return torch.stack([loss_of(ids) for ids in ids_of(4, 1).split(2)]).mean().item()

    optimizer = optimizer_of(model)
    schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=2 * EPOCHS)
    train = ids_of(16, 0)
    orders = [list(DistributedSampler(range(16), num_replicas=2, rank=rank)) for rank in range(2)]
    losses: list[list[float]] = [[], []]
    evaluations = [evaluated()]
    for _ in range(EPOCHS):
        model.train()
        for step in range(2):
            rows = [[order[4 * step + 2 * micro :][:2] for micro in range(2)] for order in orders]
            made = [[loss_of(train[part]) for part in rank] for rank in rows]
            torch.stack([loss for rank in made for loss in rank]).mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            for own, ones in zip(losses, made, strict=True):
                own += [loss.item() for loss in ones]
        evaluations.append(evaluated())
    return losses, evaluations


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    fused = {f"{name}.weight": module.fused() for name, module in model.named_modules() if isinstance(module, Lora)}
    kept = {name: value for name, value in model.state_dict().items() if name.split(".")[-1] not in ("left", "right")}
    return {name.replace(".linear", ""): value for name, value in kept.items()} | fused


@pytest.mark.parametrize(
    ("stage", "lora", "options"),
    [
        (2, 0, ["--gradient_checkpointing", "--offload"]),
        (3, 0, []),
        (3, 4, []),
        (3, 4, ["--only_optimize_lora", "--gradient_checkpointing"]),
    ],
)
def test_an_unmodified_script_fine_tunes(stage: int, lora: int, options: list[str], tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=61, max_position_embeddings=32, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    words = ["--model_name_or_path", "base", "--output_dir", "out", "--num_train_epochs", str(EPOCHS)]
    words += ["--learning_rate", str(RATE), "--zero_stage", str(stage), "--lora_dim", str(lora), "--deepspeed"]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "deepspeed", "--num_gpus", "2", str(SCRIPT), *words, *options],
        cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]

    def told(word: str) -> Any:
        return json.loads(next(line for line in done.stdout.splitlines() if line.startswith(word)).partition(" ")[2])

    model = built(tmp_path / "base", lora, "--only_optimize_lora" in options)
    losses, evaluations = plain(model)
    for rank, expected in enumerate(losses):
        assert told(f"LOSSES{rank}") == pytest.approx(expected, rel=1e-5)
        assert [loss for _, loss in told(f"EVALUATED{rank}")] == pytest.approx(evaluations, rel=1e-5)
    saved = torch.load(tmp_path / "out" / "pytorch_model.bin")
    for name, value in weights_of(model).items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-5)
