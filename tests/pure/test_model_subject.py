"""Models as the subject of a search: equal blocks are rehearsed once, axes that split a model are tried and refused."""

from __future__ import annotations

import copy
import gc
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.fit.candidates import Bounds, Candidate, Space
from shardwise.fit.equal_blocks import EqualBlocks, equal_blocks, treats_alike, without_values
from shardwise.fit.few_blocks import FewBlocks, count_alike
from shardwise.fit.foreseen import Counted, count_step, updates_of
from shardwise.fit.hardware import Disk, hardware
from shardwise.fit.model_subject import ModelSubject
from shardwise.fit.search import Found, Limits, search
from shardwise.fit.stage_rehearsal import in_transit
from shardwise.init import deferred_init
from shardwise.memory import unit_specs
from shardwise.parallel.outline import outline
from shardwise.plan import Plan, PolicyName
from shardwise.plan.mesh import Mesh
from shardwise.program import Update
from shardwise.system.units import parse_bytes
from tests.models import Decoder, Gpt, Mixture, Stack
from tests.thorough import sampled, thorough_only

H100 = hardware("h100-sxm")
ONE = Mesh(("dp",), (1,))
ROOMY = Limits(2**34, 2**36)


def on_meta(build: Callable[..., nn.Module], **sizes: Any) -> nn.Module:
    with torch.device("meta"):
        return build(**sizes)


def tokens(rows: int = 2, length: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length, dtype=torch.long)


class Skips(Stack):
    """As a U-Net: each block of the second half also gets what its counterpart has returned."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden, kept = self.tokens(x), []
        half = len(self.blocks) // 2
        for block in self.blocks[:half]:
            hidden = block(hidden)
            kept.append(hidden * 2)
        for block in self.blocks[half:]:
            hidden = block(hidden + kept.pop()) if kept else block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())


class Counts(Decoder):
    """Knows how many blocks it has."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks=num_blocks)
        self.num = num_blocks

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        for place in range(self.num):
            hidden = self.blocks[place](hidden)
        return self.head(hidden)


def counted(policy: str, rows: int = 2) -> Callable[[nn.Module], Counted]:
    plan = Plan(preset="zero3", precision="bf16", activations={"policy": policy})  # type: ignore[arg-type]
    return lambda model: count_step(model, tokens(rows), plan, ONE, counts_work=True, on_cpu=False)[0]


@sampled
@pytest.mark.parametrize("policy", ["keep", "selective", "recompute", "offload"])
def test_equal_blocks_are_counted_once(policy: str) -> None:
    """All that a rehearsal of the whole model finds, to the byte and the operation."""
    model = on_meta(Decoder, num_blocks=9, recomputes=False)
    of_few = FewBlocks.of(model)
    assert of_few.blocks == EqualBlocks("blocks", 9)
    rehearsed: list[int] = []

    def count(rows: int) -> Callable[[nn.Module], Counted]:
        def counts(fewer: nn.Module) -> Counted:
            rehearsed.append(len(fewer.blocks))
            return counted(policy, rows)(fewer)

        return counts

    def whole(rows: int) -> Counted:
        return counted(policy, rows)(copy.deepcopy(model))

    of_two = whole(2)
    assert of_few.count(count(2)) == of_two
    most = max(rehearsed)
    assert set(rehearsed) == set(range(min(4, most - 1), most + 1)), "one of them to see whether their number matters"
    rehearsed.clear()
    assert of_few.count(count(3)) == whole(3)
    assert rehearsed == [most - 1], "for other samples it is known that few blocks tell"
    rehearsed.clear()
    assert of_few.count(count(2), split="another split") == of_two
    assert rehearsed == [most], "fewer did not tell, or were not enough to see"
    rehearsed.clear()
    assert of_few.count(count(2), "another treatment") == of_two
    assert min(rehearsed) >= 4, "for other treatments it is known that their number does not matter"


def test_equal_blocks_behind_others_are_counted_once() -> None:
    """As DeepSeek-V3's, of whose layers the first ones have no experts. A plan that names blocks is for all of them."""
    model = on_meta(Decoder, num_blocks=9)
    with torch.device("meta"):
        model.blocks[0].up, model.blocks[0].down = nn.Linear(32, 96), nn.Linear(96, 32)
    assert equal_blocks(model) == EqualBlocks("blocks", 8, 1)
    whole = counted("keep")(copy.deepcopy(model))
    assert FewBlocks.of(model).count(counted("keep")) == whole
    named = Plan(preset="zero3", precision="bf16", units=tuple(f"blocks.{place}" for place in range(9)))
    for given in (Plan(preset="zero3", precision="bf16"), named):
        assert count_alike(copy.deepcopy(model), tokens(), given, ONE) == [whole]


