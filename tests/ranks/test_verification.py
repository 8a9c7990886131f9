"""Verified steps: every flipped bit is found before the update, on the right rank, and nothing else is."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ConfigError, CorruptionError
from shardwise.memory import Flat
from shardwise.program import Action
from shardwise.runtime import ParamMover
from shardwise.testing import run_ranks
from tests import inside
from tests.models import Decoder
from tests.ranks.twins import adamw, batches, plan_of
from tests.thorough import drawn, sampled, varies

Tensor = torch.Tensor
Place = Callable[[sw.Engine, random.Random], tuple[Tensor, str] | None]
"""A tensor of a rank in which a bit is to flip, and the parameter's name."""


def flip(tensor: Tensor, numbers: random.Random) -> None:
    """Flip one bit, so that torch knows nothing of it."""
    view = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    view[numbers.randrange(view.size)] ^= 1 << numbers.randrange(8)


def slots(flat: Flat, numbers: random.Random) -> list[int]:
    return numbers.sample(range(len(flat.slots)), len(flat.slots))


def a_param(engine: sw.Engine, numbers: random.Random) -> tuple[Tensor, str] | None:
    flats = inside.flats(engine)
    for flat in numbers.sample(flats, len(flats)):
        for index in slots(flat, numbers):
            mine = flat.slots[index].span.overlap(flat.param_span)
            if mine.numel:
                own = mine.within(flat.param_span)
                return flat.param[own.start : own.stop], flat.slots[index].name
    return None


def a_master(engine: sw.Engine, numbers: random.Random) -> tuple[Tensor, str] | None:
    flats = [flat for flat in inside.flats(engine) if flat.spec.trainable]
    for flat in numbers.sample(flats, len(flats)):
        for index in slots(flat, numbers):
            piece = flat.master_piece(index)[0]
            if piece.numel():
                return piece, flat.slots[index].name
    return None


def a_state(engine: sw.Engine, numbers: random.Random) -> tuple[Tensor, str] | None:
    optimizer = inside.adopted(engine)
    for piece in numbers.sample(optimizer.pieces, len(optimizer.pieces)):
        states = optimizer.raw_state_of(piece) if piece.span.numel else {}
        if states:
            return states[numbers.choice(sorted(states))], piece.name
    return None


def a_gradient(engine: sw.Engine, numbers: random.Random) -> tuple[Tensor, str] | None:
    """As the update reads it."""
    inside.sharded(engine).parts.gradients.prepare()
    flats = [flat for flat in inside.flats(engine) if flat.spec.trainable]
    for flat in numbers.sample(flats, len(flats)):
        for index in slots(flat, numbers):
            piece = flat.grads.due_piece(index)
            if piece is not None and piece.numel():
                return piece, flat.slots[index].name
    return None


