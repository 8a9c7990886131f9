"""Predicted memory of ranks with experts, compared with what a step allocates; `explain` with several model axes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pipelined
import pytest
import sequences
import small_transformers
import torch
from experts_models import mixture
from test_experts import expert_decoder
from test_split_products import CUT, net
from torch import nn
from twins import peak_of_third_step, work_on_ranks

import shardwise as sw
from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.parallel.experts import Router
from shardwise.program import Footprint
from tests.models import VOCAB, Gpt
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
NUM_RANKS = 2


def promised_and_made(
    model: nn.Module, preset: str, batch: Any, expert_load: float, mesh: dict[str, int]
) -> list[tuple[Footprint, int]]:
    """For each rank, the prediction and the peak of what its third step allocated."""

    def work(engine: sw.Engine) -> tuple[Footprint, int]:
        def step() -> None:
            output = engine(**batch) if isinstance(batch, dict) else engine(*batch)
            engine.backward(output if isinstance(output, Tensor) else output.loss)
            del output
            engine.step()

        promised = engine.rehearse(batch, expert_load=expert_load)
        return promised, peak_of_third_step(engine, step)

    return work_on_ranks(NUM_RANKS, work, {"preset": preset, "mesh": mesh}, model)


def held(promised: Footprint) -> int:
    return promised.total - promised.process - promised.param - promised.optim


def even_routers(model: nn.Module) -> nn.Module:
    """Route each token to experts by its position, so that all experts get equally many."""
    for router in model.modules():
        if isinstance(router, Router):
            router.forward = _evenly(router)  # type: ignore[method-assign]
    return model


class _evenly:
    def __init__(self, router: Router) -> None:
        self.router = router

    def __call__(self, hidden: Tensor) -> Any:
        index, weights = Router.forward(self.router, hidden)
        first = torch.ones_like(index).cumsum(0) - 1
        second = torch.ones_like(index).cumsum(1) - 1
        return (first + second) % self.router.num_experts, weights


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize(
    ("preset", "settings", "load", "bounds"),
    [
        ("zero1", {}, 1.0, (0.85, 1.05)),
        ("zero3", {"num_experts": 5, "recomputes": True}, 1.2, (0.75, 1.05)),
        ("zero1", {"capacity_factor": 1.0}, 1.0, (0.75, 1.05)),
    ],
    ids=["even", "uneven", "capacity"],
)
def test_what_a_rank_holds_of_its_experts_tokens_is_promised(
    preset: str, settings: dict[str, Any], load: float, bounds: tuple[float, float]
) -> None:
    model = even_routers(mixture(**settings))
    x, y = (torch.randint(0, VOCAB, (96, 6)) for _ in range(2))
    for promised, made in promised_and_made(model, preset, (x, y), load, {"ep": NUM_RANKS}):
        least, most = bounds
        assert least * held(promised) <= made <= most * held(promised)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_experts_with_a_capacity_that_lie_whole_are_rehearsed_too() -> None:
    model = mixture(capacity_factor=0.5)
    x, y = (torch.randint(0, VOCAB, (96, 6)) for _ in range(2))
    for promised, made in promised_and_made(model, "zero1", (x, y), 1.0, {"dp": NUM_RANKS}):
        assert 0.75 * held(promised) <= made <= 1.05 * held(promised)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_model_of_transformers_is_rehearsed_without_a_message() -> None:
    """Its tokens are not distributed evenly, so `expert_load` bounds how many a rank gets."""
    model = small_transformers.mixtral()
    tokens = torch.randint(0, model.config.vocab_size, (16, 12))
    batch = {"input_ids": tokens, "labels": tokens}
    for promised, made in promised_and_made(model, "zero1", batch, 2.0, {"ep": NUM_RANKS}):
        assert 0.5 * held(promised) <= made <= 1.05 * held(promised)


def test_a_load_below_an_even_share_is_refused() -> None:
    model = mixture()
    with sw.shard(model, "zero1") as engine, pytest.raises(ConfigError, match=r"expert_load is 0.5; give how many"):
        engine.rehearse(torch.zeros(1), expert_load=0.5)


# -- explain ----------------------------------------------------------------------------------------------

FILE = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_expert_memory import BATCHES, MODELS

def build():
    return MODELS["KIND"]()

def batch():
    return BATCHES["KIND"]()
"""


def decoder() -> nn.Module:
    return expert_decoder(top_k=1)


def part_of_tokens() -> dict[str, Tensor]:
    """Half of a sequence, as a rank along `sp` has it."""
    length = sequences.TOKENS // 2
    return {"input_ids": torch.zeros(2, length, dtype=torch.long), "position_ids": torch.arange(length).expand(2, -1)}


MODELS = {"tp": lambda: net(tied=False), "sp": Gpt, "ep": decoder, "ep, no stages": mixture}
BATCHES = {
    "tp": lambda: pipelined.batches(1, 2)[0],
    "sp": part_of_tokens,
    "ep": lambda: pipelined.batches(1, 2)[0],
    "ep, no stages": lambda: pipelined.batches(1, 2)[0],
}
PLANS: dict[str, dict[str, Any]] = {
    "tp": {"preset": "zero1", "mesh": {"pp": 2, "tp": 2}, "accumulate": 2, "tensor": CUT},
    "sp": {"preset": "zero1", "mesh": {"pp": 2, "sp": 2}, "accumulate": 2},
    "ep": {"preset": "zero1", "mesh": {"pp": 2, "ep": 2}, "accumulate": 2},
    "ep, no stages": {"preset": "zero3", "mesh": {"dp": 2, "ep": 2}},
}


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("kind", PLANS)
def test_explain_promises_what_a_live_engine_does(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`explain` predicts the memory of the rank with the most parameters."""
    (tmp_path / "plan.json").write_text(json.dumps(PLANS[kind]))
    (tmp_path / "model.py").write_text(FILE.replace("KIND", kind))
    asked = ["explain", str(tmp_path / "plan.json"), "--world", "4", "--optimizer", "adamw"]
    asked += ["--model", f"{tmp_path}/model.py:build", "--batch", f"{tmp_path}/model.py:batch"]
    assert main([*asked, "--json"]) == 0
    promised = json.loads(capsys.readouterr().out)["bytes"]
    torch.manual_seed(0)

    def work(engine: sw.Engine) -> tuple[int, int, int | None]:
        found = engine.rehearse(BATCHES[kind]())
        return found.param, found.total, found.activations

    _, total, activations = max(
        work_on_ranks(4, work, PLANS[kind], MODELS[kind], lambda mine: torch.optim.AdamW(mine.parameters()))
    )
    assert (promised["total"], promised["activations"]) == (total, activations)
    assert main(asked) == 0
    said = "".join(capsys.readouterr().out.split())
    assert ("1.5timesanevenshareofthetokens" in said) == kind.startswith("ep")