@thorough_only("slow; smaller tests beside it cover the same code")
def test_blocks_that_are_not_alike_are_rehearsed_one_by_one() -> None:
    """Where a block differs in a number, a shape or a tensor that it shares, there are no equal ones. Where what they
    do depends on how many there are, copies with few do not tell."""

    def changed(change: Callable[[nn.ModuleList], object]) -> EqualBlocks | None:
        model = Stack(8)
        change(model.blocks)
        return equal_blocks(model)

    assert changed(lambda _: None) == EqualBlocks("blocks", 8)
    assert changed(lambda blocks: setattr(blocks[5], "window", 7)) is None
    assert changed(lambda blocks: setattr(blocks[5].norm1, "eps", 0.1)) is None
    assert changed(lambda blocks: setattr(blocks[5], "up", nn.Linear(32, 64))) is None
    assert changed(lambda blocks: setattr(blocks[5], "up", blocks[4].up)) is None
    assert changed(lambda blocks: blocks[5].up.weight.requires_grad_(False)) is None

    def numbered(blocks: nn.ModuleList) -> None:
        for place, block in enumerate(blocks):
            block.place = place

    assert changed(numbered) == EqualBlocks("blocks", 8), "a place is not a difference"
    assert changed(lambda blocks: setattr(blocks[1], "window", 7)) == EqualBlocks("blocks", 6, 2)
    assert equal_blocks(Stack(5)) is None, "too few to be worth it"
    for build in (Skips, Counts):
        of_few = FewBlocks.of(on_meta(build, num_blocks=8))
        assert of_few.blocks is not None
        assert of_few.count(counted("keep")) is None, build
    assert treats_alike(Plan(tensor={"plan": {"blocks.*.up": "column"}}))  # type: ignore[arg-type]
    for more in (
        {"units": ["tokens", "blocks.3"]},
        {"tensor": {"plan": {"blocks.3.up": "column"}}},
        {"activations": {"policy": "recompute", "every": 2}},
        {"rules": {"some": {"params": ["*3*"], "activations": {"policy": "recompute"}}}},
    ):
        assert not treats_alike(Plan(**more)), more  # type: ignore[arg-type]


def searched(model: nn.Module, batch: Any, axis: str, world_size: int = 4) -> Found:
    subject = ModelSubject(model, batch, H100, 16, Plan(preset="zero3"), on_cpu=False)
    space = Space(presets=("zero3",), axes=(axis,), activations=("keep",), rows=(2, 4))
    return search(subject, world_size, ROOMY, base=subject.base, space=space)


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize(
    ("axis", "build", "batch"),
    [("sp", Gpt, (torch.zeros(2, 16, dtype=torch.long), torch.arange(16).repeat(2, 1))), ("ep", Mixture, tokens())],
)
def test_axes_are_tried(axis: str, build: Callable[..., nn.Module], batch: Any) -> None:
    """Sequences and experts are split, and what that sends takes time."""
    found = searched(on_meta(build), batch, axis)
    assert not found.refused
    by_size = {one.candidate.size(axis): one.found for one in found.evaluated if one.candidate.rows == 2}
    assert {1, 2} <= by_size.keys() <= {1, 2, 4}, "four ranks may take too long by their bound"
    assert by_size[2].parts[f"waiting along {axis}"] > by_size[1].parts.get(f"waiting along {axis}", 0.0)


def test_units_with_the_same_contents_are_planned_once() -> None:
    """Whatever one of them has apart (what is frozen, another optimizer's update) is planned for it alone."""
    model, mesh = on_meta(Decoder, num_blocks=6), Mesh(("dp",), (4,))
    plan = Plan(preset="zero3", resident_below=100)
    updates = updates_of(model, "adamw")
    model.blocks[2].up.weight.requires_grad_(False)
    updates[model.blocks[4].up.weight] = Update(needs_norm=True)
    found = outline(model, plan, mesh, 0)
    together = unit_specs(found.choices, found.rows, mesh, updates, on_cpu=False)
    one_by_one = [unit_specs([choice], found.rows, mesh, updates, on_cpu=False)[0] for choice in found.choices]
    assert together == one_by_one
    names = [{flat.name for flat in unit.flats} for unit in together]
    assert len(set().union(*names)) == sum(map(len, names)) > len(names), "each has names of its own"
    by_block = [[replace(flat, name="") for flat in unit.flats] for unit in together if "blocks" in unit.name]
    assert by_block[0] == by_block[1] == by_block[5] != by_block[4]
    assert by_block[0] != by_block[2] != by_block[4]


