"""Ranks that run a sharded model at their own pace get the plain model's results."""

from __future__ import annotations

import copy
import itertools
import random
import threading
from pathlib import Path

import pytest
import torch
from small_transformers import gpt2, llama
from torch import nn
from twins import adamw, batches, engine_step, work_on_ranks

import shardwise as sw
from shardwise.errors import StateError
from shardwise.memory import GATHERING, Unit
from shardwise.runtime.gathering import Gathering
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Transformer
from tests.patience import PATIENCE
from tests.thorough import drawn, sampled, thorough_only, varies

KEEP = {"whole": None, "some": 30_000, "none": 0}


def prompts(num: int) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(4)
    return [torch.randint(0, 97, (1, 3 + rank), generator=numbers) for rank in range(num)]


@thorough_only("test_generation has other prompts and lengths on every rank, too")
@sampled
@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("keep", KEEP)
def test_generate_with_other_prompts_and_lengths_on_every_rank(build, keep: str) -> None:
    twin = build().eval()
    given = prompts(3)
    lengths = (2, 9, 5)
    expected = [
        twin.generate(prompt, max_new_tokens=length, do_sample=False)
        for prompt, length in zip(given, lengths, strict=True)
    ]
    replicas = [copy.deepcopy(twin) for _ in range(3)]

    def rank(world: sw.World) -> tuple[torch.Tensor, int]:
        engine = sw.shard(replicas[world.rank], "zero3", world=world)
        with engine.inference(KEEP[keep]):
            tokens = engine.module.generate(given[world.rank], max_new_tokens=lengths[world.rank], do_sample=False)
        return tokens, inside.meter(engine).now["working"]

    for (tokens, working), theirs in zip(run_ranks(3, rank), expected, strict=True):
        assert torch.equal(tokens, theirs)
        assert working == 0


@sampled
@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("preset", ["zero3", "zero1", "hsdp"])
def test_any_method_between_training_steps(preset: str, keep: str) -> None:
    """`logits` calls blocks and reads the positions' weights without the model's own forward."""
    num_ranks = 4 if preset == "hsdp" else 2
    torch.manual_seed(0)
    start = Transformer(tied=True)
    replicas = [copy.deepcopy(start) for _ in range(num_ranks)]
    data = batches(3)

    def rank(world: sw.World) -> None:
        model = replicas[world.rank]
        plan = {"preset": preset, **({"mesh": {"node": 2, "local": 2}} if preset == "hsdp" else {})}
        engine = sw.shard(model, plan, optimizer=(optimizer := adamw(model)), world=world)
        for index, (x, y) in enumerate(data):
            engine_step(engine, optimizer, (x, y))
            plain = Transformer(tied=True)
            plain.load_state_dict(engine.state_dict())
            with engine.inference(KEEP[keep]):
                for _ in range((world.rank + index) % 3):
                    assert torch.equal(model.logits(x), plain.logits(x))
                    assert torch.equal(model(x, y), plain(x, y))

    with torch.random.fork_rng():
        run_ranks(num_ranks, rank)


def test_a_rank_that_fails_takes_the_others_along() -> None:
    replicas = [Transformer() for _ in range(3)]
    x, _ = batches(1)[0]
    seen: dict[int, str] = {}
    done = threading.Barrier(3)

    def rank(world: sw.World) -> None:
        engine = sw.shard(replicas[world.rank], "zero3", world=world)

        def answer() -> None:
            with engine.inference(0):
                for index in range(3):
                    if world.rank == 1 and index == 1:
                        raise ValueError("a bad prompt")
                    engine.module.logits(x)

        with pytest.raises((ValueError, StateError)) as caught:
            answer()
        seen[world.rank] = str(caught.value)
        done.wait(PATIENCE)
        with engine.inference():  # and it can be entered again
            engine.module.logits(x)

    run_ranks(3, rank)
    assert seen[1] == "a bad prompt"
    assert "Rank 1 left engine.inference() with an error" in seen[0]
    assert "Rank 1 left engine.inference() with an error" in seen[2]


def test_training_inside_is_refused() -> None:
    model = Transformer()
    engine = sw.shard(model, "zero3")
    x, y = batches(1)[0]
    with pytest.raises(StateError, match="Train outside"), engine.inference(), torch.enable_grad():
        model(x, y)
    with engine.inference(), pytest.raises(StateError, match="inside another engine"), engine.inference():
        pass


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo reads .grad of an input that is no leaf
def test_compiled_units_generate_uncompiled_and_train_on_compiled() -> None:
    replicas = [Transformer() for _ in range(2)]
    data = batches(3)

    def rank(world: sw.World) -> bool:
        model = replicas[world.rank]
        plan = {"preset": "zero3", "compile": "aot_eager"}
        engine = sw.shard(model, plan, optimizer=(optimizer := adamw(model)), world=world)
        for batch in data[:2]:
            engine_step(engine, optimizer, batch)
        with engine.inference(0):
            assert "forward" not in model.blocks[0].__dict__
            for _ in range(world.rank + 1):
                model.logits(data[2][0])
        engine_step(engine, optimizer, data[2])
        return "forward" in model.blocks[0].__dict__

    assert run_ranks(2, rank) == [True, True]


