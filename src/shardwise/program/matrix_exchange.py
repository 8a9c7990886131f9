"""Which rank works out which whole matrix, and what has to travel for it.

[Note: whole matrices] An update such as Muon's needs a whole matrix, of which a rank holds a range. Each matrix gets
an owner among the ranks that share its states: pieces of it are collected there, worked out once, and handed back.
A flat buffer is cut into few large ranges, so most matrices lie on one rank already or nearly so, and the owner is
the rank that holds most of it, unless it has enough to do: then the least busy one. That sends at most twice what
of a matrix is not with its owner; to gather all of it everywhere would send (n - 1) times the matrix and have every
rank do all the work. Ranks with copies of the states (`ddp`, or the nodes of `hsdp`) each do the same work, as they
do the whole update, and send nothing for it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.placement import WIDTH, Dtype, Span
from shardwise.program.spec import FlatSpec

SLACK = 1.25
"""How much more than its even share of the work a rank may get for the sake of fewer bytes."""


@dataclass(frozen=True)
class Matrix:
    """The matrix at `span` of a flat buffer, parameter `index` of it, and the place of the rank that works it out."""

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
    """The matrices of one flat buffer. A *place* counts the ranges of its states: place 0 has the first."""

    flat: FlatSpec
    matrices: tuple[Matrix, ...]

    @property
    def dtype(self) -> Dtype:
        """What travels. One optimizer iterates in one dtype."""
        return self.matrices[0].dtype

    @cached_property
    def range_numel(self) -> int:
        return self.flat.layout.span(self.flat.table.optim.shard, dict.fromkeys(self.flat.layout.order, 0)).numel

    def place(self, coordinate: Mapping[str, int]) -> int:
        """Where the rank at `coordinate` of the mesh stands among those that share the states."""
        return self.flat.layout.span(self.flat.table.optim.shard, coordinate).start // self.range_numel

    def held(self, matrix: Matrix, place: int) -> Span:
        """The elements of `matrix` that the rank at `place` holds, counted from its first."""
        mine = Span(place * self.range_numel, (place + 1) * self.range_numel)
        return matrix.span.overlap(mine).within(matrix.span)

    def travels(self, matrix: Matrix) -> bool:
        return self.held(matrix, matrix.owner).numel < matrix.span.numel

    @property
    def moves(self) -> bool:
        """Whether anything has to travel at all."""
        return any(self.travels(matrix) for matrix in self.matrices)

    @cached_property
    def given_bytes(self) -> Counter[int]:
        """By place: pieces that lie there and are worked out elsewhere."""
        given: Counter[int] = Counter()
        for matrix, place, numel in self._pieces():
            given[place] += numel * WIDTH[matrix.dtype] if place != matrix.owner else 0
        return given

    @cached_property
    def taken_bytes(self) -> Counter[int]:
        """By place: pieces that are worked out there and lie elsewhere."""
        taken: Counter[int] = Counter()
        for matrix, place, numel in self._pieces():
            taken[matrix.owner] += numel * WIDTH[matrix.dtype] if place != matrix.owner else 0
        return taken

    @cached_property
    def whole_bytes(self) -> Counter[int]:
        """By place: matrices that travel, whole, where they are worked out."""
        whole: Counter[int] = Counter()
        for matrix in filter(self.travels, self.matrices):
            whole[matrix.owner] += matrix.span.numel * WIDTH[matrix.dtype]
        return whole

    def work_bytes(self, place: int | None) -> int:
        """The most that the work on one matrix takes at `place`, or anywhere: one that never travelled comes in too."""
        own = [matrix for matrix in self.matrices if place is None or matrix.owner == place]
        return max(
            (one.work_bytes + (0 if self.travels(one) else one.span.numel * WIDTH[one.dtype]) for one in own),
            default=0,
        )

    def _pieces(self) -> Iterator[tuple[Matrix, int, int]]:
        for matrix in self.matrices:
            yield from ((matrix, place, numel) for place, numel in _holders(matrix, self.range_numel))


def at(by_place: Counter[int], place: int | None) -> int:
    """The bytes at `place`; without one the most at any."""
    return max(by_place.values(), default=0) if place is None else by_place[place]


def matrix_exchanges(flats: Sequence[FlatSpec]) -> dict[str, MatrixExchange]:
    """For every flat buffer with matrices in it, who works them out. The same on every rank."""
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
    """Owners for the matrices of flat buffers that are sharded alike: the costliest matrix chooses first."""
    jobs = [(one, matrix) for one in alike for matrix in one.matrices]
    num_places = alike[0].flat.numel // alike[0].range_numel
    loads = [0] * num_places
    total = sum(matrix.cost for _, matrix in jobs)
    limit = max(SLACK * total / num_places, *(matrix.cost for _, matrix in jobs))
    owners: dict[tuple[str, int], int] = {}
    for one, matrix in sorted(jobs, key=lambda job: -job[1].cost):
        by_share = sorted(_holders(matrix, one.range_numel), key=lambda holder: -holder[1])
        free = (place for place, _ in by_share if loads[place] + matrix.cost <= limit)
        owner = next(free, None)
        owner = loads.index(min(loads)) if owner is None else owner
        loads[owner] += matrix.cost
        owners[one.flat.name, matrix.index] = owner
    for one in alike:
        owned = tuple(_owned_by(matrix, owners[one.flat.name, matrix.index]) for matrix in one.matrices)
        yield MatrixExchange(one.flat, owned)


def _owned_by(matrix: Matrix, owner: int) -> Matrix:
    return Matrix(matrix.index, matrix.span, matrix.rows, matrix.cols, matrix.dtype, owner)


def _holders(matrix: Matrix, range_numel: int) -> list[tuple[int, int]]:
    """Places that hold some of `matrix`, and how many elements."""
    first, last = matrix.span.start // range_numel, (matrix.span.stop - 1) // range_numel
    ranges = [(place, Span(place * range_numel, (place + 1) * range_numel)) for place in range(first, last + 1)]
    return [(place, matrix.span.overlap(one).numel) for place, one in ranges]
