"""A rehearsal counts what a real forward and backward allocate, byte for byte, and changes nothing."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import small_transformers
import torch
import torch.nn.functional as F
from allocations import profiled_peak
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from twins import adamw, batches, engine_step, peak_of_third_step, work_on_ranks

import shardwise as sw
from shardwise.errors import ConfigError, ModelError
from shardwise.memory import Unit, choose_units, make_units, tables_for, torch_dtype, unit_specs
from shardwise.plan import Plan, load_plan
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import mesh_for, table_for
from shardwise.program import Activations, Footprint
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.runtime.rehearsal import RehearsedForwards, rehearse
from shardwise.runtime.rehearsal.grouped import (
    CONVOLUTION_BYTES,
    GroupedProducts,
    bytes_of_a_kernel,
    num_kept_kernels,
)
from shardwise.runtime.rehearsal.live_bytes import LivingBytes
from shardwise.runtime.rehearsal.rehearse import process_bytes_for
from shardwise.system.own_hooks import hook
from shardwise.system.torch_private import storage_id
from shardwise.testing import run_ranks
from tests import inside
from tests.models import LENGTH, Transformer
from tests.thorough import sampled, thorough_only

pytestmark = sampled

Tensor = torch.Tensor
CPU = torch.device("cpu")
GENERATOR_BYTES = torch.get_rng_state().nbytes
"""Size of the generator state that a checkpointed block keeps, in a tensor that no operation creates."""
Loss = Callable[[Any], torch.Tensor]


class Checkpointed(Transformer):
    """Recomputes its blocks in the backward."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__(recomputes=True, reentrant=reentrant)


class CheckpointedReentrant(Checkpointed):
    def __init__(self) -> None:
        super().__init__(reentrant=True)


class Logits(Transformer):
    """Returns logits; the loop computes the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.logits(x)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.linear(x)
        return x[x > 0].sum() + self.linear(x)


class Selecting(Branching):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)[x > 0]


class Silent(Branching):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"count": torch.zeros(x.shape)}


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.lock = threading.Lock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Remembering(nn.Module):
    """Keeps what it computes, like a cached table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.table = torch.ones(4)
        self.mean = self.mean * 0.9 + x.mean(0)
        return self.linear(x + self.table)


def planned(precision: str) -> tuple[Plan, Mesh]:
    plan = load_plan("zero3", [f"precision={precision}"])
    return plan, mesh_for(plan, 2)


def units_of(model: nn.Module, precision: str = "fp32") -> list[Unit]:
    plan, mesh = planned(precision)
    choices, rows = choose_units(model, plan), tables_for(model, plan, mesh)
    return make_units(choices, unit_specs(choices, rows, mesh), rows, mesh.coordinate(0), CPU)


def rehearsed(model: nn.Module, batch: object, precision: str = "fp32", loss: Loss | None = None) -> Activations:
    compute = table_for(*planned(precision)).compute
    return rehearse(model, units_of(model, precision), batch, device=CPU, compute=compute, loss=loss)


def peak_of(activations: Activations) -> int:
    return max(mark.peak_bytes for mark in activations.marks)


def bytes_of(batch: tuple[torch.Tensor, ...]) -> int:
    return sum(tensor.nbytes for tensor in batch)


def profiled(model: nn.Module, batch: tuple[torch.Tensor, ...], precision: str, loss: Loss | None = None) -> int:
    """What torch's profiler counts in a real forward and backward; gradients are dropped as soon as they are made."""
    model = copy.deepcopy(model).to(torch_dtype("bf16" if precision == "bf16" else "fp32"))
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))

    def step() -> None:
        (loss or (lambda output: output))(model(*batch)).backward()

    return profiled_peak(step)


@pytest.mark.parametrize(
    ("kind", "precision"),
    [
        (Transformer, "fp32"),
        (Transformer, "bf16"),
        (Checkpointed, "fp32"),  # in bf16 the peak is inside a matrix product, whose scratch cannot be predicted
        (CheckpointedReentrant, "fp32"),
    ],
)
def test_counts_what_a_real_run_allocates(kind: type[Transformer], precision: str) -> None:
    model = kind()
    batch = tuple(tensor.contiguous() for tensor in batches(1, rows=64)[0])
    expected = profiled(model, batch, precision) + bytes_of(batch)
    if issubclass(kind, Checkpointed):
        expected -= len(model.blocks) * GENERATOR_BYTES
    assert peak_of(rehearsed(model, batch, precision)) == expected


