"""A program walked through for the bytes that come and go: what each action brings and frees, and the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import ProgramError
from shardwise.placement import WIDTH, Dtype, Tier
from shardwise.program.action import AFTER_STEP, Action, Block, Moment
from shardwise.program.activations import Mark
from shardwise.program.build import backward_makes, fills_grad
from shardwise.program.effects import Buffer, Effect, adds_in_place
from shardwise.program.matrix_exchange import at, matrix_exchanges
from shardwise.program.spec import FlatSpec, UnitSpec


@dataclass(frozen=True, slots=True)
class Lying:
    """What lies in one buffer: so many bytes, of gradients in `dtype`."""

    num_bytes: int
    dtype: Dtype = "fp32"
    is_kept: bool = False
    """Whether in memory that stays from step to step (`keeps_grad_buffer`), which is no part of what comes and goes."""
    tier: Tier = "device"


_AT_REST: tuple[Buffer, ...] = ("param", "master")
_SENT: tuple[str, ...] = ("fresh", "sum")
_WAITING: tuple[str, ...] = ("grad", "due")


class Walk:
    """Adds and takes away the bytes that each action brings and frees, and remembers the peak."""

    def __init__(self, units: Sequence[UnitSpec], coordinate: Mapping[str, int] | None) -> None:
        self._flats = {flat.name: flat for unit in units for flat in unit.flats}
        self._by_unit = {unit.name: unit.flats for unit in units}
        self._coordinate = coordinate
        self._matrix_exchanges = matrix_exchanges(tuple(self._flats.values()))
        self._live: dict[tuple[str, str], Lying] = {}
        """By flat buffer and buffer; `next sum` is one that is on its way from another."""
        self._source: dict[tuple[str, Buffer], Buffer] = {}
        """Of what is on its way, what it is made of."""
        self._taken: set[str] = set()
        """The flat buffers in whose kept memory something lies."""
        self.pooled = 0
        """Bytes on the host that have been taken for what comes and goes: they are used again, and stay."""
        self._free_there: Counter[int] = Counter()
        """Of those, pieces in which nothing lies, by their size."""
        self.kept = 0
        """Bytes that stay for gradients that are sent, whether any are or not."""
        self._num_live = self._num_sent = self._num_waiting = 0
        """Bytes that live, and those of them that are gradients to be sent or that wait."""
        self.peak = 0
        self.peak_grad = 0
        self.peak_activations = 0
        self.peak_at: Moment | None = None
        self._activations = 0
        self._moment: Moment | None = None

    def walk(self, block: Block, mark: Mark | None = None) -> None:
        moment = self._moment = block.moment
        if mark is not None:
            self._look(mark.peak_bytes)
            self._activations = mark.live_bytes
        for action in block.actions:
            if action.flat in self._flats:
                self._act(self._flats[action.flat], action)
        if moment.edge == "before" and moment.unit and moment.leaves_gradients:
            for flat in self._by_unit[moment.unit]:
                self._leave_gradients(flat)
        if moment == AFTER_STEP:
            for name, buffer in list(self._live):
                if buffer in (*_SENT, *_WAITING):
                    self._drop(name, buffer)
            self._taken.clear()

    def _leave_gradients(self, flat: FlatSpec) -> None:
        """As a backward leaves them: in the dtype of the wire, or as they rest if nothing travels."""
        left = backward_makes(flat)
        if flat.trainable and (flat.name, left) not in self._live:
            dtype = flat.table.wire if left == "fresh" else flat.table.grad.dtype
            num_bytes = flat.numel * WIDTH[dtype]
            is_kept = fills_grad(flat) and self._takes_kept(flat, num_bytes, dtype)
            self._hold(flat.name, left, Lying(num_bytes, dtype, is_kept))

    def _act(self, flat: FlatSpec, action: Action) -> None:
        effect, name = action.effect, flat.name
        if effect.waits is not None:
            self._arrive(name, effect, effect.waits)
            return
        if effect.makes == "sum":
            self._add_up(flat, action)
        elif effect.makes is not None and effect.makes not in _AT_REST and (name, effect.makes) not in self._live:
            tier = flat.tier_of(effect.makes)
            self._hold(name, effect.makes, Lying(self._num_bytes(flat, effect.makes), tier=tier))
        if effect.makes is not None and effect.makes != "sum":
            for buffer in effect.consumes:
                self._source[name, effect.makes] = buffer
        if effect.makes != "sum":
            for buffer in effect.scratch:
                self._hold(name, buffer, Lying(self._num_bytes(flat, buffer)))
        for buffer in effect.frees if effect.awaited or not effect.scratch else (*effect.frees, *effect.scratch):
            self._drop(name, buffer)

    def _num_bytes(self, flat: FlatSpec, buffer: Buffer) -> int:
        """Of a buffer that has one size, whatever brings it."""
        match buffer:
            case "full":
                return flat.full_bytes
            case "held":
                return flat.num_bytes(flat.table.held.shard, flat.table.held.dtype)
            case "outgoing":
                return flat.num_bytes(flat.table.optim.shard, flat.table.param.dtype)
        over = self._matrix_exchanges[flat.name]
        place = None if self._coordinate is None else over.place(self._coordinate)
        match buffer:
            case "given":
                return at(over.given_bytes, place)
            case "matrix":
                return at(over.whole_bytes, place)
            case "staging":
                return at(over.taken_bytes, place)
            case "work":
                return over.work_bytes(place)
        raise ProgramError(f"{flat.name}: how large its {buffer} is depends on what makes it.")

    def _add_up(self, flat: FlatSpec, action: Action) -> None:
        """One step of a reduction: what it makes, and what arrives and is cast to be sent meanwhile."""
        effect, name, wire = action.effect, flat.name, flat.table.wire
        source: Buffer = "sum" if (name, "sum") in self._live else effect.reads[0]
        lying = self._live.get((name, source), Lying(0, flat.table.grad.dtype))
        dtype = lying.dtype if action.dtype == "-" else action.dtype
        numel = lying.num_bytes // WIDTH[lying.dtype]
        own = numel // flat.mesh.size(action.over) if effect.cuts else numel
        if action.copies:
            self._hold(name, "next sum", Lying(lying.num_bytes, lying.dtype, tier="host"))
            self._source[name, "sum"] = source
            return
        if effect.sends:
            copies = 1 if lying.dtype == wire else 2
            staged = numel - own if effect.cuts else numel
            self._hold(name, "staging", Lying(copies * staged * WIDTH[wire], wire))
        num_bytes, is_in_place = (
            own * WIDTH[dtype],
            adds_in_place(effect, is_same_dtype=lying.dtype == dtype, is_kept=lying.is_kept),
        )
        if effect.cuts or not is_in_place:
            is_kept = lying.is_kept if is_in_place else self._takes_kept(flat, num_bytes, dtype)
            self._hold(name, "next sum", Lying(num_bytes, dtype, is_kept))
        self._source[name, "sum"] = source

    def _arrive(self, name: str, effect: Effect, made: Buffer) -> None:
        """What was on its way is there: what it is made of goes, or is the same memory."""
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
        if effect.keeps is not None and (name, effect.keeps) in self._live:  # added to that
            self._drop(name, made)
        elif effect.keeps is not None:
            self._rename(name, made, effect.keeps)

    def _takes_kept(self, flat: FlatSpec, num_bytes: int, dtype: Dtype) -> bool:
        """Whether that can lie in the memory that stays: there is such, this is all of it, and nothing lies there."""
        fits = (num_bytes, dtype) == (flat.grad_bytes, flat.table.grad.dtype)
        if not flat.keeps_grad_buffer or not fits or flat.name in self._taken:
            return False
        self._taken.add(flat.name)
        return True

    def _hold(self, name: str, buffer: str, lying: Lying) -> None:
        self._drop(name, buffer)
        self._live[name, buffer] = lying
        self._count(buffer, lying, 1)
        self._look(self._activations)

    def _drop(self, name: str, buffer: str) -> None:
        lying = self._live.pop((name, buffer), None)
        if lying is not None:
            self._count(buffer, lying, -1)

    def _rename(self, name: str, old: str, new: str) -> None:
        """It is the same memory."""
        lying = self._live.get((name, old))
        if lying is not None and old != new:
            self._drop(name, old)
            self._live[name, new] = lying
            self._count(new, lying, 1)

    def _count(self, buffer: str, lying: Lying, sign: int) -> None:
        if lying.tier != "device":
            self._count_there(lying.num_bytes, sign)
            return
        if not lying.is_kept:
            self._num_live += sign * lying.num_bytes
            self._num_sent += sign * lying.num_bytes if buffer in _SENT else 0
            self._num_waiting += sign * lying.num_bytes if buffer in _WAITING else 0

    def _count_there(self, num_bytes: int, sign: int) -> None:
        if sign < 0 or self._free_there[num_bytes]:
            self._free_there[num_bytes] -= sign
        else:
            self.pooled += num_bytes

    def _look(self, activations: int) -> None:
        """Whether this is the most so far, beside so many bytes of activations."""
        held = self._num_live + max(0, self.kept - self._num_sent) + activations
        if held > self.peak:
            self.peak, self.peak_activations, self.peak_at = held, activations, self._moment
            self.peak_grad = self._num_waiting