class Spares(Decoder):
    """Copies nothing for a single sample, as reshaping and expanding do."""

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits_of(hidden if len(hidden) == 1 else hidden.clone())


WIDE = Plan(tensor={"plan": {"blocks.*.up": "column", "blocks.*.down": "row"}})  # type: ignore[arg-type]


def counting(subject: ModelSubject) -> list[tuple[str, int, int]]:
    """Treatment, size along tp and rows of what `subject` rehearses from now on."""
    rehearsed: list[tuple[str, int, int]] = []
    own = subject.rehearsals._rehearsed

    def noted(candidate: Candidate, *, for_messages: bool) -> list[Counted]:
        rehearsed.append((candidate.policy, candidate.size("tp"), candidate.rows))
        return own(candidate, for_messages=for_messages)

    subject.rehearsals._rehearsed = noted  # type: ignore[method-assign]  # of this one
    return rehearsed


@sampled
@pytest.mark.parametrize(("build", "told"), [(Decoder, (1, 2)), (Spares, (1, 2, 4))])
def test_two_sizes_of_micro_batches_tell_of_all_others(build: type[Decoder], told: tuple[int, ...]) -> None:
    """Of each way to split a model. Where a single sample is treated otherwise, two other sizes do."""
    model = on_meta(build, num_blocks=8, width=64)
    subject = ModelSubject(model, tokens(1, length=64), H100, 64, WIDE, on_cpu=False)
    rehearsed = counting(subject)
    for tp in (1, 2):
        candidates = [Candidate("zero1", (("dp", 1), ("tp", tp)), rows, 1) for rows in (8, 16, 64)]
        derived = {one.rows: subject.rehearsals.derived(one) for one in candidates}
        assert sorted(rehearsed) == [("keep", tp, rows) for rows in (told if tp == 1 else told[-2:])]
        ((found,), exact) = derived[16], subject.rehearsals.count(Candidate("zero1", (("dp", 1), ("tp", tp)), 16, 1))[0]
        rehearsed.clear()
        assert found.worked == exact.worked
        assert found.sent_bytes == exact.sent_bytes
        assert found.activations.trace == exact.activations.trace
        most = max(mark.peak_bytes for mark in exact.activations.marks)
        for mark, same in zip(found.activations.marks, exact.activations.marks, strict=True):
            assert abs(mark.peak_bytes - same.peak_bytes) <= 0.02 * most, "allocators round small blocks up"


def test_what_a_rehearsal_leaves_is_collected_where_nothing_else_does() -> None:
    """The copies of modules, which are cycles: a search lets Python's collector wait."""
    subject = ModelSubject(on_meta(Decoder, num_blocks=8, width=64), tokens(1, length=64), H100, 64, WIDE, on_cpu=False)
    num_alive = []
    gc.collect()
    gc.disable()
    try:
        for rows in (1, 2, 3, 4):
            subject.rehearsals.count(Candidate("zero1", (("dp", 1), ("tp", 2)), rows, 1))
            num_alive.append(sum(type(one) is Decoder for one in gc.get_objects()))
    finally:
        gc.enable()
    assert num_alive[0] <= 4, "the model, and copies with few blocks"
    assert num_alive == num_alive[:1] * 4


@thorough_only("several rehearsals; test_search has bounds of candidates")
def test_a_bound_needs_no_rehearsal_of_each_treatment() -> None:
    """Whatever is done with activations, a micro-batch computes and sends what it does when they are kept."""
    subject = ModelSubject(on_meta(Decoder, num_blocks=8), tokens(), H100, 64, WIDE, on_cpu=False)
    for policy in ("keep", "recompute"):
        subject.size(policy, None)  # type: ignore[arg-type]  # one of them
    kept = Candidate("zero1", (("dp", 2), ("tp", 2)), 8, 1)
    again = replace(kept, policy="recompute")
    rehearsed = counting(subject)
    bounds = [subject.least(one).seconds for one in (kept, again)]
    assert rehearsed == [("keep", 2, 2), ("keep", 2, 4)]
    assert bounds[0] < bounds[1]
    for bound, candidate in zip(bounds, (kept, again), strict=True):
        assert bound <= subject.evaluate(candidate).seconds
    assert subject.least(again).seconds > bounds[1], "now it is known"
    far = H100.model_copy(update={"local": H100.local.model_copy(update={"bytes_per_second": 1e6})})
    subject = ModelSubject(on_meta(Decoder, num_blocks=8), tokens(), far, 64, WIDE, on_cpu=False)
    assert subject.least(kept).seconds > 50 * bounds[0], "messages within layers count"