def test_recomputing_blocks_holds_less_than_keeping_them() -> None:
    batch = batches(1, rows=64)[0]
    assert peak_of(rehearsed(Checkpointed(), batch)) < 0.8 * peak_of(rehearsed(Transformer(), batch))


def test_a_loss_outside_of_the_model_is_counted() -> None:
    x, y = (tensor.contiguous() for tensor in batches(1, rows=64)[0])

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    expected = profiled(Logits(), (x,), "fp32", loss) + bytes_of((x, y))
    assert peak_of(rehearsed(Logits(), (x,), loss=loss)) == expected
    assert peak_of(rehearsed(Logits(), (x,))) < expected


@thorough_only("the tests beside it count models of ours by the same code")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_counts_models_of_transformers(name: str, checkpointing: bool) -> None:
    test_transformers = pytest.importorskip("test_transformers")
    model = getattr(test_transformers, name)()
    if checkpointing:
        model.activation_checkpointing_enable()
    tokens = torch.randint(0, 97, (16, 12))
    batch = {"input_ids": tokens, "labels": tokens}
    twin = copy.deepcopy(model)
    for param in twin.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    expected = profiled_peak(lambda: twin(**batch).loss.backward()) + tokens.nbytes
    if checkpointing:
        expected -= 3 * GENERATOR_BYTES
    numbers = 128  # bytes: the Python numbers that autograd keeps as tensors, such as GELU's
    assert peak_of(rehearsed(model, batch)) == pytest.approx(expected, abs=numbers)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_counts_mixtures_of_experts(precision: str) -> None:
    model = small_transformers.mixtral()
    tokens = torch.randint(0, 97, (16, 12))
    twin = copy.deepcopy(model).to(torch_dtype("bf16" if precision == "bf16" else "fp32"))
    for param in twin.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    expected = profiled_peak(lambda: twin(input_ids=tokens, labels=tokens).loss.backward()) + tokens.nbytes
    numbers = 4096  # bytes: what a matrix product's kernel keeps while it runs, and Python numbers as above
    activations = rehearsed(model, {"input_ids": tokens, "labels": tokens}, precision)
    assert peak_of(activations) == pytest.approx(expected, abs=numbers)
    has_kernels = precision == "bf16" and torch.backends.mkldnn.is_available()
    kernels = num_kept_kernels() * bytes_of_a_kernel(torch.bfloat16) if has_kernels else 0
    assert activations.process_bytes == process_bytes_for("bf16" if precision == "bf16" else "fp32") + kernels


