"""Flat memory: many parameters in one buffer, each a named view into it.

[Note: freeing in place] A parameter's `data` is a view of `full` for as long as the engine lives. To free a gathered
buffer its *storage* loses its bytes (`releasable.py`); the next gather gives the same storage new ones.
Re-pointing `data` would not free anything: autograd saves views such as `weight.t()`, which keep the old
storage alive, and which see the next gather this way.

[Note: resting in common] Where the ranks that shard a buffer have memory in common, `param` is this rank's part
of it and `full` all of it: nothing is gathered or freed but the pages that this process maps, and parameters can be
read at any time. What somebody writes to `full` is his own, and gone when it is freed, as with any other buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import torch

from shardwise.comm import SharedBuffer
from shardwise.errors import StateError
from shardwise.placement import Slot, Span
from shardwise.program import Buffer, FlatSpec, disk_bytes, resting_disk_bytes
from shardwise.storage.at_rest import ParamGuard
from shardwise.storage.disk_memory import DiskMemory, DiskRows
from shardwise.storage.dtypes import torch_dtype
from shardwise.storage.grad_buffer import Memory, OwnMemory
from shardwise.storage.gradients import FlatGradients
from shardwise.storage.host_memory import Copied, Copy, HostMemory
from shardwise.storage.releasable import Releasable, releasable
from shardwise.telemetry import ByteMeter

Tensor = torch.Tensor
_PIECE_NUMEL = 2**20
"""Elements of master weights that are taken from a disk at once."""


class FullState(Enum):
    """What the whole buffer is. `RESIDENT` never changes; the others go round in this order."""

    RESIDENT = "resident"
    ABSENT = "absent"
    GATHERING = "flying"
    READY = "ready"


RESIDENT, ABSENT, GATHERING, READY = FullState
"""To look one up in the class takes Python 3.11 eight times as long as a name, and every gather asks for several."""


class Flat:
    """One flat buffer on one rank: the parameters' bytes at rest and whole. `grads` are their gradients.

    `param`, `held` and `master` are this rank's ranges of the places that the table gives them; `full` is everything,
    its storage empty while it is not gathered. `master` is what the optimizer updates: a range of `param` itself where
    the dtypes agree.
    """

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
        self.meter = meter
        self.device = device
        table, layout = spec.table, spec.layout
        self.param_span = layout.span(table.param.shard, coordinate)
        self.held_span = layout.span(table.held.shard, coordinate)
        self.optim_span = layout.span(table.optim.shard, coordinate)
        self.state = RESIDENT if spec.resident else ABSENT
        self.stays = False
        """Whether the whole buffer, once it is there, is not to be freed, since a graph may still read it."""
        self.lasts = False
        """Likewise, but only until the backward ends."""
        self.owes_free = False
        """Whether it would have been freed otherwise, and has not been asked for since."""
        self.full = torch.empty(0)
        self._bytes_of_full: Releasable | None = None
        self.param = torch.empty(0)
        self.master: Tensor | None = None
        self.held: Tensor | None = None
        self.shared: SharedBuffer | None = None
        """Where the parameters rest, if that is shared memory; given before the first values."""
        self.own_memory = OwnMemory(device)
        self.memory: Memory = self.own_memory
        """For what is sent from where it lies: parameters that are updated in parts."""
        self.grads = FlatGradients(spec, self.slots, coordinate, meter, device)
        self.reading: Copy = Copied()
        """The copy that was last to read what rests on the host: `land` before that is written to."""
        self.disk: DiskMemory | None = None
        self.rows: DiskRows | None = None
        """What lies on a disk, if the table has a row there."""
        self.outgoing: Tensor | None = None
        """What is to travel of what was updated on the host, if the update itself has cast it."""
        self.guard = ParamGuard()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_whole(self) -> bool:
        """Whether all of `full` can be read."""
        state = self.state
        return state is READY or state is RESIDENT

    def send_from(self, memory: Memory) -> None:
        """What is sent from where it lies is to lie in `memory`. Said before the first values."""
        self.memory = self.grads.memory = memory

    def keep_below(self, host: HostMemory, disk: DiskMemory | None = None) -> None:
        """Rows on the host are to lie in `host`, those on a disk in `disk`. Said before the first values."""
        self.grads.host = host
        self.disk = disk

    @property
    def host(self) -> HostMemory:
        """The host's memory, which there is where the table has a row there."""
        return self.grads.require_host()

    def require_master(self) -> Tensor:
        """What the optimizer updates, of a buffer that is trained."""
        assert self.master is not None
        return self.master

    def land(self) -> None:
        """Block until nothing reads what rests on the host or a disk: it is about to be written to."""
        self.reading.land()
        if self.rows is not None and self.disk is not None:
            self.disk.forget_read(self.rows)

    # -- birth ------------------------------------------------------------------------------------------

    def settle(self, whole: Tensor) -> None:
        """Put every row where the table says, from `whole`."""
        self.settle_pieces(lambda index, span: _part(_part(whole, self.slots[index].span), span))

    def settle_pieces(self, values: Callable[[int, Span], Tensor]) -> None:
        """Make the parameters views of `full`, and put every row where the table says.

        `values(index, span)` are the elements `span` of one parameter, flat. It is asked once for each parameter of
        which this rank keeps something.
        """
        views = self._lay_out()
        for index, (slot, param) in enumerate(zip(self.slots, self.params, strict=True)):
            mine = slot.span.overlap(self.param_span)
            if mine.numel:
                self._keep(mine, values(index, mine.within(slot.span)).to(self.kept_dtype))
            _show(param, views[index])  # only now: it may have been where the values came from

    def _keep(self, mine: Span, values: Tensor) -> None:
        """Take over first values of the elements `mine`, which lie in `param_span`."""
        self.put(_part(self.param, mine.within(self.param_span)), values)
        if self.master is not None and not self.spec.master_is_param:
            updated = mine.overlap(self.optim_span)
            self.put(_part(self.master, updated.within(self.optim_span)), _part(values, updated.within(mine)))

    def lay_out(self) -> None:
        """Memory for what this rank keeps, zero so far, and the parameters views of `full`: for values that are moved
        here from another layout. Trainable ones go into `master`, frozen ones into `param`."""
        for param, view in zip(self.params, self._lay_out(), strict=True):
            _show(param, view)

    def _lay_out(self) -> list[Tensor]:
        """Memory for what this rank keeps, zero between the parameters. Returns each parameter's view of `full`."""
        table = self.spec.table
        compute = torch_dtype(table.compute)
        if self.spec.lies_on_disk:
            self._open_rows()
        if self.shared is not None:
            self.full = self.shared.whole.view(compute)
            self.param = self.shared.own.view(compute)
        elif self.spec.resident:  # what is updated in parts is sent from where it lies
            memory = self.memory if table.optim.shard else self.own_memory
            self.full = memory.buffer(self.spec.numel, compute).zero_()
        else:
            self._bytes_of_full = releasable(self.spec.full_bytes, self.device)
            self.full = self._bytes_of_full.tensor.view(compute)
        views = [_part(self.full, slot.span).view(slot.shape) for slot in self.slots]
        if self.spec.resident:
            self.param = self.full
        elif self._bytes_of_full is not None:
            self._bytes_of_full.free()
            self.param = self._resting("param", self.param_span.numel, compute)
        if self.spec.tier_of("param") == "device":
            self.meter.hold("param", self.param.nbytes)
        if self.spec.trainable:
            if self.spec.master_is_param:
                self.master = _part(self.param, self.optim_span.within(self.param_span))
            else:
                self.master = self._resting("master", self.optim_span.numel, torch_dtype(table.optim.dtype))
                if self.spec.tier_of("master") == "device":
                    self.meter.hold("optim", self.master.nbytes)
        return views

    def _resting(self, buffer: Buffer, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of zeros for a row, on its tier; the host's counts its own."""
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
        """In which the parameters' values are kept: that of master weights, or a frozen one's own."""
        table = self.spec.table
        return torch_dtype(table.optim.dtype if self.spec.trainable else table.compute)

    # -- the whole buffer -------------------------------------------------------------------------------

    def allocate_full(self) -> None:
        """Give `full` its bytes back, undefined. It is on its way from here until it is `READY`."""
        if self.shared is not None:
            self.shared.renew()
        elif self._bytes_of_full is not None:
            self._bytes_of_full.allocate()
        self.meter.hold("working", self.spec.full_bytes)
        self.state = GATHERING

    def free_full(self) -> None:
        """Let the bytes of `full` go. Asked twice, or of one that is resident, stays or lasts, it does nothing."""
        self.owes_free = self.state is READY and self.lasts and not self.stays
        if self.state is READY and not (self.stays or self.lasts):
            if self.shared is not None:
                self.shared.renew()
            elif self._bytes_of_full is not None:
                self._bytes_of_full.free()
            self.meter.drop("working", self.spec.full_bytes)
            self.state = ABSENT

    def relax(self) -> None:
        """The whole buffer is not read for a while. In shared memory its pages can go meanwhile, and it stays whole."""
        if self.shared is not None and self.state is READY:
            self.shared.relax()

    def hold(self) -> None:
        """Keep from `full` what the table says is held until the backward. In shared memory it is there anyway,
        and counted all the same: a promise does not depend on where ranks run."""
        if self.held is None:
            held = _part(self.full, self.held_span)
            self.held = held.clone() if self.shared is None else held
            self.meter.hold("working", self.held.nbytes)

    def free_held(self) -> None:
        if self.held is not None:
            self.meter.drop("working", self.held.nbytes)
            self.held = None

    def find_rows(self) -> None:
        """Let `param` and `master` be where the disk's rows are now."""
        assert self.rows is not None
        if self.spec.rests_on_disk:
            self.param = self.rows.param(self.param.numel(), self.param.dtype)
        if self.spec.updates_from_disk:
            self.master = self.master_in_rows()

    def master_in_rows(self) -> Tensor:
        """What the optimizer updates, where the disk's rows are now."""
        assert self.rows is not None
        numel, dtype = self.optim_span.numel, torch_dtype(self.spec.table.optim.dtype)
        if not self.spec.master_is_param:
            return self.rows.master(numel, dtype)
        return _part(self.rows.param(self.param_span.numel, dtype), self.optim_span.within(self.param_span))

    def accept_master(self) -> None:
        """Cast what the optimizer has updated into the range of `param` that it came from."""
        self.land()
        if self.master is not None and not self.spec.master_is_param:
            self.copy_master(_part(self.param, self.optim_span.within(self.param_span)))

    def copy_master(self, out: Tensor) -> None:
        """Master weights into `out`, cast to its dtype; from a disk piece by piece."""
        master = self.require_master()
        if self.on_disk(master) is None:
            out.copy_(master)
            return
        for start in range(0, master.numel(), _PIECE_NUMEL):
            stop = start + _PIECE_NUMEL
            self.put(out[start:stop], self.loaded(master[start:stop]))

    # -- what may lie on a disk ---------------------------------------------------------------------------

    def on_disk(self, tensor: Tensor) -> DiskRows | None:
        """The rows that have to be asked for what `tensor` stands for; `None` if it is in memory."""
        return self.rows if self.rows is not None and self.rows.has(tensor) else None

    def loaded(self, tensor: Tensor) -> Tensor:
        """`tensor`, flat, of a row or a state of this buffer, in memory: a copy if it lies on a disk."""
        rows = self.on_disk(tensor)
        return tensor.detach() if rows is None else rows.read(tensor)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Write `values`, flat, over `tensor`, wherever that is."""
        rows = self.on_disk(tensor)
        if rows is None:
            tensor.copy_(values)
        else:
            rows.write(tensor, values)

    def accept_edit(self, index: int, values: Tensor) -> None:
        """Put `values`, whole and flat, in the place of parameter `index`, wherever this rank keeps some of it.

        What is the same to the precision of `values` keeps the precision in which it is kept.
        """
        self.land()
        span = self.slots[index].span
        if self.spec.resident:
            _part(self.full, span).copy_(values)
        else:
            mine = span.overlap(self.param_span)
            self.put(_part(self.param, mine.within(self.param_span)), _part(values, mine.within(span)))
        if self.master is not None and not self.spec.master_is_param:
            piece, mine = self.master_piece(index)
            master = self.loaded(piece)
            edited = _part(values, mine).to(master.device)
            self.put(piece, torch.where(master.to(edited.dtype) == edited, master, edited.to(master.dtype)))

    # -- one parameter ----------------------------------------------------------------------------------

    def master_piece(self, index: int) -> tuple[Tensor, Span]:
        """This rank's elements of parameter `index`, as a view of `master`, and which of its elements they are."""
        if self.master is None:
            raise ValueError(f"{self.slots[index].name} is frozen and has no master weights")
        self.land()
        mine = self.slots[index].span.overlap(self.optim_span)
        return _part(self.master, mine.within(self.optim_span)), mine.within(self.slots[index].span)

    def param_piece(self, index: int) -> Tensor:
        """This rank's elements of parameter `index` where they are kept: master weights, or a frozen one's bytes."""
        if self.master is not None:
            return self.master_piece(index)[0]
        self.land()
        mine = self.slots[index].span.overlap(self.param_span)
        return _part(self.param, mine.within(self.param_span))


def _show(param: torch.nn.Parameter, view: Tensor) -> None:
    """Make `view` the data of `param`.

    A graph that somebody still holds keeps the parameter's accumulator alive, which expects gradients of the old shape;
    torch makes a new one only where dtype or device change.
    """
    if param.shape != view.shape:
        other = torch.float32 if param.dtype == torch.float64 else torch.float64
        param.data = torch.empty(0, dtype=other, device=view.device)
    param.data = view


def _part(tensor: Tensor, span: Span) -> Tensor:
    return tensor[span.start : span.stop]
