"""`engine.mismatch`: the distance between a sampler's probabilities and the trainer's, against a plain computation."""

from __future__ import annotations

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_transformers import VOCAB, llama, mixtral
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.observe import read_record
from shardwise.observe.layer_outputs import LayerDistance, distances, parting
from shardwise.observe.mismatch import Mismatch, Sampling, log_probs
from shardwise.testing import run_ranks

Tensor = torch.Tensor
ROWS, TOKENS, PROMPT = 6, 9, 3


def samples_of(model: nn.Module, noise: float = 0.0) -> dict[str, Tensor]:
    """Tokens with the log-probabilities that `model` gives them, changed by `noise`."""
    numbers = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=numbers)
    with torch.no_grad():
        told = model.eval()(input_ids=tokens).logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    told = nn.functional.pad(told, (1, 0)) + noise * torch.randn(tokens.shape, generator=numbers)
    counted = torch.arange(TOKENS).expand(ROWS, -1) >= PROMPT
    return {"input_ids": tokens, "log_probs": told, "counted": counted}


def on_ranks(model: nn.Module, samples: dict[str, Tensor], plan: dict[str, Any], **more: Any) -> list[Mismatch]:
    num_ranks = math.prod(plan["mesh"].values())
    models = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank(world: sw.World) -> Mismatch:
        mine = models[world.rank].train()
        optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
        with sw.shard(mine, plan, optimizer=optimizer, world=world) as engine:
            share, shares = engine.data_ranks
            cuts = [0, 1] if shares == 2 else []  # the first has one row, the second all others
            parts = {name: one.tensor_split(cuts[1:])[share] for name, one in samples.items()}
            frozen = next(iter(mine.children())).eval()  # as batch norms of a pretrained part are
            found = engine.mismatch(parts, rows=2, **more)
            assert mine.training
            assert not frozen.training
            return found

    return run_ranks(num_ranks, rank)


@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"pp": 2}])
def test_the_distance_is_that_of_a_plain_computation(mesh: dict[str, int]) -> None:
    torch.manual_seed(5)
    model = llama()
    exact, noisy = samples_of(model), samples_of(model, noise=0.3)
    apart = (exact["log_probs"] - noisy["log_probs"]).double()[noisy["counted"]]
    for found in on_ranks(model, noisy, {"preset": "zero3", "mesh": mesh}):
        assert found.num_tokens == ROWS * (TOKENS - PROMPT)
        assert found.kl == pytest.approx(float((apart.exp() - 1 - apart).mean()), rel=1e-4)
        assert found.mean_difference == pytest.approx(float(apart.mean()), abs=1e-5)
        assert found.largest_ratio == pytest.approx(float(apart.abs().max().exp()), rel=1e-4)
        row = found.row + (found.rank if "dp" in mesh else 0)  # rank 1 begins with the second
        worst = (exact["log_probs"] - noisy["log_probs"])[row, found.position]
        assert math.exp(abs(worst)) == pytest.approx(found.largest_ratio, rel=1e-4)
    for found in on_ranks(model, exact, {"preset": "zero3", "mesh": mesh}):
        assert found.kl < 1e-9
        assert found.largest_ratio < 1 + 1e-4


@pytest.mark.parametrize("cut", [0, 2])
def test_experts_compute_for_ranks_with_other_numbers_of_samples(cut: int) -> None:
    """A rank with fewer rows, or none, calls the model as often as the others."""
    torch.manual_seed(5)
    model = mixtral()
    samples, own = samples_of(model), sw.layer_outputs(model, samples_of(model)["input_ids"], names=["model.layers.0"])
    for found in with_layers(model, samples, own, {"mesh": {"ep": 2}}, cut):
        assert found.num_tokens == ROWS * (TOKENS - PROMPT)
        assert found.kl < 1e-9
        assert found.layers[0].distance < 1e-6