@thorough_only("seconds of searching; tests beside it have the other bounds")
@sampled
@pytest.mark.parametrize("build", [Decoder, Spares])
@pytest.mark.parametrize("link", [1e8, 25e9])
def test_a_treatment_is_bounded_by_itself_on_fewer_ranks(build: type[Decoder], link: float) -> None:
    """Whatever it computes, copies to the host and holds there, each of twice as many ranks does half of at least; so
    no split of a model is rehearsed for a treatment that is too slow or too large without it."""
    host = H100.host
    assert host is not None
    slow = H100.model_copy(update={"host": host.model_copy(update={"link_bytes_per_second": link})})
    subject = ModelSubject(on_meta(build, num_blocks=8, width=256), tokens(1, length=64), slow, 64, WIDE, on_cpu=False)
    bounds = Bounds(subject.base, slow, {}, subject.blocks_by_rank)
    for policy in ("keep", "recompute", "offload"):
        bounds.size_of[policy, None] = subject.size(policy, None)  # type: ignore[index, arg-type]  # one of them
    split = [Candidate("zero1", (("dp", 2), ("tp", tp)), rows, 16 // rows) for tp in (2, 4) for rows in (1, 2)]
    for one in split:
        subject.least(one, itself=True)
    rehearsed = counting(subject)
    policies: tuple[PolicyName, ...] = ("recompute", "offload")
    every = [replace(one, policy=policy) for policy in policies for one in split]
    least = [subject.least(one) for one in every]
    assert rehearsed == [], "activations that are kept were, and treatments without a split"
    assert not any(one.is_own for one in least)
    for one in every:
        if (one.size("tp"), one.rows) == (4, 1):
            assert not subject.least(one, itself=True).is_own
    rows = subject.rehearsals.rows_of_size
    assert rehearsed == [(policy, 2, rows) for policy in policies], "of four ranks two tell more"
    closer = [subject.least(one) for one in every]
    for one, *bounded in zip(every, least, closer, strict=True):
        exact = subject.evaluate(one)
        rough = replace(bounds.of(one), device_bytes=0.0)
        held = [rough.bytes_with(found.loads, grad_waits=False) for found in bounded]
        assert max(found.seconds for found in bounded) <= 1.001 * exact.seconds, one
        assert 0 < held[0] <= held[1] <= 1.001 * exact.device_bytes, one
        if (one.policy, link) == ("offload", 1e8):
            kept = subject.least(replace(one, policy="keep")).seconds
            assert bounded[0].seconds > 0.3 * exact.seconds > 10 * kept, one


class Planned(Decoder):
    """Says itself how it is split, as models of transformers do."""

    _tp_plan: ClassVar = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


@pytest.mark.parametrize(("plan", "rehearsed"), [(Plan(), 1), (WIDE, 2)])
def test_messages_of_stages_are_whole(plan: Plan, rehearsed: int) -> None:
    """On any number of ranks along tp, which are rehearsed only where a plan may split what a stage hands over."""
    subject = ModelSubject(on_meta(Planned, num_blocks=8, width=64), tokens(2, length=64), H100, 64, plan, on_cpu=False)
    own, count = subject.rehearsals._rehearsed, list[Candidate]()

    def noted(candidate: Candidate, *, for_messages: bool) -> list[Counted]:
        count.extend([candidate] if for_messages else [])
        return own(candidate, for_messages=for_messages)

    subject.rehearsals._rehearsed = noted  # type: ignore[method-assign]  # of this one
    split = [Candidate("zero1", (("pp", 4), ("dp", 1), ("tp", tp)), 2, 8) for tp in (1, 2)]
    found = [subject.rehearsals.message_bytes(one) for one in split]
    counts = map(subject.rehearsals.count, split)
    assert found == [max(num for part in one for num in part.message_bytes.values()) for one in counts]
    assert len(count) == rehearsed


@sampled
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
@pytest.mark.parametrize("policy", ["keep", "selective", "recompute"])
def test_what_stages_hold_is_derived_closely(policy: PolicyName, schedule: str, chunks: int) -> None:
    """With the messages under way, what has arrived, and what is put aside of activations that are computed again."""
    model = on_meta(Decoder, num_blocks=16, width=256)
    subject = ModelSubject(model, tokens(2, length=512), H100, 64, Plan(), on_cpu=False)
    one = Candidate("zero2", (("pp", 8), ("dp", 2)), 2, 16, policy, schedule, chunks)
    derived, exact = subject.evaluate(one), subject.confirm(one)
    assert 0.95 * exact.device_bytes <= derived.device_bytes <= 1.05 * exact.device_bytes
    assert 0 < subject.held(one, enough=0) <= subject.held(one) <= derived.device_bytes


@sampled
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)])
@pytest.mark.parametrize("policy", ["keep", "offload"])
def test_few_rounds_hold_what_all_of_them_hold(policy: PolicyName, schedule: str, chunks: int) -> None:
    """To the byte, on devices and hosts; so others are only timed. What was held on some ranks is not looked for
    again."""
    subject = ModelSubject(on_meta(Decoder, num_blocks=9, width=64), tokens(1), H100, 64, Plan(), on_cpu=False)
    for preset in ("zero1", "zero2", "zero3", "offload"):
        every = Candidate(preset, (("pp", 2), ("dp", 2)), 1, 16, policy, schedule, chunks)
        found, few = subject.evaluate(every), every.fullest
        assert few == replace(every, accumulate=6 if chunks > 1 else 4)
        most = subject.held(few)
        bytes_of_few = subject.evaluate(few)
        for name in ("device_bytes", "host_bytes", "disk_bytes", "process_bytes"):
            assert getattr(bytes_of_few, name) == getattr(found, name), (preset, name)
        assert most <= found.device_bytes
        assert subject.timed(every) == replace(found, device_bytes=0, host_bytes=0, disk_bytes=0, process_bytes=0)


