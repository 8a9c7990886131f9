"""Runs a model on a batch without memory, and records what it would hold at each moment.

Moments come from the same hooks as in training. Tensors claim the device on which the model will train, so that
attention and other operators choose the same kernels as there. Gradients are dropped when training would take them, as
soon as autograd produces them. Recomputation (activation checkpointing) needs no special case.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.errors import ConfigError, ModelError
from shardwise.memory import FullState, Unit, torch_dtype
from shardwise.optim.precision import cast_floating
from shardwise.plan.placement import WIDTH, Dtype
from shardwise.program import END_OF_BACKWARD, GAP_BYTES, Activations, Held, Mark, Moment, stay_as_made
from shardwise.runtime.activations import (
    Offloading,
    RehearsedDiskStore,
    RehearsedStore,
    TreatedSites,
    Treatments,
)
from shardwise.runtime.foreign_reads import Callers, Reach
from shardwise.runtime.hooks import Hooks
from shardwise.runtime.micro_batches import MicroBatch
from shardwise.runtime.rehearsal.fake_mode import FakeMode
from shardwise.runtime.rehearsal.grouped import GroupedProducts
from shardwise.runtime.rehearsal.integers import like
from shardwise.runtime.rehearsal.kernel_memory import OfAccelerators
from shardwise.runtime.rehearsal.live_bytes import Heard, LivingBytes
from shardwise.runtime.rehearsal.refusal import WITHOUT_BATCH, refusal
from shardwise.runtime.rehearsal.twin import Twin, TwinFlat, TwinGradients
from shardwise.runtime.split_backward import Halves
from shardwise.system.telemetry import Ledger
from shardwise.system.torch_private import forget_cached_parametrizations, tree_leaves, tree_map_only

_rehearses = ContextVar("rehearses", default=False)
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda _: not _rehearses.get())
"""Torch logs an operator that fails on fake tensors, with its trace. Whoever rehearses is told by an exception."""
Loss = Callable[[Any], torch.Tensor]
Take = Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
"""Makes the arguments of a forward, which then belong to the caller alone."""
Around = Callable[[nn.Module], AbstractContextManager[None]]
Work = Callable[[Take, LivingBytes], None]
"""Runs a forward and backward on some arguments while bytes are counted."""


class Watch(Protocol):
    """Follows a rehearsal, which may run several passes; the last one counts. `ledger` is told of what a model that is
    split would send within its layers."""

    ledger: Ledger

    def during(self, resting: Sequence[torch.Tensor]) -> AbstractContextManager[Heard | None]:
        """The context of a new pass; what it returns is told of each operation. `resting` are the tensors that are no
        activations, such as parameters."""
        ...

    def note_moment(self, moment: Moment) -> None: ...

    def note_copy(self, verb: str, tier: str, num_bytes: int) -> None:
        """Activations leave for another tier (`evict`) or come back (`fetch`)."""
        ...


CODE_BYTES = 14 * 2**20
PROCESS_BYTES, HALF_PROCESS_BYTES = 18 * 2**20, 20 * 2**20
"""[Note: process memory] On a CPU a process that begins to compute grows by what no tensor accounts for. That depends
little on the model, so constants are used. Measured with torch 2.13 and one thread, in steps of three models, on ranks
with the settings of [Note: glibc and small blocks] in `launch/environment.py`:

- `CODE_BYTES`: pages of libraries that are first used then, 10 to 15 MiB of fp32 and 12 to 17 of bf16, of which the
  ranks of a host have one copy together.
- `PROCESS_BYTES`, for products in fp32: MKL makes a buffer for packed operands for each product that needs a larger one
  than those before, and keeps them all: two or three, of 384 rows of the right operand and 2.6 MiB more, together 11
  MiB (256 wide), 15 (384) and 22 (768). Not all of it is there at every peak; Python objects of the engine are 3 to 5.
- `HALF_PROCESS_BYTES`, for products in bf16 and fp16: kernels that oneDNN compiles, which stay (13 to 15 MiB), and a
  buffer of MKL's (5). Compiling them leaves 9 to 12 MiB of the heap free, whatever else lies there (`GAP_BYTES`). A
  budget, which has free heap returned ([Note: free heap is returned] in `system/heap.py`), leaves 1 to 3 MiB of that;
  it counts all the same.

