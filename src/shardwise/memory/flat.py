"""Flat memory: many parameters in one buffer, each a named view into it.

[Note: freeing in place] A parameter's `data` is a view of `full` for as long as the engine lives. To free a gathered
buffer its *storage* is emptied (`releasable.py`); the next gather gives the same storage new bytes. Re-pointing `data`
would free nothing: autograd saves views such as `weight.t()`, which keep the old storage alive. This way they see the
next gather.

[Note: resting in common] Where the ranks that shard a buffer share memory, `param` is this rank's part of it and `full`
all of it. Nothing is gathered or freed except pages that this process maps, and parameters can be read at any time.
What a rank writes to `full` stays its own, and is lost when it is freed, as with any other buffer.

[Note: updates behind the step] If parameters are whole on every rank and their update is sharded (ZeRO-1 and 2), each
rank gathers what the others have updated. On devices and between hosts such a gather proceeds while ranks compute, so
the step starts it and returns, and the next forward waits for it, unit by unit. Any other code that reads the memory in
between waits here, so that it never sees a partial update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import torch

from shardwise.comm import SharedBuffer
from shardwise.errors import StateError
from shardwise.memory.at_rest import ParamGuard
from shardwise.memory.coded_rows import CodedRows, RestCodec, Rows
from shardwise.memory.disk_memory import DiskMemory
from shardwise.memory.disk_rows import DiskRows
from shardwise.memory.dtypes import torch_dtype
from shardwise.memory.factors import Factors, KeptFactors
from shardwise.memory.flat_gradients import FlatGradients
from shardwise.memory.grad_buffer import Memory, OwnMemory
from shardwise.memory.host_memory import Copied, Copy, HostMemory
from shardwise.memory.releasable import Releasable, releasable
from shardwise.plan.placement import LOSS_DTYPE, Slot, Span
from shardwise.program import Buffer, FlatSpec, disk_bytes, kept_losses, resting_disk_bytes
from shardwise.system.telemetry import ByteMeter
from shardwise.system.torch_private import DisableTorchFunction, storage_id

Tensor = torch.Tensor
ANCHOR, MOMENTUM = "outer.anchor", "outer.momentum"
"""Names of what islands have in common, in checkpoints and for `engine.get`."""
_PIECE_NUMEL = 2**20
"""Elements of master weights that are read from a disk at once."""


class FullState(Enum):
    """The state of the whole buffer. `RESIDENT` never changes; the others cycle in this order."""

    RESIDENT = "resident"
    ABSENT = "absent"
    GATHERING = "gathering"
    READY = "ready"


RESIDENT, ABSENT, GATHERING, READY = FullState
"""Module-level names because attribute access on an enum is eight times as slow in Python 3.11, and every gather needs
several."""


class Flat:
    """One flat buffer on one rank: its parameters at rest and whole. `grads` are their gradients.

    `param`, `held` and `master` are this rank's ranges under the table; `full` is the whole buffer, with an empty
    storage while it is not gathered. `master` is what the optimizer updates: a range of `param` itself if the dtypes
    agree. All are one-dimensional.
    """

    _Gradients = FlatGradients

    def __init__(
        self,
        spec: FlatSpec,
        slots: Sequence[Slot],
        params: Sequence[torch.nn.Parameter],
        coordinate: Mapping[str, int],
        meter: ByteMeter,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.slots = tuple(slots)
        self.params = tuple(params)
        self.coordinate = dict(coordinate)
        self.meter, self.device = meter, device
        table, layout = spec.table, spec.layout
        self.param_span = layout.span(table.param.shard, coordinate)
        self.held_span = layout.span(table.held.shard, coordinate)
        self.optim_span = layout.span(table.optim.shard, coordinate)
        self.state = RESIDENT if spec.resident else ABSENT
        self.stays = False
        """Whether the whole buffer, once gathered, must not be freed because a graph may still read it."""
        self.lasts = False
        """The same, but only until the backward ends."""
        self.owes_free = False
        """Whether a free was skipped for that reason and the buffer has not been requested since."""
        self.is_outdated = False
        """Whether parameters were updated while the whole buffer had to stay, so that it has the values of before."""
        self._bytes_of_full: Releasable | None = None
        self._full = torch.empty(0, device="cpu")
        self._param = torch.empty(0, device="cpu")
        self._await_update: Callable[[], None] | None = None
        self.failed_update: Exception | None = None
        """Why the last update will never be complete. Every reader gets it, and none gets a part of the update."""
        self.master: Tensor | None = None
        self.anchor: Tensor | None = None
        """What islands have in common of `master`, and `momentum` of the optimizer that updates it."""
        self.momentum: Tensor | None = None
        self.held: Tensor | None = None
        self.shared: SharedBuffer | None = None
        """Where the parameters rest, if that is shared memory; set before the first values."""
        self._keeps_pages = False
        self.is_relaxed = False
        """Whether its pages have gone while it is whole, and come in one call when it is read."""
        self.own_memory = OwnMemory(device)
        self.memory: Memory = self.own_memory
        """Memory for what is sent in place: parameters that are updated in parts."""
        self.grads = self._Gradients(spec, self.slots, coordinate, meter, device)
        self.reading: Copy = Copied()
        """The last copy to read what rests on the host: `land` it before that is written."""
        self.disk: DiskMemory | None = None
        self.rows: DiskRows | None = None
        """What lies on a disk, if the table has a row there."""
        self.coded: CodedRows | None = None
        """What rests as codes, if parameters do."""
        self._rest_codec: RestCodec | None = None
        self.factors: Factors | None = None
        """What is kept of gradients that are sent as factors, if any are."""
        self.losses: dict[str, Tensor] = {}
        """What codes of gradients have lost, by the axis along which these are sent: see [Note: kept losses]."""
        self.outgoing: Tensor | None = None
        """The cast of what was updated on the host, if the update itself has made it."""
        self.guard = ParamGuard()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_whole(self) -> bool:
        """Whether all of `full` can be read."""
        state = self.state
        return state is READY or (state is RESIDENT and self._await_update is None)

    def send_from(self, memory: Memory) -> None:
        """Allocate what is sent in place from `memory`. Call before the first values."""
        self.memory = self.grads.memory = memory

    def keep_below(self, host: HostMemory, disk: DiskMemory | None) -> None:
        """Put rows on the host into `host`, and rows on a disk into `disk`. Call before the first values."""
        self.grads.host = host
        self.disk = disk

    def rest_by(self, codec: RestCodec) -> None:
        """Make codes of what rests as such by `codec`. Call before the first values."""
        self._rest_codec = codec

    @property
    def host(self) -> HostMemory:
        """The host's memory; only if the table has a row there."""
        return self.grads.require_host()

    def require_master(self) -> Tensor:
        """What the optimizer updates; only for trainable buffers."""
        assert self.master is not None
        return self.master

    def land(self) -> None:
        """Block until nothing reads what rests on the host or a disk, because it is about to be written."""
        self.reading.land()
        if self.rows is not None and self.disk is not None:
            self.disk.forget_read(self.rows)

    # -- parameters that are still being updated: see [Note: updates behind the step] -------------------

    @property
    def is_updating(self) -> bool:
        """Whether these parameters are still being gathered from the ranks that updated them."""
        return self._await_update is not None

    @property
    def full(self) -> Tensor:
        """The whole buffer; blocks while it is being updated, because readers cannot tell old values from new ones."""
        if self._await_update is not None:
            self._await_update()
        return self._full

    @full.setter
    def full(self, tensor: Tensor) -> None:
        self._full = tensor

    @property
    def param(self) -> Tensor:
        """The range stored on this rank; blocks as `full` does."""
        if self._await_update is not None:
            self._await_update()
        return self._param

    @param.setter
    def param(self, tensor: Tensor) -> None:
        self._param = tensor

    def begin_update(self, wait: Callable[[], None]) -> None:
        """Note that the parameters are being gathered; `wait` blocks until they are, and calls `end_update`."""
        self._await_update = wait

    def fail_update(self, error: Exception) -> None:
        """The update will never be complete."""
        self.failed_update = error
        self._await_update = self.end_update

    def end_update(self) -> None:
        """The parameters are up to date. Raises the error of an update that has failed."""
        if self.failed_update is not None:
            raise self.failed_update
        self._await_update = None

    # -- birth ------------------------------------------------------------------------------------------

    def fill_rows(self, whole: Tensor) -> None:
        """Fill every row from `whole`."""
        self.fill_rows_by(lambda index, span: whole[self.slots[index].span.as_slice][span.as_slice])

    def fill_rows_by(self, values: Callable[[int, Span], Tensor]) -> None:
        """Make the parameters views of `full`, and fill every row.

        `values(index, span)` returns the elements `span` of one parameter, flat. It is called once for each parameter
        of which this rank keeps a part.
        """
        views = self._lay_out()
        for index, (slot, param) in enumerate(zip(self.slots, self.params, strict=True)):
            mine = slot.span.overlap(self.param_span)
            if mine.numel:
                self._keep(mine, values(index, mine.within(slot.span)).to(self.kept_dtype))
            _set_data(param, views[index])  # only now: the values may have come from its memory

    def _keep(self, mine: Span, values: Tensor) -> None:
        """Store first values of the elements `mine`, which lie in `param_span`."""
        self.put(self.param[mine.within(self.param_span).as_slice], values)
        if self.master is not None and not self.spec.master_is_param:
            updated = mine.overlap(self.optim_span)
            self.put(self.master[updated.within(self.optim_span).as_slice], values[updated.within(mine).as_slice])
        if self.anchor is not None:
            updated = mine.overlap(self.optim_span)
            self.anchor[updated.within(self.optim_span).as_slice].copy_(values[updated.within(mine).as_slice])

    def lay_out(self) -> None:
        """Allocate zeros for what this rank keeps, and make the parameters views of `full`: for values that are moved
        here from another layout. Trainable ones go into `master`, frozen ones into `param`."""
        for param, view in zip(self.params, self._lay_out(), strict=True):
            _set_data(param, view)

    def _lay_out(self) -> list[Tensor]:
        """Allocate what this rank keeps, zero between parameters. Returns each parameter's view of `full`."""
        table = self.spec.table
        compute = torch_dtype(table.compute)
        if self.spec.lies_on_disk:
            self._open_rows()
        if self.shared is not None:
            self.full = self.shared.whole.view(compute)
            self.param = self.shared.own.view(compute)
        elif self.spec.resident:  # what is updated in parts is sent in place
            memory = self.memory if table.optim.shard else self.own_memory
            self.full = memory.buffer(self.spec.numel, compute).zero_()
        else:
            self._bytes_of_full = releasable(self.spec.full_bytes, self.device)
            self.full = self._bytes_of_full.tensor.view(compute)
        views = [self.full[slot.span.as_slice].view(slot.shape) for slot in self.slots]
        if self.spec.resident:
            self.param = self.full
        elif self._bytes_of_full is not None:
            self._bytes_of_full.free()
            self.param = self._resting("param", self.param_span.numel, compute)
        if self.spec.tier_of("param") == "device":
            self.meter.hold("param", self.spec.resting_bytes)
        if self.spec.factored:
            self.factors = Factors(self.spec, self.meter, self.device)
        for one in kept_losses(self.spec):
            losses = torch.zeros(one.numel, dtype=torch_dtype(LOSS_DTYPE), device=self.device)
            self.losses[one.axis] = losses
            self.meter.hold("optim", losses.nbytes)
        if self.spec.trainable:
            if self.spec.master_is_param:
                self.master = self.param[self.optim_span.within(self.param_span).as_slice]
            else:
                self.master = self._resting("master", self.optim_span.numel, torch_dtype(table.optim.dtype))
                if self.spec.tier_of("master") == "device":
                    self.meter.hold("optim", self.master.nbytes)
            if table.outer is not None:
                self.anchor = self._outer_row()
                self.momentum = self._outer_row() if table.outer.num_states else None
        return views

    def _outer_row(self) -> Tensor:
        """Memory of zeros, as much as `master` has."""
        assert self.spec.table.outer is not None
        place, numel = self.spec.table.outer.place, self.optim_span.numel
        if place.tier == "host":
            return self.host.zeros(numel, torch_dtype(place.dtype), "optim")
        row = torch.zeros(numel, dtype=torch_dtype(place.dtype), device=self.device)
        self.meter.hold("optim", row.nbytes)
        return row

    def kept_factors(self) -> dict[str, KeptFactors]:
        """By parameter, what is kept of gradients that are sent as factors."""
        kept = self.factors
        if kept is None:
            return {}
        return {
            self.slots[one.index].name: (kept.unsent[one.span.as_slice], kept.cols[one.index])
            for one in self.spec.factored
        }

    def go_on_with(self, former: Mapping[str, KeptFactors]) -> None:
        """Take over what another layout of the same ranks has kept."""
        for name, own in self.kept_factors().items():
            theirs = former.get(name)
            if theirs is not None and all(one.shape == other.shape for one, other in zip(own, theirs, strict=True)):
                for one, other in zip(own, theirs, strict=True):
                    one.copy_(other)

    def rest_in(self, memory: Tensor) -> None:
        """Keep the parameters, which are whole here between steps, in `memory`, as large as `full` and of its dtype."""
        memory.copy_(self.full)
        self.full = self.param = memory
        if self.spec.trainable and self.spec.master_is_param:
            self.master = memory[self.optim_span.as_slice]
        is_resting = self.guard.is_resting
        self.guard.wake()
        for slot, param in zip(self.slots, self.params, strict=True):
            _set_data(param, memory[slot.span.as_slice].view(slot.shape))
        if is_resting:
            self.guard.rest()

    def put_back(self) -> bool:
        """Make parameters views of `full` again that have been given other memory (`param.data = ...`) below our
        notice. Returns whether there were any."""
        with DisableTorchFunction():
            own = storage_id(self.full.untyped_storage())
            moved = [
                (slot, param)
                for slot, param in zip(self.slots, self.params, strict=True)
                if storage_id(param.untyped_storage()) != own
            ]
            for slot, param in moved:
                _set_data(param, self.full[slot.span.as_slice].view(slot.shape))
        return bool(moved)

    def _resting(self, buffer: Buffer, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of zeros for a row, on its tier; `HostMemory` counts its own."""
        codes = self.spec.table.rests_as if buffer == "param" else None
        if codes is not None:
            assert self._rest_codec is not None
            self.coded = CodedRows(self.name, self._rest_codec, codes, numel, dtype, self.device)
            return self.coded.param
        if self.spec.tier_of(buffer) == "device":
            return torch.zeros(numel, dtype=dtype, device=self.device)
        if self.rows is not None and self.spec.tier_of(buffer) == "disk":
            return self.rows.param(numel, dtype) if buffer == "param" else self.rows.master(numel, dtype)
        return self.host.zeros(numel, dtype, "param" if buffer == "param" else "optim")

    def _open_rows(self) -> None:
        if self.disk is None:
            raise StateError(f"{self.name} has rows on a disk, and no folder was opened for them.")
        spec, num_bytes = self.spec, disk_bytes(self.spec, self.coordinate)
        self.rows = self.disk.rows(self.name, num_bytes, resting_disk_bytes(spec), is_updated=spec.updates_from_disk)

    @property
    def kept_dtype(self) -> torch.dtype:
        """The dtype in which values are kept: that of master weights, or a frozen parameter's own."""
        table = self.spec.table
        return torch_dtype(table.optim.dtype if self.spec.trainable else table.compute)

    # -- the whole buffer -------------------------------------------------------------------------------

    @property
    def must_be_gathered_again(self) -> bool:
        """Whether another rank has freed it and needs this one's part, or it has been updated since it was gathered."""
        return self.owes_free or self.is_outdated

    def allocate_full(self) -> None:
        """Give `full` its bytes back, undefined. It counts as being gathered until it is `READY`."""
        if self.shared is not None:
            self._renew_pages()
        elif self._bytes_of_full is not None:
            self._bytes_of_full.allocate()
        self.meter.hold("working", self.spec.full_bytes)
        self.state = GATHERING
        self.is_outdated = False

    def free_full(self) -> None:
        """Free the bytes of `full`. No effect if they are free, resident, or have to stay."""
        self.owes_free = self.state is READY and self.lasts and not self.stays
        if self.state is READY and not (self.stays or self.lasts):
            if self.shared is not None:
                self._renew_pages()
            elif self._bytes_of_full is not None:
                self._bytes_of_full.free()
            self.meter.drop("working", self.spec.full_bytes)
            self.state = ABSENT

    def keep_pages(self, *, kept: bool) -> None:
        """Let pages of shared memory stay mapped, or not any more, while the buffer is not whole. It is there anyway,
        and to map 128 MiB again takes 15 ms of a core that multiplies them with a vector in 10. What this rank writes
        to it meanwhile is lost at the end."""
        self._keeps_pages = kept
        self._renew_pages()

    def _renew_pages(self) -> None:
        if self.shared is not None and not self._keeps_pages:
            self.shared.renew()

    def relax(self) -> None:
        """The whole buffer will not be read for a while: in shared memory its pages may go meanwhile, and it stays
        whole. So with the last unit, whose backward follows its forward but for the loss, where memory peaks."""
        if self.shared is not None and self.state is READY:
            self.is_relaxed = self.shared.relax()

    def resume(self) -> None:
        """The whole buffer, which was relaxed, is about to be read."""
        self.is_relaxed = False
        if self.shared is not None:
            self.shared.resume()

    def hold(self) -> None:
        """Keep the part of `full` that is held until the backward. In shared memory it exists anyway, but is still
        counted, because a promise does not depend on where ranks run."""
        if self.held is None:
            held = self.full[self.held_span.as_slice]
            self.held = held.clone() if self.shared is None else held
            self.meter.hold("working", self.held.nbytes)

    def free_held(self) -> None:
        if self.held is not None:
            self.meter.drop("working", self.held.nbytes)
            self.held = None

    def find_rows(self) -> None:
        """Point `param` and `master` at the current place of the disk's rows."""
        assert self.rows is not None
        if self.spec.rests_on_disk:
            self.param = self.rows.param(self.param.numel(), self.param.dtype)
        if self.spec.updates_from_disk:
            self.master = self.master_in_rows()

    def master_in_rows(self) -> Tensor:
        """What the optimizer updates, at the current place of the disk's rows."""
        assert self.rows is not None
        numel, dtype = self.optim_span.numel, torch_dtype(self.spec.table.optim.dtype)
        if not self.spec.master_is_param:
            return self.rows.master(numel, dtype)
        return self.rows.param(self.param_span.numel, dtype)[self.optim_span.within(self.param_span).as_slice]

    def accept_master(self) -> None:
        """Cast the master weights into their range of `param`."""
        self.land()
        if self.master is not None and not self.spec.master_is_param:
            self.copy_master(self.param[self.optim_span.within(self.param_span).as_slice])

    def copy_master(self, out: Tensor) -> None:
        """Copy master weights into `out`, cast to its dtype; from a disk in pieces."""
        master = self.require_master()
        if self.on_disk(master) is None:
            out.copy_(master)
            return
        for start in range(0, master.numel(), _PIECE_NUMEL):
            stop = start + _PIECE_NUMEL
            self.put(out[start:stop], self.loaded(master[start:stop]))

    # -- what may lie on a disk, or as codes ---------------------------------------------------------------

    def on_disk(self, tensor: Tensor) -> DiskRows | None:
        """The rows that hold what `tensor` stands for; `None` if it is in memory."""
        return self.rows if self.rows is not None and self.rows.has(tensor) else None

    def rows_of(self, tensor: Tensor) -> Rows | None:
        """Those that hold what `tensor` stands for, on a disk or as codes; `None` if it is in memory."""
        return self.coded if self.coded is not None and self.coded.has(tensor) else self.on_disk(tensor)

    def loaded(self, tensor: Tensor) -> Tensor:
        """`tensor`, a flat row or state of this buffer, in memory: a copy if it lies on a disk, or as codes."""
        rows = self.rows_of(tensor)
        return tensor.detach() if rows is None else rows.read(tensor)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write `values`, flat, over `tensor`, wherever it lies."""
        rows = self.rows_of(tensor)
        if rows is not None:
            rows.write(tensor, values)
        elif tensor.numel():  # torch counts a copy of nothing as a change of all that shares its memory
            tensor.copy_(values)

    def accept_edit(self, index: int, values: Tensor) -> None:
        """Replace parameter `index` by `values`, whole and flat, wherever this rank keeps a part of it.

        Master weights that are equal to `values` in the precision of `values` are left as they are.
        """
        self.land()
        span = self.slots[index].span
        if self.spec.resident:
            self.full[span.as_slice].copy_(values)
        else:
            mine = span.overlap(self.param_span)
            self.put(self.param[mine.within(self.param_span).as_slice], values[mine.within(span).as_slice])
        if self.master is not None and not self.spec.master_is_param:
            piece, mine = self.master_piece(index)
            master = self.loaded(piece)
            edited = values[mine.as_slice].to(master.device)
            self.put(piece, torch.where(master.to(edited.dtype) == edited, master, edited.to(master.dtype)))

    # -- one parameter ----------------------------------------------------------------------------------

    def master_piece(self, index: int) -> tuple[Tensor, Span]:
        """This rank's elements of parameter `index` as a view of `master`, and which elements they are. Raises
        `ValueError` for a frozen parameter."""
        if self.master is None:
            raise ValueError(f"{self.slots[index].name} is frozen and has no master weights")
        self.land()
        mine = self.slots[index].span.overlap(self.optim_span)
        return self.master[mine.within(self.optim_span).as_slice], mine.within(self.slots[index].span)

    def param_piece(self, index: int) -> Tensor:
        """This rank's elements of parameter `index` where they are kept: master weights, or a frozen parameter's
        own."""
        if self.master is not None:
            return self.master_piece(index)[0]
        self.land()
        mine = self.slots[index].span.overlap(self.param_span)
        return self.param[mine.within(self.param_span).as_slice]

    def common_piece(self, index: int) -> Tensor:
        """`param_piece` of the model that a checkpoint's readers want: with islands, of the one that these have in
        common."""
        return self.param_piece(index) if self.anchor is None else self.outer_pieces(index)[ANCHOR]

    def outer_pieces(self, index: int) -> dict[str, Tensor]:
        """This rank's elements of parameter `index` in what islands have in common, by name."""
        rows = {ANCHOR: self.anchor, MOMENTUM: self.momentum}
        mine = self.slots[index].span.overlap(self.optim_span).within(self.optim_span)
        return {name: row[mine.as_slice] for name, row in rows.items() if row is not None}

    # -- the end ----------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Free all memory, when the content has moved to another layout. The description is left."""
        if self.shared is not None:
            self.shared.let_go()
        self.full = self.param = torch.empty(0, dtype=torch_dtype(self.spec.table.compute), device=self.device)
        self.master = self.held = self.outgoing = self.shared = self._bytes_of_full = None
        self.anchor = self.momentum = self.coded = None
        self.grads.let_go()

    def give_back_shapes(self) -> None:
        """Let go of all memory, and let the parameters have the shapes and dtypes of the whole ones again, with one
        zero in place of their values. What is shared stays while other ranks map it: they may read this rank's part."""
        self.shared = None
        self.let_go()
        dtype = torch_dtype(self.spec.kept.dtype)
        for slot, param in zip(self.slots, self.params, strict=True):
            _set_data(param, torch.zeros((), dtype=dtype, device=self.device).expand(slot.whole_shape))


def _set_data(param: torch.nn.Parameter, view: Tensor) -> None:
    """Make `view` the data of `param`.

    A graph that is still referenced keeps the parameter's accumulator alive, which expects gradients of the old shape;
    torch makes a new accumulator only if dtype or device change.
    """
    if param.shape != view.shape:
        other = torch.float32 if param.dtype == torch.float64 else torch.float64
        param.data = torch.empty(0, dtype=other, device=view.device)
    param.data = view
