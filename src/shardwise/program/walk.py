"""Walks through a program to count temporary bytes: what each action allocates and frees, and the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from shardwise.errors import ProgramError
from shardwise.plan.placement import WIDTH, Dtype, SumOfCodes, Tier
from shardwise.program.action import AFTER_STEP, Action, Block, Moment
from shardwise.program.activations import Awaited, Mark
from shardwise.program.build import backward_makes, fills_grad, reduce_due, stay_as_made, sums_own_chunk_apart
from shardwise.program.effects import Buffer, Effect, adds_in_place
from shardwise.program.low_rank import FACTORING, Factored
from shardwise.program.matrix_exchange import at, matrix_exchanges
from shardwise.program.sign_exchange import SignExchange
from shardwise.program.spec import FlatSpec, UnitSpec


class Content(NamedTuple):
    """The content of one buffer: its bytes, and the dtype of gradients."""

    num_bytes: int
    dtype: Dtype = "fp32"
    is_kept: bool = False
    """Whether it is in memory that is kept from step to step (`keeps_grad_buffer`), which is not temporary."""
    apart_bytes: int = 0
    """Those of `num_bytes` that lie in other memory, and count there."""
    tier: Tier = "device"


# [Note: gradients come one by one]
# A backward is counted with all gradients of its unit from its start. Where they stay in the tensors that autograd has
# made ([Note: gradients that stay] in `memory/fresh.py`), it holds of them what has come, and by then the unit's
# activations have mostly gone: a pipeline of three wide blocks, kept, was promised 324 MiB and held 293, of which a
# block's gradients are 27. So a rehearsal says what was held between one gradient and the next. Gradients that are
# copied into one memory count as a whole: its pages may be there from the unit before.
_AT_REST: tuple[Buffer, ...] = ("param", "master")
_SENT: tuple[str, ...] = ("fresh", "sum")
_WAITING: tuple[str, ...] = ("grad", "due")


def own_chunk_bytes(flat: FlatSpec) -> int:
    """Of the gradients that a backward leaves, those that lie where their sum is made, on every rank of a host: see
    [Note: own chunks] in `memory/fresh.py`. Of more than two ranks some have none."""
    if not sums_own_chunk_apart(flat):
        return 0
    num_ranks = flat.mesh.size(reduce_due(flat)[0].over)
    return flat.numel * WIDTH[flat.fresh.dtype] // num_ranks if num_ranks == 2 else 0


class Walk:
    """Adds and subtracts the bytes that each action allocates and frees, and records the peak."""

    def __init__(
        self,
        units: Sequence[UnitSpec],
        coordinate: Mapping[str, int] | None,
        read_in_place: Container[str] = frozenset(),
        summed_in_place: Container[str] = frozenset(),
        *,
        kept_bytes: int = 0,
        heap_bytes: int = 0,
    ) -> None:
        """`read_in_place`: the flat buffers of which nothing is gathered, because it lies where all ranks read it.
        `summed_in_place`: those whose gradients the ranks of the first reduction read where they lie.
        `kept_bytes`: kept for sending gradients, whether any are being sent or not. `heap_bytes`: the most bytes of
        activations that lie in the heap at once; it does not shrink."""
        self._flats = {flat.name: flat for unit in units for flat in unit.flats}
        self._by_unit = {unit.name: unit.flats for unit in units}
        self._coordinate = coordinate
        self._read_in_place, self._summed_in_place = read_in_place, summed_in_place
        self._matrix_exchanges = matrix_exchanges(tuple(self._flats.values()))
        self._live: dict[tuple[str, str], Content] = {}
        """By flat buffer and buffer; `next sum` is the result of a step under way."""
        self._source: dict[tuple[str, Buffer], Buffer] = {}
        """For a buffer that is being made, its source."""
        self._taken: set[str] = set()
        """The flat buffers whose kept memory is in use."""
        self.pooled = 0
        """Host bytes taken for temporary buffers; they are reused, and stay allocated."""
        self._free_host: Counter[int] = Counter()
        """Unused pieces of those, by their size."""
        self._kept_bytes, self._heap_bytes = kept_bytes, heap_bytes
        self._gap = 0
        """Bytes of the heap that are unused."""
        self._coming: set[str] = set()
        """The flat buffers whose first gradients come one by one, up to the moment behind their backward."""
        self._have_come: set[str] = set()
        """Those of them whose backward has ended."""
        self._awaited: Awaited = ()
        self._num_live = self._num_sent = self._num_waiting = 0
        """Live bytes, and how many of them are gradients being sent, or waiting."""
        self.peak = 0
        self.peak_with_gaps = 0
        """The most that is held together with the unused part of the heap."""
        self.peak_grad = 0
        self.peak_activations = 0
        self.peak_at: Moment | None = None
        self._activations = 0
        self._moment: Moment | None = None

    def walk(self, block: Block, mark: Mark | None = None) -> None:
        moment = self._moment = block.moment
        if mark is not None:
            self._gap = 0  # how much of the heap is used at that peak is not known
            if self._coming:
                self._come(mark)
            else:
                self._awaited = ()
                self._update_peak(mark.peak_bytes)
            self._have_come.clear()
            self._awaited = mark.awaited
            self._activations = mark.live_bytes - (mark.come_bytes if self._coming else 0)
            self._gap = max(0, self._heap_bytes - mark.heap_bytes)
        for action in block.actions:
            if action.flat in self._flats:
                self._act(self._flats[action.flat], action)
        if moment.edge == "before" and moment.unit and moment.leaves_gradients:
            for flat in self._by_unit[moment.unit]:
                self._leave_gradients(flat)
        elif self._coming and moment.unit and moment.leaves_gradients:
            self._have_come.update(flat.name for flat in self._by_unit[moment.unit])
        if moment == AFTER_STEP:
            for name, buffer in list(self._live):
                if buffer in (*_SENT, *_WAITING, "own"):
                    self._drop(name, buffer)
            self._taken.clear()

    def _come(self, mark: Mark) -> None:
        """Update the peak with those while gradients came, up to `mark`."""
        if not mark.peaks:
            self._awaited = ()
            self._update_peak(mark.peak_bytes)
        for one in mark.peaks:
            self._awaited = one.awaited
            self._update_peak(one.num_bytes)
        self._coming -= self._have_come  # the last of them was there, as made and as it stays, until here

    def _leave_gradients(self, flat: FlatSpec) -> None:
        """Account for gradients as a backward leaves them: to be sent, or as they rest if nothing is."""
        left = backward_makes(flat)
        if flat.trainable and (flat.name, left) not in self._live:
            dtype = flat.fresh.dtype if left == "fresh" else flat.table.grad.dtype
            num_bytes = flat.numel * WIDTH[dtype]
            is_kept = fills_grad(flat) and self._takes_kept(flat, num_bytes, dtype)
            if stay_as_made(flat) and not is_kept:
                self._coming.add(flat.name)
            apart = own_chunk_bytes(flat) if flat.name in self._summed_in_place else 0
            if apart:
                self._hold(flat.name, "own", Content(apart, dtype, self._fits_kept(flat, apart, dtype)))
            self._hold(flat.name, left, Content(num_bytes, dtype, is_kept, apart_bytes=apart))

    def _act(self, flat: FlatSpec, action: Action) -> None:
        effect, name = action.effect, flat.name
        if effect.waits is not None:
            self._arrive(name, effect, effect.waits)
            return
        if effect.makes == "sum":
            self._reduce(flat, action)
        else:
            if effect.makes is not None:
                self._make(flat, effect, effect.makes)
            for buffer in effect.scratch:
                self._hold(name, buffer, Content(self._scratch_bytes(flat, buffer, action)))
        for buffer in effect.frees if effect.awaited or not effect.scratch else (*effect.frees, *effect.scratch):
            self._drop(name, buffer)

    def _make(self, flat: FlatSpec, effect: Effect, made: Buffer) -> None:
        """Hold a buffer whose size does not depend on what makes it, unless it is there already."""
        if made not in _AT_REST and (flat.name, made) not in self._live:
            self._hold(flat.name, made, Content(self._num_bytes(flat, made), tier=flat.tier_of(made)))
        for buffer in effect.consumes:
            self._source[flat.name, made] = buffer

    def _scratch_bytes(self, flat: FlatSpec, buffer: Buffer, action: Action) -> int:
        if buffer == "messages" and flat.table.outer is not None:
            wire, dtype = flat.table.outer.wire, flat.table.optim.dtype
            numel = flat.num_elements(flat.table.optim.shard)
            if action.codes:
                return SumOfCodes.parse(action.verb, action.codes).memory_bytes(numel, flat.mesh.size(action.over))
            return (1 if wire.dtype == dtype else 2) * wire.num_bytes(numel)
        if buffer != "codes":
            return self._num_bytes(flat, buffer)
        num_ranks = flat.mesh.size(action.over)  # all ranks' codes; this one sends its own to all others
        is_encoded = bool(action.codes) or flat.table.param_wire is not None
        return action.sent_bytes // (num_ranks - 1) * num_ranks if is_encoded else 0

    def _num_bytes(self, flat: FlatSpec, buffer: Buffer) -> int:
        """The size of a buffer whose size does not depend on what makes it."""
        if buffer in ("full", "held") and flat.name in self._read_in_place:
            return 0
        match buffer:
            case "full":
                return flat.full_bytes
            case "held":
                return flat.num_bytes(flat.table.held.shard, flat.table.held.dtype)
            case "outer":
                return flat.num_bytes(flat.table.optim.shard, flat.table.optim.dtype)
            case "outgoing":
                return flat.num_bytes(flat.table.optim.shard, flat.table.param.dtype)
            case "signs" | "arrived" | "averaged":
                return SignExchange(flat).buffer_bytes
        over = self._matrix_exchanges[flat.name]
        number = None if self._coordinate is None else over.range_of(self._coordinate)
        match buffer:
            case "given":
                return at(over.given_bytes, number)
            case "matrix":
                return at(over.whole_bytes, number)
            case "staging":
                return at(over.taken_bytes, number)
            case "work":
                return over.work_bytes(number)
        raise ProgramError(f"{flat.name}: the size of its {buffer} depends on what makes it.")

    def _reduce(self, flat: FlatSpec, action: Action) -> None:
        """One step of a reduction: its result, and its staging memory."""
        effect, name, wire = action.effect, flat.name, flat.table.grad_wire
        source: Buffer = "sum" if (name, "sum") in self._live else effect.reads[0]
        content = self._live.get((name, source), Content(0, flat.table.grad.dtype))
        dtype = content.dtype if action.dtype == "-" else action.dtype
        numel = content.num_bytes // WIDTH[content.dtype]
        own = numel // flat.mesh.size(action.over) if effect.cuts else numel
        if action.copies:
            self._hold(name, "next sum", Content(content.num_bytes, content.dtype, tier="host"))
            self._source[name, "sum"] = source
            return
        if action.verb in FACTORING:
            self._hold(name, "staging", Content(Factored(flat).num_bytes(action.verb)))
        elif action.codes:
            way = SumOfCodes.parse(action.verb, action.codes)
            self._hold(name, "staging", Content(way.memory_bytes(numel, flat.mesh.size(action.over))))
        elif effect.sends and not self._is_read(name, source, content, action):
            copies = 1 if content.dtype == wire.dtype else 2
            staged = numel - own if effect.cuts else numel
            self._hold(name, "staging", Content(copies * wire.num_bytes(staged), wire.dtype))
        self._drop(name, "own")  # the sum is made there
        num_bytes = own * WIDTH[dtype]
        is_in_place = adds_in_place(effect, is_same_dtype=content.dtype == dtype, is_kept=content.is_kept)
        if effect.cuts or not is_in_place:
            is_kept = content.is_kept if is_in_place else self._takes_kept(flat, num_bytes, dtype)
            self._hold(name, "next sum", Content(num_bytes, dtype, is_kept))
        self._source[name, "sum"] = source

    def _is_read(self, name: str, source: Buffer, content: Content, action: Action) -> bool:
        """Whether the other ranks' parts are read where they lie, so that none are received."""
        is_first = name in self._summed_in_place and source != "sum" and action.verb == "reduce_scatter"
        return is_first and content.dtype == self._flats[name].table.grad_wire.dtype

    def _arrive(self, name: str, effect: Effect, made: Buffer) -> None:
        """A transfer has finished: its source is freed, or is the same memory."""
        for buffer in effect.frees:
            self._drop(name, buffer)
        source = self._source.pop((name, made), None)
        if (name, "next sum") in self._live and made == "sum" and source is not None:
            self._drop(name, source)
            self._rename(name, "next sum", made)
        elif made == "sum" and source is not None:
            self._rename(name, source, made)
        elif source is not None:
            self._drop(name, source)
        if effect.keeps is not None and (name, effect.keeps) in self._live:  # it was added to that
            self._drop(name, made)
        elif effect.keeps is not None:
            self._rename(name, made, effect.keeps)

    def _takes_kept(self, flat: FlatSpec, num_bytes: int, dtype: Dtype) -> bool:
        """Whether this can use the kept memory, which it then does."""
        if not self._fits_kept(flat, num_bytes, dtype):
            return False
        self._taken.add(flat.name)
        return True

    def _fits_kept(self, flat: FlatSpec, num_bytes: int, dtype: Dtype) -> bool:
        """Whether there is such memory, it fits exactly, and it is free."""
        fits = (num_bytes, dtype) == (flat.grad_bytes, flat.table.grad.dtype)
        return flat.keeps_grad_buffer and fits and flat.name not in self._taken

    def _hold(self, name: str, buffer: str, content: Content) -> None:
        self._drop(name, buffer)
        self._live[name, buffer] = content
        self._count(buffer, content, 1)
        self._update_peak(self._activations)

    def _drop(self, name: str, buffer: str) -> None:
        content = self._live.pop((name, buffer), None)
        if content is not None:
            self._count(buffer, content, -1)

    def _rename(self, name: str, old: str, new: str) -> None:
        """The same memory under another name."""
        content = self._live.get((name, old))
        if content is not None and old != new:
            self._drop(name, old)
            self._live[name, new] = content
            self._count(new, content, 1)

    def _count(self, buffer: str, content: Content, sign: int) -> None:
        if content.tier != "device":
            self._count_host(content.num_bytes, sign)
            return
        if not content.is_kept:
            num_bytes = sign * (content.num_bytes - content.apart_bytes)
            self._num_live += num_bytes
            self._num_sent += num_bytes if buffer in _SENT else 0
            self._num_waiting += num_bytes if buffer in _WAITING else 0

    def _count_host(self, num_bytes: int, sign: int) -> None:
        if sign < 0 or self._free_host[num_bytes]:
            self._free_host[num_bytes] -= sign
        else:
            self.pooled += num_bytes

    def _update_peak(self, activations: int) -> None:
        """Update the peak with what is live now and `activations` bytes."""
        awaited = self._awaited_bytes() if self._coming and self._awaited else 0
        held = self._num_live - awaited + activations
        if self._kept_bytes > self._num_sent:
            held += self._kept_bytes - self._num_sent
        if held + self._gap > self.peak_with_gaps:
            self.peak_with_gaps = held + self._gap
        if held > self.peak:
            self.peak, self.peak_activations, self.peak_at = held, activations, self._moment
            self.peak_grad = self._num_waiting - awaited

    def _awaited_bytes(self) -> int:
        """Of the gradients that count as live, those that have not come."""
        coming = [(self._flats[name], numel) for name, numel in self._awaited if name in self._coming]
        return sum(numel * WIDTH[flat.table.grad.dtype] for flat, numel in coming)
