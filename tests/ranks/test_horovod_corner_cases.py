"""Horovod's API in situations that are easily forgotten: `join` with factors, errors, parameters that come later."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
import shardwise.integrations.horovod.torch as hvd
from shardwise.integrations.horovod.errors import InvalidCallError
from shardwise.testing import run_ranks
from tests.ranks.horovod_ranks import on_ranks

Tensor = torch.Tensor


# -- collectives --------------------------------------------------------------------------------------------


def test_a_reduction_that_is_not_possible_fails_alone() -> None:
    def work() -> float:
        with pytest.raises(InvalidCallError, match="Adasum needs a power of two"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
        with pytest.raises(InvalidCallError, match="cannot reduce bool tensors by Average"):
            hvd.allreduce(torch.ones(2, dtype=torch.bool))
        with pytest.raises(ValueError, match="an empty list of tensors"):
            hvd.grouped_allreduce([])
        with pytest.raises(ValueError, match="reducescatter does not support Adasum"):
            hvd.reducescatter(torch.ones(2), op=hvd.Adasum)
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert on_ranks(3, work) == [3, 3, 3]


def test_a_root_may_be_an_integer_of_numpy() -> None:
    def work() -> tuple[list[float], list[float]]:
        x = torch.full((2,), float(hvd.rank()))
        return hvd.broadcast(x, np.int64(1), name="w").tolist(), hvd.broadcast_(x, np.int64(1), name="w").tolist()

    assert on_ranks(2, work) == [([1, 1], [1, 1])] * 2


def test_a_rank_that_has_joined_is_neutral_whatever_the_prescale_factor() -> None:
    def work() -> list[float]:
        results: list[float] = []
        if hvd.rank() == 1:
            x = torch.tensor([3.0])
            for op, factor in ((hvd.Product, 2.0), (hvd.Min, -2.0), (hvd.Max, 0.0), (hvd.Sum, 2.0)):
                results.append(hvd.allreduce(x, op=op, prescale_factor=factor).item())
            results.append(hvd.allreduce(x.int(), op=hvd.Min, prescale_factor=0.5).item())
        hvd.join()
        return results

    assert on_ranks(2, work)[1] == [6, -6, 0, 6, 1]


def test_only_sums_and_averages_have_gradients() -> None:
    """The maximum of the ranks' gradients, for example, would not be the gradient of a maximum."""

    def work() -> None:
        for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
            x = torch.full((2,), 1.0 + hvd.rank(), requires_grad=True)
            y = hvd.allreduce(x, op=op)
            with pytest.raises(ValueError, match=f"allreduce has no gradient for op={op.name}"):
                y.sum().backward()
        x = torch.ones(2, requires_grad=True)
        with pytest.raises(ValueError, match="reducescatter has no gradient for op=Max"):
            hvd.reducescatter(x, op=hvd.Max).sum().backward()

    on_ranks(2, work)


def test_process_sets_of_all_ranks() -> None:
    def work() -> tuple[Any, float]:
        everybody = hvd.add_process_set(range(2))
        return everybody.process_set_id, hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=everybody).item()

    assert on_ranks(2, work) == [(0, 2)] * 2


# -- DistributedOptimizer -----------------------------------------------------------------------------------


def batches(steps: int, size: int) -> Tensor:
    return torch.randn(steps, size, 4, 3, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return model(rows).square().mean()


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))


