"""The main job's text: the same on every machine with this Python."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from shardwise import ShardwiseError
from tests.files import module_at

SCRIPT = Path(__file__).parents[2] / "examples" / "stdlib_gpt" / "corpus.py"


@pytest.fixture(scope="module")
def corpus() -> ModuleType:
    return module_at(SCRIPT)


@pytest.fixture(scope="module")
def tokens() -> ModuleType:
    return module_at(SCRIPT.with_name("tokens.py"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(60):
        (tmp_path / f"m{number:02d}.py").write_text(f"module = {number}\n" * 10)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("SKIPPED\n")
    (tmp_path / "notes.txt").write_text("SKIPPED\n")
    return tmp_path


def test_the_standard_library_is_found(corpus: ModuleType) -> None:
    text = corpus.Corpus.of_folder(corpus.stdlib_folder(), 2**22)
    assert len(text.train) + len(text.validation) == 2**22
    assert 0.005 < len(text.validation) / 2**22 < 0.3
    assert b"def __init__(self" in text.train


def test_files_are_read_in_order_and_others_skipped(corpus: ModuleType, folder: Path) -> None:
    text = corpus.Corpus.of_folder(folder, 2**20)
    again = corpus.Corpus.of_folder(folder, 2**20)
    assert text == again
    train, validation = text.train.decode(), text.validation.decode()
    assert "SKIPPED" not in train + validation
    assert train.splitlines() == sorted(train.splitlines(), key=lambda line: int(line.split()[-1]))
    assert not set(train.splitlines()) & set(validation.splitlines())


def test_a_new_file_does_not_move_another_to_the_other_side(corpus: ModuleType, folder: Path) -> None:
    before = set(corpus.Corpus.of_folder(folder, 2**20).validation.splitlines())
    (folder / "a_new_one.py").write_text("new = 1\n")
    after = set(corpus.Corpus.of_folder(folder, 2**20).validation.splitlines())
    assert after - {b"new = 1"} == before


def test_the_cap_holds(corpus: ModuleType, folder: Path) -> None:
    text = corpus.Corpus.of_folder(folder, 5000)
    assert len(text.train) + len(text.validation) == 5000


def test_a_folder_without_source_is_refused(corpus: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ShardwiseError, match="--text"):
        corpus.Corpus.of_folder(tmp_path, 2**20)


def test_pieces_are_every_place_and_the_token_that_follows(corpus: ModuleType) -> None:
    text = (np.arange(5000) % 251).astype(np.uint16)
    pieces = corpus.pieces(text, context=16)
    assert len(pieces) == 5000 - 16
    for place in (0, 1, 4983):
        assert pieces[place].tolist() == text[place : place + 17].tolist()
    assert pieces[0].dtype == np.int64


def test_a_text_without_a_piece_is_refused(corpus: ModuleType) -> None:
    with pytest.raises(ShardwiseError, match="16 tokens in all do not fill one row of 17"):
        corpus.pieces(np.zeros(16, dtype=np.uint16), context=16)


def test_docstrings_and_comments_are_left_out(corpus: ModuleType) -> None:
    source = (
        b'''"""A module."""
# about it
import re  # for patterns


class Reader:
    r"""Reads.

    Much.
    """

    def read(self, sign="#"):  # so
        '''
        + b"'''Once.'''"
        + b'''
        text = """
# no comment
"""
        return text if sign == "#" else "# none"
'''
    )
    assert (
        corpus.code_of(source)
        == b'''import re


class Reader:

    def read(self, sign="#"):
        text = """
"""
        return text if sign == "#" else "# none"
'''
    )


def test_tokens_give_the_text_back(tokens: ModuleType) -> None:
    text = b"def name(self):\n    return self.name\n" * 30 + b"def \xff\x00other(x):\r\n\tpass  123\n"
    learned = tokens.Tokens.learn(text, 300)
    found = learned.encode(text)
    assert b"".join(learned.decode(int(token)) for token in found) == text
    assert found.dtype == np.uint16
    assert found.max() < len(learned) <= 300
    assert len(found) < len(text) / 2
    assert len(learned.encode(b" self")) == 1
    assert len(tokens.Tokens.learn(text, 256)) == 256


def test_the_most_frequent_pairs_become_tokens(tokens: ModuleType) -> None:
    """`ab` is in 70 words, `bc` in 40, and `xy` in too few."""
    learned = tokens.Tokens.learn(b" abc" * 40 + b" abd" * 30 + b" xy" * 3, 258)
    assert [learned.decode(token) for token in (256, 257)] == [b"ab", b" ab"]
    assert tokens.Tokens.learn(b" xy" * 3, 300).encode(b" xy").tolist() == list(b" xy")


def test_a_bigram_model_is_as_good_as_its_text_allows(tokens: ModuleType) -> None:
    """Of a cycle it knows the next token, and of noise only how many tokens there are."""
    cycle = np.tile(np.arange(4, dtype=np.uint16), 100_000)
    assert tokens.bigram_loss(cycle, cycle[:1000], 4) < 0.01
    noise = np.random.default_rng(0).integers(0, 4, 100_000).astype(np.uint16)
    assert tokens.bigram_loss(noise, noise[::-1], 4) == pytest.approx(np.log(4), abs=0.01)
    assert np.isfinite(tokens.bigram_loss(cycle, np.array([0, 5, 5], dtype=np.uint16), 6))
