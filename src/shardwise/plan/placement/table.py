"""The table: one place for each of four kinds of tensor, and the checks that keep a table consistent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from shardwise.errors import PlacementError, nearest
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement.layout import ALIGN
from shardwise.plan.placement.low_rank import LowRank
from shardwise.plan.placement.place import KINDS, WIDTH, Axes, Dtype, Kind, Place, Tier
from shardwise.plan.placement.wire import FP32, Codes, Wire, check_codes

if TYPE_CHECKING:
    from shardwise.plan.placement.fragment import Fragment


@dataclass(frozen=True)
class Outer:
    """Of the model that islands have in common: where it is, with how many states of the outer optimizer; the parts
    that have outer steps in turn, and the format in which outer gradients are sent."""

    place: Place
    num_states: int
    fragments: tuple[Fragment, ...]
    wire: Wire = FP32
    codes: Codes | None = None
    """What is sent instead, if that is codes."""


@dataclass(frozen=True)
class Table:
    """Where the four kinds of tensor of one model (or of some of its parameters) live.

    `axes` are the mesh's replica axes (those of data parallelism, and `sp`), outermost first. `compute` is the dtype in
    which forward and backward run, `step` the tier of the update. `grad_wire` is the format in which gradients are
    sent; `param_wire` that of parameters, or `None` if they are sent as they are. Along the axes of `grad_codes` and
    `param_codes` they are sent as these instead; `frozen_codes` are `param_codes` of frozen parameters, if these have
    others (`for_frozen`). With islands, along which all four kinds vary, `outer` says where
    their common model is. Raises `PlacementError` for rows that no step could follow.

    With `summands` gradients are never summed: the update reads this rank's own, and averages over the ranks what it
    makes of it (1-bit Adam its momentum). With `low_rank` gradients of some matrices are sent as thin factors.
    """

    axes: Axes
    param: Place
    held: Place
    grad: Place
    optim: Place
    compute: Dtype = "fp32"
    grad_wire: Wire = FP32
    param_wire: Wire | None = None
    grad_codes: Codes | None = None
    param_codes: Codes | None = None
    frozen_codes: Codes | None = None
    step: Tier = "device"
    outer: Outer | None = None
    summands: bool = False
    low_rank: LowRank | None = None

    def __post_init__(self) -> None:
        if any(self.place(kind).varying != self.param.varying for kind in KINDS):
            raise PlacementError("What varies along an axis varies with everything that is computed from it.")
        for kind in KINDS:
            self._check_axes(kind)
        for kind in ("param", "grad"):
            self._check_no_repeated_update(kind)
        self._check_nesting()
        self._check_states_are_wide()
        for kind, codes, dtype in (
            ("param", self.param_codes, self.param.dtype),
            ("frozen", self.frozen_codes, self.param.dtype),
            ("grad", self.grad_codes, self.grad.dtype),
        ):
            if codes is not None:
                check_codes(codes, dtype, kind)
        if self.rests_as is not None and self.param.tier != "device":
            raise PlacementError(
                f"storage.frozen is {self.rests_as}, and frozen parameters rest on the {self.param.tier}, where codes "
                f"do not. Keep them on the device (offload.param: 0), or leave out storage.frozen."
            )
        if self.param_wire is not None and not narrows(self.param_wire, self.param.dtype):
            raise PlacementError(
                f"wire.param is {self.param_wire}, which is not narrower than parameters in {self.param.dtype}, so "
                f"sending would gain nothing. Leave it out: parameters are then sent as they are."
            )

    def place(self, kind: Kind) -> Place:
        place: Place = getattr(self, kind)
        return place

    @property
    def full(self) -> Place:
        """What forward and backward need: everything, on the device, in the compute dtype."""
        return Place(dtype=self.compute, varying=self.param.varying)

    @property
    def rests_as(self) -> Codes | None:
        """The codes as which parameters lie between computations, if they do."""
        return self.param_codes if self.param_codes is not None and self.param_codes.rests else None

    @property
    def stays_whole(self) -> bool:
        """Whether parameters lie between computations as these need them: there is nothing to gather or free."""
        return self.param == self.full and self.rests_as is None

    @property
    def fresh(self) -> Place:
        """What a backward produces: a summand of everything, in the dtype that is sent. (`FlatSpec.fresh` has that of
        several backwards.)"""
        return Place(partial=self.axes, dtype=self.grad_wire.dtype, varying=self.grad.varying)

    @cached_property
    def due(self) -> Place:
        """What the update needs: the gradient of the elements whose states are on this rank."""
        return replace(self.optim, tier=self.step, partial=self.grad.partial if self.summands else ())

    @property
    def outer_gradient(self) -> Place:
        """What an island has to say in an outer step, in the dtype of its master weights: a summand of the range that
        it updates."""
        return Place(shard=self.optim.shard, partial=self.optim.varying, dtype=self.optim.dtype)

    @property
    def align(self) -> int:
        """Parameters and shards start at multiples of this many elements.

        [Note: blocks of codes] Where codes are sent, that is at the start of a block. So no block is cut by a shard or
        has elements of two parameters, and the codes of a parameter do not depend on how many ranks there are.
        """
        return math.lcm(ALIGN, *(codes.block for codes in self._every_codes))

    @property
    def _every_codes(self) -> tuple[Codes, ...]:
        outer = None if self.outer is None else self.outer.codes
        return tuple(codes for codes in (self.grad_codes, self.param_codes, outer) if codes is not None)

    def param_wire_over(self, axis: str) -> Wire | Codes | None:
        """The format in which parameters are sent along `axis`, or `None` if they are sent as they are."""
        codes = self.param_codes
        return codes if codes is not None and axis in codes.axes else self.param_wire

    def grad_wire_over(self, axis: str) -> Wire | Codes:
        """The format in which gradients are sent along `axis`."""
        codes = self.grad_codes
        return codes if codes is not None and axis in codes.axes else self.grad_wire

    def rounds_params_over(self, axes: Axes) -> bool:
        """Whether parameters that are gathered over `axes` are not what was sent, to the bit."""
        return any(self.param_wire_over(axis) is not None for axis in axes)

    @property
    def sends_codes(self) -> bool:
        return bool(self._every_codes)

    def without_codes(self) -> Table:
        """The same table for parameters that are sent whole, and whose gradients are."""
        outer = self.outer and replace(self.outer, codes=None)
        param = None if self.param_codes is None else self.param_codes.rest
        grad = None if self.grad_codes is None else self.grad_codes.rest
        return replace(
            self,
            param_wire=param if param is not None and narrows(param, self.param.dtype) else self.param_wire,
            grad_wire=grad or self.grad_wire,
            grad_codes=None,
            param_codes=None,
            frozen_codes=None,
            outer=outer,
        )

    def for_frozen(self) -> Table:
        """The same table for frozen parameters."""
        return self if self.frozen_codes is None else replace(self, param_codes=self.frozen_codes, frozen_codes=None)

    @cached_property
    def order(self) -> Axes:
        """The sharded axes, beginning with the one that splits a buffer first, into the largest pieces.

        [Note: why places nest] Every place of a table is one contiguous range of a flat buffer, and the ranges nest:
        what is sharded over fewer axes contains what is sharded over more. So an all-gather grows a range in place and
        a reduce-scatter shrinks one, and neither copies to reorder. Among axes that appear together the inner one, with
        the faster links, splits first: reductions then run over the fast axis while the buffer is whole, and over the
        slow one when it is small.
        """
        inner_first = tuple(reversed(self.axes))
        shards = [self.place(kind).shard for kind in KINDS]
        count = {axis: sum(axis in shard for shard in shards) for axis in self.axes}
        used = [axis for axis in inner_first if count[axis]]
        return tuple(sorted(used, key=lambda axis: -count[axis]))

    def on(self, mesh: Mesh) -> Table:
        """The same table without the axes on which the mesh has a single rank; with none left nothing is sent, so that
        gradients are not rounded for it."""
        mesh.require(self.axes, "The table")

        def keep(axes: Axes) -> Axes:
            return tuple(axis for axis in axes if mesh.size(axis) > 1)

        table = self._with_axes(keep)
        if table.grad_codes is not None:
            table = replace(table, grad_codes=table.grad_codes.settled())
        if not table.axes and narrows(self.grad_wire, self.compute):
            return replace(table, grad_wire=Wire(self.compute))
        return table

    def stored_as(self, dtype: Dtype) -> Table:
        """The same table for frozen parameters that are stored, gathered and used in `dtype`."""
        wire = self.param_wire if self.param_wire is not None and narrows(self.param_wire, dtype) else None
        return replace(
            self,
            param=replace(self.param, dtype=dtype),
            held=replace(self.held, dtype=dtype),
            compute=dtype,
            param_wire=wire,
            param_codes=None if dtype in ("uint8", "int8") else self.param_codes,
        )

    def with_low_rank(self, low_rank: LowRank) -> Table:
        """The same table with gradients sent as factors, in fp32 as the rest. Raises `PlacementError` unless every rank
        has and updates parameters whole, on its device, and gets their gradients whole."""
        for kind in KINDS:
            place = self.place(kind)
            if place.shard or place.partial or place.tier != "device":
                raise PlacementError(
                    f"powersgd.rank is {low_rank.rank}, and {kind} is {place}. All ranks get the same factors of a "
                    f"gradient, so each has to have and update whole parameters on its device. Take the preset ddp, or "
                    f"leave powersgd out."
                )
        return replace(self, low_rank=low_rank, grad_wire=Wire(self.grad.dtype))

    def with_summands(self) -> Table:
        """The same table for parameters that are updated with summands. Raises `PlacementError` unless every rank has
        and updates them whole, on its device."""
        for kind in KINDS:
            place = self.place(kind)
            if place.shard or place.tier != "device":
                raise PlacementError(
                    f"{kind} is {place}, but this optimizer averages what it makes of gradients over the ranks itself, "
                    f"one bit per element, so each rank has and updates whole parameters on its device. Take the "
                    f"preset ddp (DeepSpeed's stage 0), or an elementwise optimizer such as AdamW."
                )
        if self.low_rank is not None:
            raise PlacementError(
                "powersgd is for gradients that ranks sum, and this optimizer averages momenta in their place. Leave "
                "powersgd out of the plan."
            )
        return replace(self, grad=replace(self.grad, partial=self.axes), summands=True)

    def without(self, axis: str) -> Table:
        """The same table without `axis`, for parameters that differ between the ranks along it."""

        def left(axes: Axes) -> Axes:
            return tuple(one for one in axes if one != axis)

        return self._with_axes(left)

    def _with_axes(self, chosen: Callable[[Axes], Axes]) -> Table:
        def kept(place: Place) -> Place:
            shard, partial, varying = map(chosen, (place.shard, place.partial, place.varying))
            return replace(place, shard=shard, partial=partial, varying=varying)

        outer = self.outer and replace(self.outer, place=kept(self.outer.place))
        return replace(
            self,
            axes=chosen(self.axes),
            outer=outer,
            param=kept(self.param),
            held=kept(self.held),
            grad=kept(self.grad),
            optim=kept(self.optim),
            grad_codes=None if self.grad_codes is None else self.grad_codes.over(chosen(self.axes)),
            param_codes=None if self.param_codes is None else self.param_codes.over(chosen(self.axes)),
            frozen_codes=None if self.frozen_codes is None else self.frozen_codes.over(chosen(self.axes)),
        )

    def _check_axes(self, kind: Kind) -> None:
        place = self.place(kind)
        for axis in place.shard + place.partial:
            if axis not in self.axes:
                raise PlacementError(
                    f"{kind} is placed on axis {axis!r}, but a plan places over {', '.join(self.axes)}. "
                    f"{nearest(axis, self.axes)}"
                )
        for axes in (place.shard, place.partial):
            self._check_order(kind, axes)
        both = set(place.shard) & set(place.partial)
        if both:
            raise PlacementError(f"{kind} is both sharded and partial over {'+'.join(sorted(both))}; choose one.")
        if place.partial and kind != "grad":
            raise PlacementError(
                f"{kind} is partial over {'+'.join(place.partial)}, but only gradients are ever summands. "
                f"Shard it over that axis, or leave it a copy."
            )

    def _check_order(self, kind: Kind, axes: Axes) -> None:
        """Rows are compared for equality, so the axes of equal rows have to be written alike."""
        if len(set(axes)) < len(axes):
            raise PlacementError(f"{kind} names an axis twice: {'+'.join(axes)}. Name each once.")
        in_order = tuple(axis for axis in self.axes if axis in axes)
        if axes != in_order:
            raise PlacementError(
                f"{kind} is placed on {'+'.join(axes)}; write the axes in the order of the mesh: {'+'.join(in_order)}."
            )

    def _check_no_repeated_update(self, kind: Kind) -> None:
        repeated = set(self.place(kind).shard) - set(self.optim.shard)
        if repeated:
            raise PlacementError(
                f"{kind} is sharded over {'+'.join(sorted(repeated))} but its optimizer state is not, "
                f"so every rank there would repeat the same update. Shard optim over it too."
            )

    def _check_nesting(self) -> None:
        by_size = sorted(KINDS, key=lambda kind: len(self.place(kind).shard))
        for small, large in itertools.pairwise(by_size):
            odd = set(self.place(small).shard) - set(self.place(large).shard)
            if odd:
                raise PlacementError(
                    f"{small} is sharded over {'+'.join(self.place(small).shard)} and {large} over "
                    f"{'+'.join(self.place(large).shard)}: neither contains the other, so no rank could hold "
                    f"both as one range. Shard {large} over {'+'.join(sorted(odd))} too."
                )

    def _check_states_are_wide(self) -> None:
        """New parameters are a cast of the master weights, made before they are gathered: it must narrow."""
        if WIDTH[self.optim.dtype] < WIDTH[self.param.dtype]:
            raise PlacementError(
                f"optim is {self.optim.dtype}, narrower than param in {self.param.dtype}, so updates would be "
                f"rounded away. Make optim {self.param.dtype} or wider."
            )
        if {self.optim.dtype, self.param.dtype} == {"bf16", "fp16"}:
            raise PlacementError(
                f"optim is {self.optim.dtype} and param {self.param.dtype}: neither can hold all values of the other. "
                f"Make optim fp32, or {self.param.dtype}."
            )


def narrows(wire: Wire, dtype: Dtype) -> bool:
    """Whether elements in `dtype` take fewer bytes as `wire`. What is no floating-point number is never converted."""
    return dtype not in ("uint8", "int8") and WIDTH[wire.dtype] < WIDTH[dtype]
