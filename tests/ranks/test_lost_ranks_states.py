"""Ranks are lost in jobs with other kinds of state: fp16 and its loss scale, Muon, several optimizers, saves in
progress. Each job is compared with the same one without deaths."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import PostOffice, ThreadTransport, World
from shardwise.elastic.optimizer_attributes import Attributes, ChangedAttributes, take_over
from shardwise.elastic.state_image import TORN, ImagePlace
from shardwise.elastic.survival import NUMBERS, Survival
from shardwise.errors import LostStateError, StateError
from tests import inside
from tests.ranks.test_foreign_optimizers import fading, schedule_free
from tests.ranks.test_lost_ranks import (
    NUM_RANKS,
    NUM_STEPS,
    PLANS,
    ROWS,
    DiesAt,
    Net,
    adamw,
    batches,
    let_die_updated,
    loss_of,
    net,
    race,
)
from tests.ranks.threads_as_members import run_members
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for matrices and AdamW for the rest, as one optimizer; in fp32, since bf16 turns rounding into steps."""
    params = [param for param in model.parameters() if param.requires_grad]
    others = {"params": [param for param in params if param.ndim != 2], "use_muon": False}
    return [sw.optim.Muon([{"params": [param for param in params if param.ndim == 2]}, others], iterate_in="fp32")]


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        torch.optim.AdamW([param for param in params if param.ndim == 2], lr=1e-2),
        torch.optim.SGD([param for param in params if param.ndim != 2], lr=1e-2, momentum=0.9),
    ]


