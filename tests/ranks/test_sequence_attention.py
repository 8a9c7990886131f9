"""Attention over split sequences equals that over whole ones: outputs and gradients, with all-to-alls and rings."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fake_devices import WHENS, Devices, When
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import shardwise as sw
from shardwise.comm import Group, Line
from shardwise.errors import ModelError
from shardwise.parallel.sequence import (
    Layout,
    Visibility,
    Weighing,
    blocks,
    fused,
    ring_attention,
    ulysses,
    ulysses_attention,
)
from shardwise.plan.mesh import Mesh
from shardwise.testing import run_ranks
from tests.thorough import sampled

pytestmark = sampled

Tensor = torch.Tensor
BATCH, TOKENS, DIM = 2, 16, 8


def inputs(num_heads: int, num_kv_heads: int, dtype: torch.dtype = torch.float32, value_dim: int = DIM) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(3)
    shapes = [(num_heads, DIM), (num_kv_heads, DIM), (num_kv_heads, value_dim), (num_heads, value_dim)]
    return [torch.randn(BATCH, heads, TOKENS, dim, generator=numbers).to(dtype) for heads, dim in shapes]


def plain(visibility: Visibility, *tensors: Tensor, softcap: float | None = None) -> list[Tensor]:
    """Explicit scores, mask and softmax; returns the output and the gradients."""
    *inside, grad = tensors
    query, key, value = (tensor.clone().requires_grad_() for tensor in inside)
    repeats = query.shape[1] // key.shape[1]
    keys, values = (tensor.repeat_interleave(repeats, dim=1) for tensor in (key, value))
    at = torch.arange(TOKENS)
    seen = torch.ones(BATCH, TOKENS, TOKENS, dtype=torch.bool)
    if visibility.is_causal:
        seen = seen & (at[:, None] >= at)
    if visibility.window is not None:
        seen = seen & (at[:, None] - at < visibility.window)
    if visibility.documents is not None:
        seen = seen & (visibility.documents[:, :, None] == visibility.documents[:, None])
    if visibility.kept is not None:
        seen = seen & visibility.kept[:, None]
    scores = query @ keys.transpose(-1, -2) / DIM**0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    weights = scores.masked_fill(~seen[:, None], torch.finfo(scores.dtype).min).softmax(-1)
    out = weights.masked_fill(~seen.any(-1)[:, None, :, None], 0) @ values  # zeros for a token that sees nothing
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad)]


def split(
    world: sw.World, kind: str, visibility: Visibility, *tensors: Tensor, softcap: float | None = None
) -> list[Tensor]:
    """This rank's part of the same, with split sequences."""
    line = Line(world.collectives(torch.device("cpu")), Group("sp", tuple(range(world.size)), world.rank))
    layout = Layout(TOKENS, world.size, kind == "zigzag")
    *mine, grad = (layout.take(tensor, world.rank, 2) for tensor in tensors)
    query, key, value = (tensor.requires_grad_() for tensor in mine)
    attention = ulysses_attention if kind == "ulysses" else ring_attention
    out = attention(query, key, value, layout, line, visibility, Weighing(DIM**-0.5, softcap))
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), grad)]


def joined(by_rank: list[list[Tensor]], kind: str) -> list[Tensor]:
    layout = Layout(TOKENS, len(by_rank), kind == "zigzag")
    return [layout.join(list(parts), 2) for parts in zip(*by_rank, strict=True)]


DOCUMENTS = torch.tensor([[0] * 5 + [1] * 6 + [2] * 5, [0] * 15 + [1]])
KEPT = torch.tensor([[False] * 3 + [True] * 13, [True] * 10 + [False] * 6])
SEEN = {
    "causal": Visibility(),
    "all": Visibility(is_causal=False),
    "window": Visibility(window=5),
    "documents": Visibility(documents=DOCUMENTS),
    "documents both ways": Visibility(is_causal=False, documents=DOCUMENTS),
    "padding": Visibility(kept=KEPT),
    "everything": Visibility(window=6, documents=DOCUMENTS, kept=KEPT),
}


