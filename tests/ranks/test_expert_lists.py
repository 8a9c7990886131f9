"""Experts that are separate modules train the same after they are stacked, also on several ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import FaultError, ModelError
from shardwise.parallel.experts import Experts
from shardwise.testing import run_ranks
from tests.thorough import sampled

Tensor = torch.Tensor
WIDTH, NUM_EXPERTS = 8, 4


class Expert(nn.Module):
    def __init__(self, *, gated: bool, bias: bool = False, inner: int = 12) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, inner, bias=bias) if gated else None
        self.w2 = nn.Linear(inner, WIDTH, bias=bias)
        self.w3 = nn.Linear(WIDTH, inner, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w3(x)) if self.w1 is None else F.silu(self.w1(x)) * self.w3(x))


class Listed(nn.Module):
    """Calls its experts one by one, each with the tokens routed to it."""

    def __init__(self, *, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts: Any = nn.ModuleList(Expert(gated=gated) for _ in range(NUM_EXPERTS))
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(dim=-1).topk(2, dim=-1)
        if isinstance(self.experts, Experts):
            return x + self.experts(x, chosen, weights)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, choice = torch.where(chosen == number)
            out = out.index_add(0, rows, weights[rows, choice, None] * expert(x[rows]))
        return x + out

    def stack(self) -> None:
        names = {"gate": "w1"} if self.gated else {}
        activation = "silu" if self.gated else "gelu"
        self.experts = Experts.stacked(self.experts, up="w3", down="w2", activation=activation, **names)


def stacked(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, Listed):
            module.stack()
    return model


def in_one_form(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model with lists of experts, in the form of the stacked model."""
    other = copy.deepcopy(model)
    other.load_state_dict(state)
    return stacked(other).state_dict()


@sampled
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    ("mesh", "plan"),
    [
        ({"ep": 2}, {"preset": "zero1"}),
        ({"dp": 2, "ep": 2}, {"preset": "zero3"}),
        ({"pp": 2, "ep": 2}, {"preset": "zero1", "pipeline": {"schedule": "1f1b"}}),
        ({"pp": 2, "ep": 2}, {"preset": "zero3", "pipeline": {"schedule": "interleaved"}}),
        ({"pp": 2, "ep": 2}, {"preset": "zero1", "pipeline": {"schedule": "zb-h1"}}),
    ],
)
def test_stacked_experts_are_trained_as_those_of_the_list(
    mesh: dict[str, int], plan: dict[str, Any], gated: bool
) -> None:
    model = nn.Sequential(*(Listed(gated=gated) for _ in range(4)))
    x, y = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    plain, losses = copy.deepcopy(model), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    expected = in_one_form(plain.state_dict(), model)
    num_ranks = torch.Size(mesh.values()).numel()
    full = {"mesh": mesh, "accumulate": 2, **plan}

    def work(engine: sw.Engine) -> tuple[list[float], dict[str, Tensor]]:
        place, num_shares = engine.mesh.data_place(engine.world.rank)
        own = x.chunk(num_shares)[place], y.chunk(num_shares)[place]
        return [float(engine.train_step(*own, loss_fn=F.mse_loss)) for _ in range(3)], engine.state_dict()

    told = work_on_ranks(
        num_ranks, work, full, lambda: stacked(model), lambda mine: torch.optim.SGD(mine.parameters(), lr=0.3)
    )
    means = torch.tensor([one for one, _ in told]).mean(0)
    assert means.tolist() == pytest.approx(losses, rel=1e-5)
    for _, state in told:
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6, msg=name)


def test_a_list_of_experts_is_refused_with_the_way_out() -> None:
    def rank(world: sw.World) -> None:
        sw.shard(nn.Sequential(Listed(gated=True)), {"preset": "zero1", "mesh": {"ep": 2}}, world=world)

    with pytest.raises(
        (ModelError, FaultError), match=r"0.experts has 4 experts .*experts.Experts.stacked\(experts, gate="
    ):
        run_ranks(2, rank)


@pytest.mark.parametrize(
    ("experts", "words"),
    [
        ([Expert(gated=True, bias=True)], "Expert 0 has the parameters w1.weight, w1.bias"),
        ([Expert(gated=True), Expert(gated=False)], "Expert 1 has the parameters w2.weight, w3.weight, but"),
        ([Expert(gated=True), Expert(gated=True, inner=16)], "2 experts cannot be stacked: .* of the same sizes"),
        ([], "0 experts cannot be stacked"),
    ],
)
def test_experts_that_cannot_be_stacked_are_refused(experts: list[nn.Module], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Experts.stacked(experts, gate="w1", up="w3", down="w2")


def test_matrices_in_the_wrong_places_are_refused() -> None:
    with pytest.raises(ModelError, match="w3 must lead back"):
        Experts.stacked([Expert(gated=True)], gate="w1", up="w2", down="w3")
