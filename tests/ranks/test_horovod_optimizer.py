"""Loops with Horovod's `DistributedOptimizer`, compared with the same loop on whole batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
import shardwise.integrations.horovod.torch as hvd
from shardwise.testing import run_ranks
from tests.ranks.horovod_ranks import on_ranks
from tests.thorough import sampled

Tensor = torch.Tensor
RANKS, ROWS, STEPS = 3, 4, 5


class Net(nn.Module):
    """A model with a layer that some ranks do not use, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6, sparse=False)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
        self.side = nn.Linear(6, 6)
        self.head = nn.Linear(6, 13)
        self.head.bias.requires_grad_(False)

    def forward(self, tokens: Tensor, *, uses_side: bool = True) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.body(hidden)
        return self.head(hidden + self.side(hidden) if uses_side else hidden)


def loss_of(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(model(tokens, **options).flatten(0, -2), tokens.roll(1, -1).flatten())


def model_and_batches() -> tuple[Net, Tensor]:
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(0)
    return Net(), torch.randint(13, (STEPS, 2, RANKS, ROWS, 5), generator=generator)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.3, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def plain(model: Net, batches: Tensor, make: Callable[[Any], torch.optim.Optimizer], passes: int, clip: float) -> Net:
    """Run the loop in one process: gradients are summed over passes and averaged over ranks."""
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for batch in batches:
        for micro in batch[:passes]:
            torch.stack(
                [loss_of(model, rows, uses_side=rank != 1) for rank, rows in enumerate(micro)]
            ).mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model


def distributed(
    model: Net,
    batches: Tensor,
    make: Callable[[Any], torch.optim.Optimizer],
    passes: int,
    clip: float,
    options: dict[str, Any],
) -> tuple[list[Tensor], list[Tensor]]:
    rank = hvd.rank()
    model = copy.deepcopy(model)
    if rank:
        with torch.no_grad():
            model.head.weight.add_(1)  # the broadcast undoes this
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    given = {"groups": [list(model.body.parameters()), [model.head.weight]]} if options.get("groups") == "lists" else {}
    optimizer = make(model.parameters())
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=passes, **{**options, **given}
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    steps: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    grads: list[Tensor] = []
    for batch in batches:
        for micro in batch[:passes]:
            loss_of(model, micro[rank], uses_side=rank != 1).backward()
        if clip:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        optimizer.zero_grad(set_to_none=bool(rank % 2))
        schedule.step()
    assert len(steps) == len(batches)
    return [param.detach() for param in model.parameters()], grads


@sampled
@pytest.mark.parametrize(
    ("make", "passes", "clip", "options"),
    [
        (sgd, 1, 0.0, {}),
        (adamw, 2, 0.1, {"gradient_predivide_factor": 2.0}),
        (adamw, 1, 0.0, {"groups": 2}),
        (sgd, 2, 0.0, {"groups": "lists", "gradient_predivide_factor": 3.0}),
    ],
)
def test_a_loop_equals_the_one_on_whole_batches(
    make: Callable[[Any], torch.optim.Optimizer], passes: int, clip: float, options: dict[str, Any]
) -> None:
    model, batches = model_and_batches()
    results = on_ranks(RANKS, lambda: distributed(model, batches, make, passes, clip, options))
    expected = plain(copy.deepcopy(model), batches, make, passes, clip)
    for params, grads in results:
        torch.testing.assert_close(params, [param.detach() for param in expected.parameters()], atol=1e-6, rtol=1e-5)
        assert all(torch.equal(mine, first) for mine, first in zip(grads, results[0][1], strict=True))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 warns in `coalesce`
@pytest.mark.parametrize("groups", [0, 1])
def test_sparse_gradients_sent_as_dense_stay_sparse_for_the_optimizer(groups: int) -> None:
    tables = nn.ModuleList(nn.Embedding(11, 3, sparse=True) for _ in range(2))
    tokens = torch.arange(RANKS * 4).reshape(RANKS, 4) % 7

    def work() -> list[Tensor]:
        model = copy.deepcopy(tables)
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=True, num_groups=groups)
        for _ in range(3):
            optimizer.zero_grad()
            sum(table(tokens[hvd.rank()]).square().sum() for table in model).backward()
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    results = on_ranks(RANKS, work)
    optimizer = torch.optim.SparseAdam(list(tables.parameters()), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        (sum(table(tokens).square().sum() for table in tables) / RANKS).backward()
        optimizer.step()
    for weights in results:
        torch.testing.assert_close(weights, [param.detach() for param in tables.parameters()])


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense: bool) -> None:
    embedding = nn.EmbeddingBag(11, 3, sparse=True, mode="sum")
    tokens = torch.randint(11, (RANKS, 4, 2))

    def work() -> Tensor:
        model = copy.deepcopy(embedding)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), sparse_as_dense=as_dense)
        for _ in range(2):
            optimizer.zero_grad()
            model(tokens[hvd.rank()]).square().sum().backward()
            optimizer.step()
        optimizer.zero_grad()
        if hvd.rank() == 0:  # the others have no rows in this step
            model(tokens[0]).square().sum().backward()
        optimizer.step()
        assert model.weight.grad is not None
        assert model.weight.grad.is_sparse
        return model.weight.detach()

    results = on_ranks(RANKS, work)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        (sum(embedding(rows).square().sum() for rows in tokens) / RANKS).backward()
        optimizer.step()
    optimizer.zero_grad()
    (embedding(tokens[0]).square().sum() / RANKS).backward()
    optimizer.step()
    for weight in results:
        torch.testing.assert_close(weight, embedding.weight.detach())