def one(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [adamw(model)]


@dataclass(frozen=True)
class Found:
    """The results of one rank."""

    losses: dict[int, float]
    state: dict[str, Tensor]
    rates: list[float]
    scale: float | None
    num_void: int
    size: int


def trained(
    plan: dict[str, Any],
    make: Callable[[nn.Module], Sequence[torch.optim.Optimizer]],
    deaths: dict[int, int],
    folder: Path,
    *,
    loop: str = "engine",
    after_step: Callable[[sw.Engine], None] = lambda engine: None,
) -> list[Found]:
    """Train, and return the results of the surviving ranks. Each optimizer has two schedulers of the same class."""
    torch.manual_seed(0)
    model = Net()
    models = [copy.deepcopy(model) for _ in range(NUM_RANKS)]

    def work(world: World, member: int) -> Found:
        own = models[member]
        optimizers = make(own)
        engine = sw.shard(own, plan, optimizer=list(optimizers), world=world)
        rates = [torch.optim.lr_scheduler.StepLR(optimizer, size, 0.5) for optimizer in optimizers for size in (2, 3)]
        DiesAt(deaths)(engine, member)
        found: dict[int, float] = {}
        while engine.num_steps < NUM_STEPS:
            step = engine.num_steps
            x, y = (whole.tensor_split(engine.data_ranks[1])[engine.data_ranks[0]] for whole in batches()[step])
            engine.weigh(len(x), ROWS)
            loss = loss_of(own(x), y)
            if loop == "engine":
                engine.backward(loss)
                engine.step()
            else:
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for rate in rates:
                rate.step()
            if engine.num_steps > step:
                found[step] = engine.mean(loss.item())
                after_step(engine)
        scale = engine.scaler.scale if engine.scaler is not None else None
        last = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
        result = Found(found, engine.state_dict(), last, scale, engine.num_void, engine.world.size)
        engine.close()
        return result

    return list(run_members(NUM_RANKS, work, folder).values())


def compare(found: Sequence[Found], whole: Found, bound: float) -> None:
    assert found
    for one_of_them in found:
        assert one_of_them.size == len(found) < NUM_RANKS
        assert one_of_them.num_void == found[0].num_void
        assert one_of_them.rates == whole.rates
        assert one_of_them.scale == whole.scale
        wrong = [
            step for step, loss in one_of_them.losses.items() if abs(loss - whole.losses[step]) > bound * abs(loss)
        ]
        assert len(wrong) <= NUM_RANKS - len(found), "a rank that dies takes its own loss of that step with it"
        for name, value in whole.state.items():
            assert (one_of_them.state[name] - value).abs().max() <= bound * max(1.0, value.abs().max()), name


@sampled
@pytest.mark.parametrize("deaths", [{1: 23}, {0: 41, 2: 50}], ids=str)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
def test_muon(name: str, deaths: dict[int, int], tmp_path: Path) -> None:
    race(PLANS[name], DiesAt(deaths), tmp_path, make=lambda model: muon(model)[0], bound=2e-5)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("deaths", [{1: 23}, {0: 41, 2: 50}], ids=str)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
def test_adafactor(name: str, deaths: dict[int, int], tmp_path: Path) -> None:
    """The states of rows and columns, which every rank has whole, survive with the others."""

    def adafactor(model: nn.Module) -> torch.optim.Optimizer:
        return sw.optim.Adafactor([param for param in model.parameters() if param.requires_grad], lr=1e-2)

    race(PLANS[name], DiesAt(deaths), tmp_path, make=adafactor, bound=2e-5)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("deaths", [{3: 12}, {1: 25}, {0: 41, 2: 50}], ids=str)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_fp16_while_its_scale_is_found(name: str, deaths: dict[int, int], tmp_path: Path) -> None:
    """The first steps overflow: no update, and the scale is halved once for all ranks, however often they repeat it."""
    plan = {**PLANS[name], "precision": "fp16", "loss_scale": {"initial": 2.0**24, "hysteresis": 1}}
    whole = trained(plan, one, {}, tmp_path)[0]
    assert whole.scale is not None
    assert whole.scale < 2.0**24
    compare(trained(plan, one, deaths, tmp_path), whole, 2e-2)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("deaths", [{1: 23}, {0: 41, 2: 55}, {3: 34}], ids=str)
@pytest.mark.parametrize("loop", ["engine", "plain"])
@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_two_optimizers(name: str, loop: str, deaths: dict[int, int], tmp_path: Path) -> None:
    whole = trained(PLANS[name], two, {}, tmp_path, loop=loop)[0]
    compare(trained(PLANS[name], two, deaths, tmp_path, loop=loop), whole, 2e-6)


@thorough_only("slow; smaller tests beside it cover the same code")
@sampled
@pytest.mark.parametrize("deaths", [{1: 30}, {0: 41, 2: 62}, {3: 50}, {0: 25}], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_a_save_is_under_way(name: str, deaths: dict[int, int], tmp_path: Path) -> None:
    """Every step is saved in the background. The last checkpoint can be read and has the trained values."""
    images, folder = tmp_path / "images", tmp_path / "checkpoints"
    images.mkdir()

    def save(engine: sw.Engine) -> None:
        engine.save(folder, wait=False)
        if engine.num_steps == NUM_STEPS:
            engine.wait_for_save()

    whole = trained(PLANS[name], one, {}, images)[0]
    found = trained(PLANS[name], one, deaths, images, after_step=save)
    compare(found, whole, 2e-6)
    assert not list(images.iterdir())
    model = Net()
    with sw.shard(
        model, PLANS["ddp"], optimizer=adamw(model), world=World(0, 1, ThreadTransport(PostOffice(), 0))
    ) as engine:
        loaded = engine.resume(folder)
        assert loaded is not None
        assert loaded.step == NUM_STEPS
        for key, value in engine.state_dict().items():
            assert torch.equal(value, found[0].state[key]), key


@sampled
@pytest.mark.parametrize("deaths", [{1: 25}, {0: 41, 2: 50}], ids=str)
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3"])
def test_states_in_bf16(name: str, deaths: dict[int, int], tmp_path: Path) -> None:
    """Images have them as they are. How a state is rounded depends on the number of its element, and on no rank."""

    def narrow(model: nn.Module) -> list[torch.optim.Optimizer]:
        params = [param for param in model.parameters() if param.requires_grad]
        return [sw.optim.AdamW(params, lr=1e-2, state_dtype="bf16")]

    whole = trained(PLANS[name], narrow, {}, tmp_path)[0]
    compare(trained(PLANS[name], narrow, deaths, tmp_path), whole, 1e-2)


@thorough_only("two things at once; the tests beside it have each")
def test_a_share_on_the_host_in_bf16(tmp_path: Path) -> None:
    plan = {"preset": "zero2", "offload": {"optim": 0.5}, "precision": "bf16"}
    whole = trained(plan, one, {}, tmp_path)[0]
    compare(trained(plan, one, {1: 25}, tmp_path), whole, 2e-2)


@sampled
@pytest.mark.parametrize("make", [schedule_free, fading])
@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3", "hpz", "ddp"])
def test_an_update_that_is_undone_is_not_counted(
    name: str, make: Callable[[nn.Module], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule-free optimizers count their steps in the settings of a group, and weigh by them what they add; others
    in attributes of their own."""
    let_die_updated(monkeypatch, is_taken=name == "ddp")
    race(PLANS[name], lambda engine, member: None, tmp_path, model=net(frozen=False), make=make, bound=1e-5)


class Keeping(torch.optim.SGD):
    """It keeps many things in attributes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.count, self.seen, self.mean, self.rank = 0, [1.0, (2, "a")], torch.zeros(()), 3
        self.sums = torch.zeros(2000)

    def change(self) -> None:
        self.count, self.best = self.count + 1, 0.5
        self.seen.append(3.0)
        self.mean += 1


def test_what_an_optimizer_keeps_in_attributes_is_put_back_or_the_loss_is_refused() -> None:
    model = nn.Linear(2, 2)
    optimizer, other = Keeping(model.parameters()), Keeping(model.parameters())
    before = Attributes.of(optimizer)
    optimizer.change()
    before.restore()
    assert (optimizer.count, optimizer.seen, optimizer.mean.item()) == (0, [1.0, (2, "a")], 0.0)
    assert not hasattr(optimizer, "best")
    changed = ChangedAttributes([optimizer])
    optimizer.change()
    (told,) = json.loads(json.dumps(changed.told()))
    assert told["values"].keys() == {"count", "seen", "mean", "best"}, "not its rank, which may be another elsewhere"
    take_over([other], [told])
    assert (other.count, other.seen, other.mean.item(), other.best) == (1, [1.0, (2, "a"), 3.0], 1.0, 0.5)
    optimizer.sums.add_(1)
    with pytest.raises(LostStateError, match=r"Keeping has changed tensors in attributes of its own \(sums\)"):
        before.restore()
    with pytest.raises(StateError, match=r"Keeping keeps in attributes of its own what cannot be sent \(sums\)"):
        take_over([other], changed.told())


class Counting(torch.optim.SGD):
    """It keeps a state that is no tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["calls"] = self.state[param].get("calls", 0) + 1
        return super().step(closure)


def test_an_image_is_torn_during_an_update_and_then_has_states_that_are_no_tensors(tmp_path: Path) -> None:
    model, (x, y) = Net(), batches()[0]
    with sw.shard(model, "zero1", optimizer=Counting(model.parameters(), lr=0.1, momentum=0.9)) as engine:
        engine.train_step(x, y, loss_fn=loss_of)
        survival = Survival(inside.flats(engine), inside.adopted(engine), ImagePlace(tmp_path, "rank0"))
        survival.begin(1)
        image = survival.image
        assert (image.live_version, image.shadow_version) == (1, 1)
        survival.before_change()
        assert (image.live_version, image.shadow_version) == (TORN, 1)
        engine.train_step(x, y, loss_fn=loss_of)
        survival.complete(2)
        assert (image.live_version, image.shadow_version) == (2, 1)
        [cell] = [cell for cell in image.directory.cells if cell.kind == NUMBERS]
        numbers = json.loads(bytes(image.live(cell).numpy()).rstrip(b"\0"))
        survival.close()
    assert {of_param["calls"] for of_param in numbers.values()} == {2}
