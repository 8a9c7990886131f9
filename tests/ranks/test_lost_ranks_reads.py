"""Ranks are lost while the others read whole tensors between steps, or close their engines. All ranks read the right
values, and those that have finished wait for those that have not."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.comm import World
from shardwise.errors import StateError
from tests.faults.exact_training import Model, alone, loader, loss_of, optimizer_of
from tests.ranks.test_lost_ranks import DISK, DISKS, PLANS
from tests.ranks.threads_as_members import Killed, run_members
from tests.thorough import drawn, sampled, thorough_only

Tensor = torch.Tensor
NUM_RANKS, NUM_STEPS = 3, 4
ON_FOUR = ("hsdp", "hpz")
"""Plans whose mesh has four ranks."""
Reads = Callable[[sw.Engine], dict[str, Tensor]]


class DiesSending:
    """A member dies before it sends message number `left`, counted from `arm` on. Ranks that already have everything
    they need from it continue; the others are interrupted."""

    def __init__(self, engine: sw.Engine, left: int) -> None:
        self._engine, self._left = engine, left
        self.num_sent = 0

    def arm(self) -> None:
        transport = self._engine.world.transport
        send = transport.send

        def counted(*args: Any) -> Any:
            if self.num_sent == self._left:
                raise Killed
            self.num_sent += 1
            return send(*args)

        transport.send = counted  # type: ignore[method-assign]


def read_all(engine: sw.Engine) -> dict[str, Tensor]:
    """Parameters and momenta, read in three ways."""
    found = dict(engine.state_dict())
    single = engine.get("blocks.1.weight")
    assert single is not None
    assert torch.equal(single, found["blocks.1.weight"])
    states = engine.optimizer_state_dict()["state"]
    found |= {f"momentum {index}": state["momentum_buffer"].clone() for index, state in states.items()}
    return found


def read_plainly(engine: sw.Engine) -> dict[str, Tensor]:
    """Parameters, read by torch's own functions, as in code that averages weights."""
    params = dict(engine.module.named_parameters())
    with torch.no_grad():
        found = {name: param.detach().clone() for name, param in params.items()}
        both = params["blocks.0.weight"] + params["blocks.1.weight"]
        assert torch.equal(both, found["blocks.0.weight"] + found["blocks.1.weight"])
    return found


def lived(
    name: str,
    left: int,
    folder: Path,
    at_step: int = 2,
    reads: Reads = read_all,
    victim: int = 1,
    num_ranks: int | None = None,
) -> tuple[list[list[dict[str, Tensor]]], int]:
    """What each surviving rank read after each step from the second on, and how many messages the victim sent from its
    read after `at_step` on."""
    sent = [0]

    def work(world: World, member: int) -> list[dict[str, Tensor]]:
        model = Model()
        plan = PLANS.get(name) or {**DISKS[name], "disk": str(folder / DISK)}
        engine = sw.shard(model, plan, optimizer=optimizer_of(model), world=world)
        dies = DiesSending(engine, left if member == victim else 10**9)
        found = []
        with loader(engine.data_ranks, 1) as batches:
            while engine.num_steps < NUM_STEPS:
                for batch in batches:
                    step = engine.num_steps
                    engine.backward(loss_of(model(batch["index"], batch["x"]), batch["weight"]))
                    engine.step()
                    if engine.num_steps == step:
                        continue
                    if engine.num_steps == at_step and member == victim:
                        dies.arm()
                    if engine.num_steps >= 2:
                        found.append(reads(engine))
                    if engine.num_steps == NUM_STEPS:
                        break
        engine.close()
        sent[0] = max(sent[0], dies.num_sent)
        return found

    results = run_members(num_ranks or num_ranks_of(name), work, folder, shares_memory=False)
    return [results[member] for member in sorted(results)], sent[0]


def num_ranks_of(name: str) -> int:
    return NUM_RANKS + (name in ON_FOUR)


