"""A range of elements."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Elements `start` up to, but not including, `stop` of a flat buffer."""

    start: int
    stop: int

    @classmethod
    def nth(cls, number: int, numel: int) -> Span:
        """The range with that number, from 0 on, of a buffer cut into ranges of `numel` elements."""
        return cls(number * numel, (number + 1) * numel)

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def as_slice(self) -> slice:
        """For `tensor[span.as_slice]`."""
        return slice(self.start, self.stop)

    def overlap(self, other: Span) -> Span:
        """The common elements; an empty span, never a negative one, if there are none."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def within(self, other: Span) -> Span:
        """This span counted from the start of `other`."""
        return Span(self.start - other.start, self.stop - other.start)
