"""Our Adafactor on sharded parameters of any shape, compared with torch's own on the whole model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import work_on_ranks

import shardwise as sw
from shardwise.errors import ModelError
from shardwise.optim import Adafactor
from shardwise.program import States, Update, factored_update
from shardwise.testing import run_ranks
from tests.thorough import sampled

Tensor = torch.Tensor
TORCHS: dict[str, dict[str, Any]] = {
    "defaults": {"lr": 0.05},
    "all settings": {"lr": 0.03, "beta2_decay": -0.5, "eps": (1e-4, 1e-2), "d": 1.5, "weight_decay": 0.1},
}
PLANS: list[tuple[Any, int]] = [
    ("ddp", 2),
    ("zero1", 3),
    ("zero3", 4),
    ({"preset": "hsdp", "mesh": {"node": 2, "local": 2}}, 4),
    ("zero3-offload", 3),
]


SPLIT: dict[str, dict[str, Any]] = {
    "pp": {"mesh": {"pp": 2, "dp": 2}, "accumulate": 2},
    "tp": {"mesh": {"dp": 2, "tp": 2}, "tensor": {"plan": {"0": "column", "1": "row"}}},
}


class Odd(nn.Module):
    """A parameter of each kind of shape: convolutions, one row, one column, a vector, a number, integers, and one that
    is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.point = nn.Conv2d(6, 5, 1)
        self.column, self.row = nn.Linear(1, 7), nn.Linear(7, 1)
        self.sometimes = nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.codes = nn.Parameter(torch.arange(6).view(2, 3), requires_grad=False)

    def forward(self, x: Tensor, *, uses_all: bool = True) -> Tensor:
        pooled = self.point(self.conv(x).tanh()).mean((1, 2, 3))
        wide = self.column(pooled[:, None] * self.scale).tanh()
        if uses_all:
            wide = self.sometimes(wide).tanh()
        loss: Tensor = self.row(wide).square().mean()
        return loss


def data() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [torch.randn(12, 2, 5, 5, generator=numbers) for _ in range(6)]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return Odd()


def feed(engine: sw.Engine, batches: Sequence[Tensor]) -> None:
    for number, x in enumerate(batches):
        engine.backward(engine(x.chunk(engine.world.size)[engine.world.rank], uses_all=number % 3 != 1))
        engine.step()


