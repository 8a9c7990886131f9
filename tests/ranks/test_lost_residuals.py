"""What ranks keep of what they have not sent begins at zero when one is lost or joins: against the same in one process,
which forgets it before the same steps. And frozen parameters that rest as codes outlive a rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import test_onebit
import test_powersgd
import torch
from test_feedback import fed_back
from torch import nn
from twins import rounded_by
from wires import Sent

import shardwise as sw
from shardwise.comm import World
from tests.ranks.lost_groups import DiesBefore
from tests.ranks.test_lost_ranks import NUM_STEPS, ROWS, Make, Net, batches, loss_of, race, trained_alone
from tests.ranks.test_lost_ranks import adamw as adamw_of_net
from tests.ranks.threads_as_members import ThreadMembership, run_members
from tests.thorough import sampled, thorough_only

Tensor = torch.Tensor
Members = tuple[int, ...]
NUM_RANKS, NUM_ROWS = 3, 24
ROUNDING = {"rtol": 2e-4, "atol": 2e-5}


class Twin:
    """Steps in one process on the shares of so many ranks."""

    model: nn.Module

    def forget(self, num_ranks: int) -> None:
        """Go on with so many ranks, none of which has anything left to send."""
        raise NotImplementedError

    def step(self, shares: Sequence[Tensor]) -> None:
        raise NotImplementedError


class FedBack(Twin):
    """With codes of gradients, and what they have lost."""

    wire = fed_back(0.5, reset=5)

    def __init__(self) -> None:
        self.model = test_powersgd.Small()
        self._optimizer = test_powersgd.sgd(self.model)
        self._sent = Sent(self.wire, {})

    def forget(self, num_ranks: int) -> None:  # each share says it
        self._sent.forget()

    def step(self, shares: Sequence[Tensor]) -> None:
        grads: list[dict[str, Tensor]] = []
        for share in shares:
            self.model.zero_grad()
            test_powersgd.loss_of(self.model, share).backward()
            grads.append({name: param.grad / len(shares) for name, param in self.model.named_parameters()})
        for name, param in self.model.named_parameters():
            param.grad = sum(self._sent(name, place, one[name]) for place, one in enumerate(grads))
        self._optimizer.step()
        self._sent.end_step()


class Factored(Twin):
    """With gradients as factors, the first of which are drawn anew."""

    def __init__(self) -> None:
        self.model = test_powersgd.Small()
        self._optimizer = test_powersgd.sgd(self.model)
        self._paper = test_powersgd.Paper(self.model, NUM_RANKS, 2, test_powersgd.drawn_factors())

    def forget(self, num_ranks: int) -> None:
        self._paper.num_ranks, self._paper.factors = num_ranks, test_powersgd.drawn_factors()
        self._paper.unsent = [{} for _ in range(num_ranks)]

    def step(self, shares: Sequence[Tensor]) -> None:
        self._paper.set_gradients(shares)
        self._optimizer.step()


class OneBit(Twin):
    """With signs of momenta, or of gradients."""

    def __init__(self, name: str) -> None:
        self.model = test_onebit.small()
        self._papers = test_onebit.Papers(self.model, NUM_RANKS, name)

    def forget(self, num_ranks: int) -> None:
        papers = self._papers
        papers.num_ranks = num_ranks
        papers.own = [[torch.zeros(param.numel()) for param in papers.params] for _ in range(num_ranks)]
        papers.average = [torch.zeros(param.numel()) for param in papers.params]

    def step(self, shares: Sequence[Tensor]) -> None:
        self._papers.step(shares)


KINDS: dict[str, tuple[Callable[[], Twin], dict[str, Any], Any, Any, int]] = {
    "codes": (FedBack, {"wire": FedBack.wire}, test_powersgd, test_powersgd.sgd, 9),
    "factors": (Factored, test_powersgd.plan_of(), test_powersgd, test_powersgd.sgd, 7),
    "adam": (lambda: OneBit("adam"), {}, test_onebit, test_onebit.MAKE["adam"], 8),
    "lamb": (lambda: OneBit("lamb"), {}, test_onebit, test_onebit.MAKE["lamb"], 8),
    "zero-one": (lambda: OneBit("zero-one"), {}, test_onebit, test_onebit.MAKE["zero-one"], 13),
}
POINTS = {
    "codes": [(1, "*reduce* *"), (3, "*reduce* *"), (3, "* verdict"), (6, "exchange of commit")],
    "factors": [(1, "exchange of commit"), (2, "project *"), (4, "restore *"), (5, "exchange of commit")],
    "adam": [
        (2, "* verdict"),
        (2, "exchange of commit"),
        (3, "collect *"),
        (5, "hand_back *"),
        (6, "exchange of commit"),
    ],
    "zero-one": [(2, "collect *"), (3, "exchange of commit"), (8, "exchange of commit"), (10, "hand_back *")],
}
"""The step, counted from 0, and the point before which a rank is lost: at each change of what is sent, and later."""
POINTS["lamb"] = POINTS["adam"]
CASES = [
    (kind, preset, *point, joins)
    for kind, points in POINTS.items()
    for preset in (("ddp", "zero1", "zero3") if kind == "codes" else ("ddp",))
    for point in points
    for joins in (False, True)
]


def steps_taken(engine: sw.Engine, of_kind: Any, data: Sequence[Tensor]) -> dict[int, Members]:
    """Take a step for each of `data`; which members took it with this one."""
    membership = engine.world.membership
    assert isinstance(membership, ThreadMembership)
    found: dict[int, Members] = {}
    while engine.num_steps < len(data):
        step, void, members = engine.num_steps, engine.num_void, membership.members
        place, num = engine.data_ranks
        engine.weigh(NUM_ROWS // num, NUM_ROWS)
        engine.backward(of_kind.loss_of(engine, data[step].chunk(num)[place]))
        engine.step()
        if engine.num_steps == step + 1 and engine.num_void == void:
            found[step] = members
    return found


def steps_of(kind: str, preset: str, fault: DiesBefore, folder: Path, *, num_newcomers: int) -> list[Members]:
    """Train on threads, of which one dies, beside the twin. Returns who took each step."""
    make_twin, plan, of_kind, make_optimizer, num_steps = KINDS[kind]
    twin = make_twin()
    data = of_kind.data(num_steps)
    models = [copy.deepcopy(twin.model) for _ in range(NUM_RANKS + num_newcomers)]

    def work(world: World, member: int) -> tuple[dict[int, Members], dict[str, Tensor]]:
        model = models[member]
        optimizer = make_optimizer(model)
        engine = sw.shard(model, {**plan, "preset": preset}, optimizer=optimizer, world=world)
        fault(engine, member)
        found = steps_taken(engine, of_kind, data)
        state = {name: engine.get(name) for name, _ in model.named_parameters()}
        engine.close()
        return found, state  # type: ignore[return-value]  # a rank with all has no `None`

    results = run_members(NUM_RANKS, work, folder, num_newcomers=num_newcomers)
    assert fault.is_dead
    took: dict[int, Members] = {}
    for found, _ in results.values():
        for step, members in found.items():
            assert took.setdefault(step, members) == members
    assert sorted(took) == list(range(num_steps)), "each step was taken once"
    before: Members = ()
    for step, x in enumerate(data):
        if took[step] != before:
            twin.forget(len(took[step]))
        before = took[step]
        twin.step(x.chunk(len(before)))
    first = next(state for _, state in results.values())
    for _, state in results.values():
        for name, param in twin.model.named_parameters():
            assert torch.equal(state[name], first[name]), f"ranks disagree about {name}"
            torch.testing.assert_close(state[name], param.detach(), **ROUNDING)
    return [took[step] for step in range(num_steps)]


@sampled
@pytest.mark.parametrize(("kind", "preset", "step", "point", "joins"), CASES)
def test_all_begin_at_zero_when_a_rank_is_lost_before(
    kind: str, preset: str, step: int, point: str, joins: bool, tmp_path: Path
) -> None:
    took = steps_of(kind, preset, DiesBefore(1, step, point), tmp_path, num_newcomers=int(joins))
    assert len(took[0]) == NUM_RANKS
    assert (1 in took[-1], len(took[-1])) == (False, NUM_RANKS if joins else NUM_RANKS - 1)


STORED = {"dtype": "int8", "block": 32}


def trained_beside_codes(model: nn.Module, make: Make, **more: Any) -> tuple[list[float], nn.Module]:
    return trained_alone(with_rounded_base(model), make, **more)


def with_rounded_base(model: nn.Module) -> nn.Module:
    """What is frozen as it rests."""
    plain = copy.deepcopy(model)
    with torch.no_grad():
        plain.c.weight.copy_(rounded_by({**STORED, "rests": True})(plain.c.weight))
    return plain


@sampled
@pytest.mark.parametrize("hosts", [(), ("a", "a", "b", "b")], ids=["one host", "two hosts"])
@pytest.mark.parametrize("point", [(1, "exchange of commit"), (3, "*gather* *"), (4, "* verdict")])
@pytest.mark.parametrize("preset", ["ddp", "zero1", "zero3", "zero3-kept"])
def test_what_rests_as_codes_outlives_a_rank(
    preset: str, point: tuple[int, str], hosts: Sequence[str], tmp_path: Path
) -> None:
    """Its part is made codes again, the same ones, where it begins at another element."""
    where = (point[0], "exchange of commit") if preset == "ddp" and "gather" in point[1] else point
    fault = DiesBefore(2, *where)
    plan = {"preset": preset, "storage": {"frozen": STORED}}
    race(plan, fault, tmp_path, alone=trained_beside_codes, hosts=hosts)
    assert fault.is_dead


@sampled
@pytest.mark.parametrize("storage", [{}, {"frozen": STORED}], ids=["elements", "codes"])
@pytest.mark.parametrize("hosts", [(), ("a", "a", "b", "b")], ids=["one host", "two hosts"])
def test_what_was_set_of_frozen_parameters_outlives_a_rank(
    storage: dict[str, Any], hosts: Sequence[str], tmp_path: Path
) -> None:
    """An image was made before that, and no step changes them."""
    start, fault = Net(), DiesBefore(2, 4, "exchange of commit")
    with torch.no_grad():
        new = start.c.weight * 1.5
        new = rounded_by({**STORED, "rests": True})(new) if storage else new
    models = [copy.deepcopy(start) for _ in range(4)]

    def work(world: World, member: int) -> Tensor:
        model = models[member]
        engine = sw.shard(model, {"preset": "zero3", "storage": storage}, optimizer=adamw_of_net(model), world=world)
        fault(engine, member)
        while engine.num_steps < NUM_STEPS:
            if engine.num_steps == 2:
                engine.set("c.weight", new)
            place, num = engine.data_ranks
            x, y = (whole.tensor_split(num)[place] for whole in batches()[engine.num_steps])
            engine.weigh(len(x), ROWS)
            engine.backward(loss_of(engine(x), y))
            engine.step()
        found = engine.get("c.weight")
        engine.close()
        assert found is not None
        return found

    results = run_members(4, work, tmp_path, hosts=hosts)
    assert fault.is_dead
    for found in results.values():
        assert torch.equal(found, new)


@thorough_only("a rank that joins gets what others have of it")
@pytest.mark.parametrize("preset", ["ddp", "zero3"])
def test_what_rests_as_codes_is_given_to_who_joins(preset: str, tmp_path: Path) -> None:
    start, fault = Net(), DiesBefore(1, 2, "exchange of commit")
    expected = with_rounded_base(start).c.weight.detach()
    models = [copy.deepcopy(start) for _ in range(3)]
    with torch.no_grad():
        models[2].c.weight.zero_()

    def work(world: World, member: int) -> tuple[int, Tensor]:
        model, plan = models[member], {"preset": preset, "storage": {"frozen": STORED}}
        engine = sw.shard(model, plan, optimizer=adamw_of_net(model), world=world)
        fault(engine, member)
        while engine.num_steps < NUM_STEPS:
            place, num = engine.data_ranks
            x, y = (whole.tensor_split(num)[place] for whole in batches()[engine.num_steps])
            engine.weigh(len(x), ROWS)
            engine.backward(loss_of(engine(x), y))
            engine.step()
        found = engine.world.size, engine.get("c.weight")
        engine.close()
        return found  # type: ignore[return-value]  # a rank with all has no `None`

    results = run_members(2, work, tmp_path, num_newcomers=1)
    assert results.keys() == {0, 2}
    for size, found in results.values():
        assert size == 2
        assert torch.equal(found, expected)