def test_an_alarm_and_the_age_of_the_weights_are_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(5)
    model = llama()
    with caplog.at_level(logging.WARNING, logger="shardwise"):
        found = on_ranks(model, samples_of(model, noise=0.5), {"mesh": {"dp": 2}}, alarm=0.01, version=-3)
    assert {one.steps_behind for one in found} == {3}
    told = [record.message for record in caplog.records if "does not agree" in record.message]
    assert len(told) == 1
    assert f"KL {found[0].kl:.3g} nats a token over {found[0].num_tokens} tokens, with weights of 3 steps" in told[0]


def test_it_is_in_the_record_of_the_run(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = llama()
    plan = {"mesh": {"dp": 2}, "run": str(tmp_path / "run")}
    found = on_ranks(model, samples_of(model, noise=0.3), plan, version=-2, alarm=1e-3)[0]
    lines = [line for line in read_record(tmp_path / "run" / "record.jsonl").lines if line["kind"] == "mismatch"]
    assert [(line["kl"], line["largest_ratio"]) for line in lines] == [(found.kl, found.largest_ratio)]
    assert [(line["steps_behind"], line["alarm"]) for line in lines] == [(2, 1)]


@pytest.mark.parametrize("plan", [{"preset": "zero3", "mesh": {"dp": 2}}, {"mesh": {"tp": 2}}, {"mesh": {"pp": 2}}])
def test_the_layer_where_a_sampler_parts_is_found(plan: dict[str, Any]) -> None:
    """A sampler with an old norm in its second block. Each stage of a pipeline has seen only layers of its own."""
    torch.manual_seed(5)
    model = llama()
    sampler = copy.deepcopy(model)
    sampler.get_submodule("model.layers.1.input_layernorm").weight.data.mul_(1.5)
    samples = samples_of(model)
    samples["attention_mask"] = (torch.arange(TOKENS) > torch.arange(ROWS)[:, None] - 2).long()
    layers = sw.layer_outputs(sampler, samples["input_ids"], samples["attention_mask"], rows=4)
    assert list(layers) == [f"model.layers.{number}" for number in range(3)]
    own = sw.layer_outputs(model, samples["input_ids"], samples["attention_mask"])
    is_token = samples["attention_mask"][..., None].double()
    for one in layers.values():
        one[samples["attention_mask"] == 0] = math.nan  # what is at padding is nobody's business
    for found in with_layers(model, samples, layers, plan):
        assert [layer.name for layer in found.layers] == list(layers)
        for layer in found.layers:
            apart = (own[layer.name] - layers[layer.name].nan_to_num(0.0)).double() * is_token
            expected = float(apart.norm() / (own[layer.name].double() * is_token).norm())
            assert layer.distance == pytest.approx(expected, rel=1e-3, abs=1e-6)
        assert found.parts_at == 1
        assert f"they part at model.layers.1: {found.layers[0].distance:.2g} before it, " in str(found)
    for found in with_layers(model, samples, {name: one.bfloat16() for name, one in own.items()}, plan):
        assert found.parts_at is None
        assert "; layers part nowhere, by at most 0.0" in str(found)


def with_layers(
    model: nn.Module, samples: dict[str, Tensor], layers: dict[str, Tensor], plan: dict[str, Any], first: int = 1
) -> list[Mismatch]:
    """As `on_ranks`; of two shares one has the `first` rows."""
    models = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> Mismatch:
        with sw.shard(models[world.rank], plan, optimizer=None, world=world) as engine:
            share, shares = engine.data_ranks
            cut = [first] if shares == 2 else []
            parts = {name: one.tensor_split(cut)[share] for name, one in samples.items()}
            mine = {name: one.tensor_split(cut)[share] for name, one in layers.items()}
            return engine.mismatch(parts, rows=2, layers=mine)

    return run_ranks(2, rank)


def test_a_layer_that_overflows_is_where_they_part() -> None:
    near = LayerDistance("a", 1e-6, 1e-7)
    assert parting([near, LayerDistance("b", math.inf, 1e-7), LayerDistance("c", math.inf, 1e-7)]) == 1
    assert parting([near, LayerDistance("b", 2e-6, 1e-7), LayerDistance("c", 1e-2, 1e-7)]) == 2
    assert parting([LayerDistance("a", 1e-3, 8e-3), LayerDistance("b", 7e-3, 8e-3)]) is None
    assert parting([LayerDistance("a", 1.7e-7, 1.2e-7), LayerDistance("b", 2.4e-7, 1.2e-7)]) is None  # rounding grows
    for factor, found in ((3.5, None), (4.5, 1)):  # rounding grows by less
        assert parting([LayerDistance("a", 1e-3, 1e-3), LayerDistance("b", factor * 1e-3, 1e-3)]) == found
    assert parting([]) is None
    told = json.loads(json.dumps({"a": [math.nan, 1.0, 1e-7]}))  # as ranks tell it
    assert distances(["a"], [told])[0].distance == math.inf


def test_layers_that_cannot_be_compared_are_refused() -> None:
    torch.manual_seed(5)
    model = llama()
    samples = samples_of(model)
    own = sw.layer_outputs(model, samples["input_ids"])
    block, head = own["model.layers.0"], torch.zeros(ROWS, TOKENS, 5)
    for bad, words in (
        ({"model.layer.0": block}, "has no layer 'model.layer.0'. Did you mean 'model.layers.0'"),
        (
            {"layers.0": block[:, 1:]},
            r"\[rows, tokens, features\] for tokens \[6, 9\], and got torch.float32 \[6, 8, 32\]",
        ),
        ({"lm_head": head}, r"lm_head gives \[2, 9, 97\] in the trainer, and in the sampler \[2, 9, 5\]"),
        ({"mlp": block}, "has several layers that end with 'mlp': model.layers.0.mlp, "),
    ):
        with pytest.raises(ConfigError, match=words):
            with_layers(model, samples, bad, {"preset": "ddp", "mesh": {"tp": 2}})
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(ConfigError, match=r"model.layers.0 is called more than once in a forward"):
        with_layers(model, samples, {"model.layers.0": block}, {"mesh": {"tp": 2}})
    with pytest.raises(ModelError, match=r"has given \[12, 9, 32\] for tokens \[6, 9\], in all its calls"):
        sw.layer_outputs(model, samples["input_ids"], names=["model.layers.0"])
    with pytest.raises(ModelError, match="Linear has no list of blocks"):
        sw.layer_outputs(nn.Linear(2, 2), samples["input_ids"])
    with pytest.raises(ModelError, match=r"model.rotary_emb has given"):
        sw.layer_outputs(model, samples["input_ids"], names=["model.rotary_emb"])


@pytest.mark.parametrize("sampling", [Sampling(top_k=5), Sampling(top_p=0.6), Sampling(temperature=0.5, top_k=3)])
def test_what_a_sampler_keeps_sums_to_one(sampling: Sampling) -> None:
    """As vLLM reports them: renormalized over what top_k and top_p keep; a token that is not kept cannot have been
    sampled."""
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(2))
    every = torch.arange(20).expand(4, -1)
    kept = torch.stack([log_probs(logits, tokens, sampling) for tokens in every.T], -1)
    assert torch.allclose(kept.exp().sum(-1), torch.ones(4))
    number = (kept > -math.inf).sum(-1)
    if sampling.top_k:
        assert number.tolist() == [sampling.top_k] * 4
    else:
        probs = logits.softmax(-1).sort(descending=True).values.cumsum(-1)
        assert number.tolist() == ((probs < sampling.top_p).sum(-1) + 1).tolist()
    expected = (logits / sampling.temperature).masked_fill(kept == -math.inf, -math.inf).log_softmax(-1)
    assert torch.allclose(kept, expected)


def test_samples_of_other_shapes_are_refused() -> None:
    model = llama()
    good = samples_of(model)
    for bad, words in (
        ({"input_ids": good["input_ids"]}, "needs counted, log_probs among its samples"),
        (good | {"log_probs": good["log_probs"][:, 1:]}, r"all have the shape \[rows, tokens\]"),
        (good | {"counted": torch.zeros_like(good["counted"])}, "no token that counts"),
    ):
        with pytest.raises(ConfigError, match=words):
            on_ranks(model, bad, {"mesh": {"tp": 1}})
    with pytest.raises(ConfigError, match="temperature above 0"):
        Sampling(temperature=0.0)
