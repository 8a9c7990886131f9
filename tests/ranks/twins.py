"""Comparisons (races) of a sharded model on several ranks with its unsharded twin, which gets the whole batch."""

from __future__ import annotations

import copy
import gc
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.runtime.rehearsal.live_bytes import LivingBytes
from shardwise.system.telemetry import Ledger
from shardwise.testing import run_ranks
from tests import inside
from tests.models import LENGTH, VOCAB

Tensor = torch.Tensor
Batch = tuple[Tensor, Tensor]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

PRESETS_2 = [(name, 2, None) for name in ("ddp", "zero1", "zero2", "zero3", "zero3-kept")]
PRESETS_4 = [(name, 4, None) for name in ("ddp", "zero1", "zero2", "zero3", "zero3-kept")]
PRESETS_2X2 = [(name, 4, {"node": 2, "local": 2}) for name in ("hsdp", "hpz", "zero3", "zero1")]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With an `eps` well above rounding. With Adam's default, gradients close to zero lead to full-size updates that
    depend on the order of additions."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, eps=1e-5)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def muon_groups(model: nn.Module, **of_others: Any) -> list[dict[str, Any]]:
    """For `Muon`: its own parameters, and all others, which AdamW updates with the settings `of_others`."""
    hidden = sw.optim.hidden_matrices(model)
    others = [param for param in model.parameters() if all(param is not one for one in hidden)]
    return [{"params": hidden}, {"params": others, "use_muon": False, **of_others}]


def batches(num_steps: int, rows: int = 8, seed: int = 1, *, words: int = VOCAB, length: int = LENGTH) -> list[Batch]:
    numbers = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, words, (rows, length + 1), generator=numbers) for _ in range(num_steps)]
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in draw]


def normal_batches(num_steps: int, inputs: Sequence[int], targets: Sequence[int], seed: int = 1) -> list[Batch]:
    """Inputs and targets of these shapes, both normally distributed."""
    numbers = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(*inputs, generator=numbers), torch.randn(*targets, generator=numbers)) for _ in range(num_steps)
    ]


