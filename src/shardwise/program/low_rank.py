"""Gradients of matrices as thin factors: what is sent and kept of one flat buffer.

[Note: factors] PowerSGD (arXiv:1905.13727, algorithms 1 and 2) sends of a gradient M of n by m elements P = M Q, of n
by r, and then Q = M' P, of m by r, where the columns of the sum of all P have been made orthonormal. The gradient is
P Q' for all ranks. What that leaves out of a rank's own M stays with it, and is added to its next gradient. Q is that
of the step before, with orthonormal columns; the first is random. What is sent as it is goes with P.

[Note: messages of factors] Factors are small, so what they cost is the number of their messages: each is two rounds
between hosts. So the P of several flat buffers are one message, and then their Q: as soon as gradients of
`MESSAGE_OF_GRADIENTS` are complete, and at the end of the backward. In a program, `project`s are one message if no
`wait` for any of them comes between, and so are `restore`s.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.plan.placement import WIDTH, Span
from shardwise.program.action import Program
from shardwise.program.effects import Verb
from shardwise.program.spec import FlatSpec
from shardwise.system.even_parts import round_up

FACTORING: tuple[Verb, ...] = ("project", "restore")
MESSAGE_OF_GRADIENTS = 25 * 2**20
"""Bytes of gradients whose factors are one message: as much as in a bucket of torch's DDP."""
Position = tuple[int, int]
"""An action of a program: the number of its block, and its own in there."""


def ends_of_messages(program: Program) -> frozenset[Position]:
    """The actions that complete a message of factors: see [Note: messages of factors]."""
    ends: set[Position] = set()
    begun: list[tuple[Position, Verb, str]] = []
    for number, block in enumerate(program):
        for place, action in enumerate(block.actions):
            waits_for_it = action.verb == "wait" and any(flat == action.flat for _, _, flat in begun)
            if begun and (waits_for_it or (action.verb in FACTORING and action.verb != begun[-1][1])):
                ends.add(begun[-1][0])
                begun = []
            if action.verb in FACTORING:
                begun.append(((number, place), action.verb, action.flat))
    if begun:
        ends.add(begun[-1][0])
    return frozenset(ends)


@dataclass(frozen=True)
class Factored:
    """The messages of one flat buffer. Both are sums, padded so that the ranks divide them."""

    flat: FlatSpec

    @cached_property
    def num_ranks(self) -> int:
        return self.flat.mesh.size(self.axis)

    @property
    def axis(self) -> str:
        return self.flat.table.axes[0]

    @cached_property
    def plain(self) -> tuple[Span, ...]:
        """What is sent as it is: elements of other parameters, and between parameters."""
        stops = [0, *(matrix.span.stop for matrix in self.flat.factored)]
        starts = [*(matrix.span.start for matrix in self.flat.factored), self.flat.numel]
        return tuple(Span(start, stop) for start, stop in zip(stops, starts, strict=True) if stop > start)

    @cached_property
    def projected_numel(self) -> int:
        """Elements of the message with every P."""
        own = sum(matrix.rows * matrix.rank for matrix in self.flat.factored)
        return round_up(own + sum(span.numel for span in self.plain), self.num_ranks)

    @cached_property
    def restored_numel(self) -> int:
        """Elements of the message with every Q."""
        return round_up(sum(matrix.cols * matrix.rank for matrix in self.flat.factored), self.num_ranks)

    def numel_of(self, verb: str) -> int:
        return self.projected_numel if verb == "project" else self.restored_numel

    def num_bytes(self, verb: str) -> int:
        """Of the message of one action, and of the memory that it takes."""
        return self.numel_of(verb) * WIDTH[self.flat.table.grad.dtype]

    def sent_bytes(self, verb: str) -> int:
        """What a rank sends for one action."""
        return 2 * (self.num_ranks - 1) * (self.num_bytes(verb) // self.num_ranks)

    @property
    def kept_bytes(self) -> int:
        """What a rank keeps from step to step: what it has not sent, and every Q."""
        factors = sum(matrix.cols * matrix.rank for matrix in self.flat.factored)
        return (self.flat.numel + factors) * WIDTH[self.flat.table.grad.dtype]


def factored_bytes(flat: FlatSpec) -> int:
    """What a rank keeps from the first step on, so that a job that fits goes on fitting."""
    return Factored(flat).kept_bytes if flat.factored else 0