[Note: cached kernels] in `grouped.py`, and gaps between live blocks in the heap (`GAP_BYTES` in
`program/footprint.py`), come on top. Python modules that are imported late are not included: 16 MiB by the first
`shard`, and some 80 by the first optimizer of torch, with or without shardwise. On a GPU the allocator's peak contains
none of this.

What freed activations leave in the heap is counted by moment on top of that ([Note: the heap does not shrink] in
`system/heap.py`). Gaps can be larger. By default glibc takes blocks of up to 32 MiB from one heap, and cannot return
memory below a live block. Where blocks of many sizes come and go (long sequences beside short ones, groups of different
sizes in every step), gaps were another half of the predicted bytes for a Whisper, and three times as much for a small
Mixtral in bf16. With MALLOC_MMAP_THRESHOLD_=131072 in the environment there are hardly any, at the cost of fresh pages.
"""
MAX_PASSES = 4
"""Each pass may discover more: modules that read units without calling them, parameters without a gradient."""


def rehearse(  # noqa: PLR0913  # what its callers vary, and who follows
    model: nn.Module,
    units: Sequence[Unit],
    batch: object,
    *,
    device: torch.device,
    compute: Dtype,
    loss: Loss | None = None,
    around: Around | None = None,
    treatments: Treatments | None = None,
    watch: Watch | None = None,
    on_cpu: bool | None = None,
) -> Activations:
    """The activations of one forward and backward of `model` on `batch`. Changes neither; needs no other rank.

    `batch` is what the model is called with: a tensor, a tuple of arguments, a dict of keyword arguments, or a
    `MicroBatch` with both. Only its shapes, dtypes and integers matter. The backward starts from `loss(output)`;
    without `loss`, from the output itself if it is a tensor, or its `loss`, or else the sum of its floating-point
    tensors. As in `loss = model(...)`, the rest of the output is freed before the backward. `units` are those of the
    model, whose parameters may be on the meta device. `around` is entered with the model's copy while that computes.
    `treatments`: the units whose activations are recomputed or offloaded. `watch` follows each pass. `on_cpu`: whether
    the memory is that of a CPU; by default, whether `device` is one ([Note: other devices]).

    Raises `ModelError` for a model that reads values of floating-point tensors or fails on the batch, and `ConfigError`
    for a `batch` of another type.
    """

    def prepare(twin: Twin) -> Work:
        return partial(_back_and_forth, twin.model, loss or loss_in, around or nothing_around)

    return rehearse_work(
        prepare,
        model,
        units,
        batch,
        device=device,
        compute=compute,
        treatments=treatments,
        watch=watch,
        on_cpu=on_cpu,
    )


def nothing_around(_: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


def _back_and_forth(model: nn.Module, loss: Loss, around: Around, take: Take, _: LivingBytes) -> None:
    with around(model):
        args, kwargs = take()
        result = loss(model(*args, **kwargs))
        del args, kwargs
        if not result.requires_grad:
            if next(model.parameters(), None) is None:
                raise ModelError(f"{type(model).__name__} has no parameters, so there is nothing to train or to shard.")
            raise ModelError(
                f"The loss of {type(model).__name__} depends on no trained parameter, so there is no backward to "
                f"rehearse: all of them are frozen, or the forward detaches what it computes."
            )
        (result if result.numel() == 1 else result.sum()).backward()


def rehearse_work(  # noqa: PLR0913  # likewise
    prepare: Callable[[Twin], Work],
    model: nn.Module,
    units: Sequence[Unit],
    batch: object,
    *,
    device: torch.device,
    compute: Dtype,
    treatments: Treatments | None,
    watch: Watch | None,
    on_cpu: bool | None,
) -> Activations:
    """As `rehearse`, for another kind of forward and backward: `prepare` makes the work for the copy of `model`, once
    its hooks are registered. The work may run several times."""
    on_cpu = device.type == "cpu" if on_cpu is None else on_cpu
    products = GroupedProducts()
    elsewhere_kernels = OfAccelerators() if device.type == "cpu" and not on_cpu else nullcontext()
    ledger = None if watch is None else watch.ledger
    with _uncollected(), _computing_nothing(_fake()), ExitStack() as modes:
        twin, fake = _copies(model, units, _arguments(batch), device, ledger)
        modes.enter_context(products)
        modes.enter_context(elsewhere_kernels)
        listener = _Listener(twin, on_cpu, watch)
        work = prepare(twin)
        on_host = RehearsedStore(None if watch is None else partial(_copied, watch, "host"))
        on_disk = RehearsedDiskStore(None if watch is None else partial(_copied, watch, "disk"))
        elsewhere = {"offload": on_host, "disk": on_disk}
        if treatments:
            resting = twin.resting
            keepers = {
                policy: Offloading(store, device, resting, waits=not on_cpu) for policy, store in elsewhere.items()
            }
            by_site = {twin.copied(site): treatment for site, treatment in treatments.by_site.items()}
            TreatedSites(by_site, keepers).install()
        for _ in range(MAX_PASSES):
            for store in elsewhere.values():
                store.begin_peaks()
            try:
                listener.perform(work, fake, compute)
            except ModelError:
                raise
            except Exception as error:
                raise refusal(error, model, WITHOUT_BATCH) from error
            if not listener.is_wiser:
                break
    process_bytes = process_bytes_for(compute) + products.kernel_bytes if on_cpu else 0
    return Activations(
        tuple(listener.marks),
        process_bytes,
        on_cpu,
        host_bytes=on_host.peak_bytes,
        host_heap_bytes=on_host.peak_heap_bytes if on_cpu else 0,
        disk_bytes=on_disk.peak_bytes,
        staging_bytes=on_disk.peak_staging_bytes,
        unit_bytes=on_disk.peak_unit_bytes,
        peak_heap_bytes=listener.peak_heap_bytes if on_cpu else 0,
        gap_bytes=GAP_BYTES if on_cpu and WIDTH[compute] == 2 else 0,
        code_bytes=CODE_BYTES if on_cpu else 0,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Python's collector waits: it would free cycles, and tensors in them, at moments that no two runs share, and walk
    through all objects of the process for a tenth of a rehearsal's time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class RehearsedForwards:
    """Forwards of a copy of `model` without gradients, for their shapes alone: no memory is counted. What one leaves in
    the copy's modules the next one finds there, as in training. Making the copy takes half the time of a small model's
    forward.

    Raises `ModelError` as `rehearse` does.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], batch: MicroBatch, *, device: torch.device, compute: Dtype
    ) -> None:
        self._model, self._compute = model, compute
        self._mode = _fake()
        with _computing_nothing(self._mode):
            self.twin, self._given = _copies(model, units, (batch.args, batch.kwargs), device, keeps_floats=True)

    def rehearse(self, run: Callable[[Twin, tuple[Any, ...], dict[str, Any]], object]) -> None:
        """Let `run` call the copy of the model. It gets arguments like those of `batch`."""
        known = [one for one in tree_leaves(self._given) if type(one) is torch.Tensor]
        with _computing_nothing(self._mode), GroupedProducts(known):
            args, kwargs = _cast(self._given, self._compute)
            try:
                with torch.no_grad():
                    run(self.twin, args, kwargs)
            except ModelError:
                raise
            except Exception as error:
                raise refusal(error, self._model) from error