def plain(settings: dict[str, Any], batches: Sequence[Tensor]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of()
    optimizer = torch.optim.Adafactor(model.parameters(), **settings)
    for number, x in enumerate(batches):
        optimizer.zero_grad()
        model(x, uses_all=number % 3 != 1).backward()
        optimizer.step()
    return model, optimizer


def assert_close(found: dict[str, Tensor], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        assert (found[name] - value).abs().max() <= 1e-5, name


@sampled
@pytest.mark.parametrize("settings", TORCHS)
@pytest.mark.parametrize(("plan", "num_ranks"), PLANS, ids=str)
def test_it_is_torchs_for_parameters_of_any_shape(settings: str, plan: Any, num_ranks: int) -> None:
    def work(engine: sw.Engine) -> Any:
        feed(engine, data())
        return engine.state_dict(), engine.optimizer_state_dict()

    def ours(model: nn.Module) -> Adafactor:
        return Adafactor(model.parameters(), **TORCHS[settings])

    twin, optimizer = plain(TORCHS[settings], data())
    for params, states in work_on_ranks(num_ranks, work, plan, model_of, ours):
        assert_close(params, twin)
        for number, entry in optimizer.state_dict()["state"].items():
            assert list(states["state"][number]) == list(entry)
            for key, value in entry.items():
                assert states["state"][number][key].shape == value.shape
                torch.testing.assert_close(states["state"][number][key].cpu(), value, rtol=1e-3, atol=1e-7)


def test_checkpoints_and_plain_states_continue_on_other_ranks(tmp_path: Path) -> None:
    """Shapes in which a row's state looks like the parameter are not cut; torch's own states are taken over."""
    settings = TORCHS["all settings"]
    twin, optimizer = plain(settings, data()[:3])
    state = copy.deepcopy(optimizer.state_dict())
    whole, _ = plain(settings, data())

    def first(engine: sw.Engine) -> None:
        engine.load_state_dict(twin.state_dict())
        engine.load_optimizer_state_dict(state)
        engine.save(tmp_path)

    def second(engine: sw.Engine) -> Any:
        assert engine.resume(tmp_path) is not None
        feed(engine, data()[3:5])
        engine.reshard("zero1" if engine.plan.preset == "zero3" else "zero3")
        for number, x in enumerate(data()[5:], 2):
            engine.backward(engine(x.chunk(engine.world.size)[engine.world.rank], uses_all=number % 3 != 1))
            engine.step()
        return engine.state_dict()

    def ours(model: nn.Module) -> Adafactor:
        return Adafactor(model.parameters(), **settings)

    work_on_ranks(3, first, "zero3", model_of, ours)
    for plan, num_ranks in (("zero3", 4), ("zero1", 2), ("ddp", 1)):
        for params in work_on_ranks(num_ranks, second, plan, model_of, ours):
            assert_close(params, whole)


def test_the_program_has_both_messages_with_their_bytes() -> None:
    """Sums of rows and columns, and two squares per parameter, as fp32 in an all-reduce of two ranks."""

    def work(engine: sw.Engine) -> str:
        feed(engine, data()[:2])
        return engine.program()

    program = work_on_ranks(2, work, "zero3", model_of, lambda model: Adafactor(model.parameters()))[0]
    lines = [line.split() for line in program.splitlines() if line.split()[:2] == ["agree", "*"]]
    sent = {line[2]: int(line[line.index("B") - 1]) for line in lines}
    params = [param for param in model_of().parameters() if param.requires_grad]
    num_sums = sum(factored_update(tuple(param.shape)).num_sums for param in params)
    assert num_sums == 12 * 6 + 30 * 2 + 8 + 8 + 14
    assert sent["sums"] == num_sums // 2 * 2 * 4
    assert sent["norms"] == 2 * len(params) // 2 * 2 * 4


@sampled
@pytest.mark.parametrize("axis", SPLIT)
def test_with_stages_and_beside_split_layers(axis: str) -> None:
    """Of split layers AdamW updates the weights; parameters that both ranks along `tp` have count once."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    inputs = [torch.randn(8, 8) for _ in range(3)]

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        params = dict(model.named_parameters())
        split = [param for name, param in params.items() if axis == "tp" and name in ("0.weight", "0.bias", "1.weight")]
        others = [param for param in params.values() if all(param is not one for one in split)]
        beside = [torch.optim.AdamW(split, lr=0.01, eps=1e-3)] if split else []
        return [Adafactor(others, lr=0.05), *beside]

    twin = copy.deepcopy(model)
    optimizers = make(twin)
    for x in inputs:
        twin.zero_grad()
        twin(x).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    def work(world: sw.World) -> dict[str, Tensor]:
        own = copy.deepcopy(model)
        with sw.shard(own, {"preset": "zero1", **SPLIT[axis]}, optimizer=make(own), world=world) as engine:
            for x in inputs:
                share = x.chunk(engine.data_ranks[1])[engine.data_ranks[0]]
                engine.train_step(share, loss_fn=lambda out: out.square().mean())
            return engine.state_dict()

    for params in run_ranks(4, work):
        assert_close(params, twin)


def test_what_an_update_needs() -> None:
    assert factored_update((3, 4, 5)) == Update(States(whole_bytes=3 * 9 * 4), needs_norm=True, num_sums=27)
    assert factored_update((5,), has_first_moment=True) == Update(States(copies=2), needs_norm=True)
    assert factored_update((0, 5)) == Update(States(copies=1), needs_norm=True)


def test_what_cannot_be_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2, 2))]
    for settings, words in {
        "variant": ({"variant": "hf"}, "variant is 'hf'"),
        "warm-up": ({"warmup_init": True, "relative_step": False}, "needs relative_step=True"),
        "lr": ({"lr": None, "relative_step": False}, "give lr"),
        "decay": ({"beta2_decay": 0.8}, "0 or less"),
    }.values():
        with pytest.raises(ValueError, match=words):
            Adafactor(params, **settings)

    state = Adafactor(params).state_dict()
    state["param_groups"][0]["maximize"] = True
    with pytest.raises(ValueError, match="maximize=True, which this one lacks: negate the loss"):
        Adafactor(params).load_state_dict(state)

    def split(world: sw.World) -> None:
        model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        plan = {"preset": "zero1", **SPLIT["tp"], "mesh": {"dp": 1, "tp": 2}}
        with pytest.raises(ModelError, match=r"0\.weight is split along tp.*, such as AdamW, or use shardwise"):
            sw.shard(model, plan, optimizer=Adafactor(model.parameters()), world=world)

    run_ranks(2, split)
