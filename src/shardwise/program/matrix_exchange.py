"""Which rank orthogonalizes which whole matrix, and what has to be sent for it.

[Note: whole matrices] An update such as Muon's needs a whole matrix, of which a rank holds a range. Each matrix gets an
owner among the ranks that share its states: its pieces are collected there, the update is computed once, and the pieces
are handed back. A flat buffer is cut into few large ranges, so most matrices lie on one rank already, or nearly so. The
owner is the rank that holds most of the matrix, unless that rank has enough to do; then it is the least busy one. This
sends at most twice the part of a matrix that is not with its owner; gathering it everywhere would send (n - 1) times
the matrix and repeat the work on every rank. Ranks with copies of the states (`ddp`, or the nodes of `hsdp`) all do the
same work, like the rest of their update, and send nothing for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.plan.placement import WIDTH, Dtype, Span
from shardwise.program.spec import FlatSpec

SLACK = 1.25
"""A rank may get this multiple of its even share of the work if that saves bytes."""


@dataclass(frozen=True)
class Matrix:
    """The matrix at `span` of a flat buffer, which is its parameter `index`. The rank of range `owner` collects it."""

    index: int
    span: Span
    rows: int
    cols: int
    dtype: Dtype
    owner: int = 0

    @property
    def cost(self) -> int:
        """Multiplications of one step of a Newton-Schulz iteration, which works on the short side."""
        short, long = sorted((self.rows, self.cols))
        return short * short * (2 * long + short)

    @property
    def work_bytes(self) -> int:
        """What the iteration holds besides the matrix: its next value, and two squares of the short side."""
        short = min(self.rows, self.cols)
        return (self.span.numel + 2 * short * short) * WIDTH[self.dtype]


@dataclass(frozen=True)
class MatrixExchange:
    """The matrices of one flat buffer. States are cut into ranges, one per rank; range 0 is the first."""

    flat: FlatSpec
    matrices: tuple[Matrix, ...]

    @property
    def dtype(self) -> Dtype:
        """The dtype that is sent. One optimizer iterates in one dtype."""
        return self.matrices[0].dtype

    @cached_property
    def range_numel(self) -> int:
        return self.flat.num_elements(self.flat.table.optim.shard)

    def range_of(self, coordinate: Mapping[str, int]) -> int:
        """The range of the rank at `coordinate` of the mesh, among those that share the states."""
        return self.flat.layout.span(self.flat.table.optim.shard, coordinate).start // self.range_numel

    def held(self, matrix: Matrix, number: int) -> Span:
        """The elements of `matrix` that are in range `number`, counted from its first."""
        return matrix.span.overlap(Span.nth(number, self.range_numel)).within(matrix.span)

    def travels(self, matrix: Matrix) -> bool:
        return self.held(matrix, matrix.owner).numel < matrix.span.numel

    @property
    def moves(self) -> bool:
        """Whether anything has to be sent."""
        return any(self.travels(matrix) for matrix in self.matrices)

    @cached_property
    def given_bytes(self) -> Counter[int]:
        """By range: bytes of its pieces of matrices owned elsewhere."""
        given: Counter[int] = Counter()
        for matrix, number, numel in self._pieces():
            given[number] += numel * WIDTH[matrix.dtype] if number != matrix.owner else 0
        return given

    @cached_property
    def taken_bytes(self) -> Counter[int]:
        """By range: bytes of pieces elsewhere of matrices that it owns."""
        taken: Counter[int] = Counter()
        for matrix, number, numel in self._pieces():
            taken[matrix.owner] += numel * WIDTH[matrix.dtype] if number != matrix.owner else 0
        return taken

    @cached_property
    def whole_bytes(self) -> Counter[int]:
        """By range: bytes of owned matrices of which pieces have to be collected."""
        whole: Counter[int] = Counter()
        for matrix in filter(self.travels, self.matrices):
            whole[matrix.owner] += matrix.span.numel * WIDTH[matrix.dtype]
        return whole

    def work_bytes(self, number: int | None) -> int:
        """The most memory for one matrix of range `number`, or of any; includes the matrix itself if all of it is held
        there."""
        own = [matrix for matrix in self.matrices if number is None or matrix.owner == number]
        return max(
            (one.work_bytes + (0 if self.travels(one) else one.span.numel * WIDTH[one.dtype]) for one in own),
            default=0,
        )

    def _pieces(self) -> Iterator[tuple[Matrix, int, int]]:
        for matrix in self.matrices:
            yield from ((matrix, number, numel) for number, numel in _holders(matrix, self.range_numel))


def at(by_range: Counter[int], number: int | None) -> int:
    """The bytes of range `number`; without one the most of any."""
    return max(by_range.values(), default=0) if number is None else by_range[number]


def matrix_exchanges(flats: Sequence[FlatSpec]) -> dict[str, MatrixExchange]:
    """The exchange of every flat buffer that has matrices. The same on every rank."""
    by_shard: dict[tuple[str, ...], list[MatrixExchange]] = defaultdict(list)
    for flat in flats:
        matrices = tuple(_matrices(flat)) if flat.trainable else ()
        if matrices:
            by_shard[flat.table.optim.shard].append(MatrixExchange(flat, matrices))
    return {one.flat.name: one for alike in by_shard.values() for one in _assigned(alike)}


def _matrices(flat: FlatSpec) -> Iterator[Matrix]:
    for index, placed in enumerate(flat.updates):
        if placed.update.matrix is not None:
            yield Matrix(index, placed.span, *placed.update.matrix, placed.update.dtype)


def _assigned(alike: Sequence[MatrixExchange]) -> Iterator[MatrixExchange]:
    """Owners for the matrices of flat buffers that are sharded alike, assigned from the costliest matrix down."""
    jobs = [(one, matrix) for one in alike for matrix in one.matrices]
    num_ranges = alike[0].flat.numel // alike[0].range_numel
    loads = [0] * num_ranges
    total = sum(matrix.cost for _, matrix in jobs)
    limit = max(SLACK * total / num_ranges, *(matrix.cost for _, matrix in jobs))
    owners: dict[tuple[str, int], int] = {}
    for one, matrix in sorted(jobs, key=lambda job: -job[1].cost):
        by_share = sorted(_holders(matrix, one.range_numel), key=lambda holder: -holder[1])
        free = (number for number, _ in by_share if loads[number] + matrix.cost <= limit)
        owner = next(free, None)
        owner = loads.index(min(loads)) if owner is None else owner
        loads[owner] += matrix.cost
        owners[one.flat.name, matrix.index] = owner
    for one in alike:
        owned = (replace(matrix, owner=owners[one.flat.name, matrix.index]) for matrix in one.matrices)
        yield MatrixExchange(one.flat, tuple(owned))


def _holders(matrix: Matrix, range_numel: int) -> list[tuple[int, int]]:
    """The ranges that have some of `matrix`, and how many elements each."""
    first, last = matrix.span.start // range_numel, (matrix.span.stop - 1) // range_numel
    return [(number, matrix.span.overlap(Span.nth(number, range_numel)).numel) for number in range(first, last + 1)]