def test_fp16_compression_and_a_process_set() -> None:
    """Two of three ranks average gradients; the third uses its own."""
    model, batches = model_and_batches()

    def rank_of(world: sw.World) -> list[Tensor]:
        pair = hvd.ProcessSet([0, 2])
        hvd.init(world, process_sets=[pair])
        mine = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(
            sgd(mine.parameters()), mine.named_parameters(), compression=hvd.Compression.fp16, process_set=pair
        )
        assert (optimizer.op, optimizer.process_set, optimizer.backward_passes_per_step) == (hvd.Average, pair, 1)
        assert (optimizer.gradient_predivide_factor, optimizer.sparse_as_dense) == (1.0, False)
        loss_of(mine, batches[0, 0, hvd.rank()]).backward()
        optimizer.step()
        hvd.shutdown()
        return [param.grad for param in mine.parameters() if param.grad is not None]

    results = run_ranks(RANKS, rank_of)
    own = []
    for rank in range(RANKS):
        twin = copy.deepcopy(model)
        loss_of(twin, batches[0, 0, rank]).backward()
        own.append([param.grad for param in twin.parameters() if param.grad is not None])
    torch.testing.assert_close(results[1], own[1])
    torch.testing.assert_close(
        results[0], [(a + b) / 2 for a, b in zip(own[0], own[2], strict=True)], atol=2e-4, rtol=2e-3
    )
    assert all(map(torch.equal, results[0], results[2]))


def test_adasum_of_equal_gradients_is_one_update() -> None:
    """Each rank has its own optimizer state."""
    model, batches = model_and_batches()

    def work() -> list[Tensor]:
        mine = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(adamw(mine.parameters()), mine.named_parameters(), op=hvd.Adasum)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(mine, batches[0, 0, 0]).backward()
            optimizer.step()
        return [param.detach() for param in mine.parameters()]

    results = on_ranks(2, work)
    optimizer = adamw(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, batches[0, 0, 0]).backward()
        optimizer.step()
    torch.testing.assert_close(results[1], [param.detach() for param in model.parameters()], atol=1e-5, rtol=1e-5)


def test_a_broadcast_of_no_state_leaves_zero_gradients() -> None:
    """Horovod creates an optimizer's state by a step with zeros, and scripts read them."""

    def work() -> None:
        words, frozen = nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3, bias=False).requires_grad_(False)
        model = nn.Sequential(words, frozen, nn.Linear(3, 2, bias=False))
        params, before = list(model.parameters()), copy.deepcopy(model.state_dict())
        for optimizer, given, are_sparse in (
            (sgd(params), None, (False, False)),
            (sgd(params), model, (True, False)),
            (torch.optim.SparseAdam([words.weight]), None, (True, None)),
        ):
            model.zero_grad()
            hvd.broadcast_optimizer_state(optimizer, 0, given)
            grads = [param.grad for param in (words.weight, model[2].weight)]
            assert [None if grad is None else grad.is_sparse for grad in grads] == list(are_sparse)
            assert not any(grad.to_dense().any() for grad in grads if grad is not None)
            assert frozen.weight.grad is None
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        optimizer = adamw(model[2].parameters())
        model[2](torch.ones(1, 3)).sum().backward()
        optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert model[2].weight.grad.any()

    on_ranks(2, work)