def check(
    name: str, folder: Path, at_step: int, places: Callable[[int], Iterable[int]], reads: Reads = read_all
) -> None:
    params = [params for _, params in alone(NUM_STEPS)]
    _, num_sent = lived(name, 10**9, folder, at_step, reads)
    assert not [path for path in folder.rglob("*") if path.is_file()], "all have closed"
    for left in places(num_sent):
        found, _ = lived(name, left, folder, at_step, reads)
        assert len(found) == num_ranks_of(name) - 1, left
        for one in found:
            assert len(one) == NUM_STEPS - 1, left
            for step, read in enumerate(one):
                for key, whole in params[step + 1].items():
                    assert (read[key].double() == whole).all(), (left, step, key)
                assert all(torch.equal(read[key], found[0][step][key]) for key in read), (left, step)
        left_there = [*folder.rglob("*.image"), *folder.rglob("*.rows-*")]
        assert not left_there, "images of a job that has ended"


@sampled
@pytest.mark.parametrize("name", [*PLANS, "infinity", "params"])
def test_a_rank_dies_anywhere_in_a_read(name: str, tmp_path: Path) -> None:
    """At that time some of the other ranks have the result, and some do not."""
    check(name, tmp_path, 2, lambda _: range(7, 40, drawn(13, 1)))


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("name", [*PLANS, "infinity", "params"])
def test_a_rank_dies_anywhere_in_the_last_read_or_in_close(name: str, tmp_path: Path) -> None:
    """At that time some of the other ranks have finished, and some still need data from those."""
    check(name, tmp_path, NUM_STEPS, lambda num_sent: range(num_sent - drawn(3, num_sent), num_sent))


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("name", [name for name in PLANS if name != "ddp"])
def test_a_rank_dies_anywhere_in_the_first_read_by_torch_alone(name: str, tmp_path: Path) -> None:
    """Nothing was read before, so no commit has waited for what is read."""
    check(name, tmp_path, 2, lambda num_sent: range(0, min(num_sent, drawn(8, 40)), drawn(3, 1)), read_plainly)


@sampled
@pytest.mark.parametrize("name", ["zero3", "zero1"])
def test_the_last_rank_has_plain_parameters_in_the_middle_of_a_read(name: str, tmp_path: Path) -> None:
    """One operand of the sum has been gathered by then, or none. Once, the sum asked a plain parameter for its home."""
    params = [params for _, params in alone(NUM_STEPS)]
    for left in (0, 1, 2, 7, 8):
        ((read, *_), *others), _ = lived(name, left, tmp_path, 2, read_plainly, num_ranks=2)
        assert not others
        assert all((read[key].double() == whole).all() for key, whole in params[1].items() if key in read), left


@sampled
@pytest.mark.parametrize("shares_memory", [False, True])
@pytest.mark.parametrize("name", ["zero3", "zero1"])
def test_one_that_comes_reads_what_the_others_have_and_cannot_change_it(
    name: str, shares_memory: bool, tmp_path: Path
) -> None:
    """It reads before its loop, at a point where the other ranks are not. Once, such a read brought down all ranks."""
    params = [params for _, params in alone(NUM_STEPS)]

    def work(world: World, member: int) -> int:
        model = Model()
        engine = sw.shard(model, PLANS[name], optimizer=optimizer_of(model), world=world)
        if member == NUM_RANKS:
            state, single = engine.state_dict(), engine.get("blocks.1.more.weight")
            assert single is not None
            expected = params[engine.num_steps - 1]
            assert all((state[key].double() == whole).all() for key, whole in expected.items())
            assert (single.double() == expected["blocks.1.more.weight"]).all()
            with pytest.raises(StateError, match=r"has just joined .* optimizer_state_dict"):
                engine.optimizer_state_dict()
            with pytest.raises(StateError, match=r"has just joined .* a change of values"):
                engine.load_state_dict(state)
            with pytest.raises(StateError, match=r"has just joined .* the momentum_buffer of"):
                engine.get("blocks.1.more.weight", "momentum_buffer")
        with loader(engine.data_ranks, 1) as batches:
            for batch in batches:
                if engine.num_steps == 1 and member == 1:
                    raise Killed
                engine.backward(loss_of(model(batch["index"], batch["x"]), batch["weight"]))
                engine.step()
                if engine.num_steps == NUM_STEPS:
                    break
        state = engine.state_dict()
        assert all((state[key].double() == whole).all() for key, whole in params[-1].items())
        engine.close()
        return member

    found = run_members(NUM_RANKS, work, tmp_path, shares_memory=shares_memory, num_newcomers=1)
    assert set(found) >= {0, 2}
