"""Several tensors between stages: blocks that take and return tuples, and tensors passed to all blocks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fake_devices import WHENS, Devices, When
from pipelined import batches, rows_of, unsplit
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import Run

import shardwise as sw
from shardwise.parallel.pipeline.sends import Channel
from shardwise.testing import run_ranks
from tests.models import VOCAB, WIDTH, Block, Decoder, Transformer
from tests.thorough import sampled

pytestmark = sampled

Tensor = torch.Tensor


class Base(Decoder):
    """A `Decoder` with its own class of blocks."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(WIDTH) for _ in range(4))

    def loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())


class WithResidual(Block):
    def forward(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        return super().forward(residual) - residual, residual


class Residual(Base):
    """Passes (hidden, residual), as in Mamba; the first block gets `None`."""

    block = WithResidual

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden, residual = self.tokens(x), None
        for block in self.blocks:
            hidden, residual = block(hidden, residual)
        return self.loss(hidden + residual, y)


class Gated(Block):
    """Passes a tuple with a boolean, an integer and an activation without gradients; all depend on activations."""

    def forward(self, state: tuple[Tensor, Tensor, dict[str, Tensor]]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        hidden, is_high, more = state
        hidden = super().forward(hidden) * (1 + 0.1 * is_high) + 0.01 * more["count"][..., None] * more["held"]
        is_high = hidden > hidden.detach().mean()
        return hidden, is_high, {"count": more["count"] + is_high.sum(-1), "held": hidden.detach()}


class Sequential(Base):
    block = Gated

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.tokens(x)
        state = hidden, hidden > 0, {"count": torch.zeros_like(x), "held": hidden.detach()}
        for block in self.blocks:
            state = block(state)
        return self.loss(state[0], y)


class Summing(Block):
    def forward(self, hidden: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        hidden = super().forward(hidden)
        return hidden, total + hidden.pow(2).mean()


class AuxiliaryLoss(Base):
    """A scalar loss to which each block adds."""

    block = Summing

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.tokens(x)
        total = hidden.new_zeros(())
        for block in self.blocks:
            hidden, total = block(hidden, total)
        return self.loss(hidden, y) + 0.1 * total


class Conditioned(Block):
    def forward(self, hidden: Tensor, condition: Tensor, *, scale: Tensor) -> Tensor:
        return super().forward(hidden) * (1 + condition * scale)


class Condition(Base):
    """All blocks are called with the same activation (as in a diffusion transformer) and with a table."""

    block = Conditioned

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.classes = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.checkpoints = checkpoints

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        condition = self.classes(x[:, :1, None].float() / VOCAB)
        hidden = self.tokens(x)
        condition = condition + 0.1 * hidden.mean(1, keepdim=True)
        scale = torch.linspace(0.5, 1, x.shape[1])[:, None]
        for block in self.blocks:
            if self.checkpoints:
                hidden = checkpoint(block, hidden, condition, scale=scale, use_reentrant=False)
            else:
                hidden = block(hidden, condition, scale=scale)
        return self.loss(hidden, y)


ORDER = [["classes", "tokens", "blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "norm", "head"]]


class Checked(Base):
    """Checks values between blocks, which does not change the results."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.tokens(x)
        for block in self.blocks:
            hidden = block(hidden)
            assert not torch.isnan(hidden).any()
            assert hidden.isfinite().all()
            if torch.isinf(hidden).any().item():
                raise ValueError("an infinite activation")
        return self.loss(hidden, y)


class Reading(Base):
    """Reads shapes, dtypes and devices of parameters and modules of all stages, and calls a PyTorch function on one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.tokens.weight
        assert isinstance(weight, nn.Parameter)
        assert weight.shape == (VOCAB, WIDTH)
        assert sum(param.numel() for param in self.parameters()) == self.num_elements
        assert len([one for one in self.modules() if isinstance(one, nn.Linear)]) == self.num_linear
        inner = self.blocks[0].up.weight
        x = x.to(inner.device)
        hidden = self.tokens(x) + torch.zeros_like(inner)[0, 0] + weight.new_ones(1).to(self.head.weight.dtype)
        for block in self.blocks:
            hidden = block(hidden)
        return self.loss(hidden, y)

    def __init__(self) -> None:
        super().__init__()
        self.num_elements = sum(param.numel() for param in self.parameters())
        self.num_linear = len([one for one in self.modules() if isinstance(one, nn.Linear)])


def race(make: Any, plan: dict[str, Any], num_ranks: int, *, rows: int = 8, run: Any = run_ranks) -> None:
    torch.manual_seed(0)
    model = make()
    data = batches(4, rows, lengths=(6, 6, 4, 6))
    plain = unsplit(model, data)
    models = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank(world: sw.World) -> Run:
        mine, told = models[world.rank], Run()
        optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-5)
        with sw.shard(mine, plan, optimizer=optimizer, world=world) as engine:
            for x, y in data:
                told.losses.append(float(engine.train_step((rows_of(engine, x), rows_of(engine, y)))))
                told.norms.append(float(engine.gradient_norm))
            told.params = engine.state_dict()
            told.extra["eval"] = float(engine.eval_step(tuple(rows_of(engine, one) for one in data[0])))
        return told

    after = make()
    after.load_state_dict(plain.params)
    for told in run(num_ranks, rank):
        if plan["mesh"].get("dp", 1) == 1:  # otherwise it is the loss of this rank's rows
            assert told.losses == pytest.approx(plain.losses, rel=1e-5)
            assert told.extra["eval"] == pytest.approx(after(*data[0]).item(), rel=1e-4)
        assert told.norms == pytest.approx(plain.norms, rel=1e-4)
        for name, value in plain.params.items():
            torch.testing.assert_close(told.params[name], value, rtol=1e-4, atol=2e-5, msg=name)


def in_four(**more: Any) -> dict[str, Any]:
    return {"preset": "zero1", "mesh": {"pp": 4}, "accumulate": 4, **more}


@pytest.mark.parametrize(
    ("plan", "num_ranks"),
    [
        ({"preset": "zero3", "mesh": {"pp": 2, "dp": 2}, "accumulate": 2}, 4),
        (in_four(pipeline={"schedule": "gpipe"}), 4),
        ({"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 4, "pipeline": {"schedule": "interleaved"}}, 2),
        ({"preset": "zero2", "mesh": {"pp": 2}, "accumulate": 4, "pipeline": {"schedule": "zb-h1"}}, 2),
    ],
    ids=["1f1b-zero3", "gpipe", "interleaved", "zb-h1"],
)
@pytest.mark.parametrize("make", [Residual, Sequential, AuxiliaryLoss], ids=lambda make: make.__name__)
def test_blocks_that_return_several_tensors(make: Any, plan: dict[str, Any], num_ranks: int) -> None:
    race(Micro.of(make, plan), plan, num_ranks)


IN_TWO = {"preset": "zero1", "mesh": {"pp": 2}, "accumulate": 2}


@pytest.mark.parametrize("when", WHENS)
def test_integers_and_booleans_on_devices_whenever_they_come(when: When) -> None:
    devices = Devices(when)
    race(Micro.of(Sequential, IN_TWO), IN_TWO, 2, run=devices.run)
    assert devices.num_works == devices.num_waited


def test_integers_and_booleans_that_are_read_too_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """They travel as bytes, beside activations, which are waited for."""

    def hasty(self: Channel, layouts: Any, micro_batch: int) -> list[Tensor]:
        self.expect(layouts, micro_batch)
        tensors, works = self._incoming.pop(micro_batch)
        for tensor, work in zip(tensors, works, strict=True):
            if tensor.is_floating_point():
                work.wait()
        return tensors

    monkeypatch.setattr(Channel, "receive", hasty)
    with pytest.raises(AssertionError):
        race(Micro.of(Sequential, IN_TWO), IN_TWO, 2, run=Devices("late").run)


class Micro(nn.Module):
    """The plain twin of a step: the mean over its micro-batches. This differs from the whole batch if the model
    computes a loss or mean per micro-batch. On ranks, each call has one micro-batch."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        super().__init__()
        self.model, self.rows = model, rows

    @classmethod
    def of(cls, make: Any, plan: dict[str, Any]) -> Any:
        rows = 8 // plan["accumulate"] // plan["mesh"].get("dp", 1)
        return lambda: cls(make(), rows)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        losses = [self.model(*one) for one in zip(x.split(self.rows), y.split(self.rows), strict=True)]
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_a_tensor_that_all_blocks_are_called_with(schedule: str, checkpoints: bool) -> None:
    of_two = schedule == "interleaved"
    plan = in_four(mesh={"pp": 2 if of_two else 4}, pipeline={"schedule": schedule, "stages": ORDER})
    race(lambda: Condition(checkpoints=checkpoints), plan, 2 if of_two else 4)


@pytest.mark.parametrize("make", [Checked, Reading, Transformer], ids=lambda make: make.__name__)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_forwards_that_check_activations_and_read_facts_of_other_stages(make: Any, preset: str) -> None:
    data = batches(1, 8)
    torch.manual_seed(0)
    model = make()
    plain = unsplit(model, data)
    models = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> tuple[float, dict[str, Tensor]]:
        mine = models[world.rank]
        optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-5)
        plan = {"preset": preset, "mesh": {"pp": 2}, "accumulate": 4}
        with sw.shard(mine, plan, optimizer=optimizer, world=world) as engine:
            loss = float(engine.train_step(data[0]))
            return loss, engine.state_dict()

    for loss, state in run_ranks(2, rank):
        assert loss == pytest.approx(plain.losses[0], rel=1e-5)
        for name, value in plain.params.items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-5, msg=name)
