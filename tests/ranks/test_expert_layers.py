"""Layers of experts in one process, compared with sums computed expert by expert and token by token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from experts_models import mixture
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from twins import batches

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.parallel.experts import MoE, Router, auxiliary_loss, update_biases
from shardwise.parallel.experts.assignment import assign, capacity_of, dropped_over
from shardwise.parallel.experts.products import grouped_linear

Tensor = torch.Tensor
HIDDEN, EXPERTS = 16, 5


def written_out(layer: MoE, hidden: Tensor) -> Tensor:
    """The output of a layer, computed for one token and one of its experts at a time."""
    index, weights = layer.router(hidden)
    if layer.capacity_factor is not None:
        capacity = capacity_of(len(hidden), layer.router.top_k, layer.router.num_experts, layer.capacity_factor)
        index = dropped_over(index, layer.router.num_experts, capacity)
    experts, rows = layer.experts, []
    activate = {"silu": functional.silu, "gelu": functional.gelu}[experts.activation]
    for token, chosen, weight in zip(hidden, index.tolist(), weights, strict=True):
        row = torch.zeros_like(token)
        for expert, times in zip(chosen, weight, strict=True):
            if expert == layer.router.num_experts:
                continue
            if experts.gated:
                gate, up = (experts.gate_up_proj[expert] @ token).chunk(2)
                inner = activate(gate) * up
            else:
                inner = activate(experts.up_proj[expert] @ token)
            row = row + times * (experts.down_proj[expert] @ inner)
        rows.append(row if layer.shared is None else row + layer.shared(token))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 1, "normalize": False, "gated": False},
        {"scores": "sigmoid", "scale": 2.5, "bias_rate": 0.1, "activation": "gelu"},
        {"top_k": EXPERTS, "shared_size": 12},
        {"capacity_factor": 0.7, "gated": False, "activation": "gelu"},
        {"capacity_factor": 1e-9, "top_k": 1},
    ],
    ids=["softmax", "switch", "sigmoid", "all", "capacity", "one each"],
)
@pytest.mark.parametrize("inner", [12, 10], ids=["aligned", "not aligned"])  # with torch's kernel, and without
def test_a_layer_computes_what_its_experts_do(settings: dict[str, Any], inner: int) -> None:
    layer = MoE(HIDDEN, inner, EXPERTS, **settings)
    if layer.router.bias is not None:
        layer.router.bias += torch.randn(EXPERTS)
    hidden = torch.randn(3, 7, HIDDEN, requires_grad=True)
    expected = written_out(layer, hidden.flatten(0, 1))
    wanted = torch.autograd.grad(expected.square().sum(), [hidden, *layer.parameters()])
    made = layer(hidden)
    found = torch.autograd.grad(made.square().sum(), [hidden, *layer.parameters()])
    torch.testing.assert_close(made, expected.view_as(made), rtol=1e-5, atol=1e-5)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_gradients_of_gradients() -> None:
    layer = MoE(6, 4, 3, 2, activation="gelu").double()
    hidden = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, (hidden,))


def test_no_tokens_make_nothing_and_have_gradients_of_zero() -> None:
    layer = MoE(HIDDEN, 12, EXPERTS, capacity_factor=1.0, balance_loss=0.1, z_loss=0.1)
    made = layer(torch.randn(0, HIDDEN))
    (made.sum() + auxiliary_loss(layer)).backward()
    assert made.shape == (0, HIDDEN)
    for param in layer.parameters():
        assert param.grad is not None
        assert torch.count_nonzero(param.grad) == 0


@pytest.mark.parametrize("width", [16, 10])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_of_groups(width: int, dtype: torch.dtype) -> None:
    rows, weights = torch.randn(9, width, dtype=dtype), torch.randn(4, 8, width, dtype=dtype)
    counts = torch.tensor([0, 5, 0, 4])
    expected = torch.cat([rows[:5] @ weights[1].T, rows[5:] @ weights[3].T])
    torch.testing.assert_close(grouped_linear(rows, weights, counts), expected)
    assert grouped_linear(rows[:0], weights, counts * 0).shape == (0, 8)


def test_what_has_no_room_is_dropped_by_choice_and_then_by_position() -> None:
    index = torch.tensor([[0, 1], [0, 1], [1, 0], [0, 2]])
    assert dropped_over(index, 3, 2).tolist() == [[0, 1], [0, 3], [1, 3], [3, 2]]
    assignment = assign(dropped_over(index, 3, 2), 3, 2)
    assert assignment.counts.tolist() == [2, 2, 1]
    assert assignment.order.tolist() == [0, 2, 1, 4, 7]
    assert capacity_of(4, 2, 3, 1.0) == 3


def test_losses_are_those_of_the_papers() -> None:
    router = Router(HIDDEN, EXPERTS, 2, balance_loss=0.3, z_loss=0.2)
    hidden = torch.randn(11, HIDDEN)
    index, _ = router(hidden)
    logits = hidden @ router.weight.T
    chosen = functional.one_hot(index, EXPERTS).sum(dim=(0, 1)) / 22
    balance = EXPERTS * (chosen * logits.softmax(-1).mean(0)).sum()
    z = logits.exp().sum(-1).log().square().mean()
    torch.testing.assert_close(auxiliary_loss(router), 0.3 * balance + 0.2 * z)
    assert float(auxiliary_loss(router)) == 0.0  # it was taken already
    router.eval()(hidden)
    assert router.loss is None


def test_biases_move_towards_experts_with_few_tokens_and_even_out_their_load() -> None:
    router = Router(HIDDEN, 4, 1, bias_rate=0.02)
    router.weight.data[0] += 0.6
    hidden = torch.randn(400, HIDDEN) + 0.3

    def load() -> Tensor:
        return torch.bincount(router(hidden).experts.flatten(), minlength=4)

    first = load()
    update_biases(router)
    assert router.bias is not None
    assert torch.equal(router.bias, 0.02 * torch.sign(first.float().mean() - first))
    for _ in range(100):
        last = load()
        update_biases(router)
    assert last.max() < 130 < 200 < first.max()
    assert "bias" in router.state_dict()
    assert not any(param is router.bias for param in router.parameters())


def test_a_loss_from_a_forward_without_gradients_is_refused() -> None:
    layer = MoE(HIDDEN, 12, EXPERTS, balance_loss=0.1)
    hidden = torch.randn(4, HIDDEN, requires_grad=True)
    checkpoint(layer, hidden, use_reentrant=True)
    with pytest.raises(ModelError, match=r"router computed its loss without gradients.*use_reentrant=False"):
        auxiliary_loss(layer)
    made = checkpoint(layer, hidden, use_reentrant=False)
    (made.sum() + auxiliary_loss(layer)).backward()
    assert layer.router.loss is None  # the recomputed forward has left none
    assert layer.router.weight.grad is not None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"top_k": 6}, "top_k is 6, and there are 5 experts. Choose a top_k from 1 to 5"),
        ({"scores": "tanh"}, "scores is 'tanh'; it is one of softmax, sigmoid"),
        ({"activation": "relu"}, "activation is 'relu'; it is one of silu, gelu"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0; give a positive one"),
    ],
)
def test_settings_that_make_no_layer_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        MoE(HIDDEN, 12, EXPERTS, **settings)


def test_choices_of_tokens_that_are_not_in_rows_are_refused() -> None:
    experts, hidden = sw.experts.Experts(HIDDEN, 8, EXPERTS), torch.ones(2, 3, HIDDEN)
    with pytest.raises(ModelError, match=r"choices of shape \[2, 3, 1\], where \[tokens, top_k\] is meant"):
        experts(hidden, torch.zeros(2, 3, 1, dtype=torch.long))


def test_it_trains_and_is_copied_like_any_module() -> None:
    model = mixture(balance_loss=0.1, capacity_factor=1.25)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    data = batches(1)[0]
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(*data)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    again = copy.deepcopy(model).eval()
    assert again(*data) == model.eval()(*data)
    assert isinstance(sw.experts.MoE(4, 4, 2, 1), nn.Module)