@dataclass
class Run:
    """Results of a training run: losses and norms of each step, final parameters by name, gradients of each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    """Before they are clipped. Of ranks, those that the test compares."""
    each: list[Any] = field(default_factory=list)
    """What a test has looked at after each step, and `extra` at the end."""
    extra: Any = field(default_factory=dict)


def call(model: Any, batch: Batch) -> Tensor:
    return model(*batch)


def chunked(batch: Any, parts: int) -> list[Any]:
    """The parts of a batch, which is a tuple of tensors or a dict of them."""
    if isinstance(batch, Mapping):
        return [dict(zip(batch, part, strict=True)) for part in chunked(tuple(batch.values()), parts)]
    return list(zip(*(tensor.chunk(parts) for tensor in batch), strict=True))


def plain_run(  # each is a way of training
    model: nn.Module,
    data: Sequence[Any],
    make_optimizer: MakeOptimizer = adamw,
    *,
    clip: float | None = None,
    shares: int = 1,
    dtype: torch.dtype | None = None,
    keeps: tuple[type[nn.Module], ...] = (),
    forward: Callable[[Any, Any], Tensor] = call,
    after_step: Callable[[nn.Module], None] | None = None,
    whole_state: bool = False,
) -> Run:
    """The twin: one process, without this library. It trains on whole batches, or on as many `shares` of each as there
    are ranks or micro-batches, and averages their gradients as ranks do, each times its share and then added: by any
    other order a third differs in its last bit, which moves some 8-bit codes to their neighbours. With a narrow
    `dtype`, the model computes in it, except for modules of classes in `keeps`, and the optimizer updates fp32 masters.
    `whole_state`: the final parameters with buffers, and with the other names of tied ones."""
    masters = copy.deepcopy(model)
    model = masters if dtype is None else narrowed(model, dtype, keeps)
    scale = 2.0**16 if dtype == torch.float16 else 1.0
    optimizer = make_optimizer(masters)
    run = Run()
    for batch in data:
        parts = [batch] if shares == 1 else chunked(batch, shares)
        losses, grads = zip(*(_loss_and_grads(model, part, forward, scale) for part in parts), strict=True)
        for param, *of_parts in zip(masters.parameters(), *grads, strict=True):
            there = [grad.to(param.dtype) * (1 / (scale * shares)) for grad in of_parts if grad is not None]
            param.grad = sum(there[1:], there[0]) if there else None
        run.grads.append({name: one.grad.clone() for name, one in masters.named_parameters() if one.grad is not None})
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), clip if clip is not None else float("inf"))
        optimizer.step()
        copy_params(masters, model)
        if after_step is not None:
            after_step(model)
        run.losses.append(sum(losses) / shares)
        run.norms.append(norm.item())
    floating = {name: param for name, param in masters.named_parameters() if param.is_floating_point()}
    final = masters.state_dict() if whole_state else floating
    run.params = {name: value.detach().clone() for name, value in final.items()}
    return run


def narrowed(model: nn.Module, dtype: torch.dtype, keeps: tuple[type[nn.Module], ...] = ()) -> nn.Module:
    """A copy in `dtype`, except for modules of the classes in `keeps`."""
    narrow = copy.deepcopy(model).to(dtype)
    for module in narrow.modules():
        if isinstance(module, keeps):
            module.float()
    return narrow


def copy_params(masters: nn.Module, model: nn.Module) -> None:
    """Cast master weights into the model that computes with them, unless both are the same."""
    if model is not masters:
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters.parameters(), strict=True):
                param.copy_(master)


def _loss_and_grads(
    model: nn.Module, batch: Any, forward: Callable[[Any, Any], Tensor], scale: float
) -> tuple[float, list[Tensor | None]]:
    model.zero_grad()
    loss = forward(model, batch)
    (loss * scale if scale != 1 else loss).backward()
    return loss.item(), [param.grad for param in model.parameters()]


def sharded_run(
    model: nn.Module,
    data: Sequence[Batch],
    preset: str,
    num_ranks: int,
    mesh: Mapping[str, int] | None,
    make_optimizer: MakeOptimizer = adamw,
    *,
    step: Callable[[sw.Engine, torch.optim.Optimizer, Batch], Tensor] | None = None,
    after: Callable[[sw.Engine], dict[str, Any]] | None = None,
    shares_memory: bool = True,
    hosts: Sequence[str] | None = None,
    **plan: Any,
) -> Run:
    """The same training on threads as ranks. `step` replaces the loop's body, for other styles."""
    replicas = [copy.deepcopy(model) for _ in range(num_ranks)]
    settings = plan_of(preset, mesh, **plan)

    def rank(world: sw.World) -> Run:
        replica = replicas[world.rank]
        optimizer = make_optimizer(replica)
        engine = sw.shard(replica, settings, optimizer=optimizer, world=world)
        run = Run()
        for batch in data:
            loss = (step or engine_step)(engine, optimizer, share_of(engine, batch))
            run.losses.append(world.mean(loss.item()))
            run.norms.append(engine.gradient_norm or 0.0)
        run.params = full_params(engine)
        run.extra = after(engine) if after is not None else {}
        engine.close()
        return run

    runs = run_ranks(num_ranks, rank, shares_memory=shares_memory, hosts=hosts)
    for run in runs[1:]:
        assert run.losses == runs[0].losses
        assert run.norms == runs[0].norms
        for name, param in run.params.items():
            assert torch.equal(param, runs[0].params[name]), f"ranks disagree on {name}"
    return runs[0]


Train = Callable[[sw.Engine, Any], float]
"""Brings the gradients of one step, and returns the loss of this rank's rows of a batch."""


def by_micro_batches(loss_of: Callable[[sw.Engine, Any], Tensor] = call) -> Train:
    """As a loop does that calls the model with its rows of each micro-batch."""

    def train(engine: sw.Engine, batch: Any) -> float:
        share, num_shares = engine.data_ranks
        losses = []
        for micro in chunked(batch, engine.plan.accumulate):
            loss = loss_of(engine, chunked(micro, num_shares)[share])
            engine.backward(loss)
            losses.append(loss.item())
        return sum(losses) / len(losses)

    return train


