"""The moves of one flat buffer's parameters: gathered and freed in a pass, restored after an update."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch

from shardwise.comm import Communicator, Group, Work
from shardwise.errors import CommError, TierError
from shardwise.memory import ABSENT, GATHERING, READY, Copy, DiskRead, Flat, torch_dtype
from shardwise.plan.placement import Axes, Span
from shardwise.program import Action, Subject, Verb
from shardwise.runtime.codec import EncodedGather, codec_for
from shardwise.system.torch_private import is_transforming, outside_transforms

Tensor = torch.Tensor


class ParamMover:
    """One flat buffer's parameters on this rank, and the transfer under way."""

    def __init__(self, flat: Flat, collectives: Communicator, groups: Mapping[str, Group]) -> None:
        self.flat = flat
        self._collectives = collectives
        self._groups = groups
        self._journal = collectives.journal
        self._name = flat.name
        self._gathering = f"gather of {flat.name}"
        self._coordinate = {axis: group.index for axis, group in groups.items()}
        self._spans: dict[Axes, Span] = {}
        self._parts_of_full: dict[Axes, Tensor] = {}
        self._chunks_of_full: dict[tuple[Axes, str], Sequence[Tensor]] = {}
        self._spread: Axes = ()
        self._arriving: Work | None = None
        table = flat.spec.table
        wires = {axis: table.param_wire_over(axis) for axis in table.axes}
        self._codecs = {axis: codec_for(wire, flat.device) for axis, wire in wires.items() if wire is not None}
        self._codes = table.param_codes
        self._outgoing: Tensor | None = None
        """On the host: the cast of what was updated there, while it is being fetched."""

    def moves(self) -> dict[tuple[Verb, Subject], Callable[[Action], None]]:
        """The method for each action on parameters. Made anew for each caller: kept, it would be a reference cycle,
        and a buffer would outlive its engine until the next garbage collection."""
        return {
            ("gather", "param"): self.gather_param,
            ("fetch", "param"): self.fetch_param,
            ("decode", "param"): self.decode_param,
            ("gather", "held"): self.gather_held,
            ("slice", "held"): self.slice_held,
            ("free", "full"): self.free_full,
            ("wait", "range"): self.wait_range,
            ("wait", "full"): self.wait_full,
            ("cast", "param"): self.cast_param,
            ("cast", "outgoing"): self.cast_outgoing,
            ("fetch", "outgoing"): self.fetch_outgoing,
            ("fetch", "updated"): self.fetch_updated,
            ("gather", "updated"): self.gather_updated,
            ("wait", "updated"): self.wait_updated,
            ("wait", "param"): self.wait_param,
        }

    # -- parameters, in a pass ----------------------------------------------------------------------------

    def gather_param(self, action: Action) -> None:
        """Start to gather `full` over one axis, from the resting parameters."""
        self._gather(action, self.flat.param, self.flat.spec.table.param.shard)

    def fetch_param(self, _: Action) -> None:
        """Start to copy the resting parameters from the host, or from a disk, to their place in `full`."""
        flat = self.flat
        if flat.is_whole and flat.must_be_gathered_again:
            flat.owes_free = flat.is_outdated = False
            flat.state = GATHERING
        elif flat.state is ABSENT:
            flat.allocate_full()
        else:
            return
        self._spread = flat.spec.table.param.shard
        part = self._part_of_full(self._spread)
        if flat.spec.rests_on_disk:
            self._arriving = flat.reading = self._read(part)
        else:
            self._arriving = flat.reading = flat.host.fetch(part, flat.param)

    def _read(self, out: Tensor) -> Copy:
        """Start to read the parameters from the disk into `out`, on the device."""
        flat, num_bytes = self.flat, self.flat.param.nbytes
        assert flat.disk is not None
        assert flat.rows is not None
        return flat.disk.read(flat.rows, lambda buffer: flat.host.fetch(out, buffer[:num_bytes].view(out.dtype)))

    def decode_param(self, _: Action) -> None:
        """Make `full` of codes that rest here whole."""
        flat = self.flat
        if flat.is_whole and not flat.must_be_gathered_again:
            return
        if flat.state is ABSENT:
            flat.allocate_full()
        flat.owes_free = flat.is_outdated = False
        assert flat.coded is not None
        flat.coded.decode(flat.full)
        flat.state = READY
        flat.free_held()

    def gather_held(self, action: Action) -> None:
        """Start to gather from what is held; if nothing is, from the resting parameters."""
        if self.flat.held is not None:
            self._gather(action, self.flat.held, self.flat.spec.table.held.shard)
        else:
            self.gather_param(action)

    def wait_range(self, _: Action) -> None:
        """Wait until a larger range of `full` is filled."""
        if self.flat.spec.rests_on_disk and isinstance(self._arriving, DiskRead):
            self._wait_for_all_disks(self._arriving)
        self._wait_arriving()

    def _wait_for_all_disks(self, read: DiskRead) -> None:
        """Before ranks exchange what they have read: if a disk of any rank failed, all raise `TierError`; where the
        others go on without it, they raise `FaultError`."""
        why = ""
        try:
            read.wait()
        except TierError as error:
            why = str(error)
        groups = [self._groups[axis] for axis in self.flat.spec.table.axes]
        me = groups[0].ranks[groups[0].index] if groups else 0
        told = {me: why}
        for group in groups:
            messages = self._collectives.exchange(json.dumps(told).encode(), group, self._gathering)
            told = {int(rank): text for message in messages for rank, text in json.loads(message).items()}
        failed = {rank: text for rank, text in sorted(told.items()) if text}
        if failed:
            assert self.flat.disk is not None
            self.flat.disk.leave_if_lost(me, failed, list(told), "in a pass")
            raise TierError(next(iter(failed.values())))

    def free_full(self, _: Action) -> None:
        self.flat.free_full()

    def slice_held(self, _: Action) -> None:
        self.flat.hold()

    def wait_full(self, _: Action | None = None) -> None:
        """Wait for the gather under way; `full` is then whole, and what was held of it is freed."""
        self._wait_arriving()
        self.flat.end_update()
        if self.flat.state is GATHERING and not self._spread:
            if self.flat.shared is not None:
                self.flat.shared.wait_closed()
            self.flat.state = READY
            self.flat.free_held()

    def _gather(self, action: Action, source: Tensor, shard: Axes) -> None:
        flat, axis = self.flat, action.over
        if flat.is_whole and not flat.must_be_gathered_again:
            return
        if flat.is_whole:
            flat.owes_free = flat.is_outdated = False
            self._spread = shard
            flat.state = GATHERING
            self._place(source, shard)
        if flat.state is GATHERING and axis not in self._spread:
            return
        if flat.state is ABSENT:
            self._spread = shard
            flat.allocate_full()
            self._place(source, shard)
        for other in reversed(flat.spec.table.order):
            if other == axis:
                break
            if other in self._spread:  # nothing was held, so the resting parameters are gathered over more axes
                self._gather_over(other)
                self._wait_arriving()
        self._gather_over(axis, is_held=action.subject == "held")

    def _place(self, source: Tensor, shard: Axes) -> None:
        """Copy what is gathered to its place in `full`, unless it is there, or comes there with the others' codes."""
        comes_as_codes = self.flat.coded is not None and self.flat.coded.has(source)
        if self.flat.shared is None and not comes_as_codes:
            self._part_of_full(shard).copy_(source)

    def _gather_over(self, axis: str, *, is_held: bool = False) -> None:
        """[Note: held ranges are sent as they are] What is held has been decoded from codes once. It is not made codes
        again: in a narrow dtype its scales could come out otherwise, and the backward would see other parameters than
        the forward."""
        spread = self._spread = tuple([other for other in self._spread if other != axis])
        gathered, group = self._part_of_full(spread), self._groups[axis]
        if self.flat.shared is not None:  # shared memory holds it already
            self._count_read(gathered, group)
            return
        chunks = self._chunks_of_full.get((spread, axis))
        if chunks is None:
            chunks = self._chunks_of_full[spread, axis] = gathered.chunk(len(group.ranks))
        self._arriving = self._all_gather(gathered, group, chunks, is_held=is_held)

    def _all_gather(self, whole: Tensor, group: Group, chunks: Sequence[Tensor], *, is_held: bool = False) -> Work:
        codec = self._codecs.get(group.axis)
        if codec is None or (is_held and self._codes is not None):
            return self._collectives.all_gather(whole, group, self._name, chunks)
        own, coded, meter = chunks[group.index], self.flat.coded, self.flat.meter
        encoded = coded.codes if coded is not None and own.numel() == coded.param.numel() else None
        source = self._exact(own)
        return EncodedGather(codec, self._collectives, chunks, group, self._name, meter, source, encoded)

    def _exact(self, part: Tensor) -> Tensor | None:
        """The master weights of `part`, this rank's share of what is gathered, if they are here: codes are made of
        these, so that elements are rounded once even where parameters rest in a narrower dtype."""
        flat = self.flat
        master = flat.master
        if self._codes is None or master is None or flat.spec.tier_of("master") != "device":
            return None
        return master if part.numel() == master.numel() else None

    def _count_read(self, gathered: Tensor, group: Group) -> None:
        """Count what the other ranks read of this rank's part as if it had been sent, and mark it so that ranks that
        differ are detected."""
        self._journal.mark(self._gathering, is_of_part=True)
        ledger, num_ranks = self._collectives.ledger, len(group.ranks)
        ledger.called("gather", group.axis)
        ledger.sent("gather", group.axis, (num_ranks - 1) * (gathered.nbytes // num_ranks))

    def _wait_arriving(self) -> None:
        if self._arriving is None:
            return
        try:
            if not is_transforming():
                self._arriving.wait()
            else:
                with outside_transforms():
                    self._arriving.wait()
        except CommError as error:
            if self.flat.is_updating:
                self.flat.fail_update(error)
            raise
        self._arriving = None

    # -- parameters, after an update ----------------------------------------------------------------------

    def cast_param(self, _: Action) -> None:
        self.flat.accept_master()

    def cast_outgoing(self, _: Action) -> None:
        """Cast what was updated on the host to the dtype in which it travels, unless the update has done so."""
        self._outgoing, self.flat.outgoing = self.flat.outgoing, None
        if self._outgoing is not None:
            return
        master, dtype = self.flat.require_master(), torch_dtype(self.flat.spec.table.param.dtype)
        self._outgoing = self.flat.host.buffer(master.numel(), dtype)
        self.flat.copy_master(self._outgoing)

    def fetch_outgoing(self, _: Action) -> None:
        """Start to copy `outgoing` to where parameters rest."""
        assert self._outgoing is not None
        self._bring(self._outgoing)

    def fetch_updated(self, _: Action) -> None:
        """Start to copy updated parameters there in their own dtype."""
        master = self.flat.require_master()
        if self.flat.on_disk(master) is not None:
            self._outgoing = self.flat.host.buffer(master.numel(), master.dtype)
            self.flat.copy_master(self._outgoing)
        self._bring(master if self._outgoing is None else self._outgoing)

    def _bring(self, source: Tensor) -> None:
        span = self.flat.optim_span.within(self.flat.param_span)
        self._arriving = self.flat.reading = self.flat.host.fetch(self.flat.param[span.as_slice], source)

    def gather_updated(self, action: Action) -> None:
        """Start to gather updated parameters, from the ranks that updated them to where they rest."""
        table = self.flat.spec.table
        if not self._spread:
            self._spread = table.optim.shard
        self._spread = tuple(other for other in self._spread if other != action.over)
        span = self.flat.spec.layout.span(self._spread, self._coordinate).within(self.flat.param_span)
        resting, group = self.flat.param[span.as_slice], self._groups[action.over]
        self._arriving = self._all_gather(resting, group, resting.chunk(len(group.ranks)))
        if set(self._spread) == set(table.param.shard):
            self._spread = ()
            if self.flat.spec.gathers_behind_step:
                self.flat.begin_update(self.wait_param)

    def wait_updated(self, _: Action) -> None:
        """Wait until a larger range of the resting parameters is up to date."""
        self._wait_arriving()
        self._return_outgoing()

    def wait_param(self, _: Action | None = None) -> None:
        """What rests is up to date. Nothing is done if it is already."""
        self._wait_arriving()
        self.flat.end_update()
        self._return_outgoing()

    def _return_outgoing(self) -> None:
        outgoing, self._outgoing = self._outgoing, None
        if outgoing is not None:
            self.flat.host.give_back(outgoing, self.flat.reading)

    # -- when something raised ------------------------------------------------------------------------------

    def abandon(self) -> None:
        """Wait for the transfer under way and forget it, unless it is an update that has failed. A `CommError` has been
        reported already."""
        with suppress(CommError, TierError):
            self._wait_arriving()
            self.flat.end_update()
        self._arriving = None
        if self.flat.disk is not None:
            self.flat.disk.abandon_reads()
        self._spread = ()
        if self.flat.state is GATHERING:
            self.flat.state = READY

    def _part_of_full(self, shard: Axes) -> Tensor:
        """This rank's part of `full` under `shard`. The tensor outlives its bytes, so it is made once."""
        part = self._parts_of_full.get(shard)
        if part is None:
            part = self._parts_of_full[shard] = self._spanned(self.flat.full, shard)
        return part

    def _spanned(self, tensor: Tensor, shard: Axes) -> Tensor:
        span = self._spans.get(shard)
        if span is None:
            span = self._spans[shard] = self.flat.spec.layout.span(shard, self._coordinate)
        return tensor[span.as_slice]
