"""After each step, buffers have rank 0's values on all ranks, however and whenever they were changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.testing import run_ranks

Tensor = torch.Tensor
NUM_STEPS = 6
Change = Callable[[nn.Module, int, int], None]
"""Called in every forward with the module, the rank and the number of the call."""


class Counting(nn.Module):
    """A small model whose forward changes its buffers by calling `change`."""

    def __init__(self, numel: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.register_buffer("running", torch.zeros(numel))
        self.register_buffer("fixed", torch.full((3,), torch.nan))
        self.register_buffer("wide", torch.arange(4.0).expand(2, 4))
        self.change: Change | None = None
        self.rank = self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.change is not None:
            self.change(self, self.rank, self.num_calls)
        self.num_calls += 1
        return self.layer(x).square().mean()


def trained(model: nn.Module, change: Change | None, preset: str = "zero3", **plan: Any) -> list[dict[str, Tensor]]:
    """Train, and return the buffers of each rank after the last step."""

    def work(engine: sw.Engine) -> dict[str, Tensor]:
        replica = engine.module
        replica.change, replica.rank = change, engine.world.rank
        numbers = torch.Generator().manual_seed(engine.world.rank)
        for _ in range(NUM_STEPS):
            engine.backward(engine(torch.randn(6, 8, generator=numbers)))
            engine.step()
        return {name: buffer.clone() for name, buffer in replica.named_buffers()}

    return work_on_ranks(
        2, work, {"preset": preset, **plan}, model, lambda replica: torch.optim.SGD(replica.parameters(), lr=0.1)
    )


def assert_equal(ranks: list[dict[str, Tensor]]) -> None:
    one, two = ranks
    assert one.keys() == two.keys()
    for name, buffer in one.items():
        assert buffer.shape == two[name].shape
        assert torch.equal(buffer.nan_to_num(5), two[name].nan_to_num(5)), f"ranks disagree on {name}"


def in_place(module: nn.Module, rank: int, step: int) -> None:
    if step >= 2:
        module.running.add_(1 + rank)


def unversioned(module: nn.Module, rank: int, step: int) -> None:
    if step >= 2:
        module.running.data.add_(1 + rank)


def assigned(module: nn.Module, rank: int, step: int) -> None:
    module.running = module.running + 1 + rank + step


def assigned_late(module: nn.Module, rank: int, step: int) -> None:
    if step == 4:
        module.running = torch.full_like(module.running, rank + 1.0)


def data_assigned(module: nn.Module, rank: int, step: int) -> None:
    if step >= 2:
        module.running.data = torch.full_like(module.running, rank + step + 1.0)


def registered(module: nn.Module, rank: int, step: int) -> None:
    if step >= 3:
        module.register_buffer("later", torch.full((step,), rank + 1.0))


def of_another_shape(module: nn.Module, rank: int, step: int) -> None:
    module.running = torch.full((1 + step + 2 * rank,), rank + 1.0)


def expanded(module: nn.Module, rank: int, step: int) -> None:
    if step >= 1:
        module.wide = torch.full((4,), rank + step + 1.0).expand(2, 4)


def under_inference_mode(module: nn.Module, rank: int, step: int) -> None:
    if step >= 1:
        with torch.inference_mode():
            module.running = torch.full((4,), rank + step + 1.0)


def on_one_rank(module: nn.Module, rank: int, step: int) -> None:
    if rank == 1 and step >= 2:
        module.running.add_(1)


CHANGES = (in_place, unversioned, assigned, assigned_late, data_assigned, registered, of_another_shape, expanded)


@pytest.mark.parametrize("change", [*CHANGES, under_inference_mode, on_one_rank], ids=lambda change: change.__name__)
def test_a_change_is_found_whenever_it_begins(change: Change) -> None:
    ranks = trained(Counting(), change)
    assert_equal(ranks)
    alone = Counting()
    alone.change = change
    for _ in range(NUM_STEPS):
        alone(torch.zeros(6, 8))
    for name, buffer in alone.named_buffers():
        assert torch.equal(ranks[0][name].nan_to_num(5), buffer.nan_to_num(5)), f"{name} is not rank 0's"


@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero2"])
def test_in_every_preset(preset: str) -> None:
    for change in (unversioned, assigned, of_another_shape):
        assert_equal(trained(Counting(), change, preset))


def test_one_element_of_a_large_buffer() -> None:
    def change(module: nn.Module, rank: int, step: int) -> None:
        if step == 3:
            module.running.data[70_001] = rank + 1.0

    ranks = trained(Counting(100_003), change)
    assert_equal(ranks)
    assert ranks[0]["running"].sum() == 1


def test_elements_of_a_large_buffer_that_change_places() -> None:
    def change(module: nn.Module, rank: int, step: int) -> None:
        if step == 3:
            module.running.data.copy_(module.running.flip(0) if rank else module.running.roll(2048))

    model = Counting(100_003)
    model.running.copy_(torch.arange(100_003.0))
    assert_equal(trained(model, change))


def test_a_batch_norm_that_is_unfrozen_later() -> None:
    class Normed(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.norm.eval()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    def unfreeze(module: nn.Module, rank: int, step: int) -> None:
        if step == 2:
            module.norm.train()

    ranks = trained(Normed(), unfreeze)
    assert_equal(ranks)
    assert ranks[0]["norm.num_batches_tracked"] == NUM_STEPS - 3


def test_each_rank_keeps_its_own_if_asked() -> None:
    one, two = trained(Counting(), in_place, sync_buffers=False)
    assert torch.equal(two["running"], 2 * one["running"])


def test_ranks_exchange_names_only_when_something_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges: list[int] = []
    exchange = sw.World.exchange

    def counted(world: sw.World, message: bytes, subject: str = "message") -> list[bytes]:
        exchanges.append(world.rank)
        return exchange(world, message, subject)

    monkeypatch.setattr(sw.World, "exchange", counted)

    def num_exchanges(change: Change | None) -> int:
        exchanges.clear()
        trained(Counting(), change)
        return len(exchanges) // 2

    without = num_exchanges(None)
    assert num_exchanges(assigned) == without + 1
    assert num_exchanges(in_place) == without + 1
    assert num_exchanges(of_another_shape) == without + NUM_STEPS


def test_what_never_changes_is_never_sent() -> None:
    replicas = [Counting() for _ in range(2)]

    def rank(world: sw.World) -> str:
        replica = replicas[world.rank]
        with sw.shard(replica, optimizer=torch.optim.SGD(replica.parameters(), lr=0.1), world=world) as engine:
            for _ in range(3):
                engine.backward(engine(torch.ones(2, 8)))
                engine.step()
            return engine.program()

    assert "buffers" not in run_ranks(2, rank)[0]


def test_a_sparse_one_is_refused() -> None:
    model = Counting()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(ModelError, match="The buffer graph is sparse"):
        trained(model, None)


def test_one_that_becomes_sparse_is_refused() -> None:
    def change(module: nn.Module, rank: int, step: int) -> None:
        if step == 2:
            module.running = torch.eye(3).to_sparse()

    with pytest.raises(ModelError, match="The buffer running has changed, and one that is sparse"):
        trained(Counting(), change)


class Projected(nn.Module):
    """Multiplies by a buffer, which is cast by nobody, by its own forward, or before it is sharded."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        dtype = torch.bfloat16 if how == "before" else torch.float32
        self.register_buffer("scale" if how == "scaled" else "proj", torch.eye(8, dtype=dtype))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if self.how == "scaled":  # the next layer raises, as its input is not in bf16 any more
            hidden = hidden * self.scale.sum(0)
        else:
            hidden = hidden @ (self.proj.to(hidden.dtype) if self.how == "inside" else self.proj)
        return self.head(hidden).float().square().mean()


@pytest.mark.parametrize("how", ["nobody", "scaled", "inside", "before"])
def test_one_that_is_used_as_a_weight_in_bf16_is_named_with_a_cure_that_works(how: str) -> None:
    def work(engine: sw.Engine) -> str:
        try:
            engine.backward(engine(torch.randn(6, 8)))
            engine.step()
        except RuntimeError as error:
            return "".join(error.__notes__)
        return "trained"

    plan = {"preset": "zero3", "precision": "bf16"}
    name = "scale" if how == "scaled" else "proj"
    for told in work_on_ranks(2, work, plan, Projected(how)):
        assert (f"not the buffers {name}, of which the first is torch.float32" in told) == (how in ("nobody", "scaled"))
        assert (told == "trained") == (how in ("inside", "before"))
