"""A live engine with experts changes to plans that distribute them differently: values are kept bit by bit, and
training equals the whole model's."""

from __future__ import annotations

from typing import Any

import pytest
import split_models
import torch
from experts_models import mixture, whole_run
from test_experts import TENSOR, CutTransformer
from torch import nn
from twins import Batch, Run, assert_alike, batches, chunked, whole_grads, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.parallel.experts import update_biases
from tests.ranks.twins import assert_same_bits, moments_of
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
ORDERS: dict[str, list[dict[str, Any]]] = {
    "from ep": [
        {"preset": "zero1", "mesh": {"dp": 2, "ep": 2}},
        {"preset": "zero3", "mesh": {"dp": 4}},
        {"preset": "zero3", "mesh": {"ep": 4}, "resident_below": 4000},
        {"preset": "zero2", "mesh": {"ep": 2, "dp": 2}},
        {"preset": "zero3", "mesh": {"dp": 2, "ep": 2}, "units": {"min_numel": 3000}},
    ],
    "from none": [
        {"preset": "zero3"},
        {"preset": "hpz", "mesh": {"node": 2, "local": 1, "ep": 2}},
        {"preset": "ddp", "mesh": {"ep": 4}},
        {"preset": "zero3-kept", "mesh": {"ep": 2, "sp": 1, "dp": 2}},
        {"preset": "hsdp", "mesh": {"node": 2, "local": 2}},
    ],
}
CUT: list[dict[str, Any]] = [
    {"preset": "zero1", "mesh": {"ep": 2, "tp": 2}, "tensor": TENSOR},
    {"preset": "zero3", "mesh": {"dp": 2, "tp": 2}, "tensor": TENSOR},
    {"preset": "zero2", "mesh": {"ep": 2, "tp": 2}, "tensor": TENSOR},
]


def through(plans: list[dict[str, Any]], model: nn.Module, data: list[Batch], *, shares_memory: bool) -> Run:
    """Train two steps with each plan; each change of plan must keep all tensors bit by bit."""

    def work(engine: sw.Engine) -> Run:
        replica = engine.module
        run = Run()
        for step, batch in enumerate(data):
            if step and step % 2 == 0:
                before = moments_of(engine)
                engine.reshard(plans[step // 2])
                assert_same_bits(before, moments_of(engine))
            share, num_shares = engine.data_ranks
            loss = engine(*chunked(batch, num_shares)[share])
            engine.backward(loss)
            run.losses.append(engine.mean(loss.item()))
            run.grads.append(whole_grads(engine, [name for name, _ in replica.named_parameters()]))
            run.norms.append(float(engine.step() or 0.0))
            update_biases(replica)
            memory = engine.memory()
            assert memory.measured["param"] == memory.promised["param"]
        run.params = engine.state_dict()
        run.extra = str(engine)
        return run

    runs = work_on_ranks(4, work, plans[0], model, shares_memory=shares_memory)
    assert [run.losses for run in runs[1:]] == [runs[0].losses] * 3
    runs[0].extra = [run.extra for run in runs]
    return runs[0]


@thorough_only("takes long")
@sampled
@pytest.mark.parametrize("name", ORDERS)
def test_one_run_through_many_dealings(name: str) -> None:
    """Five experts, which cannot be divided evenly; a frozen part, and router biases."""
    model = mixture(num_experts=5, bias_rate=0.01, shared_size=8)
    model.blocks[1].moe.experts.down_proj.requires_grad_(False)
    data = batches(2 * len(ORDERS[name]), 8)
    run = through(ORDERS[name], model, data, shares_memory=name == "from ep")
    assert_alike(run, whole_run(model, data, after_step=update_biases))


@thorough_only("slow; smaller tests beside it cover the same code")
def test_with_split_attention() -> None:
    model = CutTransformer()
    data = [(split_models.tokens(step, 8),) * 2 for step in range(6)]
    run = through(CUT, model, data, shares_memory=False)
    assert_alike(run, whole_run(model, data))
    assert ["experts 0-2 of 5" in said for said in run.extra] == [True] * 4  # both lines, on every rank


def test_experts_that_were_dealt_out_are_called_as_before() -> None:
    """Nothing of the old plan remains on the model: it computes the same bits as a model that was never split."""
    model = mixture().eval()
    x, y = batches(1, 4)[0]
    expected = model(x, y)

    def work(engine: sw.Engine) -> tuple[Tensor, int, list[str]]:
        own = engine.module
        with torch.no_grad():
            engine.reshard("zero3")
            experts = own.blocks[1].moe.experts
            return engine(x, y), experts.num_experts, [key for key in vars(experts) if key == "forward"]

    for loss, num_experts, left in work_on_ranks(2, work, {"preset": "zero3", "mesh": {"ep": 2}}, model, None):
        assert torch.equal(loss, expected)
        assert (num_experts, left) == (4, [])


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    model = mixture(num_experts=3)
    x, y = batches(1, 8)[0]

    def muon(one: nn.Module) -> torch.optim.Optimizer:
        stacks = [param for name, param in one.named_parameters() if name.endswith("router.weight")]
        others = [param for param in one.parameters() if all(param is not stack for stack in stacks)]
        return sw.optim.Muon([{"params": stacks}, {"params": others, "use_muon": False}], lr=0.01)

    def work(engine: sw.Engine) -> tuple[float, float]:
        engine.backward(engine(x, y))
        engine.step()
        loss, before = engine(x, y).item(), moments_of(engine)
        for plan, error, said in [
            ({"mesh": {"ep": 4}}, ModelError, "has 3 experts for 4 ranks along ep"),
            ({"mesh": {"dp": 2, "tp": 2}}, ConfigError, "keeps how a model is split"),
            ({"mesh": {"dp": 2, "ep": 2}, "compile": "eager"}, ConfigError, "Leave it out of a plan with ep"),
            ({"mesh": {"dp": 4}, "budget": {"device": "1GiB"}}, ConfigError, "with experts dealt out say offload"),
        ]:
            with pytest.raises(error, match=said):
                engine.reshard(plan)
        assert_same_bits(before, moments_of(engine))
        return loss, engine(x, y).item()

    for loss, again in work_on_ranks(4, work, {"preset": "zero3", "mesh": {"dp": 2, "ep": 2}}, model, muon):
        assert loss == again
