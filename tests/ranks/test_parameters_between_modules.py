"""Parameters that a forward uses between its modules, in pipeline stages: of the model itself, or of a module that has
several stages. See [Note: parameters between modules] in `parallel/pipeline/stage_layout.py`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from twins import work_on_ranks

import shardwise as sw
from shardwise.parallel.pipeline.stage_layout import params_between
from shardwise.testing import run_ranks
from tests.in_stages import SPLITS, Batch, plain, race
from tests.thorough import sampled

Tensor = torch.Tensor
WIDTH, CLASSES = 8, 3


class Masking(nn.Module):
    """As models of speech: masked frames have an embedding, which is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, WIDTH)
        self.masked = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.late = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.first(x)
        if mask is not None:
            hidden = torch.where(mask[..., None], self.masked, hidden)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden * self.late


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Masking(), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.full((CLASSES,), 2.0))
        self.fixed = nn.Parameter(torch.ones(CLASSES), requires_grad=False)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        logits = self.head(self.inner(x, mask)) * self.scale + self.fixed
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return Classifier()


def drawn(num_steps: int, parts: int = 4, *, is_masked: bool = True) -> list[list[Batch]]:
    numbers = torch.Generator().manual_seed(1)

    def batch() -> Batch:
        found = {"x": torch.randn(2, 5, 4, generator=numbers), "y": torch.randint(CLASSES, (2, 5), generator=numbers)}
        return found | ({"mask": torch.rand(2, 5, generator=numbers) > 0.5} if is_masked else {})

    return [[batch() for _ in range(parts)] for _ in range(num_steps)]


def test_those_of_a_module_with_a_guest_are_its_own() -> None:
    """A module that another stage calls by itself may lie inside of one with parameters of its own."""
    model = classifier()
    modules = dict(model.named_modules())
    assert params_between(modules, ["inner.first", "inner.blocks.0", "head"]).keys() == {
        *("scale", "fixed", "inner.masked", "inner.late")
    }
    assert params_between(modules, ["inner", "inner.first", "head"]).keys() == {"scale", "fixed"}


def itself(loss: Any) -> Tensor:
    found: Tensor = loss
    return found


@sampled
@pytest.mark.parametrize("split", SPLITS)
def test_they_train_as_in_a_plain_loop(split: str) -> None:
    race(classifier(), drawn(3), loss_fn=itself, **SPLITS[split])


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_one_that_no_stage_uses_is_left_alone(preset: str) -> None:
    """As in a plain loop, where it has no gradient: it does not decay. Later it is used, by one stage."""
    model = classifier()
    data = [*drawn(2, is_masked=False), *drawn(1), *drawn(1, is_masked=False)]

    def decaying(one: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            [param for param in one.parameters() if param.requires_grad], lr=0.01, weight_decay=0.5
        )

    plain = copy.deepcopy(model)
    optimizer = decaying(plain)
    losses = []
    for parts in data:
        found = [plain(**part) / len(parts) for part in parts]
        sum(found).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(one.item() for one in found))
        if len(losses) == 2:
            assert torch.equal(plain.inner.masked, model.inner.masked)
    plan = {"preset": preset, "mesh": {"pp": 2}, "accumulate": 4}

    def work(engine: sw.Engine) -> None:
        assert [float(engine.train_step(parts)) for parts in data] == pytest.approx(losses, rel=1e-5)
        for name, value in engine.state_dict().items():
            torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-5, atol=1e-6, msg=name)

    work_on_ranks(2, work, plan, model, decaying)


def test_calls_of_the_model() -> None:
    """In a loop of one's own, whose batch is split; then without gradients."""
    model = classifier()
    [parts] = drawn(1)
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    losses, norms, params = plain(model, [[batch], [batch]], itself)
    twins = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> None:
        mine = twins[world.rank]
        optimizer = torch.optim.SGD([param for param in mine.parameters() if param.requires_grad], lr=0.1)
        with sw.shard(mine, {"preset": "zero3", "mesh": {"pp": 2}}, optimizer=optimizer, world=world) as engine:
            for loss, norm in zip(losses, norms, strict=True):
                ours = mine(**batch)
                engine.backward(ours)
                engine.step()
                assert (ours.item(), engine.gradient_norm) == pytest.approx((loss, norm), rel=1e-5)
            for name, value in engine.state_dict().items():
                torch.testing.assert_close(value, params[name], rtol=1e-5, atol=1e-6, msg=name)
            model.load_state_dict(params)
            with torch.no_grad():
                assert mine(**batch).item() == pytest.approx(model(**batch).item(), rel=1e-5)

    run_ranks(2, rank)