def train(
    preset: str,
    num_ranks: int,
    mesh: dict[str, int] | None = None,
    *,
    at: tuple[int, str] | None = None,
    on_rank: int = 0,
    place: Place = a_param,
    seed: int = 0,
    num_steps: int = 3,
    model: nn.Module | None = None,
    between: Callable[[sw.Engine], None] = lambda _: None,
    shares_memory: bool = True,
    **plan: Any,
) -> list[tuple[str, CorruptionError | None]]:
    """Train; at a step, before its `forward` or its `step`, a bit flips on one rank. Returns, for every rank, the
    name of the parameter, and what it has raised."""
    torch.manual_seed(1)
    first = model or Decoder(num_blocks=2)
    replicas = [copy.deepcopy(first) for _ in range(num_ranks)]
    tensor = {"tensor": {"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}}} if mesh and "tp" in mesh else {}
    settings = plan_of(preset, mesh, **{"verify": 1, **tensor, **plan})

    def rank(world: sw.World) -> tuple[str, CorruptionError | None]:
        name = ""

        def maybe_flip(step: int, where: str) -> str:
            if at != (step, where) or world.rank != on_rank:
                return name
            numbers = random.Random(seed)
            found = place(engine, numbers)
            assert found is not None
            flip(found[0], numbers)
            return found[1]

        replica = replicas[world.rank]
        with sw.shard(replica, settings, optimizer=adamw(replica), world=world) as engine:
            for step, batch in enumerate(batches(num_steps), start=1):
                name = maybe_flip(step, "forward")
                share, num_shares = inside.sharded(engine).mesh.data_place(world.rank)
                loss = engine.module(*(part.chunk(num_shares)[share] for part in batch))
                engine.backward(loss)
                if place is a_gradient:
                    inside.sharded(engine).parts.gradients.prepare()
                name = maybe_flip(step, "step")
                try:
                    engine.step()
                except CorruptionError as error:
                    return name, error
                between(engine)
        return name, None

    return run_ranks(num_ranks, rank, shares_memory=shares_memory)


PLANS = [
    ("ddp", 3, None),
    ("zero1", 2, None),
    ("zero3", 2, None),
    ("hsdp", 4, {"node": 2, "local": 2}),
    ("offload", 2, None),
    ("ddp", 2, None),
    ("zero2", 2, None),
    ("zero3", 3, None),
    ("zero3-kept", 2, None),
    ("hpz", 4, {"node": 2, "local": 2}),
    ("zero3-offload", 2, None),
    ("zero1", 4, {"dp": 2, "tp": 2}),
]


@sampled
@pytest.mark.parametrize("place", [a_param, a_master, a_state])
@pytest.mark.parametrize(("preset", "num_ranks", "mesh"), PLANS)
def test_a_flipped_bit_is_found_on_its_rank(
    preset: str, num_ranks: int, mesh: dict[str, int] | None, place: Place
) -> None:
    """Before the update, wherever it is, also in what no other rank has."""
    flipped = train(preset, num_ranks, mesh, at=(3, "forward"), on_rank=1, place=place)
    for _, error in flipped:
        assert error is not None
        assert (error.ranks, error.is_certain, error.step) == ((1,), True, 3), error
        assert error.tensor == flipped[1][0]
        assert error.unit


COPIED: list[tuple[str, int, dict[str, int] | None]] = [
    ("ddp", 3, None),
    ("hsdp", 3, {"node": 3, "local": 1}),
    ("ddp", 4, None),
]
"""In which several ranks have the gradients that they update with."""


@varies
def test_random_bits_of_random_tensors_are_found() -> None:
    for seed in range(drawn(1, 60)):
        numbers = random.Random(seed)
        place = numbers.choice((a_param, a_master, a_state, a_gradient))
        preset, num_ranks, mesh = numbers.choice(COPIED if place is a_gradient else PLANS)
        on_rank = numbers.randrange(num_ranks)
        step, every = numbers.choice([(2, 1), (3, 1), (4, 2)])
        flipped = train(
            preset,
            num_ranks,
            mesh,
            at=(step, "step" if place is a_gradient else "forward"),
            on_rank=on_rank,
            place=place,
            seed=seed,
            verify=every,
            num_steps=4,
        )
        for _, error in flipped:
            assert error is not None, (seed, preset, place)
            assert (error.ranks, error.is_certain, error.step) == ((on_rank,), True, step), (seed, error)
            assert error.tensor == flipped[on_rank][0]


@pytest.mark.parametrize(("preset", "mesh"), [("ddp", None), ("hsdp", {"node": 3, "local": 1})])
def test_a_flipped_bit_of_a_gradient_is_found_where_ranks_have_copies(preset: str, mesh: dict[str, int] | None) -> None:
    for name, error in (flipped := train(preset, 3, mesh, at=(2, "step"), on_rank=1, place=a_gradient)):
        assert error is not None, name
        assert (error.ranks, error.row, error.tensor) == ((1,), "due", flipped[1][0])


def test_what_is_frozen_is_compared_with_what_it_was_at_first() -> None:
    """No update writes it, so a bit may have flipped in any step since."""
    model = Decoder(num_blocks=2)
    model.blocks[0].requires_grad_(False)

    def a_frozen_param(engine: sw.Engine, _: random.Random) -> tuple[Tensor, str]:
        frozen = [flat for flat in inside.flats(engine) if not flat.spec.trainable]
        pieces = [flat.param_piece(index) for flat in frozen for index in range(len(flat.slots))]
        return next(piece for piece in pieces if piece.numel()), ""

    for _, error in train(
        "zero3", 3, at=(4, "forward"), on_rank=2, place=a_frozen_param, model=model, verify=3, num_steps=6
    ):
        assert error is not None
        assert (error.ranks, error.row, error.step, error.unit) == ((2,), "param", 6, "blocks.0")


@sampled
@pytest.mark.parametrize("preset", ["zero3", "zero3-kept", "zero1"])
@pytest.mark.parametrize("nth", [0, 2, 3])
def test_a_message_with_parameters_that_arrives_wrong_is_found(
    preset: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the forward, the backward, or the gathers after an update."""
    with monkeypatch.context() as patched:
        flip_on_arrival(patched, preset, min(nth, 3 if preset == "zero3" else 2), on_rank=1, seed=nth)
        found = train(preset, 3, shares_memory=False)
    assert_found_on_arrival(preset, found, on_rank=1)


def flip_on_arrival(
    monkeypatch: pytest.MonkeyPatch, preset: str, nth: int, *, on_rank: int, seed: int, step: int = 2
) -> None:
    """Let a bit flip in what arrives on a rank by the `nth` gather of a step, counted from 0."""
    wait = ParamMover.wait_param if preset == "zero1" else ParamMover.wait_full
    arrived: list[str] = []

    def wait_and_flip(self: ParamMover, action: Action | None = None) -> None:
        is_arriving = self._arriving is not None
        wait(self, action)
        journal = self._collectives.journal
        if is_arriving and journal.rank == on_rank and journal.num_steps == step - 1:
            arrived.append(self.flat.name)
            if len(arrived) == nth + 1:
                flip(self.flat.full[: self.flat.slots[0].numel], random.Random(seed))

    monkeypatch.setattr(ParamMover, wait.__name__, wait_and_flip)


def assert_found_on_arrival(preset: str, found: list[tuple[str, CorruptionError | None]], *, on_rank: int) -> None:
    for _, error in found:
        assert error is not None
        assert (error.ranks, error.is_certain) == ((on_rank,), True)
        assert error.row == ("param" if preset == "zero1" else "full")


@varies
def test_random_bits_of_random_messages_are_found() -> None:
    """Of gathers with parameters, on any rank and in any step."""
    for seed in range(drawn(1, 40)):
        numbers = random.Random(seed)
        preset, num_ranks = numbers.choice(("zero3", "zero3-kept", "zero1")), numbers.choice((3, 4))
        on_rank, nth, step = numbers.randrange(num_ranks), numbers.randrange(3), numbers.randrange(2, 4)
        with pytest.MonkeyPatch.context() as patched:
            flip_on_arrival(patched, preset, nth, on_rank=on_rank, seed=seed, step=step)
            found = train(preset, num_ranks, shares_memory=False, num_steps=4)
        assert_found_on_arrival(preset, found, on_rank=on_rank)


@pytest.mark.parametrize(("num_ranks", "ranks"), [(3, (1,)), (2, (0, 1))])
def test_copies_that_differ_for_longer_name_the_minority(num_ranks: int, ranks: tuple[int, ...]) -> None:
    """Of two copies nothing tells which has changed, if it has before the last sums were taken."""
    for _, error in train("ddp", num_ranks, at=(1, "forward"), on_rank=1, place=a_param, verify=3):
        assert error is not None
        assert (error.ranks, error.is_certain, error.step) == (ranks, num_ranks > 2, 3), error


@sampled
@pytest.mark.parametrize(
    ("preset", "plan"),
    [
        ("ddp", {"precision": "bf16"}),
        ("zero1", {"precision": "bf16", "accumulate": 2, "clip_grad_norm": 0.1}),
        ("zero3", {"precision": "fp16", "activations": "recompute", "units": {"class": "Block"}}),
        ("zero2", {"resident_below": 100, "wire": {"grad": "bf16"}}),
        ("zero3", {"wire": {"param": "bf16"}}),
        ("offload", {"precision": "bf16"}),
        ("zero3-offload", {"precision": "bf16"}),
    ],
)
def test_nothing_is_found_where_nothing_is_wrong(preset: str, plan: dict[str, Any]) -> None:
    """With dropout, running statistics, and values that code writes between steps."""

    def edit(engine: sw.Engine) -> None:
        with torch.no_grad():
            engine.module.head.weight.clamp_(-0.5, 0.5)
            engine.set("norm.bias", torch.ones(32))

    model = Decoder(num_blocks=2)
    model.blocks[0] = nn.Sequential(model.blocks[0], nn.Dropout(0.2), Counted())
    for _, error in train(preset, 2, model=model, between=edit, num_steps=4, **plan):
        assert error is None


class Counted(nn.Module):
    """Has a buffer that every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean()
        return x


class Spike(nn.Module):
    """Its output, and so all gradients of the rank, are not numbers while it `is_on`."""

    is_on = False

    def forward(self, x: Tensor) -> Tensor:
        return x * float("nan") if self.is_on else x


NONFINITE = [
    ("ddp", {"precision": "fp16"}),
    ("zero1", {"skip_nonfinite": True}),
    ("zero3", {"precision": "fp16"}),
    ("hsdp", {"skip_nonfinite": True}),
    ("zero2", {"precision": "fp16", "clip_grad_norm": 1.0}),
    ("zero3-offload", {"skip_nonfinite": True}),
]


@sampled
@pytest.mark.parametrize(("preset", "plan"), NONFINITE)
@pytest.mark.parametrize("on_ranks", [(1,), (0, 1)])
@pytest.mark.parametrize("shares_memory", [True, False])
def test_gradients_that_are_not_numbers_are_no_corruption(
    preset: str, plan: dict[str, Any], on_ranks: tuple[int, ...], shares_memory: bool
) -> None:
    """As when the loss scale of fp16 overflows: the step is not taken, and the next ones are as ever. A sum of numbers
    and NaN has the bits of one of its terms, which has to be the same on all ranks."""
    mesh = {"node": 2, "local": 2} if preset == "hsdp" else None
    taken: list[int] = []

    def between(engine: sw.Engine) -> None:
        spike = engine.module.blocks[1][1]
        spike.is_on = not hasattr(spike, "has_been") and engine.world.rank in on_ranks
        spike.has_been = True
        taken.append(engine.num_steps)

    model = Decoder(num_blocks=2)
    model.blocks[1] = nn.Sequential(model.blocks[1], Spike())
    num_ranks = 4 if mesh else 2
    more: Any = {"between": between, "num_steps": 4, "shares_memory": shares_memory}
    for _, error in train(preset, num_ranks, mesh, model=model, **more, **plan):
        assert error is None
    assert sorted(taken) == [step for step in (1, 1, 2, 3) for _ in range(num_ranks)], "the second one was not taken"


def test_data_writes_on_all_ranks_are_no_corruption() -> None:
    """Torch does not count writes to `.data`; that all ranks have changed the same shows that code has."""

    def edit(engine: sw.Engine) -> None:
        engine.module.head.weight.data.mul_(0.9)

    for preset in ("ddp", "zero1"):
        assert all(error is None for _, error in train(preset, 2, between=edit))


def test_a_plan_without_it_adds_nothing() -> None:
    assert all(error is None for _, error in train("ddp", 2, at=(2, "forward"), place=a_param, verify={}))


class Broken(nn.Module):
    """Computes wrong results in the passes `wrong` of this rank, counted from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: frozenset[int] = frozenset()
        self.num_passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_passes += torch.is_grad_enabled()
        return x * (1 + 2.0**-20) if self.num_passes - 1 in self.wrong else x


def recompute(preset: str, num_ranks: int, wrong: frozenset[int], **plan: Any) -> list[CorruptionError | None]:
    """Take a step that is verified by computing it elsewhere; rank 1 computes wrong results in some passes."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), Broken(), nn.Linear(32, 32), nn.Linear(32, 8))
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]
    settings = plan_of(preset, None, verify={"gradients": 2}, units=["0", "3", "4"], **plan)

    def rank(world: sw.World) -> CorruptionError | None:
        replica = replicas[world.rank]
        with sw.shard(replica, settings, optimizer=adamw(replica), world=world) as engine:
            for step in range(4):
                numbers = torch.Generator().manual_seed(10 * step + world.rank)
                x = torch.randn(6 + 2 * world.rank, 8, generator=numbers)
                if step == 3 and world.rank == 1:
                    replica[2].num_passes, replica[2].wrong = 0, wrong
                try:
                    engine.train_step(x, loss_fn=lambda output: output.square().mean())
                except CorruptionError as error:
                    return error
            params = [part.clone() for part in engine.state_dict().values()]
        kept.append(params)
        return None

    kept: list[list[Tensor]] = []
    found = run_ranks(num_ranks, rank, shares_memory=False)
    assert all(torch.equal(*pair) for one in kept for pair in zip(one, kept[0], strict=True))
    return found


@sampled
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3", "offload"])
@pytest.mark.parametrize(
    ("num_ranks", "wrong", "named"),
    [(3, {0, 1, 2}, (1,)), (3, {0}, (1,)), (3, {1}, (1,)), (2, {0}, (1,)), (2, {0, 1, 2}, (0, 1)), (2, {}, ())],
)
def test_wrong_results_of_a_rank_are_found_by_another(
    preset: str, num_ranks: int, wrong: set[int], named: tuple[int, ...]
) -> None:
    for error in recompute(preset, num_ranks, frozenset(wrong), accumulate=2):
        assert (error.ranks if error is not None else ()) == named
        if error is not None:
            assert (error.row, error.step, error.is_certain) == ("gradient", 4, len(named) == 1)


@sampled
@pytest.mark.parametrize("num_ranks", [3, 2])
@pytest.mark.parametrize("preset", ["ddp", "zero2", "zero3"])
def test_what_is_not_a_number_on_one_rank_is_none_when_another_computes_it(preset: str, num_ranks: int) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]
    settings = plan_of(preset, None, verify={"every": 1, "gradients": 1}, skip_nonfinite=True)

    def rank(world: sw.World) -> int:
        replica = replicas[world.rank]
        with sw.shard(replica, settings, optimizer=adamw(replica), world=world) as engine:
            for step in range(3):
                numbers = torch.Generator().manual_seed(10 * step + world.rank)
                x = torch.randn(6, 8, generator=numbers)
                if (step, world.rank) == (1, 0):
                    x[3, 3] = float("nan")
                engine.train_step(x, loss_fn=lambda output: output.square().mean())
            return engine.num_steps

    assert run_ranks(num_ranks, rank) == [2] * num_ranks


def test_recomputing_changes_nothing() -> None:
    """Losses, running statistics and parameters are those of a run without it."""
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Linear(32, 8))

    def train_with(verify: dict[str, int]) -> dict[str, Tensor]:
        replicas = [copy.deepcopy(model) for _ in range(2)]

        def rank(world: sw.World) -> dict[str, Tensor]:
            replica = replicas[world.rank]
            plan = {"preset": "zero1", "verify": verify}
            with sw.shard(replica, plan, optimizer=adamw(replica), world=world) as engine:
                for step in range(3):
                    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + world.rank))
                    engine.train_step(x, loss_fn=lambda output: output.square().mean())
                return engine.state_dict()

        return run_ranks(2, rank)[0]

    plain, verified = train_with({}), train_with({"gradients": 1})
    assert all(torch.equal(verified[name], value) for name, value in plain.items())


def test_gradients_that_cannot_be_computed_again_are_refused_or_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="because ranks along tp compute a micro-batch together"):
        train("zero1", 2, {"dp": 1, "tp": 2}, verify={"gradients": 1})
    assert all(error is None for _, error in train("zero1", 2, verify={"gradients": 2}))
    assert "This loop computes its loss itself" in caplog.text
