"""When a process's heap serves the large blocks of a backward: see [Note: blocks of a backward] in `system/heap.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from twins import adamw

import shardwise as sw
from shardwise.sharded import assembly
from shardwise.system.heap import HEAP_BLOCK_BYTES, BackwardHeap
from shardwise.testing import run_ranks
from tests import inside


class Told:
    """A heap that grows in each backward; its last block is freed behind the end of that."""

    def __init__(self) -> None:
        self.end = 0
        self.threshold = HEAP_BLOCK_BYTES
        self.can_shrink = False

    def map_from(self, num_bytes: int) -> None:
        self.threshold = num_bytes
        self.end += num_bytes > HEAP_BLOCK_BYTES

    def shrink_to(self, end: int) -> bool:
        if self.can_shrink:
            self.end = min(self.end, end)
        return self.end <= end


class Model(nn.Module):
    def __init__(self, told: Told) -> None:
        super().__init__()
        self.layer, self.told = nn.Linear(4, 4), told
        self.thresholds: list[int] = []

    def forward(self, x: Tensor, *, raises: str = "") -> Tensor:
        self.thresholds.append(self.told.threshold)
        if raises == "forward":
            raise ValueError(raises)
        y: Tensor = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda _: self.look(raises))
        return y.sum()

    def look(self, raises: str) -> None:
        self.thresholds.append(self.told.threshold)
        if raises == "backward":
            raise ValueError(raises)


def test_large_blocks_come_from_the_heap_in_a_backward_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And after each of them the heap ends where it did before it, however that ended."""
    heaps: dict[int, BackwardHeap] = {}
    monkeypatch.setattr(assembly, "heap_for_backwards", lambda: heaps[threading.get_ident()])

    def rank(world: sw.World) -> tuple[str, list[int]]:
        told = Told()
        heaps[threading.get_ident()] = BackwardHeap(told)
        model = Model(told)
        x, seen, ends = torch.ones(2, 4), list[str](), list[int]()

        def look() -> None:
            """Whether large blocks came from the heap, at each look of the model, and do so now."""
            thresholds = [*model.thresholds, told.threshold]
            model.thresholds.clear()
            seen.append("".join(str(int(one > HEAP_BLOCK_BYTES)) for one in thresholds))
            ends.append(told.end)

        with sw.shard(model, "zero2", optimizer=adamw(model), world=world) as engine:
            engine.backward(engine(x))
            look()
            told.can_shrink = True
            engine.step()
            look()
            engine(x)  # its backward never comes
            engine.backward(engine(x))
            engine.step()
            look()
            with torch.no_grad():
                engine(x)
            look()
            for raises in ("forward", "backward"):
                with pytest.raises(ValueError, match=raises):
                    engine.backward(engine(x, raises=raises))
                engine.zero_grad()
                look()
        return " ".join(seen), ends

    for seen, ends in run_ranks(2, rank):
        assert seen == "010 0 0010 00 00 010"
        assert ends == [1, 0, 0, 0, 0, 0]


class Looking(nn.Linear):
    """Tells in its backward, of which thread it is."""

    def __init__(self, looks: Callable[[], None]) -> None:
        super().__init__(4, 4)
        self.looks = looks

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda _: self.looks())
        return y


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_in_stages_the_heap_serves_backwards_that_follow_a_forward(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the clock prices them. Another backward begins where the one before has ended."""
    told: dict[int, Told] = {}
    seen: dict[int, list[bool]] = {}

    def look() -> None:
        thread = threading.get_ident()
        seen[thread].append(told[thread].threshold > HEAP_BLOCK_BYTES)

    monkeypatch.setattr(assembly, "heap_for_backwards", lambda: BackwardHeap(told[threading.get_ident()]))
    plan = {"preset": "zero2", "mesh": {"pp": 2, "dp": 2}, "accumulate": 3, "pipeline": {"schedule": schedule}}

    def rank(world: sw.World) -> tuple[list[bool], list[bool]]:
        thread = threading.get_ident()
        told[thread], seen[thread] = Told(), []
        model = nn.Sequential(Looking(look), Looking(look))
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            for _ in range(2):
                seen[thread].clear()
                engine.train_step(torch.ones(3, 4), loss_fn=torch.sum)
            layout = inside.sharded(engine).parts.pipeline.layout  # type: ignore[union-attr]
            row = layout.schedule.rows[layout.pp_rank_of(world.rank // 2)]
            return seen[thread], [before.kind == "F" for before, op in pairwise(row) if op.kind in "BI"]

    for found, expected in run_ranks(4, rank):
        assert found == expected
        assert any(found)


@pytest.mark.parametrize("way", ["one rank", "budget"])
def test_the_heap_serves_none_where_gradients_stay_or_memory_is_short(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that stay where autograd has made them would lie in it after the backward."""
    monkeypatch.setattr(assembly, "heap_for_backwards", lambda: pytest.fail("it is not to be asked"))
    monkeypatch.setattr(assembly, "heap_to_keep_small", lambda: None)
    plan = {"preset": "zero2", **({"budget": {"device": "100MiB"}} if way == "budget" else {})}

    def rank(world: sw.World) -> None:
        model = nn.Linear(4, 4)
        with sw.shard(model, plan, optimizer=adamw(model), world=world) as engine:
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()

    run_ranks(1 if way == "one rank" else 2, rank)