@pytest.mark.parametrize("kind", ["called", "a layer"])
def test_kernels_of_convolutions_are_allowed_for(kind: str) -> None:
    class Convolved(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv1d(4, 4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if kind == "a layer" else F.conv1d(x, self.layer.weight, self.layer.bias)

    kernels = CONVOLUTION_BYTES if torch.backends.mkldnn.is_available() else 0
    found = rehearsed(Convolved(), torch.randn(2, 4, 8))
    assert found.process_bytes == process_bytes_for("fp32") + kernels
    assert rehearsed(nn.Linear(4, 4), torch.randn(2, 4)).process_bytes == process_bytes_for("fp32")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("left", "right"), [((8, 12), (3, 12, 20)), ((12, 8), (8, 20)), ((3, 8, 12), (3, 12, 20))])
def test_a_grouped_product_has_the_shape_and_strides_of_the_real_one(
    left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype
) -> None:
    if not hasattr(F, "grouped_mm"):
        pytest.skip("no grouped_mm in this torch")
    width = 16 // dtype.itemsize

    def padded(*shape: int) -> torch.Tensor:
        row = -(-shape[-1] // width) * width
        return torch.randn(*shape[:-1], row).to(dtype)[..., : shape[-1]]

    operands = padded(*left), padded(*right)
    offs = None if len(left) == len(right) == 3 else torch.tensor([2, 5, 8], dtype=torch.int32)
    real = F.grouped_mm(*operands, offs=offs)
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, GroupedProducts():
        foreseen = F.grouped_mm(*(fakes.from_tensor(operand) for operand in operands), offs=offs)
    assert (foreseen.shape, foreseen.stride(), foreseen.dtype) == (real.shape, real.stride(), real.dtype)


class Padded(nn.Module):
    """Cuts off padding that is common to all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_token = x != 0
        if not is_token.all():
            x = x[:, : int(is_token.sum(1).max())]
        return self.tokens(x).square().sum()


def test_a_model_may_decide_by_integers() -> None:
    full, half = torch.ones(6, 8, dtype=torch.long), torch.ones(6, 8, dtype=torch.long)
    half[:, 4:] = 0
    for batch in (full, half):
        assert abs(peak_of(rehearsed(Padded(), batch)) - profiled(Padded(), (batch,), "fp32") - batch.nbytes) <= 128
    assert peak_of(rehearsed(Padded(), half)) < 0.6 * peak_of(rehearsed(Padded(), full))


def test_no_numbers_are_drawn() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    before = torch.get_rng_state()
    rehearsed(model, torch.ones(8, 4))
    assert torch.equal(torch.get_rng_state(), before)


# --- on a live engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["zero3", "zero2", "ddp"])
@pytest.mark.parametrize("kind", [Transformer, Checkpointed])
def test_a_live_engine_is_asked_and_stays_as_it_is(preset: str, kind: type[Transformer]) -> None:
    model = kind()
    data = [tuple(tensor.contiguous() for tensor in batch) for batch in batches(4, rows=8)]
    replicas = [copy.deepcopy(model) for _ in range(4)]

    def trained(world: sw.World, *, asks: bool) -> list[float]:
        replica = replicas[2 * asks + world.rank]
        engine = sw.shard(replica, preset, optimizer=adamw(replica), world=world)
        before = engine.rehearse(data[0]) if asks else None
        replica.trainer = SimpleNamespace(engine=engine)  # as a module of Lightning refers to it
        losses = [engine_step(engine, inside.member(engine), batch).item() for batch in data[:3]]
        if asks:
            footprint = engine.rehearse(data[0])
            assert footprint == before
            promised = engine.memory().promised
            assert footprint.activations is not None
            assert footprint.param == promised["param"]
            assert footprint.total - footprint.process >= sum(promised.values())
            alone = rehearsed(model, data[0])
            assert footprint.activations <= peak_of(alone)
            assert footprint.peak_at in [mark.moment for mark in alone.marks]
        losses.append(engine_step(engine, inside.member(engine), data[3]).item())
        engine.close()
        return losses

    asked = run_ranks(2, lambda world: trained(world, asks=True))
    assert asked == run_ranks(2, lambda world: trained(world, asks=False))


@pytest.mark.parametrize(
    "plan", [{"preset": "zero3"}, {"preset": "zero1", "mesh": {"pp": 2}}], ids=lambda one: one["preset"]
)
def test_a_network_may_keep_its_optimizer_and_scheduler(plan: dict[str, Any]) -> None:
    """As those of reinforcement learning do; in stages a call of the model rehearses it."""
    torch.manual_seed(0)
    plain, data = Transformer(num_blocks=4), batches(3, rows=8)

    def trained(world: sw.World, *, keeps: bool) -> tuple[int, list[float]]:
        model = copy.deepcopy(plain)
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        if keeps:
            model.optimizer, model.schedulers = optimizer, [scheduler]
        with sw.shard(model, plan, optimizer=optimizer, world=world) as engine:
            total, losses = engine.rehearse(data[0]).total, []
            for batch in data:
                losses.append(engine_step(engine, optimizer, batch).item())
                scheduler.step()
            return total, losses

    assert run_ranks(2, lambda world: trained(world, keeps=True)) == run_ranks(
        2, lambda world: trained(world, keeps=False)
    )


@pytest.mark.parametrize("kind", [Transformer, Checkpointed, CheckpointedReentrant])
def test_moments_come_in_the_order_in_which_they_come_in_training(kind: type[Transformer]) -> None:
    model, batch = kind(), batches(1)[0]
    replicas = [copy.deepcopy(model) for _ in range(2)]

    def rank(world: sw.World) -> list[str]:
        replica = replicas[world.rank]
        engine = sw.shard(replica, "zero3", optimizer=adamw(replica), world=world)
        for _ in range(3):
            engine_step(engine, inside.member(engine), batch)
        return [str(moment) for moment in inside.programs(engine).trace]

    trace = [str(moment) for moment in rehearsed(model, batch).trace]
    assert run_ranks(2, rank) == [trace, trace]


class Wide(nn.Module):
    """Two blocks that each hold about as much for their backward as their gradients take."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in "ab"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).square().mean()


def fused(model: nn.Module) -> torch.optim.Optimizer:
    """Others make copies in the update, which no promise has."""
    return torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.parametrize(("rows", "least"), [(32, 0.9), (64, 0.95), (256, 0.95)])
def test_gradients_that_stay_are_promised_as_they_come(rows: int, least: float) -> None:
    """On one rank, as in a pipeline: from the start of a block's backward on all of its gradients were counted."""
    batch = torch.randn(rows, 64)

    def work(engine: sw.Engine) -> tuple[Footprint, int]:
        def step() -> None:
            engine.backward(engine(batch))
            engine.step()

        return engine.rehearse(batch), peak_of_third_step(engine, step)

    plan = {"preset": "ddp", "units": ["blocks.*"]}
    [(promised, made)] = work_on_ranks(1, work, plan, Wide, fused)
    held = promised.total - promised.process - promised.param - promised.optim
    assert least * held <= made <= held


def test_what_a_module_keeps_is_not_replaced() -> None:
    model = Remembering()
    mean = model.mean
    calls, kept = count(), []
    model.register_forward_hook(lambda _, __, output: kept.append(output) or [next(calls), None][1])
    engines: list[int] = []
    model.register_forward_hook(hook(lambda *_: engines.append(1)))
    rehearsed(model, torch.ones(8, 4), loss=torch.sum)
    assert next(calls) > 0  # a user's hook runs, as in training
    assert kept == []  # and what it collects is not left to the loop
    assert engines == []  # an engine's does not run
    assert model.table is None
    assert model.mean is mean
    assert all(param.grad is None and type(param) is nn.Parameter for param in model.parameters())


@thorough_only("slow; smaller tests beside it cover the same code")
def test_a_watchdog_that_asks_where_the_rank_is_changes_no_count() -> None:
    """Reading a frame keeps its variables alive, and so their memory. It must not read the model's frames."""
    with sw.shard(Transformer(), "zero1", optimizer=None) as engine:
        journal, batch = engine.world.journal, batches(1, 1)[0]
        counted = engine.rehearse(batch)
        found: set[tuple[str, str]] = set()
        is_over = threading.Event()

        def ask() -> None:
            while not is_over.is_set():
                status = journal.status(0, 0.0)
                found.add((status.call, status.place))

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            assert engine.rehearse(batch) == counted
        finally:
            is_over.set()
            asking.join()
    assert {call for call, place in found if "twins.py" in place} == set(), "it has read the frames of the model"
    assert "rehearse()" in {call for call, _ in found}


# --- what is known of values --------------------------------------------------------------------------


class Masking(nn.Module):
    """Selects by masks, of a batch and computed from one, in every way, and asks whether all is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        rows = mask.any(1)
        num = int((torch.arange(2) * 1.5).long().max()) + 1
        picked = [
            hidden[:num],
            hidden[rows],
            hidden[~rows, 1:],
            hidden[:, mask[0]],
            hidden[mask],
            hidden.masked_select(mask),
        ]
        written = hidden.clone()
        written[mask] = picked[4] * 2
        written[rows] += 1
        if not torch.isfinite(written).all() or written.isnan().any() or torch.isinf(written).any(-1).any():
            raise ValueError("not finite")
        self.shapes += [tuple(one.shape) for one in picked]
        return torch.cat([one.flatten() for one in (*picked, written)]).square().mean()


def test_what_masks_select_is_as_large_as_in_training() -> None:
    """In the backward, too, and on a batch for which the model was not made."""
    x = torch.ones(3, 4)
    mask = torch.tensor([[True, False, True, True], [False] * 4, [False, True, False, False]])
    model = Masking()
    real = copy.deepcopy(model)
    real(x, mask).backward()
    peak = profiled(model, (x, mask), "fp32")
    activations = rehearsed(model, (x, mask))
    assert real.shapes == [(2, 4), (2, 4), (1, 3), (3, 3), (4,), (4,)]
    assert model.shapes == []
    assert peak * 0.5 <= peak_of(activations) <= peak * 1.5


@pytest.mark.parametrize("write", [Tensor.logical_or_, Tensor.bitwise_or_, Tensor.copy_], ids=lambda one: one.__name__)
def test_a_check_that_was_written_to_is_a_check_no_more(write: Callable[..., object]) -> None:
    class Mixing(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.linear(x)
            bad = torch.isnan(hidden)
            write(bad, hidden > 0)
            return hidden.sum() if bad.any() else hidden.mean()

    with pytest.raises(ModelError, match="asks for the value of a tensor"):
        rehearsed(Mixing(), torch.ones(8, 4))


class OfBatch(Branching):
    """Reads pixels, and leaves out rows of zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x[(x.flatten(1) != 0).any(1)] * 2)
        if hidden.shape[0] == 1:
            return hidden
        return hidden[hidden > 0]


def test_a_forward_that_is_followed_knows_the_floats_of_its_batch_alone() -> None:
    model, x = OfBatch(), torch.zeros(3, 4)
    x[1] = 1.0
    units = units_of(model)
    shapes: list[tuple[int, ...]] = []

    def follow(batch: torch.Tensor) -> None:
        forwards = RehearsedForwards(model, units, MicroBatch((batch,), {}), device=CPU, compute="fp32")
        forwards.rehearse(lambda twin, args, _: shapes.append(tuple(twin.model(*args).shape)))

    follow(x)
    assert shapes == [(1, 4)]
    with pytest.raises(ModelError, match="decide how large another one is"):
        follow(torch.ones(3, 4))  # of what was computed nothing is known
    with pytest.raises(ModelError, match="decide how large another one is"):
        rehearsed(model, x)  # there a batch is an example
    assert torch.equal(x[1], torch.ones(4))


# --- what cannot be rehearsed ------------------------------------------------------------------------


def test_a_model_that_asks_for_values_is_refused_at_its_line() -> None:
    with pytest.raises(ModelError, match=r"Branching cannot be rehearsed: .*test_rehearsal.py:\d+, in forward") as told:
        rehearsed(Branching(), torch.ones(8, 4))
    assert "'if x.sum() > 0:'" in str(told.value)
    assert "asks for the value of a tensor" in str(told.value)
    with pytest.raises(ModelError, match=r"decide how large another one is"):
        rehearsed(Selecting(), torch.ones(8, 4))


def test_a_batch_that_does_not_fit_is_refused_at_its_line() -> None:
    with pytest.raises(ModelError, match=r"could not be rehearsed on this batch: at .*in logits"):
        rehearsed(Transformer(), (torch.zeros(2, LENGTH + 1, dtype=torch.long), torch.zeros(2, dtype=torch.long)))
    with pytest.raises(ConfigError, match="The batch is of type list; it must be what the model is called with"):
        rehearsed(Transformer(), [torch.zeros(2, LENGTH)])


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(ModelError, match="cannot be copied without its tensors: TypeError: cannot pickle"):
        rehearsed(Locked(), torch.ones(8, 4))


def test_an_output_without_anything_to_send_back_is_refused() -> None:
    with pytest.raises(ModelError, match="no backward can start"):
        rehearsed(Silent(), torch.ones(8, 4))


@pytest.mark.parametrize(
    ("query", "key", "expected"),
    [
        ((2, 4, 256, 64), (2, 4, 256, 64), 2 * 4 * 256 * (64 + 1) * 4),
        ((16, 64, 197, 16), (16, 64, 197, 16), 16 * 64 * 256 * (32 + 1) * 4),  # both rounded up
        ((1, 2, 128, 160), (1, 2, 128, 160), 1 * 2 * 128 * (192 + 1) * 4),
        ((2, 8, 128, 64), (2, 2, 100, 64), 2 * 8 * 128 * (64 + 1) * 4 + 2 * (2 * 8 * 100 * 64 * 2)),  # grouped heads
    ],
)
def test_the_fp32_sums_of_attentions_backward_are_counted(
    query: tuple[int, ...], key: tuple[int, ...], expected: int
) -> None:
    """The results of torch's own operator on tensors without memory, and beside them what its kernel allocates."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, heads, tokens, _ = query
    grad, q, out, k, v = (empty(*shape) for shape in (query, query, query, key, key))
    number, log_sum = empty(dtype=torch.int64), empty(rows, heads, tokens, dtype=torch.float32)
    with LivingBytes([grad, q, out, k, v, number, log_sum], on_cpu=False) as living:
        results = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, log_sum, number, number, tokens, key[2], 0.0, True, number, number
        )
        assert living.live_bytes == sum(result.nbytes for result in results) == q.nbytes + k.nbytes + v.nbytes
        assert living.take_peak() == living.live_bytes + expected
        assert living.take_peak() == living.live_bytes


def test_what_is_put_aside_counts_when_it_is_gone() -> None:
    with LivingBytes(()) as living:
        kept, freed = torch.ones(10), torch.ones(20)
        for one in (kept, kept[1:]):
            living.put_aside(storage_id(one.untyped_storage()))
        del one
        assert (living.live_bytes, living.aside_bytes) == (120, 40)
        del kept, freed
        assert (living.live_bytes, living.aside_bytes) == (40, 40)
        torch.ones(30)
        assert (living.live_bytes, living.aside_bytes) == (40, 40)
