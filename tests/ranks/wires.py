"""What tests of wires have in common: races with a twin that rounds tensor by tensor, and runs that stop and go on."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from twins import (
    Batch,
    MakeOptimizer,
    Run,
    adamw,
    assert_as_near,
    assert_same,
    engine_step,
    rounded_by,
    sent_and_held,
    sharded_run,
)

import shardwise as sw
from benchmarks.model import GPT
from benchmarks.sizes import Size
from shardwise.testing import run_ranks
from tests import inside

Tensor = torch.Tensor


def assert_same_but_for_flips(
    run: Run, twin: Run, *, loss_apart: float = 1e-5, rates_apart: int = 1, most: float = 0.01
) -> None:
    """Where the host updates, it may round the last bit otherwise than torch's optimizer (seen on AMD with AVX-512, not
    on Intel), and along a model axis sums differ in last bits. An element that lay between two codes then gets the
    other one, which is a whole step of its block away: few do, and an update of AdamW is hardly longer than its rate,
    3e-3, in each step. Of 30 drawn plans along `tp` at most 0.03 % of the elements do in two steps. Such elements may
    be `rates_apart` rates away for each step, and be a share of at most `most`. In more steps than two, the flips of
    one change what the next computes: losses are then further apart."""
    assert run.losses == pytest.approx(twin.losses, rel=loss_apart)
    assert run.norms == pytest.approx(twin.norms, rel=1e-3)
    away = torch.cat([(run.params[name] - theirs).abs().flatten() for name, theirs in twin.params.items()])
    assert away.max() <= rates_apart * len(twin.losses) * 3e-3
    assert (away > 1e-5).float().mean() <= most


def assert_trains_like(
    twin: Run,
    model: nn.Module,
    data: Sequence[Batch],
    preset: str,
    num_ranks: int,
    mesh: Mapping[str, int] | None,
    *,
    kinds: Sequence[str] = ("param", "grad", "working"),
    other: Run | None = None,
    **settings: Any,
) -> None:
    """And sends, and holds of each kind, what its program says. `other` as in `assert_as_near`."""
    run = sharded_run(model, data, preset, num_ranks, mesh, after=sent_and_held, **settings)
    if other is not None:
        assert_as_near(run, twin, other)
    else:
        (assert_same_but_for_flips if "offload" in preset else assert_same)(run, twin)
    sent, promised = run.extra["sent"]
    assert sent == promised
    report = run.extra["report"]
    for kind in kinds:
        assert report.measured[kind] == report.promised[kind], kind


def saving_to(folder: Path) -> Callable[[sw.Engine], dict[str, Any]]:
    """For the end of a `sharded_run`."""

    def save(engine: sw.Engine) -> dict[str, Any]:
        engine.save(folder)
        return {}

    return save


StepOf = Callable[[sw.Engine, torch.optim.Optimizer, Batch], Tensor]


def resuming(folder: Path, then: StepOf = engine_step) -> StepOf:
    """The step of a `sharded_run` that goes on from `folder`."""

    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
        if engine.num_steps == 0:
            engine.resume(folder)
        return then(engine, optimizer, batch)

    return step


def is_coded(name: str, param: Tensor) -> bool:
    """Of `tests.models.Transformer`: neither vectors nor embeddings, nor routers."""
    return param.dim() > 1 and not name.startswith(("tokens", "positions")) and "router" not in name


def _narrow(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().to(tensor.dtype)


def _formats(wire: Any) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """What matrices, and what is sent beside codes, go through: of one kind of a plan's `wire`."""
    if wire == "bf16":
        return _narrow, _narrow
    is_narrow = wire is not None and wire.get("rest") == "bf16"
    return rounded_by(wire), _narrow if is_narrow else lambda tensor: tensor