class Tower(nn.Module):
    """Blocks in sequence; `through` uses every `step`-th one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.through(x, 1)

    def through(self, x: torch.Tensor, step: int) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks[::step]:
            x = block(x).tanh()
        return x


UNITS = ["first", *(f"blocks.{index}" for index in range(6))]


def drawn_programs(seed: int) -> None:
    numbers = random.Random(seed)
    num_ranks, keep_bytes = numbers.randint(2, 4), numbers.choice([0, 0, 600, 1200])
    programs = [[numbers.randint(0, 4) for _ in range(numbers.randint(0, 6))] for _ in range(num_ranks)]
    failing, fails_at = numbers.choice([None, numbers.randrange(num_ranks)]), numbers.randint(1, 20)
    torch.manual_seed(seed)
    plain, x = Tower(), torch.randn(2, 8)
    replicas = [copy.deepcopy(plain) for _ in range(num_ranks)]

    def use(model: Tower, number: int) -> torch.Tensor:
        if number == 4:
            return model.blocks[3].weight.sum()
        return model.through(x, number) if number else model(x)

    def rank(world: sw.World) -> str:
        model, calls = replicas[world.rank], itertools.count(1)
        engine = sw.shard(model, {"preset": "zero3", "units": UNITS}, world=world)

        def fail(*_: object) -> None:
            if world.rank == failing and next(calls) == fails_at:
                raise ValueError("as drawn")

        hooks = [block.register_forward_pre_hook(fail) for block in model.blocks]
        found = ""
        try:
            with engine.inference(keep_bytes):
                for number in programs[world.rank]:
                    assert torch.equal(use(model, number), use(plain, number))
        except (ValueError, StateError) as error:
            found = str(error)
        for hook in hooks:
            hook.remove()
        with engine.inference(keep_bytes):
            assert torch.equal(model(x), plain(x))
        assert inside.meter(engine).now["working"] == 0
        return found

    told = run_ranks(num_ranks, rank)
    if not any(told):
        return
    for number, error in enumerate(told):
        assert "as drawn" in error if number == failing else f"Rank {failing} left engine.inference()" in error


@varies
def test_ranks_run_drawn_programs() -> None:
    """Whatever each rank does, and however long, it gets the plain model's values; and if one raises, in whatever it
    does, the others are told, and all can begin again."""
    for seed in range(drawn(2, 200)):
        drawn_programs(seed)


def test_ranks_that_keep_different_units_are_named() -> None:
    replicas = [Transformer() for _ in range(3)]

    def rank(world: sw.World) -> None:
        engine = sw.shard(replicas[world.rank], "zero3", world=world)
        with (
            pytest.raises(StateError, match="keep_bytes=0 on rank 0 and None on rank 2, which gather together"),
            engine.inference(None if world.rank == 2 else 0),
        ):
            pass
        with engine.inference(0):
            pass

    run_ranks(3, rank)


@sampled
@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize(("tier", "num_ranks"), [("disk", 2), ("disk", 1), ("host", 2)])
def test_generation_streams_what_rests_below(build, tier: str, num_ranks: int, tmp_path: Path) -> None:
    """Ranks generate different lengths, without an optimizer, and at most three units are gathered at once."""
    twin = build().eval()
    given, lengths = prompts(num_ranks), (3, 7)
    expected = [
        twin.generate(prompt, max_new_tokens=length, do_sample=False)
        for prompt, length in zip(given, lengths, strict=False)
    ]
    rows = {"param": {"tier": tier}, "optim": {"tier": tier}, "grad": {"tier": "host"}}
    plan = {"preset": "zero3", "rows": rows, "disk": str(tmp_path)}

    def work(engine: sw.Engine) -> tuple[torch.Tensor, int, int]:
        for _ in range(2):
            with engine.inference():
                tokens = engine.module.generate(
                    given[engine.world.rank], max_new_tokens=lengths[engine.world.rank], do_sample=False
                )
        meter = inside.meter(engine)
        sizes = sorted(sum(flat.spec.full_bytes for flat in unit.flats) for unit in inside.units(engine))
        assert meter.peak["working"] <= sum(sizes[-3:])
        return tokens, meter.now["working"], meter.now["param"]

    for (tokens, working, param), theirs in zip(
        work_on_ranks(num_ranks, work, plan, twin, None), expected, strict=True
    ):
        assert torch.equal(tokens, theirs)
        assert working == param == 0


@sampled
@pytest.mark.parametrize(("tier", "num_ranks"), [("disk", 1), ("disk", 3), ("host", 2), ("device", 3)])
def test_the_next_unit_is_on_its_way_and_ranks_may_part(
    tier: str, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second round through the model on, the next unit is prefetched. Ranks that use other blocks still get
    the plain model's values."""
    ready: list[bool] = []
    take = Gathering.open

    def opened(self: Gathering, unit: Unit) -> None:
        ready.append(any(flat.state is GATHERING for flat in unit.flats))
        take(self, unit)

    monkeypatch.setattr(Gathering, "open", opened)
    torch.manual_seed(0)
    plain = Tower()
    x = torch.randn(3, 8)
    rows = {"param": {"tier": tier}, "optim": {"tier": tier}, "grad": {"tier": "host"}}
    plan = {"preset": "zero3", "units": UNITS, **({} if tier == "device" else {"rows": rows, "disk": str(tmp_path)})}

    def work(engine: sw.Engine) -> None:
        model = engine.module
        with engine.inference(0):
            for _ in range(4):
                assert torch.equal(model(x), plain(x))
            if engine.world.size == 1:
                assert ready == [False] * 8 + [True] * 20, "the first forward, and the first unit of the second"
            for turn in range(6):
                step = 1 + (turn + engine.world.rank) % 3
                assert torch.equal(model.through(x, step), plain.through(x, step))
                assert torch.equal(model(x), plain(x))

    work_on_ranks(num_ranks, work, plan, plain, None)
    assert sum(ready) > 20 * num_ranks