def changing_loop(model: nn.Sequential, wrap: Callable[[Any], Any], rows_of: Callable[[int], list[Tensor]]) -> Any:
    """The second layer is unfrozen after one step, a new one is added after two, and the first is frozen at the end."""
    model[1].requires_grad_(False)
    optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    for step in range(5):
        if step == 1:
            model[1].requires_grad_(True)
        if step == 2:
            model.append(nn.Linear(2, 2))
            nn.init.eye_(model[2].weight)
            nn.init.zeros_(model[2].bias)
            optimizer.add_param_group({"params": list(model[2].parameters())})
        if step == 4:
            model[0].requires_grad_(False)
            optimizer.zero_grad()
        torch.stack([loss_of(model, rows) for rows in rows_of(step)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("has_names", [True, False])
def test_parameters_that_are_added_unfrozen_and_frozen_later(has_names: bool) -> None:
    data = batches(5, 2)

    def work() -> list[Tensor]:
        model = copy.deepcopy(original)
        names = list(model.named_parameters()) if has_names else None
        result: list[Tensor] = changing_loop(
            model, lambda optimizer: hvd.DistributedOptimizer(optimizer, names), lambda step: [data[step, hvd.rank()]]
        )
        return result

    original = two_layers()
    first, second = on_ranks(2, work)
    expected = changing_loop(copy.deepcopy(original), lambda optimizer: optimizer, lambda step: list(data[step]))
    assert all(map(torch.equal, first, second))
    torch.testing.assert_close(first, expected, atol=1e-6, rtol=1e-5)


def test_gradients_of_a_closure_are_averaged() -> None:
    data = batches(3, 2)
    original = two_layers()

    def loop(model: nn.Module, optimizer: Any, rows_of: Callable[[int], list[Tensor]]) -> list[Tensor]:
        for step in range(len(data)):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = torch.stack([loss_of(model, rows) for rows in rows_of(step)]).mean()  # noqa: B023 (called at once)
                loss.backward()
                return loss

            optimizer.step(closure)
        return [param.detach() for param in model.parameters()]

    def work() -> list[Tensor]:
        model = copy.deepcopy(original)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return loop(model, optimizer, lambda step: [data[step, hvd.rank()]])

    first, second = on_ranks(2, work)
    assert all(map(torch.equal, first, second))
    expected = loop(original, torch.optim.SGD(original.parameters(), lr=0.1), lambda step: list(data[step]))
    torch.testing.assert_close(first, expected, atol=1e-6, rtol=1e-5)


def test_a_step_that_is_left_out_after_synchronize() -> None:
    """`torch.amp.GradScaler` does this after an overflow."""

    def work() -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        loss_of(model, torch.ones(4, 3)).backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        loss_of(model, torch.ones(4, 3)).backward()
        with pytest.raises(AssertionError, match="while gradients are in flight"):
            optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()

    on_ranks(2, work)


def test_adasum_leaves_ranks_outside_of_the_process_set_alone() -> None:
    data = batches(1, 3)[0]
    original = two_layers()

    def rank_of(world: sw.World) -> list[Tensor]:
        pair = hvd.ProcessSet([0, 1])
        hvd.init(world, process_sets=[pair])
        model = copy.deepcopy(original)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum, process_set=pair)
        loss_of(model, data[hvd.rank()]).backward()
        optimizer.step()
        hvd.shutdown()
        return [param.detach() for param in model.parameters()]

    first, second, outside = run_ranks(3, rank_of)
    assert all(map(torch.equal, first, second))
    loss_of(original, data[2]).backward()
    torch.optim.SGD(original.parameters(), lr=0.1).step()
    torch.testing.assert_close(outside, [param.detach() for param in original.parameters()])


def test_no_hooks_are_left_if_init_was_not_called() -> None:
    model = two_layers()
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    loss_of(model, torch.ones(4, 3)).backward()


class Sparse(nn.Module):
    """A model whose second parameter has sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.embedding = nn.Embedding(7, 3, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.embedding(tokens) * self.scale).square().sum()


def test_sparse_gradients_in_a_group() -> None:
    original = Sparse()
    tokens = torch.tensor([[0, 1], [1, 5]])

    def work() -> list[Tensor]:
        model = copy.deepcopy(original)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), num_groups=1, sparse_as_dense=True)
        model(tokens[hvd.rank()]).backward()
        optimizer.step()
        refused = copy.deepcopy(original)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(refused.parameters(), lr=0.1), refused.named_parameters(), num_groups=1
        )
        with pytest.raises(sw.errors.ConfigError, match="is sparse and cannot be in a group"):
            refused(tokens[hvd.rank()]).backward()
        return [param.detach() for param in model.parameters()]

    first, second = on_ranks(2, work)
    assert all(map(torch.equal, first, second))
    optimizer = torch.optim.SGD(original.parameters(), lr=0.1)
    (sum(original(rows) for rows in tokens) / 2).backward()
    optimizer.step()
    torch.testing.assert_close(first, [param.detach() for param in original.parameters()])


# -- batch norm, elastic loops ------------------------------------------------------------------------------


def test_batch_norm_keeps_the_dtype_of_its_input() -> None:
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).bfloat16()

    def work() -> Tensor:
        return hvd.SyncBatchNorm(3)(rows.split(3)[hvd.rank()]).detach()

    normalized = torch.cat(on_ranks(2, work))
    plain = nn.BatchNorm1d(3)(rows)
    assert normalized.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(normalized, plain)


def test_an_elastic_loop_begins_again_without_collectives_of_the_failed_one() -> None:
    """When both ranks fail, rank 0 has issued more collectives than rank 1, some of them unnamed."""

    def work() -> list[float]:
        state = hvd.elastic.ObjectState(hvd.broadcast_object, attempts=0)
        attempts: list[int] = []

        @hvd.elastic.run
        def loop(state: Any) -> list[float]:
            attempts.append(1)
            is_first = len(attempts) == 1
            if is_first and hvd.rank() == 0:
                hvd.allreduce_async(torch.ones(1), name="late")
                hvd.allreduce_async(torch.ones(1))
            if is_first:
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="mismatch")
            late = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)
            return [late.wait().item(), hvd.allreduce(torch.ones(1), op=hvd.Sum).item()]

        sums: list[float] = loop(state)
        assert len(attempts) == 2
        return sums

    assert on_ranks(2, work) == [[2, 2], [2, 2]]


def test_samples_come_in_the_order_in_which_horovod_draws_them() -> None:
    """A script that comes from there reads the same batches: Python's own shuffle, each rank every other sample."""

    def work() -> tuple[list[int], list[int]]:
        sampler = hvd.elastic.ElasticSampler(range(8), seed=3)
        sampler.set_epoch(1)
        first = list(sampler)
        sampler.record_batch(0, 2)
        sampler.load_state_dict(sampler.state_dict())
        return first, list(sampler)

    drawn = [1, 6, 5, 4, 7, 0, 2, 3]  # what `random.Random(4).shuffle` makes of 0 to 7
    assert on_ranks(2, work) == [(drawn[rank::2], drawn[4 + rank :: 2]) for rank in range(2)]


def test_gradients_of_a_failed_attempt_are_dropped() -> None:
    """The state does not contain the optimizer, whose gradients were in flight when the loop failed."""
    data = batches(1, 2)[0]
    original = two_layers()

    def work() -> list[Tensor]:
        model = copy.deepcopy(original)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        attempts: list[int] = []

        @hvd.elastic.run
        def loop(state: Any) -> None:
            attempts.append(1)
            optimizer.zero_grad()
            loss_of(model, data[hvd.rank()]).backward()
            if len(attempts) == 1:
                hvd.allreduce(torch.ones(1 + hvd.rank()), name="mismatch")
            optimizer.step()

        loop(hvd.elastic.ObjectState(hvd.broadcast_object))
        assert len(attempts) == 2
        return [param.detach() for param in model.parameters()]

    first, second = on_ranks(2, work)
    assert all(map(torch.equal, first, second))
    torch.stack([loss_of(original, rows) for rows in data]).mean().backward()
    torch.optim.SGD(original.parameters(), lr=0.1).step()
    torch.testing.assert_close(first, [param.detach() for param in original.parameters()])