def rehearse_forward(
    run: Callable[[Twin, tuple[Any, ...], dict[str, Any]], object],
    model: nn.Module,
    units: Sequence[Unit],
    batch: MicroBatch,
    *,
    device: torch.device,
    compute: Dtype,
) -> None:
    """One forward: see `RehearsedForwards`."""
    RehearsedForwards(model, units, batch, device=device, compute=compute).rehearse(run)


@contextmanager
def _unlogged() -> Iterator[None]:
    token = _rehearses.set(True)
    try:
        yield
    finally:
        _rehearses.reset(token)


def _fake() -> FakeMode:
    return FakeMode(allow_non_fake_inputs=True)


@contextmanager
def _computing_nothing(mode: FakeMode) -> Iterator[None]:
    """A context without bytes or arithmetic."""
    try:
        with mode, torch.enable_grad(), _unlogged():
            yield
    finally:
        forget_cached_parametrizations()


def _copies(
    model: nn.Module,
    units: Sequence[Unit],
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    device: torch.device,
    ledger: Ledger | None = None,
    *,
    keeps_floats: bool = False,
) -> tuple[Twin, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The twin of `model`, and arguments like those given. Both need no other mode, in which they would take longer."""
    twin = Twin(model, units, device, ledger)
    tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    given = {id(leaf): like(leaf, device, keeps_floats=keeps_floats) for leaf in tensors}
    return twin, tree_map_only(torch.Tensor, lambda tensor: given[id(tensor)], arguments)


def _cast(batch: tuple[Any, Any], compute: Dtype) -> tuple[Any, Any]:
    dtype = torch_dtype(compute) if compute in ("bf16", "fp16") else None
    cast: tuple[Any, Any] = batch if dtype is None else cast_floating(batch, dtype)
    return cast


def _copied(watch: Watch, tier: str, verb: str, num_bytes: int) -> None:
    watch.note_copy(verb, tier, num_bytes)


def process_bytes_for(compute: Dtype) -> int:
    """The allowance of [Note: process memory] for a model that computes in `compute`."""
    return HALF_PROCESS_BYTES if WIDTH[compute] == 2 else PROCESS_BYTES


def loss_in(output: Any) -> torch.Tensor:
    """The tensor from which the backward starts: see `rehearse`."""
    if isinstance(output, torch.Tensor):
        return output
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not tensors:
        raise ModelError(
            f"The model returns {type(output).__name__}, from which no backward can start: no tensor, no `loss`, "
            f"no floating-point tensors that depend on trained parameters. Return the loss."
        )
    return torch.stack([tensor.sum() for tensor in tensors]).sum()


def _arguments(batch: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, MicroBatch):
        return batch.args, batch.kwargs
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, tuple):
        return batch, {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    raise ConfigError(
        f"The batch is of type {type(batch).__name__}; it must be what the model is called with: a tensor, a tuple of "
        f"arguments, or a dict of keyword arguments."
    )


class _Listener:
    """Listens to the hooks of the copied model, as the runner does in training, and records moments."""

    def __init__(self, twin: Twin, on_cpu: bool, watch: Watch | None) -> None:
        self._twin, self._on_cpu, self._watch = twin, on_cpu, watch
        self._resting = twin.resting
        self._hooks = Hooks(twin.model, twin.units, self, Halves())
        self.marks: list[Mark] = []
        self.peak_heap_bytes = 0
        self.is_wiser = False
        self._open: set[str] = set()
        self._reached: list[tuple[Unit, nn.Module]] = []
        self._callers: Callers | None = None
        self._depth = 0
        """Calls of the model that have begun: a forward may call the model itself."""
        self._peaks: list[Held] = []
        self._awaited: dict[str, int] = {}
        """See [Note: gradients come one by one] in `program/walk.py`."""
        self._staying = {
            unit.name: [flat for flat in unit.flats if flat.spec.trainable and stay_as_made(flat.spec)]
            for unit in (twin.units if on_cpu else ())
        }
        for flats in self._staying.values():
            for flat in flats:
                assert isinstance(flat.grads, TwinGradients)
                flat.grads.first_comes = partial(_Listener._comes, weakref.proxy(self), flat.spec.name)

    def perform(self, work: Work, batch: tuple[Any, Any], compute: Dtype) -> None:
        """Run one pass, which sets `marks`, and `is_wiser` if another pass will discover more."""
        self.marks, self.is_wiser, self._depth = [], False, 0
        self._open.clear()
        self._awaited.clear()
        self._peaks.clear()
        self._reached.clear()
        watching = nullcontext() if self._watch is None else self._watch.during(self._resting)
        with LivingBytes(self._resting, on_cpu=self._on_cpu) as self._living, watching as self._living.heard:
            self._living.count(batch)
            work(partial(_cast, batch, compute), self._living)
        self._forget_callers()
        for unit, site in self._reached:
            unit.sites.append(site)
            self._hooks.add_site(unit, site)

    # -- events -----------------------------------------------------------------------------------------

    def enter_root(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._forget_callers()
        self._callers = Callers(self._twin.model)
        self._living.before = Reach(self._twin.units, self._reach_for).look

    def leave_root(self, *, raised: bool) -> None:  # noqa: ARG002  # marks are not used then
        self._depth -= 1
        if not self._depth:
            self._living.before = None

    def before_forward(self, unit: Unit) -> None:
        _become(unit, FullState.READY)
        self._mark(Moment("before", "forward", unit.name))

    def after_forward(self, unit: Unit, *, opaque: bool) -> None:  # noqa: ARG002
        _become(unit, FullState.ABSENT)
        self._mark(Moment("after", "forward", unit.name))

    def forward_raised(self, unit: Unit) -> None:
        """Nothing to do: the rehearsal ends with the error."""

    def before_backward(self, unit: Unit) -> None:
        if unit.name not in self._open:
            self._open.add(unit.name)
            coming = self._staying.get(unit.name, ())
            self._mark(
                Moment("before", "backward", unit.name),
                {flat.spec.name: sum(slot.span.numel for slot in flat.slots) for flat in coming},
            )

    def after_backward(self, unit: Unit) -> None:
        self._open.discard(unit.name)
        for flat in unit.flats:
            flat.grads.drop()
        self._mark(Moment("after", "backward", unit.name))
        for flat in unit.flats:
            self._awaited.pop(flat.spec.name, None)

    def _comes(self, name: str, grad: torch.Tensor) -> None:
        """The first gradient of a parameter of the flat buffer `name`, which stays where it was made."""
        if name in self._awaited:
            self._note_peak(self._living.hand_over(grad))
            self._awaited[name] -= grad.numel()

    def _note_peak(self, num_bytes: int) -> None:
        """That while the gradients that are awaited now were. What came earlier and held less never counts."""
        held = Held(num_bytes, tuple(self._awaited.items()))
        while self._peaks and self._peaks[-1].num_bytes <= held.num_bytes:
            self._peaks.pop()
        self._peaks.append(held)

    def await_graph(self, unit: Unit) -> None:
        """Nothing to do: a rehearsal builds no graph in its backward."""

    def await_end(self, unit: Unit) -> None:
        """Nothing to do: the marks do not depend on which units are gathered."""

    def end_of_backward(self) -> None:
        for unit in self._twin.units:
            if any(any(flat.grads.touched_here) for flat in unit.flats):  # some of its parameters got no gradient
                self._hooks.watch_inputs(unit)
                self.is_wiser = True
                self.after_backward(unit)
        self._mark(END_OF_BACKWARD)

    def _mark(self, moment: Moment, opened: Mapping[str, int] | None = None) -> None:
        """`opened`: the flat buffers whose gradients are awaited from here on, and how many elements."""
        living = self._living
        self._note_peak(living.take_kept_peak())
        peaks = tuple(self._peaks) if self._awaited or (self.marks and self.marks[-1].come_bytes) else ()
        self._peaks.clear()
        self._awaited.update(opened or {})
        held = living.take_peak(), living.live_bytes, living.heap_bytes
        self.marks.append(Mark(moment, *held, peaks, tuple(self._awaited.items()), living.given_bytes))
        self.peak_heap_bytes = living.peak_heap_bytes
        if self._watch is not None:
            self._watch.note_moment(moment)

    def _reach_for(self, unit: Unit) -> None:
        """A module reads `unit` without calling it: from the next pass on the unit is gathered for that module."""
        _become(unit, FullState.READY)
        site = (self._callers.innermost() if self._callers is not None else None) or self._twin.model
        if all(site is not known for known in unit.sites):
            self._reached.append((unit, site))
            self.is_wiser = True

    def _forget_callers(self) -> None:
        """Remove the hooks of `Callers`; only while no module runs."""
        if self._callers is not None:
            self._callers.remove()
            self._callers = None


def _become(unit: Unit, state: FullState) -> None:
    for flat in unit.flats:
        assert isinstance(flat, TwinFlat)
        flat.become(state)