def at_once(train: Callable[[sw.Engine, Any], Tensor] = sw.Engine.forward_backward) -> Train:
    """By one call with this rank's rows, which the engine cuts into micro-batches, as in pipeline stages."""

    def train_rows(engine: sw.Engine, batch: Any) -> float:
        share, num_shares = engine.data_ranks
        return train(engine, chunked(batch, num_shares)[share]).item()

    return train_rows


def ranks_run(
    model: nn.Module,
    data: Sequence[Any],
    plan: Mapping[str, Any],
    make_optimizer: MakeOptimizer = adamw,
    *,
    train: Train | None = None,
    grads_of: Callable[[sw.Engine], dict[str, Tensor | None]] | None = None,
    after_step: Callable[[sw.Engine], Any] = lambda _: None,
    after: Callable[[sw.Engine], Any] = lambda _: None,
    run: Callable[..., list[Run]] = run_ranks,
    **how: Any,
) -> list[Run]:
    """The same training on all ranks of the plan's mesh, along whatever axes it has; the results of each. By
    micro-batches, and with all gradients that there are, unless `train` and `grads_of` say otherwise. `how` is for
    `run`."""
    train = train or by_micro_batches()
    replicas = [copy.deepcopy(model) for _ in range(math.prod(plan["mesh"].values()))]
    names = [name for name, param in model.named_parameters() if param.requires_grad]

    def rank(world: sw.World) -> Run:
        replica, own = replicas[world.rank], Run()
        with sw.shard(replica, plan, optimizer=make_optimizer(replica), world=world) as engine:
            for batch in data:
                own.losses.append(engine.mean(train(engine, batch)))
                own.grads.append(whole_grads(engine, names) if grads_of is None else grads_of(engine))
                own.norms.append(float(engine.step(is_last=True) or 0.0))
                own.each.append(after_step(engine))
            own.params = {name: value.clone() for name, value in engine.state_dict().items()}
            own.extra = after(engine)
        return own

    runs = run(len(replicas), rank, **how)
    for other in runs[1:]:
        assert other.losses == runs[0].losses
        assert other.norms == runs[0].norms
    return runs


def whole_grads(engine: sw.Engine, names: Iterable[str]) -> dict[str, Tensor | None]:
    """Those gradients that there are, put together from the ranks' parts. All ranks call."""
    grads = {name: engine.get(name, "grad") for name in names}
    return {name: grad for name, grad in grads.items() if grad is not None}


def assert_gradients(engine: sw.Engine, expected: Mapping[str, Tensor | None], where: str) -> None:
    """Require those that are `expected` by name; none is zero. All ranks call."""
    for name, grad in expected.items():
        ours = engine.get(name, "grad")
        ours = torch.zeros(()) if ours is None else ours
        grad = torch.zeros_like(ours) if grad is None else grad
        torch.testing.assert_close(ours, grad, rtol=1e-4, atol=1e-5, msg=f"{where}: {name}")


def plan_of(preset: str, mesh: Mapping[str, int] | None, **more: Any) -> dict[str, Any]:
    return {"preset": preset, **({"mesh": dict(mesh)} if mesh else {}), **more}


def work_on_ranks(
    num_ranks: int,
    work: Callable[[sw.Engine], Any],
    plan: Any,
    model: nn.Module | Callable[[], nn.Module],
    make_optimizer: MakeOptimizer | None = adamw,
    **how: Any,
) -> list[Any]:
    """What `work` returns on each rank, given an engine over a copy of `model`, or over what that makes, with an
    optimizer unless there is none. `how` is for `run_ranks`."""
    replicas = [copy.deepcopy(model) if isinstance(model, nn.Module) else model() for _ in range(num_ranks)]

    def rank(world: sw.World) -> Any:
        replica = replicas[world.rank]
        optimizer = make_optimizer(replica) if make_optimizer is not None else None
        with sw.shard(replica, plan, optimizer=optimizer, world=world) as engine:
            return work(engine)

    return run_ranks(num_ranks, rank, **how)


