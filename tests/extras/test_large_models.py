"""Models that no machine here could hold, made of their configs alone: what it takes to price and to search them, in
counts of what is done rather than in seconds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from shardwise.fit import foreseen, model_subject, rehearsals
from shardwise.fit.candidates import Candidate, Space
from shardwise.fit.foreseen import updates_of
from shardwise.fit.hardware import hardware
from shardwise.fit.model_subject import ModelSubject
from shardwise.fit.search import Limits, search
from shardwise.plan import Plan
from tests.thorough import thorough_only

GIB = 2**30
H100 = hardware("h100-sxm")
BF16 = Plan(precision="bf16")
LLAMA_405B = {"hidden_size": 16384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53248}
LLAMA_13B = {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 13824}


def llama(sizes: dict[str, int], *, vocab: int, num_kv_heads: int) -> nn.Module:
    config = transformers.LlamaConfig(
        **sizes, vocab_size=vocab, num_key_value_heads=num_kv_heads, max_position_embeddings=8192, use_cache=False
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def subject_of(model: nn.Module, length: int, num_rows: int) -> ModelSubject:
    ids = torch.zeros(1, length, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    return ModelSubject(model, batch, H100.with_ranks(8), num_rows, BF16, updates_of(model, "adamw"), on_cpu=False)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a rehearsal, the program of a kind of rank, and the time of a plan were made, and of how many blocks at
    most a model was rehearsed."""
    found: Counter[str] = Counter()

    def counted(where: Any, name: str, what: str) -> None:
        former = getattr(where, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found[what] += 1
            return former(*args, **kwargs)

        monkeypatch.setattr(where, name, call)

    counted(rehearsals, "count_step", "rehearsals")
    counted(foreseen, "plan_step", "programs")
    counted(model_subject, "step_time", "times")
    former = rehearsals.without_values

    def whole(model: nn.Module) -> nn.Module:
        found["whole models"] += 1
        return former(model)

    monkeypatch.setattr(rehearsals, "without_values", whole)
    return found


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_model_of_405_billion_parameters_is_priced_from_its_shapes(done: Counter[str]) -> None:
    """On 16,384 GPUs, split as in arXiv:2407.21783, table 4; of the operators of transformers, which are not fused."""
    before = resident_bytes()
    model = llama(LLAMA_405B, vocab=128256, num_kv_heads=8)
    num_params = sum(param.numel() for param in model.parameters())
    assert num_params == pytest.approx(405.85e9, rel=0.001)
    rows, length = 2048, 8192
    subject = subject_of(model, length, rows)
    as_trained = Candidate("zero2", (("pp", 16), ("dp", 128), ("tp", 8)), 1, 16, schedule="interleaved", chunks=8)
    found = subject.evaluate(as_trained)
    at_peak = rows * length * 6 * num_params / (16_384 * H100.peak("bf16"))
    assert 2 * at_peak < found.seconds < 8 * at_peak
    assert not done["whole models"], "a few of its blocks tell of all"
    assert done["rehearsals"] <= 6
    assert (done["times"], done["programs"]) == (1, 16)
    assert resident_bytes() - before < GIB


@thorough_only("a search of many seconds")
@pytest.mark.parametrize(("world_size", "num_rows"), [(1024, 4096), (100_000, 400_000)])
def test_a_search_for_a_real_model_does_as_little_on_many_ranks(
    world_size: int, num_rows: int, done: Counter[str]
) -> None:
    model = llama(LLAMA_13B, vocab=32000, num_kv_heads=40)
    subject = subject_of(model, 4096, num_rows)
    found = search(subject, world_size, Limits(int(0.92 * 80 * GIB), 1800 * GIB), base=BF16, space=Space())
    assert found.best[0].found.is_exact
    assert found.best[0].candidate.world_size == world_size
    assert found.num_candidates > 10_000
    assert done["rehearsals"] <= 40, dict(done)
    assert done["times"] <= 200, dict(done)
    assert done["programs"] <= 4000, dict(done)