@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("kind", ["ulysses", "ring", "zigzag"])
@pytest.mark.parametrize(("num_ranks", "num_kv_heads"), [(2, 4), (2, 1), (4, 2)])
@pytest.mark.parametrize("tile", [512, 3])
def test_is_that_of_the_whole_sequence(
    seen: str, kind: str, num_ranks: int, num_kv_heads: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if masks are larger than what is materialized, and if tiles are smaller than a run and do not divide it."""
    monkeypatch.setattr(blocks, "TILE", tile)
    if tile == 3:
        monkeypatch.setattr(ulysses, "MOST_MASKED", 0)
    tensors = inputs(4, num_kv_heads, value_dim=6)
    expected = plain(SEEN[seen], *tensors)
    by_rank = run_ranks(
        num_ranks, lambda world: split(world, kind, SEEN[seen], *tensors), shares_memory=num_kv_heads == 4
    )
    for name, one, other in zip(("out", "query", "key", "value"), joined(by_rank, kind), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6, msg=lambda text, of=name: f"{of}: {text}")


@pytest.mark.parametrize("kind", ["ulysses", "ring", "zigzag"])
def test_scores_may_be_capped(kind: str) -> None:
    tensors = inputs(4, 2)
    for seen in ("causal", "everything"):
        expected = plain(SEEN[seen], *tensors, softcap=0.7)
        assert (expected[0] - plain(SEEN[seen], *tensors)[0]).abs().max() > 0.1
        by_rank = run_ranks(2, lambda world: split(world, kind, SEEN[seen], *tensors, softcap=0.7))  # noqa: B023
        for one, other in zip(joined(by_rank, kind), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["ulysses", "ring", "zigzag"])
def test_in_fp64_and_narrow(kind: str) -> None:
    """Accurate to fp64's precision in fp64; in bf16 the error is at most a few times that of torch's own attention."""
    for dtype in (torch.float64, torch.bfloat16):
        *tensors, grad = inputs(4, 2, dtype)
        exact = plain(SEEN["causal"], *(tensor.double() for tensor in (*tensors, grad)))
        by_rank = run_ranks(2, lambda world: split(world, kind, SEEN["causal"], *tensors, grad))  # noqa: B023
        query, key, value = (tensor.clone().requires_grad_() for tensor in tensors)
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        torchs = [out, *torch.autograd.grad(out, (query, key, value), grad)]
        for one, other, wide in zip(joined(by_rank, kind), torchs, exact, strict=True):
            assert one.dtype == dtype
            bound = 3 * (other.double() - wide).abs().max() + (1e-12 if dtype == torch.float64 else 1e-2)
            assert (one.double() - wide).abs().max() < bound


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("kind", ["ulysses", "zigzag"])
def test_on_devices_nothing_is_read_before_it_has_come(kind: str, when: When) -> None:
    tensors = inputs(4, 2)
    expected = plain(SEEN["causal"], *tensors)
    mesh = Mesh(("sp",), (4,))

    def rank(world: sw.World) -> list[Tensor]:
        world.collectives(world.device).prepare(mesh)
        return split(world, kind, SEEN["causal"], *tensors)

    by_rank = Devices(when).run(4, rank)
    for one, other in zip(joined(by_rank, kind), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-6)


def test_each_rank_sends_what_the_papers_say() -> None:
    """Ulysses sends a part of the heads of queries, keys, values and outputs once each way. Ring sends keys and values
    n - 1 times each way, and their gradients n times."""
    tensors = inputs(4, 2)
    kv_bytes, q_bytes = (2 * BATCH * heads * TOKENS // 2 * DIM * 4 for heads in (2, 4))

    def rank(world: sw.World, kind: str) -> int:
        ledger = world.collectives(torch.device("cpu")).ledger
        split(world, kind, SEEN["causal"], *tensors)
        return ledger.sent_bytes["all_to_all", "sp"]

    assert run_ranks(2, lambda world: rank(world, "ulysses")) == [(q_bytes + kv_bytes) // 2 * 2] * 2
    assert run_ranks(2, lambda world: rank(world, "ring")) == [kv_bytes + kv_bytes + 2 * kv_bytes] * 2


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("is_zigzag", [False, True])
def test_fused_parts_cover_what_is_seen_once(num_ranks: int, is_zigzag: bool) -> None:
    """For any keys of another rank, one kernel call covers all that is seen of them, exactly once."""
    layout = Layout(4 * num_ranks * 2, num_ranks, is_zigzag)
    positions = [[token for run in runs for token in range(run.start, run.stop)] for runs in layout.runs]
    for mine, theirs in itertools.product(range(num_ranks), repeat=2):
        parts = list(fused.parts(layout.runs[mine], layout.runs[theirs], is_causal=True))
        assert len(parts) <= 1
        seen = {
            (query, key)
            for part in parts
            for query in positions[mine][part.queries]
            for key in positions[theirs][part.keys]
            if not part.is_causal or query >= key
        }
        assert seen == {(query, key) for query in positions[mine] for key in positions[theirs] if query >= key}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fused_parts_come_to_what_tiles_do(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(4, 2, dtype)
    ran: list[bool] = []
    decide = fused.is_fused

    def watched(*args: Any) -> bool:
        ran.append(decide(*args))
        return ran[-1]

    monkeypatch.setattr(fused, "is_fused", watched)
    by_kernel = run_ranks(2, lambda world: split(world, "zigzag", SEEN["causal"], *tensors))
    assert ran
    assert all(ran)
    monkeypatch.setattr(fused, "is_fused", lambda *_: False)
    by_tile = run_ranks(2, lambda world: split(world, "zigzag", SEEN["causal"], *tensors))
    for one, other in zip(joined(by_kernel, "zigzag"), joined(by_tile, "zigzag"), strict=True):
        bound = 1e-12 if dtype == torch.float64 else 2e-6
        torch.testing.assert_close(one, other, rtol=1e-5, atol=bound)


def test_causal_work_is_balanced_in_zigzag_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in tiles of one token. In contiguous order, the last of four ranks has almost six times the work of the
    first."""
    monkeypatch.setattr(blocks, "TILE", 1)

    def work(layout: Layout) -> list[int]:
        every = [run for runs in layout.runs for run in runs]
        return [sum(1 for _ in blocks.tiles(runs, every, Visibility())) for runs in layout.runs]

    assert work(Layout(TOKENS, 4, True)) == [34] * 4
    assert work(Layout(TOKENS, 4)) == [10, 26, 42, 58]


@settings(max_examples=30, deadline=None)
@given(num_ranks=st.integers(1, 5), multiple=st.integers(1, 4), is_zigzag=st.booleans(), dim=st.integers(0, 2))
def test_what_ranks_take_is_the_whole(num_ranks: int, multiple: int, is_zigzag: bool, dim: int) -> None:
    num_tokens = multiple * Layout.multiple(num_ranks, is_zigzag=is_zigzag)
    layout = Layout(num_tokens, num_ranks, is_zigzag)
    shape: list[Any] = [2, 3, 2]
    shape[dim] = num_tokens
    whole = torch.randn(shape)
    parts = [layout.take(whole, rank, dim) for rank in range(num_ranks)]
    assert {part.shape[dim] for part in parts} == {layout.num_local}
    assert torch.equal(layout.join(parts, dim), whole)


def test_heads_that_do_not_divide_are_refused() -> None:
    tensors = inputs(3, 3)
    with pytest.raises(ModelError, match=r"3 heads do not divide among the 2 ranks of axis 'sp'.*attention: ring"):
        run_ranks(2, lambda world: split(world, "ulysses", SEEN["causal"], *tensors))