@sampled
@pytest.mark.parametrize("policy", ["keep", "selective", "recompute"])
@pytest.mark.parametrize("build", [Decoder, Spares])
def test_two_splits_tell_closely_what_a_third_holds(build: type[Decoder], policy: PolicyName) -> None:
    """Of eight ranks along tp, two and four: so eight are rehearsed only if they may fit and be fast enough."""
    subject = ModelSubject(on_meta(build, num_blocks=8, width=256), tokens(1, length=64), H100, 64, WIDE, on_cpu=False)
    subject.size(policy, None)
    first = subject.rehearsals.rows_of_size
    widest = [Candidate("zero1", (("dp", 1), ("tp", 8)), rows, 1, policy) for rows in (first, 4 * first)]
    rehearsed = counting(subject)
    for _ in range(2):
        assert not any(subject.least(one, itself=True).is_own for one in widest[:1])
    assert [one for one in rehearsed if one[0] == policy] == [(policy, 2, first), (policy, 4, first)]
    for one in widest:
        (held,) = (load.activations for found in [subject.least(one)] for load in found.loads[-1:])
        rehearsed.clear()
        (exact,) = subject.rehearsals.count(one)
        most = max(mark.peak_bytes for mark in exact.activations.marks)
        assert (0.9 * most if one.rows == first else 0) < held <= most, one


PRESETS = ("zero1", "zero3", "hpz", "zero3-kept")
SPLITS = ((1, 1, "1f1b", 1), (1, 2, "1f1b", 1), (4, 1, "1f1b", 1), (2, 2, "zb-h1", 1), (2, 1, "interleaved", 2))


