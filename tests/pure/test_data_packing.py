"""Documents packed into rows of one length, against laying them all end to end."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data import Documents, Loader, PackedRows
from shardwise.errors import ConfigError


def end_to_end(documents: list[list[int]], separator: int | None) -> tuple[list[int], list[int]]:
    """Tokens and the documents they are of, the plain way."""
    ends = [] if separator is None else [separator]
    tokens = [token for document in documents for token in document + ends]
    numbers = [number for number, document in enumerate(documents) for _ in document + ends]
    return tokens, numbers


def counted(numbers: list[int]) -> list[int]:
    """Positions in a row, from 0 at its beginning and wherever the document changes."""
    positions: list[int] = []
    for at, number in enumerate(numbers):
        positions.append(positions[-1] + 1 if at and numbers[at - 1] == number else 0)
    return positions


@given(
    documents=st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=12),
    separator=st.sampled_from([None, 99]),
    row_tokens=st.integers(1, 16),
    stride=st.sampled_from([None, 1, 3]),
)
def test_rows_are_pieces_of_all_documents_end_to_end(
    documents: list[list[int]], separator: int | None, row_tokens: int, stride: int | None
) -> None:
    tokens, numbers = end_to_end(documents, separator)
    if len(tokens) < row_tokens:
        with pytest.raises(ConfigError, match="do not fill one row"):
            PackedRows(documents, row_tokens, separator=separator, stride=stride)
        return
    rows = PackedRows(documents, row_tokens, separator=separator, stride=stride, masks=True)
    step = stride or row_tokens
    assert len(rows) == len(range(0, len(tokens) - row_tokens + 1, step))
    for number in range(len(rows)):
        here = slice(number * step, number * step + row_tokens)
        row: Any = rows[number]
        assert row["tokens"].tolist() == tokens[here]
        assert row["document_ids"].tolist() == numbers[here]
        assert row["positions"].tolist() == counted(numbers[here])


def test_rows_of_a_memmap_read_only_their_own_documents(tmp_path: Any) -> None:
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    lengths = [10] * 100
    kept = Documents(np.memmap(tmp_path / "tokens.bin", np.uint16), lengths)
    read: list[int] = []

    class Watched(Documents):
        def __getitem__(self, number: int) -> Any:
            read.append(number)
            return super().__getitem__(number)

    rows = PackedRows(Watched(tokens, lengths), row_tokens=25, separator=5000)
    row = rows[3]
    assert isinstance(row, np.ndarray)
    assert row.dtype == np.int64
    assert row.tolist() == [69, 5000, *range(70, 80), 5000, *range(80, 90), 5000, 90]
    assert read == [6, 7, 8, 9]
    assert np.array_equal(PackedRows(kept, row_tokens=25, separator=5000)[3], row)


def test_rows_that_share_a_token_give_inputs_and_targets() -> None:
    rows = PackedRows([list(range(100))], row_tokens=9, stride=8)
    with Loader(rows, batch_rows=4) as loader:
        for batch in loader:
            assert ((batch[:, :-1] + 1) == batch[:, 1:]).all()
    assert sorted(int(rows[number][0]) for number in range(len(rows))) == list(range(0, 92, 8))


def test_a_row_outside_is_an_index_error() -> None:
    rows = PackedRows([[1, 2, 3, 4]], row_tokens=2)
    assert np.array_equal(rows[-1], rows[1])
    with pytest.raises(IndexError):
        rows[2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PackedRows([[1]], 0), "row_tokens is 0"),
        (lambda: PackedRows([[1]], 1, stride=0), "the stride is 0"),
        (lambda: PackedRows([], 4), "0 documents of 0 tokens in all do not fill one row of 4"),
        (lambda: PackedRows([[1], [2]], 1, lengths=[1]), r"2 documents, but lengths has shape \[1\]"),
        (lambda: PackedRows([[1], [2]], 1, lengths=[3, -1]), "Document 1 has length -1"),
        (lambda: Documents(np.zeros(5), [2, 2]), "sum to 4, but there are 5 tokens"),
    ],
)
def test_what_cannot_be_packed_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("document", [np.array([0.5, 1.0, 2.0]), ["1", "2", "3"], [1.0, 2.0, 3.0]])
def test_tokens_that_are_no_whole_numbers_are_refused(document: Any) -> None:
    with pytest.raises(ConfigError, match=r"Document 1 has tokens of .*; give whole numbers"):
        PackedRows([np.arange(3), document], row_tokens=2)[2]