def work_on_mesh(
    work: Callable[[sw.Engine], Any],
    plan: Mapping[str, Any],
    model: nn.Module,
    make_optimizer: MakeOptimizer | None = adamw,
) -> list[Any]:
    """`work_on_ranks` on as many ranks as the mesh of `plan` has; on two without one."""
    num_ranks = math.prod(plan.get("mesh", {"dp": 2}).values())
    return work_on_ranks(num_ranks, work, plan, model, make_optimizer)


def share_of(engine: sw.Engine, batch: Batch) -> Batch:
    """This rank's rows of a batch."""
    x, y = (part.chunk(engine.world.size)[engine.world.rank] for part in batch)
    return x, y


def train(engine: sw.Engine, data: Sequence[Batch]) -> list[float]:
    """Train, and return the losses, averaged over the ranks."""
    losses = []
    for batch in data:
        loss = engine(*share_of(engine, batch))
        engine.backward(loss)
        engine.step()
        losses.append(engine.mean(loss.item()))
    return losses


def train_steps(engine: sw.Engine, steps: range) -> list[float]:
    """Train the given steps of a run in which step N always has the same batch."""
    return train(engine, batches(steps.stop, rows=12)[steps.start :])


def engine_step(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> Tensor:
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return loss


def three_micro_batches(engine: sw.Engine, _: torch.optim.Optimizer, batch: Batch) -> Tensor:
    """A step of a plan with `accumulate: 3`, of the same batch each time."""
    for _ in range(3):
        loss: Tensor = engine(*batch)
        engine.backward(loss)
        engine.step()
    return loss


def ledger_of_a_step(engine: sw.Engine) -> Ledger:
    """What this rank sends in one more step. All ranks call."""
    ledger = inside.ledger(engine)
    x, y = batches(1, rows=4 * engine.world.size)[0]
    engine.world.barrier()
    ledger.clear()
    engine.backward(engine(x, y))
    engine.step()
    return ledger


def sent_and_held(engine: sw.Engine) -> dict[str, Any]:
    """What this rank sends in one more step, and what its program says of that; its memory. All ranks call."""
    ledger, planned = ledger_of_a_step(engine), inside.program(engine)
    return {"report": engine.memory(), "sent": (sum(ledger.sent_bytes.values()), planned.sent_bytes())}


def peak_of_third_step(engine: sw.Engine, step: Callable[[], None]) -> int:
    """The most bytes that the third `step` on this rank's thread allocates beside what was there. All ranks call."""
    step()
    step()
    engine.world.barrier()
    there = [one for one in gc.get_objects() if type(one) is Tensor]
    there += [flat.full for flat in inside.flats(engine) if flat.full is not None]
    engine.world.barrier()
    with LivingBytes(there) as living:
        step()
    return living.peak_bytes


@dataclass
class Course:
    """The results of one rank that are compared with the twin's."""

    losses: list[float]
    """Losses of this rank's share, for each step."""
    params: dict[str, Tensor]
    working: int
    """Bytes that the engine still held for work in progress."""


def course_of(engine: sw.Engine, data: Iterable[Tensor], loss_of: Callable[[int, Tensor], Tensor]) -> Course:
    """Take a step on each tensor of `data`, of which every rank has a part; `loss_of(step, part)` runs the forward."""
    losses = []
    for step, x in enumerate(data):
        loss = loss_of(step, x.chunk(engine.world.size)[engine.world.rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return Course(losses, full_params(engine), inside.meter(engine).now["working"])


def mean_losses(courses: Sequence[Course]) -> list[float]:
    """The losses of each step, averaged over the ranks."""
    return [sum(losses) / len(courses) for losses in zip(*(course.losses for course in courses), strict=True)]


def params_of(engine: sw.Engine) -> list[Tensor]:
    """Copies of all parameters, whole. All ranks call."""
    return [engine.get(name).clone() for name, _ in engine.module.named_parameters()]


def resumed_params(
    engine: sw.Engine, folder: Path, feed: Callable[[sw.Engine, range], object], until: int, saves_at: int | None
) -> list[Tensor]:
    """The parameters after step `until`, from the checkpoint in `folder` on; where there is none, one is saved after
    `saves_at` steps. `feed` takes the steps of a range."""
    loaded = engine.resume(folder)
    start = 0 if loaded is None else loaded.step
    if loaded is None and saves_at is not None:
        feed(engine, range(saves_at))
        engine.save(folder)
        start = saves_at
    feed(engine, range(start, until))
    return params_of(engine)


def full_params(engine: sw.Engine) -> dict[str, Tensor]:
    """All parameters, whole, from all ranks' pieces of the master weights."""
    told = engine.world.exchange(_packed(engine))
    shapes = {name: param.shape for name, param in engine.module.named_parameters() if param.is_floating_point()}
    params = {name: torch.empty(shape).flatten() for name, shape in shapes.items()}
    for message in told:
        for name, start, values in _unpacked(message):
            params[name][start : start + values.numel()] = values
    return {name: params[name].view(shape) for name, shape in shapes.items()}


def _packed(engine: sw.Engine) -> bytes:
    pieces = [
        (entry.name, entry.span.start, entry.tensor.detach().float().clone())
        for entry in inside.entries(engine)
        if entry.kind == "param" and entry.span.numel and entry.tensor.is_floating_point()
    ]
    stream = io.BytesIO()
    torch.save(pieces, stream)
    return stream.getvalue()


def _unpacked(message: bytes) -> list[tuple[str, int, Tensor]]:
    return torch.load(io.BytesIO(message), weights_only=True)


def moments_of(engine: sw.Engine) -> dict[tuple[str, str], Tensor | None]:
    """Every parameter and both of its moments. All ranks call."""
    names = [name for name, _ in engine.module.named_parameters()]
    return {(name, what): engine.get(name, what) for name in names for what in ("param", "exp_avg", "exp_avg_sq")}


def assert_same_bits(one: Mapping[Any, Tensor | None], other: Mapping[Any, Tensor | None]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        again = other[key]
        assert value is again if value is None or again is None else torch.equal(value, again), key


def warmed(make: MakeOptimizer, data: Sequence[Batch]) -> MakeOptimizer:
    """Makes an optimizer that has taken a step on each of `data`."""

    def made(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = make(model)
        for x, y in data:
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
        optimizer.zero_grad()
        return optimizer

    return made


def assert_same(run: Run, twin: Run, *, loss: float = 1e-6, param: float = 1e-5, norm: float = 1e-5) -> None:
    """Require that losses and norms agree within relative tolerances, and parameters within an absolute one."""
    for index, (ours, theirs) in enumerate(zip(run.losses, twin.losses, strict=True)):
        assert abs(ours - theirs) <= loss * abs(theirs), f"step {index}: loss {ours}, the twin has {theirs}"
    for index, (ours, theirs) in enumerate(zip(run.norms, twin.norms, strict=True)):
        assert abs(ours - theirs) <= norm * abs(theirs), f"step {index}: norm {ours}, the twin has {theirs}"
    for name, theirs in twin.params.items():
        differences = (run.params[name] - theirs.float()).abs().flatten()
        difference = differences.max().item() if differences.numel() else 0.0
        assert difference <= param, f"{name} differs by {difference}"


def assert_alike(
    run: Run, twin: Run, tolerance: float = 1e-5, *, norm: float = 0.0, rtol: float = 0.0, of_all: bool = True
) -> None:
    """Require that losses and norms agree within relative tolerances, and gradients and parameters within an absolute
    and a relative one: all `tolerance`, but for those given. Not `of_all`: the run has gradients of its last steps, or
    of some parameters."""
    assert len(run.losses) == len(twin.losses) > 0
    assert run.losses == pytest.approx(twin.losses, rel=tolerance)
    assert run.norms == pytest.approx(twin.norms, rel=norm or tolerance)
    assert not of_all or [one.keys() for one in run.grads] == [one.keys() for one in twin.grads]
    pairs = [(run.params[name], value, name) for name, value in twin.params.items()]
    for place in range(-len(run.grads), 0):
        theirs = twin.grads[place]
        pairs += [(grad, theirs.get(name), f"{name} {place}") for name, grad in run.grads[place].items()]
    for ours, value, name in pairs:
        if ours is None or value is None:
            assert ours is value, f"{name}: only one has it"
            continue
        torch.testing.assert_close(
            ours, value, rtol=rtol or tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_as_near(run: Run, twin: Run, other: Run, *, times: float = 4.0) -> None:
    """Require that `run` differs from `twin` by at most a few times the plain model's own rounding on this processor.

    `other` is another plain run that differs from `twin` by rounding alone: it takes whole batches instead of the
    ranks' shares, or a wider dtype. Their difference is measured, because rounding of matrix products depends on shapes
    and processors.
    """
    names = twin.params.keys()
    assert_same(
        run,
        twin,
        loss=1e-6 + times * _furthest(zip(other.losses, twin.losses, strict=True)),
        norm=1e-5 + times * _furthest(zip(other.norms, twin.norms, strict=True)),
        param=1e-5 + times * max((other.params[name] - twin.params[name]).abs().max().item() for name in names),
    )


def _furthest(pairs: Iterable[tuple[float, float]]) -> float:
    """The largest relative difference."""
    return max((abs(one - other) / abs(other) for one, other in pairs), default=0.0)


def assert_rounds_like_the_plain_model(
    run: Run,
    model: nn.Module,
    data: Sequence[Batch],
    make_optimizer: MakeOptimizer = adamw,
    *,
    num_ranks: int,
    clip: float | None = None,
    dtype: torch.dtype | None = None,
    keeps: tuple[type[nn.Module], ...] = (),
    forward: Callable[[Any, Batch], Tensor] = call,
) -> None:
    """Compare a sharded run in a narrow `dtype`, or under the autocast that `forward` enables, with the plain model."""
    settings: dict[str, Any] = {"clip": clip, "dtype": dtype, "keeps": keeps, "forward": forward}
    in_shares = plain_run(model, data, make_optimizer, shares=num_ranks, **settings)
    assert_as_near(run, in_shares, plain_run(model, data, make_optimizer, **settings))


def _rounded_to_e4m3(rows: Tensor, scales: Tensor) -> Tensor:
    """With four bits of significand, and steps of 2^-9 below 2^-6; halves to even."""
    scaled = torch.where(scales > 0, rows / scales, torch.zeros_like(rows))
    steps = 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return ((scaled / steps).round() * steps).clamp(-448, 448) * scales


def rounded_by(codes: dict[str, Any] | None) -> Callable[[Tensor], Tensor]:
    """A tensor through its codes: written down once more, without looking at the library."""
    if codes is None:
        return lambda tensor: tensor
    largest, default = {"int8": (127, 256), "int4": (7, 128), "fp8": (448, 256)}[codes["dtype"]]
    block = codes.get("block") or default

    def through(tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return tensor
        rows = nn.functional.pad(tensor.detach().flatten().float(), (0, -tensor.numel() % block)).view(-1, block)
        scales = (rows.abs().max(dim=1, keepdim=True).values / largest).bfloat16().float()
        if largest == 448:
            scales = 2.0 ** (rows.abs().max(dim=1, keepdim=True).values / largest).log2().ceil()
            return _rounded_to_e4m3(rows, scales).flatten()[: tensor.numel()].view_as(tensor).to(tensor.dtype)
        if codes.get("rests"):
            digits = {127: 1, 7: 5}[largest]
            exact = (rows.abs().max(dim=1, keepdim=True).values / largest).double().clamp(min=2.0 ** (digits - 25))
            step = 2.0 ** (exact.log2().floor() - digits + 1)
            scales = ((exact / step).ceil() * step).float()
        integers = torch.where(scales > 0, rows / scales, torch.zeros_like(rows)).round().clamp(-largest, largest)
        return (integers * scales).flatten()[: tensor.numel()].view_as(tensor).to(tensor.dtype)

    return through