@sampled
@pytest.mark.parametrize("policy", ["keep", "selective", "recompute", "offload"])
@pytest.mark.parametrize("wide", [8, 512])
@pytest.mark.parametrize("name", ["h100-sxm", "cpu"])
def test_a_close_bound_is_below_what_is_found_and_near_it(policy: PolicyName, wide: int, name: str) -> None:
    """In time and memory, in stages and without, whether launches or matrix products take longest. What ranks hold and
    the messages beside what they compute are in it."""
    model = on_meta(Decoder, num_blocks=8, width=wide)
    machine = hardware(name).with_ranks(4)
    subject = ModelSubject(model, tokens(2, length=64), machine, 128, WIDE, on_cpu=machine.is_processor)
    sizes = {(policy, None): subject.size(policy, None)}
    bounds = Bounds(subject.base, subject.hardware, sizes, subject.blocks_by_rank)
    shares = []
    for preset, (pp, tp, schedule, chunks) in itertools.product(PRESETS, SPLITS):
        num_data = 16 // pp // tp
        data = (("node", num_data // 2), ("local", 2)) if preset == "hpz" else (("dp", num_data),)
        axes = (*((("pp", pp),) if pp > 1 else ()), *data, *((("tp", tp),) if tp > 1 else ()))
        candidate = Candidate(preset, axes, 2, 8, policy, schedule, chunks)
        rough, exact = bounds.of(candidate), subject.evaluate(candidate)
        least = subject.least(candidate)
        seconds = least.seconds_beside(rough.communicating, subject.hardware.contention)
        held = rough.bytes_with(least.loads, grad_waits=candidate.has_gradients_beside)
        assert max(seconds, rough.seconds) <= 1.001 * exact.seconds, candidate
        assert held <= 1.001 * exact.device_bytes, candidate
        if pp > 1:
            assert 0.95 * exact.device_bytes < subject.held(candidate) <= exact.device_bytes, candidate
        shares.append(max(seconds, rough.seconds) / exact.seconds)
    assert sorted(shares)[len(shares) // 2] > 0.5


def test_uneven_stages_are_bounded_by_what_each_of_them_has() -> None:
    """The first ranks hold most micro-batches, and have fewer blocks than the last ones: less than an even share of
    what the whole model holds."""
    batch = tokens(2, length=64)
    subject = ModelSubject(on_meta(Decoder, num_blocks=24, width=64), batch, H100, 64, WIDE, on_cpu=False)
    size = subject.size("keep", None)
    bounds = Bounds(subject.base, H100, {("keep", None): size}, subject.blocks_by_rank)
    candidate = Candidate("zero3", (("pp", 16), ("dp", 2)), 2, 16, "keep")
    blocks = subject.blocks_by_rank(candidate)
    assert (sum(blocks), min(blocks), max(blocks)) == (24, 1, 2)
    rough, exact = bounds.of(candidate), subject.evaluate(candidate).device_bytes
    message_bytes = subject.rehearsals.message_bytes(candidate)
    without_messages = exact - in_transit(16, 16, message_bytes, message_bytes)
    assert 0.5 * exact < rough.device_bytes <= exact
    assert without_messages < rough.resting + size.row_bytes * candidate.rows


class Reads(Gpt):
    """Reads neighbouring tokens, which `sp` puts on other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(32, 32, 3, padding=1)


@sampled
@pytest.mark.parametrize(
    ("axis", "build"), [("sp", Reads), ("ep", Gpt), ("tp", Gpt)], ids=["convolution", "no experts", "no plan"]
)
def test_axes_are_refused_as_shard_refuses_them(axis: str, build: Callable[..., nn.Module]) -> None:
    """Once for each size, with the words of the check, and what has no such axis is chosen."""
    model = on_meta(build)
    batch = torch.zeros(2, 16, dtype=torch.long), torch.arange(16).repeat(2, 1)
    with pytest.raises((ConfigError, ModelError)) as raised:
        outline(model, Plan(preset="zero3", mesh={"dp": 2, axis: 2}), Mesh(("dp", axis), (2, 2)), 0)
    found = searched(model, batch, axis)
    assert str(raised.value) in found.refused.values()
    assert {one.candidate.size(axis) for one in found.evaluated} == {1}


class LooksUp(Stack):
    """Looks positions up in a table of its own, as BERT does."""

    def __init__(self) -> None:
        super().__init__(1, length=8)
        self.register_buffer("places", torch.arange(8).flip(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.gather(self.places.expand(len(x), -1), 1, self.places[: x.shape[1]].expand(len(x), -1))
        return self.logits_of(self.tokens(x) + self.positions(places)).square().mean()


def test_integers_of_a_model_keep_their_values_or_have_none() -> None:
    """A copy without values knows them; in a model that was built without, they are not what is in memory."""
    x = torch.zeros(2, 6, dtype=torch.long)
    with deferred_init():
        deferred = LooksUp()
    copied = without_values(LooksUp())
    assert torch.equal(copied.places, torch.arange(8).flip(0))
    assert copied.positions.weight.is_meta
    for model in (copied, on_meta(LooksUp), without_values(deferred)):
        (found,) = count_step(model, x, Plan(preset="zero3"), ONE, counts_work=True)
        assert found.activations.marks[-1].live_bytes > 0


class Calls(Decoder):
    """Calls itself, hooks included, as a training step of Lightning does."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        if y is None:
            return super().forward(x)
        logits = self(x).float()
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def test_a_model_that_calls_itself_is_rehearsed_once() -> None:
    of_itself, plain = (counted("keep")(build(num_blocks=2)) for build in (Calls, Decoder))
    flops = [sum(one.flops for part in found.worked for one in part.operations) for found in (of_itself, plain)]
    assert flops[0] == flops[1] > 0
    peaks = [max(mark.peak_bytes for mark in found.activations.marks) for found in (of_itself, plain)]
    assert peaks[0] == peaks[1]


class Drops(Stack):
    """Drops some of what it attends to, and of its hidden values."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(x)
        q = hidden.unflatten(-1, (4, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
        return F.dropout(attended.transpose(1, 2).flatten(2), 0.5).sum()


def test_a_plan_for_devices_counts_their_memory() -> None:
    """On a machine without one: blocks of their allocator, no heap, and kernels that drop without noise in memory."""
    x = torch.zeros(2, 512, dtype=torch.long)
    plan = Plan(preset="zero3", precision="bf16")
    on_cpu, on_device = (
        count_step(on_meta(Drops), x, plan, ONE, on_cpu=on_cpu)[0].activations for on_cpu in (True, False)
    )
    scores = 2 * 4 * 512 * 512 * 2
    assert max(mark.peak_bytes for mark in on_cpu.marks) > scores > max(mark.peak_bytes for mark in on_device.marks)
    assert on_cpu.process_bytes
    assert not on_device.process_bytes
    assert all(mark.live_bytes % 512 == 0 and mark.heap_bytes == 0 for mark in on_device.marks)


@thorough_only("slow; smaller tests beside it cover the same code")
def test_what_does_not_fit_leaves_the_device_in_part() -> None:
    """As little as a budget would take, and the rest of the host's limit goes to a disk."""
    subject = ModelSubject(on_meta(Decoder, num_blocks=12, width=128), tokens(), H100, 8, Plan(), on_cpu=False)
    sizes = (("dp", 2),)
    whole, offloaded = (subject.evaluate(Candidate(preset, sizes, 2, 2)) for preset in ("zero3", "zero3-offload"))
    device_bytes = (whole.device_bytes + offloaded.device_bytes) // 2
    space = Space(presets=("zero3",), axes=(), activations=("keep",), rows=(2,))
    found = search(subject, 2, Limits(device_bytes), base=subject.base, space=space)
    best = found.best[0]
    assert best.candidate.offload is not None
    assert 0 < best.candidate.offload.optim < 1
    assert best.candidate.disk is None
    assert device_bytes - whole.device_bytes // 12 < best.found.device_bytes <= device_bytes
    assert whole.seconds < best.found.seconds < offloaded.seconds
    assert best.candidate.plan(subject.base).offload == best.candidate.offload
    reasons = {one.what: one.reason for one in found.why_not}
    assert reasons["all on the device"].endswith("too much on a device")
    with pytest.raises(ConfigError, match="No plan fits on 2 ranks"):
        search(subject, 2, Limits(device_bytes), base=subject.base, space=replace(space, shares=False))

    disk = Disk(read_bytes_per_second=3e9, write_bytes_per_second=3e9)
    subject = replace(subject, hardware=H100.model_copy(update={"disk": disk}), disk="/scratch")
    limits = Limits(device_bytes, best.found.host_bytes * 9 // 10)
    candidate = search(subject, 2, limits, base=subject.base, space=space).best[0].candidate
    assert candidate.offload is not None
    assert 0 < candidate.offload.optim_disk < candidate.offload.optim
    assert candidate.plan(subject.base).disk == "/scratch"
    assert "of the states on a disk" in str(candidate)


@sampled
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
def test_stages_leave_the_device_in_part_whatever_the_number_of_micro_batches(schedule: str, chunks: int) -> None:
    """What is found for three rounds of them is what more rounds need, and no more than they need."""
    subject = ModelSubject(on_meta(Decoder, num_blocks=12, width=128), tokens(), H100, 64, Plan(), on_cpu=False)
    sizes = (("pp", 2), ("dp", 2))
    long = Candidate("zero1", sizes, 1, 16, schedule=schedule, chunks=chunks)
    whole, offloaded = (subject.evaluate(replace(long, preset=preset)) for preset in ("zero1", "offload"))
    limit = (whole.device_bytes + offloaded.device_bytes) // 2
    found = subject.relieved(long, Limits(limit))
    assert found.accumulate == 16
    assert found.offload is not None
    assert limit - whole.device_bytes // 6 < subject.evaluate(found).device_bytes <= limit


@thorough_only("slow; smaller tests beside it cover the same code")
def test_what_a_plan_computes_at_least() -> None:
    """For any preset, and in equal parts for ranks that share a model; never more than a step takes."""
    subject = ModelSubject(on_meta(Decoder, num_blocks=4), tokens(), H100, 16, Plan(), on_cpu=False)
    plain, in_stages = (("dp", 4),), (("pp", 2), ("dp", 2))
    nodes = Candidate("hsdp", (("node", 2), ("local", 2)), 2, 2)
    least = subject.least(nodes).seconds
    assert least == subject.least(Candidate("zero3", plain, 2, 2)).seconds > 0
    for candidate in (nodes, Candidate("zero3", plain, 2, 2), Candidate("zero1", in_stages, 2, 4)):
        assert subject.least(candidate).seconds <= subject.evaluate(candidate).seconds
    uneven = ModelSubject(on_meta(Decoder, num_blocks=6), tokens(), H100, 64, Plan(), on_cpu=False)
    two, four = (Candidate("zero1", (("pp", pp), ("dp", 1)), 2, 32) for pp in (2, 4))
    assert uneven.least(four).seconds > 0.6 * uneven.least(two).seconds, "two stages have two blocks, of six"
    assert uneven.least(four).seconds <= uneven.evaluate(four).seconds


@sampled
@pytest.mark.parametrize(("schedule", "chunks", "pp"), [("1f1b", 1, 4), ("interleaved", 2, 2)])
def test_stages_that_a_plan_lists(schedule: str, chunks: int, pp: int) -> None:
    """Four of them, on other numbers of ranks than the two whose messages tell of all others."""
    stages = [["tokens", "blocks.0"], ["blocks.1"], ["blocks.2"], ["blocks.3", "norm", "head"]]
    virtual = {"virtual_stages": chunks} if chunks > 1 else {}
    base = Plan(pipeline={"schedule": schedule, "stages": stages, **virtual})  # type: ignore[arg-type]
    subject = ModelSubject(on_meta(Decoder, num_blocks=4), tokens(8), H100, 32, base, num_states=2, on_cpu=False)
    candidate = Candidate("zero1", (("pp", pp), ("dp", 1)), 8, 4, schedule=schedule, chunks=chunks)
    subject.check(candidate)
    derived, exact = subject.evaluate(candidate), subject.confirm(candidate)
    assert derived.seconds == pytest.approx(exact.seconds, rel=0.25)
    assert derived.device_bytes == pytest.approx(exact.device_bytes, rel=0.15)


@pytest.mark.parametrize(
    ("machine", "build", "batch"),
    [
        ("cpu", Decoder, tokens(1, length=64)),
        ("h100-sxm", Gpt, (torch.zeros(2, 16, dtype=torch.long), torch.arange(16).repeat(2, 1))),
    ],
)
def test_devices_of_what_is_said_to_do_are_enough(
    machine: str, build: Callable[..., nn.Module], batch: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """What the smallest plan takes is said as it was found exactly, rounded up; a plan is found that needs no more."""

    def searched(device_bytes: int) -> Found:
        on_cpu = machine == "cpu"
        subject = ModelSubject(on_meta(build), batch, hardware(machine), 8, Plan(), on_cpu=on_cpu)
        space = Space(("zero1", "offload"), ("pp",), ("recompute",), schedules=(("1f1b", 1),), rows=(1,))
        return search(subject, 2, Limits(device_bytes, 2**36), base=subject.base, space=space)

    with pytest.raises(ConfigError, match="What would do: devices of ") as raised:
        searched(1024)
    said = re.search(r"devices of ([\d.]+ \wiB)", str(raised.value))
    assert said is not None
    enough = parse_bytes(said[1])
    assert searched(enough).best[0].found.device_bytes <= enough
