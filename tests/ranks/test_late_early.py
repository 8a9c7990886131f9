"""Ordering on devices, tested without one: collectives run at once or at the last moment. See `fake_devices.py`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_devices import WHENS, Devices, FakeGroups, FakeWork, Race, When
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelined import unsplit
from test_random_models import PLANS, Drawn, Sketch, drawn_course, sketches
from torch import nn
from twins import (
    Batch,
    Course,
    MakeOptimizer,
    Run,
    adamw,
    assert_rounds_like_the_plain_model,
    assert_same,
    batches,
    engine_step,
    full_params,
    muon_groups,
    plain_run,
    plan_of,
    share_of,
)

import shardwise as sw
from shardwise.comm.watch.fault import Fault
from shardwise.errors import CommError, FaultError, StateError
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import PRESETS
from shardwise.program import Action
from shardwise.runtime import GradMover, ParamMover
from shardwise.testing import InjectedError, run_ranks
from tests import inside
from tests.models import Decoder, Transformer
from tests.thorough import drawn, sampled, thorough_only, varies

Tensor = torch.Tensor
GRID = {"node": 2, "local": 2}
ON_HOST = [("offload", 2, None), ("zero3-offload", 2, None)]
CASES = [(name, 2, None) if len(preset.axes) == 1 else (name, 4, GRID) for name, preset in PRESETS.items()]
NUM_MODELS = drawn(2, 200)
Step = Callable[[sw.Engine, torch.optim.Optimizer, Batch], Tensor]
Params = dict[str, Tensor]
Reader = Callable[[sw.Engine], Params]


def small() -> Transformer:
    torch.manual_seed(0)
    return Transformer(tied=True, num_blocks=2)


def run_on_devices(
    devices: Devices,
    model: nn.Module,
    data: Sequence[Batch],
    case: tuple[str, int, Mapping[str, int] | None],
    make_optimizer: MakeOptimizer = adamw,
    step: Step = engine_step,
    **plan: Any,
) -> Run:
    """`twins.sharded_run` with a device for every rank. All operations that were started must have been waited for."""
    preset, num_ranks, mesh = case
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]

    def rank(world: sw.World) -> Run:
        replica, run = replicas[world.rank], Run()
        optimizer = make_optimizer(replica)
        with sw.shard(replica, plan_of(preset, mesh, **plan), optimizer=optimizer, world=world) as engine:
            for batch in data:
                loss = step(engine, optimizer, share_of(engine, batch))
                run.losses.append(world.mean(loss.item()))
                run.norms.append(engine.gradient_norm or 0.0)
            run.params = full_params(engine)
            assert inside.meter(engine).now["working"] == 0
        return run

    runs = devices.run(num_ranks, rank)
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert all(torch.equal(param, runs[0].params[name]) for name, param in run.params.items())
    assert devices.num_works == devices.num_waited
    assert devices.num_works.total()
    return runs[0]


# -- training is the same whenever collectives run ---------------------------------------------------


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("case", CASES, ids=list(PRESETS))
@sampled
def test_presets_train_like_their_twin(case: tuple[str, int, Any], when: When, tmp_path: Path) -> None:
    """All of them; `infinity` reads its files into locked pages, from which the device copies."""
    model, data = small(), batches(3)
    plan = {"disk": str(tmp_path)} if PRESETS[case[0]].optim.tier == "disk" else {}
    assert_same(run_on_devices(Devices(when), model, data, case, **plan), plain_run(model, data))


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize(
    "case", [("zero2", 2, None), ("zero1", 2, None), ("hsdp", 4, GRID)], ids=["zero2", "zero1", "hsdp"]
)
@sampled
def test_accumulated_gradients(case: tuple[str, int, Any], when: When) -> None:
    """Micro-batches, some of which do not reduce their gradients."""

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> Tensor:
        total = torch.zeros(())
        for number, (x, y) in enumerate(zip(batch[0].chunk(2), batch[1].chunk(2), strict=True)):
            if number == 0:
                with engine.no_sync():
                    loss = engine(x, y) / 2
                    engine.backward(loss)
            else:
                loss = engine(x, y) / 2
                engine.backward(loss)
            total = total + loss.detach()
        engine.step()
        return total

    model, data = small(), batches(3)
    assert_same(run_on_devices(Devices(when), model, data, case, step=step), plain_run(model, data))


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("case", [("zero3", 2, None), ("ddp", 2, None), *ON_HOST], ids=lambda case: case[0])
@sampled
def test_narrow_precisions(case: tuple[str, int, Any], precision: str, when: When) -> None:
    model, data = small(), batches(3)
    run = run_on_devices(Devices(when), model, data, case, precision=precision)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    assert_rounds_like_the_plain_model(run, model, data, num_ranks=2, dtype=dtype)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return sw.optim.Muon(muon_groups(model))


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw-int8": lambda model: sw.optim.AdamW(model.parameters(), state_dtype="int8"),
    "lamb": lambda model: sw.optim.Lamb(model.parameters()),
    "muon": muon,
}


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("case", [("zero3", 2, None), ("hsdp", 4, GRID)], ids=["zero3", "hsdp"])
@sampled
def test_our_optimizers_do_the_same_whenever_collectives_act(name: str, case: tuple[str, int, Any]) -> None:
    model, data = small(), batches(3)
    late, early, by_lot = (run_on_devices(Devices(when), model, data, case, OPTIMIZERS[name]) for when in WHENS)
    for run in (early, by_lot):
        assert run.losses == late.losses
        assert all(torch.equal(run.params[key], param) for key, param in late.params.items())
    assert all(torch.isfinite(param).all() for param in late.params.values())


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("case", [("zero3", 2, None), ("hpz", 4, GRID)], ids=["zero3", "hpz"])
@sampled
def test_a_step_that_raises_leaves_nothing_on_its_way(case: tuple[str, int, Any], where: str, when: When) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise InjectedError

    class Fragile(Transformer):
        is_broken = False

        def logits(self, x: Tensor) -> Tensor:
            hidden = self.tokens(x) + self.positions.weight[: x.shape[1]]
            hidden = self.blocks[0](hidden)
            if self.is_broken and where == "forward":
                raise InjectedError
            if self.is_broken:
                hidden = Raises.apply(hidden)
            return self.head(self.norm(self.blocks[1](hidden)))

    def step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> Tensor:
        engine.module.is_broken = True
        with pytest.raises(InjectedError):
            engine.backward(engine(*batch))
        engine.module.is_broken = False
        return engine_step(engine, _, batch)

    torch.manual_seed(0)
    model, data = Fragile(tied=True, num_blocks=2), batches(3)
    assert_same(run_on_devices(Devices(when), model, data, case, step=step), plain_run(model, data))


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("keep_bytes", [None, 0])
@sampled
def test_inference_between_steps(keep_bytes: int | None, when: When) -> None:
    model, data = small(), batches(3)
    x, _ = batches(1, seed=5)[0]

    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
        expected = copy.deepcopy(model)
        expected.load_state_dict(engine.state_dict())
        with engine.inference(keep_bytes=keep_bytes):
            assert torch.allclose(engine.module.logits(x), expected.logits(x), atol=1e-6)
        return engine_step(engine, optimizer, batch)

    run = run_on_devices(Devices(when), model, data, ("zero3", 2, None), step=step)
    assert_same(run, plain_run(model, data))


def read_data(engine: sw.Engine) -> Params:
    return {name: param.data.clone() for name, param in engine.module.named_parameters()}


def read_one_backwards(engine: sw.Engine) -> Params:
    return {name: param + 0 for name, param in reversed(list(engine.module.named_parameters()))}


def read_state_dict(engine: sw.Engine) -> Params:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def read_inside(engine: sw.Engine) -> Params:
    with engine.inference():
        return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def read_average(engine: sw.Engine) -> Params:
    average = [torch.zeros_like(param) for param in engine.module.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(average, list(engine.module.parameters()), 1.0)
    return dict(zip((name for name, _ in engine.module.named_parameters()), average, strict=True))


def read_by_an_evaluation(engine: sw.Engine) -> Params:
    with torch.no_grad():
        engine.module(*batches(1, seed=7)[0])
    return read_data(engine)


READERS = [read_data, read_one_backwards, read_state_dict, read_inside, read_average, read_by_an_evaluation]


@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("case", [("zero1", 2, None), ("zero2", 2, None)], ids=["zero1", "zero2"])
@sampled
def test_an_update_behind_the_step_is_there_for_whoever_reads(
    case: tuple[str, int, Any], read: Reader, precision: str, when: When
) -> None:
    """Reads right after the step, while parameters are still being gathered, return the same as after waiting."""

    def train(*, awaits: bool) -> list[Params]:
        model = small()
        replicas = [copy.deepcopy(model) for _ in range(case[1])]

        def rank(world: sw.World) -> list[Params]:
            mine, read_here = replicas[world.rank], []
            with sw.shard(
                mine, plan_of(case[0], None, precision=precision), optimizer=adamw(mine), world=world
            ) as engine:
                for batch in batches(2):
                    engine_step(engine, torch.optim.SGD([torch.zeros(1)]), share_of(engine, batch))
                    flats = inside.flats(engine)
                    assert all(flat.is_updating for flat in flats), "it goes on behind the step"
                    if awaits:
                        inside.runner(engine).gathering.await_updates()
                    read_here.append(read(engine))
            return read_here

        seen = Devices(when).run(case[1], rank)
        for other in seen[1:]:
            torch.testing.assert_close(other, seen[0], rtol=0, atol=0)
        return seen[0]

    torch.testing.assert_close(train(awaits=False), train(awaits=True), rtol=0, atol=0)


@sampled
@pytest.mark.parametrize("end", ["close", "reshard", "another step", "save"])
@pytest.mark.parametrize("when", WHENS)
def test_an_update_behind_the_step_comes_to_its_end(when: When, end: str, tmp_path: Path) -> None:
    model, data = small(), batches(2)
    expected = plain_run(model, data)
    replicas = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> Params:
        mine = replicas[world.rank]
        engine = sw.shard(mine, "zero1", optimizer=adamw(mine), world=world)
        for batch in data:
            engine_step(engine, torch.optim.SGD([torch.zeros(1)]), share_of(engine, batch))
        assert any(flat.is_updating for flat in inside.flats(engine))
        if end == "reshard":
            engine.reshard("zero3")
        elif end == "another step":  # in which no module is used, and so no parameter has a gradient
            engine.step()
        elif end == "save":
            engine.save(tmp_path / "checkpoint")
        params = {} if end == "close" else full_params(engine)
        engine.close()
        return params or {name: param.detach().clone() for name, param in mine.named_parameters()}

    devices = Devices(when)
    for params in devices.run(2, rank):
        torch.testing.assert_close(params, expected.params, rtol=1e-5, atol=1e-5)
    assert devices.num_works == devices.num_waited


def test_an_update_behind_the_step_that_another_stream_reads_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training stream waits for the gather, the reading stream for the training stream: one wait is enough."""
    devices, waits = Devices("late"), []
    accelerator, wait = devices.accelerator, FakeWork.wait

    def noting(self: FakeWork) -> None:
        waits.append((self.key[-1], accelerator.current_stream()))
        wait(self)

    def rank(world: sw.World) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sw.shard(model, "zero1", optimizer=optimizer, world=world) as engine:
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
            first, other = accelerator.current_stream(), accelerator.new_stream()
            assert any(flat.is_updating for flat in inside.flats(engine))
            before = len(accelerator.noted)
            with accelerator.on(other):
                assert not model.weight.detach().clone().isnan().any()
            noted = [one.about for one in accelerator.noted[before:] if one.what == "wait_stream"]
            assert (other, first) in noted
            assert not any(flat.is_updating for flat in inside.flats(engine))

    monkeypatch.setattr(FakeWork, "wait", noting)
    devices.run(2, rank)
    assert any(verb == "gather" for verb, _ in waits)
    assert all(stream is accelerator._defaults[stream.index] for _, stream in waits)


