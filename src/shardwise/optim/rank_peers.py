"""The other ranks, for an optimizer that holds pieces: norms over all ranks, and whole matrices in turn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from shardwise.comm import Collectives, Group, Work, sum_small
from shardwise.memory import Flat, torch_dtype
from shardwise.optim.cooperative import Apply, Compute, Make, SquaresOf, on_device
from shardwise.optim.piece import Piece
from shardwise.optim.sign_mean import Residual, SignMean
from shardwise.plan.mesh import Mesh
from shardwise.plan.placement import Axes
from shardwise.program import (
    Action,
    Matrix,
    MatrixExchange,
    SignExchange,
    keeps_residuals,
    matrix_exchanges,
    norms_axes,
    sign_exchanges,
)

Tensor = torch.Tensor


class RankPeers:
    """`Peers` over the ranks of a mesh. `during` runs the program's block for the middle of a step."""

    def __init__(
        self,
        flats: Sequence[Flat],
        collectives: Collectives,
        mesh: Mesh,
        rank: int,
        during: Callable[[], None],
    ) -> None:
        self._collectives = collectives
        self._mesh = mesh
        self._rank = rank
        self._during = during
        self._flats = {flat.name: flat for flat in flats}
        self._device = flats[0].device if flats else torch.device("cpu")
        """Of messages; pieces may be on the host."""
        self._nothing = torch.zeros(0, device=self._device)
        self._matrix_exchanges = matrix_exchanges([flat.spec for flat in flats])
        self._norms_axes = norms_axes([flat.spec for flat in flats])
        self._by_param: dict[nn.Parameter, Piece] = {}
        self._by_place: dict[tuple[str, int], Piece] = {}
        self._sums: Tensor | None = None
        """The message that is being summed."""
        self._make_norms: Callable[[Tensor], Tensor] | None = None
        """Makes the next message, of norms, from sums that are complete."""
        self._rows: tuple[Tensor, Tensor] | None = None
        """The result of `_rows_of` for the optimizer's parameters."""
        self._groups: dict[str, Group] = {}
        self._calls: tuple[Make, Compute, Apply] | None = None
        self._transfers: dict[str, _MatrixTransfer] = {}
        self._sign_exchanges = sign_exchanges([flat.spec for flat in flats])
        self.residuals: dict[str, Residual] = {}
        """What this rank has not sent of what is averaged, by the name of the parameter."""
        self._values: dict[str, dict[int, Tensor]] = {}
        """What is being averaged, by flat buffer and index."""
        self._means: dict[str, SignMean] = {}
        self._is_for_unit = False

    def meet(self, pieces: Sequence[Piece]) -> None:
        """Learn which piece of which parameter each of the optimizer's entries is."""
        self._by_param = {piece.tensor: piece for piece in pieces}
        self._by_place = {(piece.flat.name, piece.index): piece for piece in pieces}
        self._rows = None
        for piece in pieces:
            spec = piece.flat.spec
            if keeps_residuals(spec) and spec.updates[piece.index].update.sends_signs and piece.span.numel:
                exchange, place = SignExchange(spec), self._among(spec.table.axes).index
                self.residuals[piece.name] = Residual.zeros(piece.name, exchange, place, piece.tensor.detach())

    def go_on_with(self, residuals: Mapping[str, Residual]) -> None:
        """Take those of an earlier layout that are of use in this one."""
        for name, residual in residuals.items():
            if name in self.residuals and residual.fits(self.residuals[name]):
                self.residuals[name] = residual

    @contextmanager
    def for_unit(self) -> Iterator[None]:
        """Inside, the optimizer updates a unit by itself: see [Note: steps by units]."""
        self._is_for_unit = True
        try:
            yield
        finally:
            self._is_for_unit = False

    # -- what an optimizer asks -------------------------------------------------------------------------

    def shape_of(self, param: nn.Parameter) -> tuple[int, ...]:
        piece = self._by_param.get(param)
        if piece is None:  # of an integer dtype: it is in no flat buffer
            return tuple(param.shape)
        return piece.flat.slots[piece.index].whole_shape

    def start_of(self, param: nn.Parameter) -> int:
        piece = self._by_param.get(param)
        return 0 if piece is None else piece.span.start

    def sum_squares(self, params: Sequence[nn.Parameter], squares: Tensor) -> Tensor:
        if self._rows is None:
            self._rows = self._rows_of(params, squares)
        trained, copies = self._rows
        self._sums = on_device((squares[trained] / copies).flatten(), self._device)
        self._during()
        return self._summed(squares)

    def _summed(self, squares: Tensor) -> Tensor:
        """The message of norms, as `squares` are, when it is complete."""
        assert self._sums is not None
        assert self._rows is not None
        summed = torch.zeros_like(squares)
        summed[self._rows[0]] = on_device(self._sums.view(-1, 2), squares.device)
        self._sums = None
        return summed

    def sum_in_turn(self, params: Sequence[nn.Parameter], sums: Sequence[Tensor], squares_of: SquaresOf) -> Tensor:
        trained = [row for row, param in enumerate(params) if self._is_trained(param)]
        message = [sums[row] / self._copies(self._by_param[params[row]]) for row in trained]
        self._sums = torch.cat([on_device(one, self._device) for one in [self._nothing, *message]])
        squares: list[Tensor] = []

        def make_norms(summed: Tensor) -> Tensor:
            whole = list(sums)
            parts = torch.split(summed, [one.numel() for one in message])
            for row, part in zip(trained, parts, strict=True):
                whole[row] = on_device(part, sums[row].device)
            squares.append(squares_of(whole))
            self._rows = self._rows or self._rows_of(params, squares[0])
            rows, copies = self._rows
            return on_device((squares[0][rows] / copies).flatten(), self._device)

        self._make_norms = make_norms
        self._during()
        self._begin_norms()
        return self._summed(squares[0])

    def _begin_norms(self) -> None:
        """The sums are complete: go on to the norms that need them, if this has not been done."""
        if self._make_norms is not None:
            assert self._sums is not None
            make_norms, self._make_norms = self._make_norms, None
            self._sums = make_norms(self._sums)

    def _rows_of(self, params: Sequence[nn.Parameter], squares: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of trained parameters, and how many ranks have each. Created once, on the device of `squares`,
        because creating them waits for the device; an optimizer asks about the same parameters in every step."""
        trained = [row for row, param in enumerate(params) if self._is_trained(param)]
        copies = [self._copies(self._by_param[params[row]]) for row in trained]
        return torch.tensor(trained, dtype=torch.long, device=squares.device), squares.new_tensor(copies)[:, None]

    def each_matrix(self, params: Sequence[nn.Parameter], make: Make, work: Compute, apply: Apply) -> None:  # noqa: ARG002
        """The program knows which parameters these are. Units that are updated one by one have none of them."""
        if self._is_for_unit:
            return
        self._calls = (make, work, apply)
        self._during()
        self._calls = None

    def num_summands(self, param: nn.Parameter) -> int:
        piece = self._by_param.get(param)
        return 1 if piece is None else piece.flat.spec.num_summands

    def average(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        if not self._sign_exchanges:
            return
        for param, value in values.items():
            piece = self._by_param[param]
            if piece.flat.name in self._sign_exchanges:
                self._values.setdefault(piece.flat.name, {})[piece.index] = value.view(-1)
        self._during()
        self._values.clear()

    def forget_residuals(self) -> None:
        for residual in self.residuals.values():
            residual.own.zero_()
            residual.average.zero_()

    # -- what the program has done ----------------------------------------------------------------------

    def add_up(self, action: Action) -> None:
        """Carry out `agree * sums` or `agree * norms`: sum them over one axis."""
        if action.subject == "norms":
            self._begin_norms()
        assert self._sums is not None
        group = self._groups.get(action.over)
        if group is None:
            ranks = self._mesh.group(self._rank, action.over)
            group = self._groups[action.over] = Group(action.over, ranks, ranks.index(self._rank))
        self._sums = sum_small(self._sums, self._collectives, group, action.subject)

    def exchange_matrices(self, action: Action) -> None:
        """Carry out `collect`, `orthogonalize`, `hand_back` and the waits between, of one flat buffer."""
        transfer = self._transfers.get(action.flat)
        if transfer is None:
            transfer = self._transfers[action.flat] = self._transfer(self._flats[action.flat])
        match action.verb:
            case "collect":
                transfer.collect()
            case "orthogonalize":
                transfer.compute()
            case "hand_back":
                transfer.hand_back()
            case "wait":
                transfer.wait()
        if transfer.is_done:
            del self._transfers[action.flat]

    def exchange_signs(self, action: Action) -> None:
        """Carry out `collect`, `hand_back` and the waits of the averages of one flat buffer."""
        mean = self._means.get(action.flat)
        if mean is None:
            mean = self._means[action.flat] = self._sign_mean(self._flats[action.flat])
        match action.verb:
            case "collect":
                mean.collect()
            case "hand_back":
                mean.hand_back()
            case "wait":
                mean.wait(action.subject)
        if mean.is_done:
            del self._means[action.flat]

    def _sign_mean(self, flat: Flat) -> SignMean:
        residuals = {
            index: self.residuals[slot.name] for index, slot in enumerate(flat.slots) if slot.name in self.residuals
        }
        values, group = self._values.get(flat.name, {}), self._among(flat.spec.table.axes)
        return SignMean(self._sign_exchanges[flat.name], flat, values, residuals, group, self._collectives)

    def _among(self, axes: Axes) -> Group:
        """The ranks that differ from this one only along `axes`."""
        ranks = self._mesh.among(self._rank, axes)
        return Group("+".join(axes), ranks, ranks.index(self._rank))

    def _transfer(self, flat: Flat) -> _MatrixTransfer:
        assert self._calls is not None
        over = self._matrix_exchanges[flat.name]
        pieces = {matrix.index: self._by_place[flat.name, matrix.index] for matrix in over.matrices}
        group = self._line(over, flat.spec.table.optim.shard)
        return _MatrixTransfer(over, flat, pieces, group, self._collectives, self._calls)

    def _line(self, over: MatrixExchange, axes: Axes) -> Group:
        """The ranks that share this rank's states, by range."""
        here = self._mesh.coordinate(self._rank)
        every = itertools.product(*(range(self._mesh.size(axis)) for axis in axes))
        coordinates = [{**here, **dict(zip(axes, indices, strict=True))} for indices in every]
        ranks = {over.range_of(coordinate): self._mesh.rank(coordinate) for coordinate in coordinates}
        return Group("+".join(axes), tuple(ranks[number] for number in sorted(ranks)), over.range_of(here))

    def _is_trained(self, param: nn.Parameter) -> bool:
        piece = self._by_param.get(param)
        return piece is not None and piece.flat.spec.trainable

    def _copies(self, piece: Piece) -> int:
        """How many of the ranks whose norms are summed hold the same elements."""
        spec, box = piece.flat.spec, piece.flat.slots[piece.index].box
        apart = {*spec.table.optim.shard, *spec.split_axes, *self._mesh.same_params_axes}
        others = (axis for axis in self._norms_axes if axis not in apart)
        return math.prod(map(self._mesh.size, others)) * (1 if box is None else box.copies)


class _MatrixTransfer:
    """The matrices of one flat buffer in one step, from pieces to their owners and back.

    `given` are this rank's pieces of matrices that others own, by range; `whole` the collected matrices that it owns,
    by index; `staging` the others' pieces of those, by range, as they are sent.
    """

    def __init__(
        self,
        over: MatrixExchange,
        flat: Flat,
        pieces: Mapping[int, Piece],
        group: Group,
        collectives: Collectives,
        calls: tuple[Make, Compute, Apply],
    ) -> None:
        self._over = over
        self._flat = flat
        self._pieces = pieces
        self._group = group
        self._collectives = collectives
        self._make, self._work, self._apply = calls
        self._matrices = [matrix for matrix in over.matrices if flat.grads.touched_anywhere[matrix.index]]
        self._dtype = torch_dtype(over.dtype)
        self._given: list[Tensor] = []
        self._whole: dict[int, Tensor] = {}
        self._staging: list[Tensor] = []
        self._arriving: Work | None = None
        self._is_computed = False

    @property
    def is_done(self) -> bool:
        return self._is_computed and not self._given and not self._staging and self._arriving is None

    def collect(self) -> None:
        """Send the pieces of matrices that others own, and start the matrices that this rank owns with its own
        pieces."""
        for matrix in self._owned():
            if self._over.travels(matrix):
                self._whole[matrix.index] = self._new(matrix.span.numel)
                own = self._over.held(matrix, self._group.index)
                if own.numel:
                    self._whole[matrix.index][own.as_slice] = self._made(matrix)
        self._given = [self._new(self._numel(self._for(number), self._group.index)) for number in self._ranges()]
        for number, message in enumerate(self._given):
            for matrix, part in self._parts(message, self._for(number), self._group.index):
                part.copy_(self._made(matrix))
        self._open_staging()
        self._arriving = self._collectives.all_to_all(self._staging, self._given, self._group, self._flat.name)

    def wait(self) -> None:
        """The first call waits for pieces, the second for results."""
        if self._arriving is None:
            return
        self._arriving.wait()
        self._arriving = None
        if not self._is_computed:
            for number, message in enumerate(self._staging):
                for matrix, part in self._parts(message, self._owned(), number):
                    held = self._over.held(matrix, number)
                    self._whole[matrix.index][held.as_slice] = part
            self._close(self._staging)
            return
        for number, message in enumerate(self._given):
            for matrix, part in self._parts(message, self._for(number), self._group.index):
                self._applied(matrix, part)
        self._close(self._staging)
        self._close(self._given)

    def compute(self) -> None:
        """Compute each matrix that this rank owns; one that is entirely here is made, computed and applied at once."""
        for matrix in self._owned():
            whole = self._whole.get(matrix.index)
            brought = 0 if whole is not None else matrix.span.numel * self._dtype.itemsize
            self._flat.meter.hold("working", matrix.work_bytes + brought)
            source = self._made(matrix) if whole is None else whole
            result = self._work(self._pieces[matrix.index].tensor, source.view(matrix.rows, matrix.cols)).reshape(-1)
            if whole is None:
                self._applied(matrix, result)
            else:
                self._whole[matrix.index] = result
            self._flat.meter.drop("working", matrix.work_bytes + brought)
        self._is_computed = True

    def hand_back(self) -> None:
        self._open_staging()
        for number, message in enumerate(self._staging):
            for matrix, part in self._parts(message, self._owned(), number):
                held = self._over.held(matrix, number)
                part.copy_(self._whole[matrix.index][held.as_slice])
        for matrix in self._owned():
            own = self._over.held(matrix, self._group.index)
            if matrix.index in self._whole and own.numel:
                self._applied(matrix, self._whole[matrix.index][own.as_slice])
        for tensor in self._whole.values():
            self._flat.meter.drop("working", tensor.nbytes)
        self._whole.clear()
        self._arriving = self._collectives.all_to_all(self._given, self._staging, self._group, self._flat.name)

    # -- what they have in common -----------------------------------------------------------------------

    def _made(self, matrix: Matrix) -> Tensor:
        """This rank's piece; brought to the device, if its momentum is on the host."""
        return on_device(self._make(self._pieces[matrix.index].tensor), self._flat.device)

    def _applied(self, matrix: Matrix, part: Tensor) -> None:
        piece = self._pieces[matrix.index].tensor
        self._apply(piece, on_device(part, piece.device))

    def _owned(self) -> list[Matrix]:
        return self._for(self._group.index)

    def _for(self, number: int) -> list[Matrix]:
        return [matrix for matrix in self._matrices if matrix.owner == number]

    def _ranges(self) -> range:
        return range(len(self._group.ranks))

    def _numel(self, matrices: Sequence[Matrix], number: int) -> int:
        """Elements of the message about `matrices` exchanged with the rank of range `number`: those that it holds."""
        is_message = not matrices or matrices[0].owner != number
        return sum(self._over.held(matrix, number).numel for matrix in matrices) if is_message else 0

    def _parts(self, message: Tensor, matrices: Sequence[Matrix], number: int) -> list[tuple[Matrix, Tensor]]:
        """The part of `message` for each matrix; nothing for a message to oneself."""
        if not message.numel():
            return []
        held = [(matrix, self._over.held(matrix, number).numel) for matrix in matrices]
        some = [(matrix, numel) for matrix, numel in held if numel]
        return list(zip((one for one, _ in some), torch.split(message, [numel for _, numel in some]), strict=True))

    def _open_staging(self) -> None:
        self._staging = [self._new(self._numel(self._owned(), number)) for number in self._ranges()]

    def _new(self, numel: int) -> Tensor:
        tensor = torch.empty(numel, dtype=self._dtype, device=self._flat.device)
        self._flat.meter.hold("working", tensor.nbytes)
        return tensor

    def _close(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            self._flat.meter.drop("working", tensor.nbytes)
        tensors.clear()