@dataclass(frozen=True)
class Summands:
    """One for each rank that sums a gradient, so ordered that those which are summed first are next to each other."""

    summands: Sequence[Tensor]
    sizes: Sequence[int]
    """Of the axes along which they are summed, one after the other."""
    num_near: int
    """How many in a row are summed before codes are made."""
    is_of_experts: bool = False
    """Whether they are of experts along `ep`, where others are summed, too."""

    @classmethod
    def of(
        cls, summands: Sequence[Tensor], num_near: int, num_dealt: int, *, dealt_last: bool, is_of_experts: bool
    ) -> Summands:
        """Of ranks in the order of the mesh, the last axis of which is `ep`; `num_near` are those of a host along the
        others. An expert has the tokens of all ranks along `ep`. Others are summed along it after `num_near`, or with
        `dealt_last` after all others, which are codes then."""
        num_others = len(summands) // num_dealt
        sizes = [num_near, num_others // num_near]
        if is_of_experts:
            return cls(_sums(summands, num_dealt), _several(sizes), num_near, num_dealt > 1)
        num_before = num_others if dealt_last else num_near
        sizes.insert(2 if dealt_last else 1, num_dealt)
        order = torch.arange(len(summands)).view(-1, num_before, num_dealt).transpose(1, 2).flatten().tolist()
        near = num_near if dealt_last else num_near * num_dealt
        return cls([summands[rank] for rank in order], _several(sizes), near)

    def of_hosts(self) -> list[Tensor]:
        """Those that are made codes."""
        return _sums(self.summands, self.num_near)


def _several(sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size > 1] or [1]


@dataclass(frozen=True)
class Reduced:
    """How ranks sum gradients that are sent in bf16: axis by axis, the inner one first, in fp32 and in their order. Who
    sums an element adds its own summand as it has it."""

    places: Mapping[str, tuple[int, int]]
    """Where each parameter begins in its flat buffer, and how long that is: equal parts of it belong to the ranks."""
    waits: bool = False
    """Whether gradients wait as they were computed (`zero1`, and `ddp` in a pipeline), so that they are not rounded
    before the first sum."""
    num_whole: int = 0
    """Along how many axes, the last that are summed, every rank gets all of the sum, which is sent in bf16, too: 1 with
    `hsdp`, all with `ddp`."""

    def sum(self, name: str, given: Summands, parts: Sequence[Tensor] | None = None) -> Tensor:
        """Of one for each rank. Where model axes split the parameter, each of its `parts` has a flat buffer of its
        own."""
        summands = given.summands
        if parts is None:
            return self._sum_of_part(name, summands, given)
        total = torch.zeros_like(summands[0]).flatten()
        for elements in parts:
            total[elements] = self._sum_of_part(name, [one.flatten()[elements] for one in summands], given)
        return total.view_as(summands[0])

    def _sum_of_part(self, name: str, summands: Sequence[Tensor], given: Summands) -> Tensor:
        first, length = self.places[name]
        place = torch.arange(first, first + summands[0].numel()).view_as(summands[0])
        summands = summands if self.waits else [_narrow(summand) for summand in summands]
        sizes, num_whole = given.sizes, self.num_whole - given.is_of_experts
        for axis, size in enumerate(sizes):
            length //= size
            owner, place = place // length, place % length
            summands = [
                sum(torch.where(owner == index, one, _narrow(one)) for index, one in enumerate(group))
                for group in (summands[at : at + size] for at in range(0, len(summands), size))
            ]
            if len(sizes) - axis <= num_whole:
                summands = [_narrow(total) for total in summands]
        (total,) = summands
        return total


def places_of(engine: sw.Engine) -> dict[str, Any]:
    """Those of `Reduced`, for the end of a `sharded_run`."""
    return {slot.name: (slot.start, flat.spec.numel) for flat in inside.flats(engine) for slot in flat.slots}


def parts_of(engine: sw.Engine) -> dict[str, Any]:
    """The part of each parameter that model axes leave on this rank: where its elements are in the whole one."""
    found = {}
    for slot in (slot for flat in inside.flats(engine) for slot in flat.slots):
        if slot.box is not None and slot.box.is_split:
            found[slot.name] = torch.cat([torch.arange(whole, whole + num) for _, whole, num in slot.box.runs])
    return found


Parts = Mapping[str, Sequence[Tensor]]
"""Of each parameter that model axes split: those of all ranks."""


def of_parts(through: Callable[[Tensor], Tensor], parts: Sequence[Tensor] | None) -> Callable[[Tensor], Tensor]:
    """Each part by itself: its blocks begin where it begins."""
    if parts is None:
        return through

    def each(tensor: Tensor) -> Tensor:
        made = tensor.detach().flatten().clone()
        for places in parts:
            made[places] = through(made[places])
        return made.view_as(tensor)

    return each


def _after(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda tensor: second(first(tensor))


class Sent:
    """A summand of a gradient as it is sent, with what earlier ones have lost (LoCo, arXiv:2407.04480): written down
    once more, without looking at the library."""

    def __init__(self, wire: Mapping[str, Any], parts: Parts) -> None:
        self._through, self._rest = _formats(wire.get("grad"))
        self._parts = parts
        self._feedback = wire.get("feedback")
        self._lost: dict[tuple[str, int], Tensor] = {}
        self._num_steps = 0

    def end_step(self) -> None:
        """One was taken."""
        self._num_steps += 1
        if self._feedback is not None and self._num_steps % self._feedback["reset"] == 0:
            self._lost.clear()

    def forget(self) -> None:
        self._lost.clear()

    def is_narrow(self, name: str, param: Tensor) -> bool:
        return (self._through if is_coded(name, param) else self._rest) is _narrow

    def __call__(self, name: str, place: int, summand: Tensor) -> Tensor:
        if not is_coded(name, summand):
            return self._rest(summand)
        through = of_parts(self._through, self._parts.get(name))
        if self._feedback is None:
            return through(summand)
        beta = self._feedback["beta"]
        kept = self._lost.get((name, place), torch.zeros_like(summand))
        sent = through(summand + kept)
        lost = (summand + kept).sub(sent).mul(1 - beta).add(kept, alpha=beta)
        self._lost[name, place] = lost.bfloat16().float().nan_to_num(0, 0, 0)
        return sent


def twin_run(
    model: nn.Module,
    data: Sequence[Any],
    num_ranks: int,
    wire: dict[str, Any],
    *,
    num_near: int = 1,
    accumulate: int = 1,
    waits_whole: bool = False,
    sends_frozen: bool = True,
    resident_below: int = 0,
    reduced: Reduced | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    parts: Parts | None = None,
    num_dealt: int = 1,
    dealt_last: bool = False,
    sent: Sent | None = None,
    skips_nonfinite: bool = False,
) -> Run:
    """One process that computes every rank's share with rounded parameters, rounds its gradients and sums them.
    `num_near` ranks sum their gradients before these are rounded, and with `waits_whole` micro-batches do. Frozen
    parameters of fewer elements than `resident_below` stay whole on every rank, so they are never sent. `reduced` is
    needed where gradients in bf16 are rounded more than once, or not by all. With the `optimizer` of an earlier run,
    `model` and it go on from there; both are in `extra` when this one ends. With `sent` so do lost parts of gradients.
    `parts` are codes' own where model axes split parameters. Experts are dealt out to `num_dealt` ranks in a row, not
    counted in `num_near`, each of which has the tokens of all; `dealt_last` as in `Summands`."""
    parts = parts or {}
    sent = sent or Sent(wire, parts)
    trained = _formats(wire.get("param"))
    frozen = _formats(wire["frozen"]) if "frozen" in wire else trained
    if "frozen" in wire and wire.get("param") == "bf16":  # beside codes, and along the axes that these leave out
        is_everywhere = num_near == 1 or wire["frozen"].get("axes") == "everywhere"
        frozen = frozen[0] if is_everywhere else _after(frozen[0], _narrow), _narrow
    masters = copy.deepcopy(model) if optimizer is None else model
    named = {name: param for name, param in masters.named_parameters() if param.requires_grad}
    optimizer, run = optimizer or adamw(masters), Run()
    for batch in data:
        computed = copy.deepcopy(masters)
        with torch.no_grad():
            for name, param in computed.named_parameters():
                to_matrix, to_rest = trained if param.requires_grad else frozen
                is_sent = param.requires_grad or (sends_frozen and param.numel() >= resident_below)
                to_sent = of_parts(to_matrix, parts.get(name)) if is_coded(name, param) else to_rest
                param.copy_(to_sent(param) if is_sent else param)
        losses, of_batches = [], []
        for part_of_step in range(accumulate):
            of_batches.append([])
            for rank in range(num_ranks):
                computed.zero_grad()
                loss = computed(*(part.chunk(num_ranks)[rank].chunk(accumulate)[part_of_step] for part in batch))
                loss.backward()
                losses.append(loss.item())
                factor = 1 / num_ranks / accumulate
                of_batches[-1].append({name: computed.get_parameter(name).grad * factor for name in named})
        if waits_whole:
            by_rank = zip(*of_batches, strict=True)
            of_batches = [[{name: sum(one[name] for one in of_rank) for name in named} for of_rank in by_rank]]
        for name, param in named.items():
            param.grad = torch.zeros_like(param)
            for of_ranks in of_batches:
                of_name = [one[name] for one in of_ranks]
                is_of_experts = "experts" in name
                given = Summands.of(of_name, num_near, num_dealt, dealt_last=dealt_last, is_of_experts=is_of_experts)
                if reduced is not None and sent.is_narrow(name, param):
                    param.grad += reduced.sum(name, given, parts.get(name))
                else:
                    param.grad += sum(sent(name, place, one) for place, one in enumerate(given.of_hosts()))
        run.norms.append(math.sqrt(sum(float(param.grad.double().square().sum()) for param in named.values())))
        if not skips_nonfinite or math.isfinite(run.norms[-1]):
            optimizer.step()
            sent.end_step()
        run.losses.append(sum(losses) / len(losses))
    run.params = {name: param.detach().clone() for name, param in named.items()}
    run.extra = {"model": masters, "optimizer": optimizer}
    return run


def _sums(summands: Sequence[Tensor], num: int) -> list[Tensor]:
    """Of so many in a row."""
    return [sum(summands[first : first + num]) for first in range(0, len(summands), num)]


def adamw_of_gpt(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def learnt(preset: str, make_optimizer: MakeOptimizer = adamw_of_gpt, **plan: Any) -> float:
    """The mean loss of the last 40 of 200 steps in which a small GPT on two ranks learns the bytes of a licence."""
    text = torch.frombuffer(bytearray((Path(__file__).parents[2] / "LICENSE").read_bytes()), dtype=torch.uint8).long()
    numbers, length, num_steps, last = torch.Generator().manual_seed(1), 48, 200, 40
    starts = torch.randint(0, len(text) - length - 1, (num_steps, 8), generator=numbers)
    torch.manual_seed(0)
    start = GPT(Size(num_blocks=2, dim=64, vocab=256, seq=length, head_dim=16))
    replicas = [copy.deepcopy(start) for _ in range(2)]

    def rank(world: sw.World) -> list[float]:
        model, found = replicas[world.rank], []
        with sw.shard(model, {"preset": preset, **plan}, optimizer=make_optimizer(model), world=world) as engine:
            for step in range(num_steps):
                rows = torch.stack([text[at : at + length + 1] for at in starts[step].chunk(2)[world.rank]])
                loss = engine(rows)
                engine.backward(loss)
                engine.step()
                found.append(engine.mean(loss.item()))
        return found

    return sum(run_ranks(2, rank)[0][-last:]) / last


def race(
    model: nn.Module,
    data: Sequence[Batch],
    preset: str,
    num_ranks: int,
    mesh: Mapping[str, int] | None,
    wire: dict[str, Any],
    *,
    shares_memory: bool,
) -> None:
    """With the twin that the wire makes of the model."""
    twin = twin_run(model, data, num_ranks, wire, num_near=2 if mesh else 1)
    assert_trains_like(twin, model, data, preset, num_ranks, mesh, shares_memory=shares_memory, wire=wire)