@pytest.mark.parametrize("when", WHENS)
@sampled
def test_a_second_step_on_the_same_gradients_waits_for_the_first_update(when: When) -> None:
    """No parameter is read between the two steps, and the second one writes to what the first one is sending."""
    num_on_their_way = []

    def twice(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
        loss = engine(*batch)
        engine.backward(loss)
        optimizer.step()
        num_on_their_way.append(sum(flat.is_updating for flat in inside.flats(engine)))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model, data = small(), batches(2)
    late = run_on_devices(Devices(when), model, data, ("zero1", 2, None), step=twice)
    assert all(num_on_their_way)
    whole = run_on_devices(Devices(when), model, data, ("ddp", 2, None), step=twice)
    assert_same(late, whole)


@sampled
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("preset", ["zero1", "zero3"])
def test_parameters_read_inside_a_transform(preset: str, when: When) -> None:
    """Right after the step: the read is refused, gathers in flight are kept, and training continues."""
    model, data = small(), batches(2)

    def step(engine: sw.Engine, optimizer: torch.optim.Optimizer, batch: Batch) -> Tensor:
        loss = engine_step(engine, optimizer, batch)
        weight = engine.module.head.weight
        with pytest.raises(StateError, match=r"is read inside a torch\.func transform"):
            torch.func.grad(lambda x: (x * weight).sum())(torch.ones(weight.shape[1]))
        with pytest.raises(StateError, match=r"called inside a torch\.func transform"):
            torch.func.grad(lambda _: engine.module(*batch))(torch.ones(()))
        return loss

    assert_same(run_on_devices(Devices(when), model, data, (preset, 2, None), step=step), plain_run(model, data))


@thorough_only("slow; smaller tests beside it cover the same code")
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("can_split", [True, False])
@sampled
def test_other_plans_and_engines_make_the_same_groups_everywhere(when: When, can_split: bool) -> None:
    """torch requires this. Groups that were made for one plan are reused by another."""
    devices, model, data = Devices(when, can_split=can_split), small(), batches(4)
    replicas = [copy.deepcopy(model) for _ in range(4)]
    others = [copy.deepcopy(model) for _ in range(4)]
    plans: list[Any] = ["zero3", {"preset": "hsdp", "mesh": GRID}, {"preset": "hpz", "mesh": GRID}, "ddp"]

    def rank(world: sw.World) -> tuple[list[float], list[int]]:
        replica = replicas[world.rank]
        engine = sw.shard(replica, plans[0], optimizer=adamw(replica), world=world)
        losses, num_made = [], []
        for plan, batch in zip(plans, data, strict=True):
            engine.reshard(plan)
            losses.append(
                world.mean(engine_step(engine, torch.optim.SGD([torch.zeros(1)]), share_of(engine, batch)).item())
            )
            num_made.append(len(devices.made[world.rank]))
        other = others[world.rank]
        sw.shard(other, plans[1], optimizer=adamw(other), world=world).close()
        num_made.append(len(devices.made[world.rank]))
        engine.close()
        return losses, num_made

    for losses, num_made in devices.run(4, rank):
        assert losses == pytest.approx(plain_run(model, data).losses, rel=1e-5)
        assert num_made == ([2, 6, 6, 6, 6] if can_split else [2, 10, 10, 10, 10])
    assert all(made == devices.made[0] for made in devices.made.values())


@sampled
@pytest.mark.parametrize("when", WHENS)
@pytest.mark.parametrize("case", [("zero3", 2, None), ("hpz", 4, GRID)], ids=["zero3", "hpz"])
def test_what_a_unit_gathers_at_one_moment_is_launched_as_one(case: tuple[str, int, Any], when: When) -> None:
    """A unit with frozen parameters has two flat buffers, which are gathered together."""
    model, data = small(), batches(3)
    for param in model.blocks[0].parameters():
        param.requires_grad_(param.dim() == 1)
    devices = Devices(when)
    run = run_on_devices(devices, model, data, case, trained_adamw)
    assert_same(run, plain_run(model, data, trained_adamw))
    assert devices.num_works["gather together"] >= case[1], "on each rank, in a backward"
    assert devices.num_works == devices.num_waited


def test_gathers_that_cannot_be_launched_fail_as_links_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for such a gather raises, as for any failed collective."""

    def refuse(*_: Any) -> FakeWork:
        raise RuntimeError("no memory for a launch")

    def rank(world: sw.World) -> None:
        mesh = Mesh(("dp",), (2,))
        collectives, group = world.collectives(world.device), world.group(mesh, "dp")
        collectives.prepare(mesh)
        works = []
        with pytest.raises(RuntimeError, match="no memory for a launch"), collectives.together():
            works += [collectives.all_gather(torch.zeros(4), group, "a shelf") for _ in range(2)]
        for work in works:
            with pytest.raises(CommError):
                work.wait()

    monkeypatch.setattr(FakeGroups, "all_gather_coalesced", refuse)
    Devices("late").run(2, rank)


def test_an_update_behind_the_step_that_never_comes_fails_for_every_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read raises, also when it is repeated, and none returns a half-gathered parameter."""
    honest = FakeWork.wait

    def breaks(self: FakeWork) -> None:
        honest(self)
        if self.key[-1] == "gather":
            raise RuntimeError("the other end is gone")

    monkeypatch.setattr(FakeWork, "wait", breaks)
    replicas = [small(), small()]

    def rank(world: sw.World) -> None:
        mine = replicas[world.rank]
        engine = sw.shard(mine, "zero1", optimizer=adamw(mine), world=world)
        engine_step(engine, torch.optim.SGD([torch.zeros(1)]), share_of(engine, batches(1)[0]))
        for _ in range(2):
            with pytest.raises(CommError):
                mine.head.weight.data.clone()
            with pytest.raises(CommError):
                mine(*share_of(engine, batches(1)[0]))
        with pytest.raises(CommError):
            engine.close()
        with pytest.raises(StateError, match="engine was closed"):
            mine.head.weight.data.clone()

    Devices("late").run(2, rank)


@pytest.mark.parametrize("preset", ["zero1", "zero3"])
@pytest.mark.parametrize(
    "read",
    [lambda engine: engine.module.head.weight.detach().clone(), lambda engine: engine.get("positions.weight")],
    ids=["param", "get"],
)
def test_what_comes_after_a_fault_is_given_to_nobody(
    preset: str, read: Callable[[sw.Engine], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that an abort wakes continues with garbage, and its wait does not fail. Reads must raise anyway."""
    honest, journals = FakeWork.wait, {}

    def aborted(self: FakeWork) -> None:
        honest(self)
        journal = journals.get((self.key[0], self.place))
        if self.key[-1] == "gather" and journal is not None:
            journal.fault = Fault("killed", (1,), "Rank 1 was killed.")

    monkeypatch.setattr(FakeWork, "wait", aborted)
    replicas = [small(), small()]

    def rank(world: sw.World) -> None:
        mine = replicas[world.rank]
        engine = sw.shard(mine, preset, optimizer=adamw(mine), world=world)
        engine_step(engine, torch.optim.SGD([torch.zeros(1)]), share_of(engine, batches(1)[0]))
        journals[(0, 1), world.rank] = world.journal
        for _ in range(2):
            with pytest.raises(FaultError):
                read(engine)
        if preset == "zero1":
            with pytest.raises(FaultError):
                engine.close()

    Devices("late").run(2, rank)


def trained_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


@varies
@settings(
    max_examples=NUM_MODELS,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    sketch=sketches(),
    plan=st.sampled_from(PLANS),
    seed=st.integers(0, 99),
    when=st.sampled_from(WHENS),
)
def test_drawn_models_train_as_on_the_host(
    sketch: Sketch, plan: tuple[int, dict[str, Any]], seed: int, when: When
) -> None:
    """Bit-identical to runs on the host: sums are computed in the same order. `test_random_models.py` compares the host
    with the plain model.

    `make exhaustive` tries 200 models, `make thorough` half as many.
    """
    num_ranks, settings = plan
    if "experts" in sketch.kinds:
        settings = {**settings, "units": {"class": "Layer"}}
    torch.manual_seed(seed)
    start, data = Drawn(sketch), torch.randn(3, 12, 6)

    def train(run: Callable[..., list[Any]]) -> list[Course]:
        replicas = [copy.deepcopy(start) for _ in range(num_ranks)]
        return run(
            num_ranks,
            lambda world: drawn_course(world, replicas[world.rank], settings, data),
        )

    devices = Devices(when, seed=seed)
    on_host = train(partial(run_ranks, shares_memory=False))
    for course, expected in zip(train(devices.run), on_host, strict=True):
        assert repr(course.losses) == repr(expected.losses)
        assert course.working == 0
        torch.testing.assert_close(course.params, expected.params, rtol=0, atol=0, equal_nan=True)
    assert devices.num_works == devices.num_waited


# -- mistakes are detected ---------------------------------------------------------------------------


class Sloppy(FakeGroups):
    """Process groups of a faulty library, which makes one mistake with the collectives of one verb."""

    verb = ""
    fault = ""

    def _work(self, verb: str, *more: Any) -> FakeWork:
        work = super()._work(verb, *more)
        if verb == self.verb:
            self.spoil(work)
        return work

    def spoil(self, work: FakeWork) -> None:
        if self.fault == "never waits" or (self.fault == "never waits for integers" and not _has_floats(work.outs)):
            work.wait = lambda: None  # type: ignore[method-assign]
        elif self.fault == "writes to what is sent":
            work.sources[0].add_(1)
        elif self.fault == "frees what is sent":
            work.sources[0].untyped_storage().resize_(0)
        elif self.fault == "writes to what is to be filled":
            work._poisoned[0].zero_()


def _has_floats(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.is_floating_point() for tensor in tensors)


@pytest.mark.parametrize(
    ("case", "verb", "fault"),
    [
        (("zero3", 2, None), "gather", "never waits"),
        (("zero3", 2, None), "reduce_scatter", "never waits"),
        (("zero1", 2, None), "gather", "never waits"),
        (("ddp", 2, None), "all_reduce", "never waits"),
        (("hsdp", 4, GRID), "all_reduce", "never waits"),
        (("zero3", 2, None), "reduce_scatter", "writes to what is sent"),
        (("zero3", 2, None), "reduce_scatter", "frees what is sent"),
        (("zero3", 2, None), "gather", "writes to what is to be filled"),
    ],
)
def test_faults_of_order_are_found(case: tuple[str, int, Any], verb: str, fault: str) -> None:
    assert _is_found(sloppy_devices(verb, fault), case)


def sloppy_devices(verb: str, fault: str) -> Devices:
    devices = Devices("late")
    sloppy = type("SloppyHere", (Sloppy,), {"verb": verb, "fault": fault})
    devices.join = lambda world: Devices.join(devices, world, sloppy)  # type: ignore[method-assign]
    return devices


RIGHT_VALUES = [
    torch.arange(4),
    torch.zeros(4, dtype=torch.int32),
    torch.zeros(4, dtype=torch.uint8),
    torch.full((4,), 255, dtype=torch.uint8),
    torch.ones(4, dtype=torch.bool),
    torch.zeros(4, dtype=torch.bool),
    torch.zeros(4, dtype=torch.float16),
]


@pytest.mark.parametrize("right", RIGHT_VALUES, ids=lambda right: f"{str(right.dtype)[6:]} {right[-1].item()}")
def test_what_is_read_too_early_has_wrong_values_in_any_dtype(right: Tensor) -> None:
    """No value is right for all uses: a mask may be all true, or all false."""
    mesh = Mesh(("dp",), (2,))

    def rank(world: sw.World) -> tuple[Tensor, Tensor]:
        collectives = world.collectives(torch.device("cpu"))
        collectives.prepare(mesh)
        out = right.clone()
        work = collectives.broadcast(out, 0, world.group(mesh, "dp"), "x")
        early = out.clone()
        work.wait()
        return early, out

    early, late = Devices("late").run(2, rank)[1]
    assert not torch.equal(early, right)
    assert torch.equal(late, right)


class Counting(nn.Module):
    """Its result depends on how often it has been called, by a buffer that ranks keep the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("num_calls", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.inner(x).square().mean() * self.num_calls.sum()


@pytest.mark.parametrize("fault", ["", "never waits for integers"])
def test_integer_buffers_that_are_read_too_early_are_found(fault: str) -> None:
    models = [Counting() for _ in range(2)]

    def rank(world: sw.World) -> list[int]:
        mine = models[world.rank]
        with sw.shard(mine, "zero2", optimizer=adamw(mine), world=world) as engine:
            for _ in range(3):
                engine_step(engine, torch.optim.SGD([torch.zeros(1)]), (torch.ones(2, 4),))
            return mine.num_calls.tolist()

    found = sloppy_devices("broadcast", fault).run(2, rank)
    assert (found == [[3, 3]] * 2) == (not fault)


def test_a_gather_that_the_library_forgets_to_wait_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake in the library's own code, instead of the process groups."""
    honest = ParamMover.wait_full

    def forgets(self: ParamMover, action: Action | None = None) -> None:
        if self._arriving is not None and not self._spread:
            self._arriving = None
        honest(self, action)

    monkeypatch.setattr(ParamMover, "wait_full", forgets)
    assert _is_found(Devices("late"), ("zero3", 2, None))


def test_an_update_behind_the_step_that_a_reader_does_not_wait_for_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ParamMover, "wait_param", lambda self, _=None: self.flat.end_update())
    assert _is_found(Devices("late"), ("zero1", 2, None))


def test_a_fresh_gradient_that_the_library_frees_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = GradMover.wait_grad

    def too_early(self: GradMover, action: Action) -> None:
        reduction = self._reduction
        if reduction is not None and reduction._fresh is not None and reduction._work is not None:
            reduction._fresh.free()
            reduction._fresh = None
        honest(self, action)

    monkeypatch.setattr(GradMover, "wait_grad", too_early)
    assert _is_found(Devices("late"), ("zero3", 2, None))


def _is_found(devices: Devices, case: tuple[str, int, Any]) -> bool:
    """Whether training raises because a tensor was touched in flight, or ends with wrong values."""
    model, data = small(), batches(3)
    try:
        assert_same(run_on_devices(devices, model, data, case), plain_run(model, data))
    except AssertionError:
        return True
    except Exception as error:
        while error.__cause__ is not None or isinstance(error.__context__, Race):
            error = error.__cause__ or error.__context__  # type: ignore[assignment]
        return isinstance(error, Race | CommError | StateError)
    return False


# -- sums and messages -------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["reduce_scatter", "all_reduce"])
def test_sums_are_made_in_the_dtype_in_which_they_are_kept(verb: str) -> None:
    """A sum in bf16 would be 256 + 1 + 1 + 1 = 256."""
    mesh = Mesh(("dp",), (4,))

    def rank(world: sw.World) -> Tensor:
        collectives = world.collectives(torch.device("cpu"))
        collectives.prepare(mesh)
        group = world.group(mesh, "dp")
        source = torch.full((8,), 256.0 if world.rank == 0 else 1.0, dtype=torch.bfloat16)
        out = torch.empty(2 if verb == "reduce_scatter" else 8)
        getattr(collectives, verb)(out, source, group, torch.bfloat16, "x").wait()
        return out

    rounded = torch.tensor(259.0).to(torch.bfloat16).item()  # what an all-reduce returns on every rank
    for out in Devices("late").run(4, rank):
        assert set(out.tolist()) == {259.0 if verb == "reduce_scatter" else rounded}


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("verb", ["reduce_scatter", "all_reduce"])
def test_what_a_collective_reads_lives_until_it_is_waited_for(verb: str, wire: torch.dtype) -> None:
    """A backend's work need not hold it: what is freed on the host is reused by what the rank queues next, and a
    collective on another stream may read it later than that."""
    mesh = Mesh(("dp",), (2,))

    read: dict[int, list[weakref.ref[Tensor]]] = {0: [], 1: []}

    class HoldsNothing:
        def wait(self) -> None: ...

    class Forgetting(FakeGroups):
        def _work(self, verb: str, group: Any, sources: Sequence[Tensor], *_: Any) -> Any:
            read[self.rank].extend(map(weakref.ref, sources))
            return HoldsNothing()

    def rank(world: sw.World) -> None:
        collectives = world.collectives(torch.device("cpu"))
        collectives.prepare(mesh)
        out = torch.empty(4 if verb == "reduce_scatter" else 8)
        work = getattr(collectives, verb)(out, torch.ones(8), world.group(mesh, "dp"), wire, "x")
        assert read[world.rank]
        assert all(one() is not None for one in read[world.rank])
        work.wait()
        alive = [tensor for one in read[world.rank] if (tensor := one()) is not None]
        assert all(tensor is out for tensor in alive)

    devices = Devices("late")
    devices.join = lambda world: Devices.join(devices, world, Forgetting)  # type: ignore[method-assign]
    devices.run(2, rank)


def test_the_sums_of_an_all_reduce_are_gathered_while_the_next_one_is_under_way() -> None:
    """In a wider dtype, an all-reduce has two halves. The first one's second half starts before it is waited for."""
    mesh = Mesh(("dp",), (2,))
    launched: dict[int, list[str]] = {0: [], 1: []}

    class Noting(FakeGroups):
        def _work(self, verb: str, *more: Any) -> FakeWork:
            launched[self.rank].append(verb)
            return super()._work(verb, *more)

    def rank(world: sw.World) -> list[float]:
        collectives = world.collectives(torch.device("cpu"))
        collectives.prepare(mesh)
        group = world.group(mesh, "dp")
        outs = [torch.empty(4) for _ in range(2)]
        source = torch.full((4,), 1.0 + world.rank, dtype=torch.bfloat16)
        first = collectives.all_reduce(outs[0], source, group, torch.bfloat16, "x")
        second = collectives.all_reduce(outs[1], 2 * source, group, torch.bfloat16, "y")
        assert launched[world.rank] == ["swap_chunks", "gather", "swap_chunks"]
        first.wait()
        second.wait()
        assert launched[world.rank] == ["swap_chunks", "gather", "swap_chunks", "gather"]
        return [out.unique().item() for out in outs]

    devices = Devices("late")
    devices.join = lambda world: Devices.join(devices, world, Noting)  # type: ignore[method-assign]
    assert devices.run(2, rank) == [[3.0, 6.0]] * 2


@sampled
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("when", WHENS)
def test_messages_between_stages_wait_for_what_they_bring(when: When, schedule: str) -> None:
    """Activations and gradients of a pipeline arrive late or at once; none is read before, or changed in flight."""
    model = Decoder(tied=True)
    data = batches(2, 8)
    twin = unsplit(model, data, clip=0.5)
    models = [copy.deepcopy(model) for _ in range(4)]
    plan = {"preset": "zero3", "mesh": {"pp": 2, "dp": 2}, "accumulate": 2, "clip_grad_norm": 0.5}

    def rank(world: sw.World) -> tuple[list[float], dict[str, Tensor]]:
        mine = models[world.rank]
        full = {**plan, "pipeline": {"schedule": schedule}}
        with sw.shard(mine, full, optimizer=adamw(mine), world=world) as engine:
            place, _ = engine.mesh.data_place(world.rank)
            losses = [world.mean(engine.train_step((x.chunk(2)[place], y.chunk(2)[place])).item()) for x, y in data]
            return losses, engine.state_dict()

    devices = Devices(when)
    for losses, params in devices.run(4, rank):
        assert losses == pytest.approx(twin.losses, rel=1e-5)
        for name, value in twin.params.items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-5, msg=name)
    assert devices.num_works["message"] == devices.num_waited["message"] > 0
