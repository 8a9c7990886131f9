"""Sums of ranks that read each other's memory, and what is left out of them: each bit is as without.

See [Note: own chunks] in `memory/fresh.py`, and [Note: sums of two] in `comm/transport/pairwise.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from twins import adamw, batches, work_on_ranks

import shardwise as sw
from shardwise.comm.transport.shm import shm_collectives
from shardwise.comm.transport.shm.file import is_possible
from shardwise.comm.transport.shm.neighbours import Neighbours
from shardwise.memory import fresh
from shardwise.runtime import grad_mover
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Decoder
from tests.thorough import sampled

Tensor = torch.Tensor
pytestmark = [sampled, pytest.mark.skipif(not is_possible(), reason="this system has no memfd")]
NEVER = 2**60
UNUSED = "aside.weight"


class Aside(Decoder):
    """With a parameter that no forward uses, and one that several chunks share with nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.aside = nn.Linear(33, 7, bias=False)


def train(engine: sw.Engine, rank: int, *, accumulates: bool) -> tuple[dict[str, Tensor], list[float]]:
    norms = []
    for x, y in batches(3, rows=12):
        rows = slice(4 * rank, 4 * rank + 4)
        if accumulates:
            with engine.no_sync():
                engine.backward(engine(x[rows], y[rows]))
            engine.backward(engine(x.flip(0)[rows], y.flip(0)[rows]))
        engine.backward(engine(x[rows], y[rows]))
        norms.append(float(engine.step() or 0.0))
    return engine.state_dict(), norms


def trained(num_ranks: int, plan: dict[str, Any], *, accumulates: bool) -> tuple[dict[str, Tensor], list[float], int]:
    """Parameters, norms, and how many flat buffers of rank 0 have a chunk that lies apart."""
    torch.manual_seed(0)
    model = Aside()

    def rank(world: sw.World) -> tuple[dict[str, Tensor], list[float], int]:
        own = copy.deepcopy(model)
        with sw.shard(own, plan, optimizer=adamw(own), world=world) as engine:
            num_apart = sum(flat.grads.own_span is not None for flat in inside.flats(engine))
            return (*train(engine, world.rank, accumulates=accumulates), num_apart)

    return run_ranks(num_ranks, rank)[0]


@pytest.mark.parametrize("accumulates", [False, True], ids=["one backward", "several"])
@pytest.mark.parametrize(
    ("num_ranks", "plan"),
    [
        (2, {"preset": "zero2"}),
        (2, {"preset": "zero3", "clip_grad_norm": 0.5}),
        (3, {"preset": "zero3"}),
        (2, {"preset": "zero2", "precision": "bf16", "wire": {"grad": "fp32"}}),
        (2, {"preset": "offload"}),
    ],
    ids=str,
)
def test_sums_are_the_same_to_the_bit(
    num_ranks: int, plan: dict[str, Any], accumulates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grad_mover, "LEAST_APART_BYTES", NEVER)
    expected, expected_norms, num_apart = trained(num_ranks, plan, accumulates=accumulates)
    assert num_apart == 0
    monkeypatch.setattr(grad_mover, "LEAST_APART_BYTES", 0)
    found, norms, num_apart = trained(num_ranks, plan, accumulates=accumulates)
    assert num_apart > 0
    assert norms == expected_norms
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_where_gradients_lie_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each parameter of a rank, and not in every step."""
    monkeypatch.setattr(grad_mover, "LEAST_APART_BYTES", 0)
    worked_out: list[Any] = []
    within = fresh._within

    def noting(*place: Any) -> Any:
        worked_out.append(place)
        return within(*place)

    monkeypatch.setattr(fresh, "_within", noting)
    trained(2, {"preset": "zero3"}, accumulates=False)
    assert len(worked_out) == 2 * len(list(Aside().parameters()))


def test_a_gradient_in_two_chunks_is_read_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """By who takes gradients before they are summed; and the memory that ranks share is not written in one's own
    chunk."""
    monkeypatch.setattr(grad_mover, "LEAST_APART_BYTES", 0)

    def work(engine: sw.Engine) -> bool:
        x = torch.arange(6.0) + engine.world.rank
        (flat,) = inside.flats(engine)
        with engine.no_sync():
            engine.backward(engine(x).sum())
        left = flat.grads.fresh
        assert left is not None
        assert left.views == [None]
        [(slot, gradient)] = flat.grads.fresh_gradients()
        assert slot.shape == (5, 6)
        return torch.equal(gradient, (x / 2).expand(5, 6))

    # Of 30 elements: a chunk begins in the middle of a row.
    assert work_on_ranks(2, work, "zero2", lambda: nn.Linear(6, 5, bias=False)) == [True, True]


@pytest.mark.parametrize(("most_bytes", "sizes"), [(1 << 17, [4000]), (0, [4000, 2000])])
def test_a_small_sum_of_two_takes_one_round(most_bytes: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is counted as the same bytes."""
    offers: list[tuple[int, int]] = []
    plain_offer = Neighbours.offer

    def offer(self: Neighbours, tensor: Tensor, *args: Any, **kwargs: Any) -> int:
        offers.append((self.rank, tensor.nbytes))
        return plain_offer(self, tensor, *args, **kwargs)

    monkeypatch.setattr(Neighbours, "offer", offer)
    monkeypatch.setattr(shm_collectives, "_ONE_ROUND_BYTES", most_bytes)
    summands = [torch.randn(1000, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]

    def rank(world: sw.World) -> tuple[Tensor, int]:
        collectives = world.collectives(torch.device("cpu"))
        own = summands[world.rank].clone()
        collectives.all_reduce(own, own, world.everybody, own.dtype, "a sum").wait()
        return own, collectives.ledger.sent_bytes["all_reduce", world.everybody.axis]

    for number, (own, sent_bytes) in enumerate(run_ranks(2, rank)):
        assert torch.equal(own, summands[0] + summands[1])
        assert sent_bytes == 4000
        assert [size for by, size in offers if by == number and size >= 2000] == sizes