def test_wrong_arguments_and_calls_in_a_wrong_order_are_refused() -> None:
    model, batches = model_and_batches()

    def work() -> None:
        mine = copy.deepcopy(model)
        named = list(mine.named_parameters())
        with pytest.raises(ValueError, match="two parameters named 'w'"):
            hvd.DistributedOptimizer(sgd(mine.parameters()), [("w", param) for _, param in named])
        with pytest.raises(ValueError, match="not in named_parameters"):
            hvd.DistributedOptimizer(sgd(mine.parameters()), named[:2])
        with pytest.raises(ValueError, match="gradient_predivide_factor needs"):
            hvd.DistributedOptimizer(sgd(mine.parameters()), named, op=hvd.Sum, gradient_predivide_factor=2.0)
        with pytest.raises(ValueError, match=r"takes model\.state_dict"):
            hvd.broadcast_parameters(mine.parameters(), 0)
        with pytest.raises(ValueError, match="L-BFGS"):
            hvd.broadcast_optimizer_state(torch.optim.LBFGS(mine.parameters()), 0)
        optimizer = hvd.DistributedOptimizer(sgd(mine.parameters()), named)
        assert isinstance(optimizer, torch.optim.SGD)
        rows = batches[0, 0, hvd.rank()]
        loss_of(mine, rows).backward()
        with pytest.raises(AssertionError, match="while gradients are in flight"):
            optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step=1"):
            loss_of(mine, rows).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match="skip_synchronize"):
            optimizer.step()

    on_ranks(1, work)


def test_batch_norm_over_all_ranks() -> None:
    """With batches of different sizes, gradients and running statistics equal those of one batch."""
    rows = torch.randn(7, 3, 2, 2, dtype=torch.float64)
    parts = rows.split([1, 4, 2])
    weights = torch.randn_like(rows)
    one = nn.BatchNorm2d(3, dtype=torch.float64)
    whole = rows.clone().requires_grad_()
    (one(whole) * weights).sum().backward()
    assert whole.grad is not None

    def work() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        norm = hvd.SyncBatchNorm(3).double()
        x = parts[hvd.rank()].clone().requires_grad_()
        y = norm(x)
        (y * weights.split([1, 4, 2])[hvd.rank()]).sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad, norm.running_mean, norm.running_var

    results = on_ranks(RANKS, work)
    torch.testing.assert_close(torch.cat([grad for _, grad, _, _ in results]), whole.grad)
    for _, _, mean, variance in results:
        torch.testing.assert_close((mean, variance), (one.running_mean, one.running_var))


def test_an_elastic_loop_returns_to_its_commit() -> None:
    """After an error of all ranks within an epoch, the loop still sees every sample once, and ranks end equal."""
    model, _ = model_and_batches()
    tokens = torch.randint(13, (24, 5), generator=torch.Generator().manual_seed(1))

    def train(fails_at: int) -> tuple[list[Tensor], list[int], list[int]]:
        mine = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(adamw(mine.parameters()), mine.named_parameters())
        sampler = hvd.elastic.ElasticSampler(range(24), shuffle=True, seed=1)
        state = hvd.elastic.TorchState(model=mine, optimizer=optimizer, sampler=sampler, batch=0)
        seen: list[list[int]] = []
        resets: list[int] = []
        state.register_reset_callbacks([lambda: resets.append(len(seen)), lambda: seen.__delitem__(slice(2, None))])
        left = [fails_at]

        @hvd.elastic.run
        def loop(state: Any) -> None:
            indices = list(state.sampler)
            for number in range(len(indices) // 2):
                chosen = state.sampler.get_indices(number, 2)
                if state.batch == left[0]:
                    left.clear()
                    left.append(-1)
                    hvd.allreduce(torch.ones(1 + hvd.rank()), name="boom")
                state.optimizer.zero_grad()
                loss_of(state.model, tokens[chosen]).backward()
                state.optimizer.step()
                state.sampler.record_batch(number, 2)
                seen.append(chosen)
                state.batch += 1
                if state.batch % 2 == 0:
                    state.commit()

        loop(state)
        assert sampler.processed_num == len(sampler.processed_indices) == 24
        return [param.detach() for param in mine.parameters()], [one for chosen in seen for one in chosen], resets

    broken = on_ranks(2, lambda: train(3))
    assert all(resets == [3] for _, _, resets in broken)
    assert [len(seen) for _, seen, _ in broken] == [12, 12]
    assert sorted(broken[0][1] + broken[1][1]) == list(range(24))
    assert all(map(torch.equal, broken[0][0], broken[1][0]))
