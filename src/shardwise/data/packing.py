"""Packs documents of any length into rows of one length, with random access to rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.errors import ConfigError
from shardwise.system.flags import takes_flags

Tokens = NDArray[np.int64]


class Documents:
    """Documents concatenated in one array, such as a memmap; `lengths` is int `[num_documents]`."""

    def __init__(self, tokens: Any, lengths: ArrayLike) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self._tokens = tokens
        self._ends = np.cumsum(self.lengths)
        held = int(self._ends[-1]) if len(self._ends) else 0
        if held != len(tokens):
            raise ConfigError(f"The lengths of the documents sum to {held}, but there are {len(tokens)} tokens.")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> Any:
        end = self._ends[number]
        return self._tokens[end - self.lengths[number] : end]


class PackedRows:
    """All documents in sequence, each followed by `separator`, cut into rows of `row_tokens` tokens.

    Row `i` is tokens `i * stride` up to `i * stride + row_tokens` of that sequence; it is found by bisection, in O(log
    documents), and reads only the documents that it contains. An incomplete row at the end is left out. For next-token
    prediction, `row_tokens=1025, stride=1024` gives rows that share one token with the next.

    `documents` is a sequence of integer arrays. With `lengths`, int `[num_documents]`, they need not all be read once;
    a `Documents` knows its own. An item is int64 `[row_tokens]`, or with `masks` a dict of three such: `tokens`;
    `document_ids`, the number of the document of a token (or of the separator after it); and `positions`, which count
    from 0 at the beginning of each document and of each row.

    Raises `ConfigError` if there are too few tokens for one row.
    """

    @takes_flags
    def __init__(
        self,
        documents: Sequence[Any] | Documents,
        row_tokens: int,
        *,
        separator: int | None = None,
        stride: int | None = None,
        lengths: ArrayLike | None = None,
        masks: bool = False,
    ) -> None:
        self.row_tokens = row_tokens
        self.stride = row_tokens if stride is None else stride
        if self.row_tokens < 1 or self.stride < 1:
            raise ConfigError(f"row_tokens is {row_tokens} and the stride is {self.stride}; both must be at least 1.")
        self._documents = documents
        self._separator = separator
        self._masks = masks
        self._lengths = _lengths(documents, lengths)
        self._ends = np.cumsum(self._lengths + (separator is not None))
        self.num_tokens = int(self._ends[-1]) if len(self._ends) else 0
        if self.num_tokens < row_tokens:
            raise ConfigError(
                f"{len(self._lengths)} documents of {self.num_tokens} tokens in all do not fill one row of "
                f"{row_tokens} tokens."
            )

    def __len__(self) -> int:
        return (self.num_tokens - self.row_tokens) // self.stride + 1

    def __getitem__(self, row: int) -> Tokens | dict[str, Tokens]:
        row = range(len(self))[row]
        first = row * self.stride
        tokens, document_ids = self._read(first, first + self.row_tokens)
        if not self._masks:
            return tokens
        return {"tokens": tokens, "document_ids": document_ids, "positions": _positions(document_ids)}

    def _read(self, first: int, last: int) -> tuple[Tokens, Tokens]:
        """Tokens `first` up to `last` of the whole sequence, and the numbers of their documents."""
        tokens, document_ids = np.empty(last - first, np.int64), np.empty(last - first, np.int64)
        number, at = int(np.searchsorted(self._ends, first, side="right")), first
        while at < last:
            end, length = int(self._ends[number]), int(self._lengths[number])
            begin = end - length - (self._separator is not None)
            until = min(last, end)
            here = slice(at - first, until - first)
            document_ids[here] = number
            if self._separator is not None and until == end:
                tokens[until - first - 1] = self._separator
            from_, to = at - begin, min(until - begin, length)
            if from_ < to:
                tokens[here.start : here.start + to - from_] = _whole(self._documents[number][from_:to], number)
            number, at = number + 1, until
        return tokens, document_ids


def _whole(tokens: Any, number: int) -> Any:
    """Tokens of document `number`; numpy would cut off what is behind the point, and read text as numbers."""
    found = np.asarray(tokens)
    if found.dtype.kind not in "iub":
        raise ConfigError(f"Document {number} has tokens of {found.dtype}; give whole numbers.")
    return found


def _lengths(documents: Any, lengths: ArrayLike | None) -> Tokens:
    if lengths is None:
        own = getattr(documents, "lengths", None)
        lengths = own if own is not None else [len(document) for document in documents]
    known = np.asarray(lengths, dtype=np.int64)
    if known.shape != (len(documents),):
        raise ConfigError(f"There are {len(documents)} documents, but lengths has shape {list(known.shape)}.")
    if known.size and known.min() < 0:
        raise ConfigError(f"Document {int(known.argmin())} has length {int(known.min())}; a length is 0 or more.")
    return known


def _positions(document_ids: Tokens) -> Tokens:
    """The distance of each token from the first one of its document in this row."""
    places = np.arange(len(document_ids))
    begins = np.r_[True, document_ids[1:] != document_ids[:-1]]
    positions: Tokens = places - np.maximum.accumulate(np.where(begins, places, 0))
    return positions
