"""What vLLM's layers give for tokens, beside what those of transformers give, and where a trainer parts from them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import PostOffice, ThreadTransport
from shardwise.errors import ConfigError
from shardwise.integrations.vllm_layers import layer_outputs

Tensor = torch.Tensor
ROWS, TOKENS, VOCAB, FEATURES = 3, 12, 128, 8
INPUTS = torch.randint(2, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(3))
MASK = torch.arange(TOKENS) >= torch.tensor([0, 4, 1])[:, None]
"""As padding on the left is."""


class Block(nn.Module):
    """As vLLM's: it returns what it adds, and the sum before it, apart."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(FEATURES, FEATURES)

    def forward(self, added: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        total = added if before is None else added + before
        return self.mlp(total), total


class Worker(nn.Module):
    """Its prompts come in pieces, and what is cached is not computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, FEATURES)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.is_compiled = False
        self._cached: set[tuple[int, ...]] = set()

    def apply_model(self, work: Callable[[nn.Module], Any]) -> list[Any]:
        return [work(self)]

    def reset_prefix_cache(self) -> None:
        self._cached.clear()

    @torch.no_grad()
    def generate(self, prompt: dict[str, list[int]], settings: Any, use_tqdm: bool) -> None:
        assert settings.max_tokens == 1
        tokens = prompt["prompt_token_ids"]
        for start in range(0, len(tokens), 5):
            piece = tuple(tokens[: start + 5])
            if piece not in self._cached:
                self._cached.add(piece)
                self.forward(torch.tensor(tokens[start : start + 5]))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, before = self.embed(tokens), None
        for block in self.layers:
            hidden, before = block.forward(hidden, before) if self.is_compiled else block(hidden, before)
        return hidden, before


def test_outputs_are_those_of_each_token_of_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    torch.manual_seed(0)
    worker = Worker()
    for _ in range(2):  # what was cached of the first time is computed again, and nothing of it is kept
        found = layer_outputs(worker, INPUTS, MASK)
        hidden, before = worker.embed(INPUTS), None
        for number, block in enumerate(worker.layers):
            hidden, before = block(hidden, before)
            assert torch.allclose(found[f"layers.{number}"], (hidden + before) * MASK[..., None], atol=1e-6)
    assert not any(block._forward_hooks for block in worker.layers)
    worker.is_compiled = True
    with pytest.raises(ConfigError, match=r"layers.0 for 0 of 12 tokens. .*enforce_eager=True"):
        layer_outputs(worker, INPUTS)
    assert not any(block._forward_hooks for block in worker.layers)


def test_a_trainer_finds_the_layer_where_vllm_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has an old norm in its second block. Runs where vLLM is installed: see `test_vllm_server.py`."""
    vllm = pytest.importorskip("vllm")
    from test_vllm_server import tiny_llama  # it is skipped without vLLM

    for name, value in {"CPU_KVCACHE_SPACE": "1", "ENABLE_V1_MULTIPROCESSING": "0"}.items():
        monkeypatch.setenv(f"VLLM_{name}", value)
    model = tiny_llama(tmp_path)
    norm = model.get_submodule("model.layers.1.input_layernorm").weight
    norm.data.mul_(2.0)
    llm = vllm.LLM(str(tmp_path), max_model_len=64, max_num_seqs=4, enforce_eager=True, dtype="bfloat16")
    layers = layer_outputs(llm, INPUTS, MASK)
    found = distances(model, layers)
    assert found.parts_at == 1
    assert found.layers[0].distance < found.layers[0].rounding < found.layers[1].distance
    norm.data.div_(2.0)
    assert distances(model, layers).parts_at is None


def distances(model: nn.Module, layers: dict[str, Tensor]) -> Any:
    samples = {"input_ids": INPUTS, "log_probs": torch.zeros(ROWS, TOKENS), "counted": MASK, "attention_mask": MASK}
    world = sw.World(0, 1, ThreadTransport(PostOffice(), 0))
    with sw.shard(model, {"preset": "ddp", "precision": "bf16"}, world=world) as engine:
        return engine.mismatch(samples, layers=layers)
