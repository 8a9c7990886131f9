"""The main job's text: the same on every machine with this Python."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from shardwise import ShardwiseError
from tests.files import module_at

SCRIPT = Path(__file__).parents[2] / "examples" / "stdlib_gpt" / "corpus.py"


@pytest.fixture(scope="module")
def corpus() -> ModuleType:
    return module_at(SCRIPT)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(60):
        (tmp_path / f"m{number:02d}.py").write_text(f"# module {number}\n" * 10)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_x.py").write_text("SKIPPED\n")
    (tmp_path / "notes.txt").write_text("SKIPPED\n")
    return tmp_path


def test_the_standard_library_is_found(corpus: ModuleType) -> None:
    text = corpus.Corpus.of_folder(corpus.stdlib_folder(), 2**22)
    assert len(text.train) + len(text.validation) == 2**22
    assert 0.005 < len(text.validation) / 2**22 < 0.3
    assert b"def __init__(self" in text.train.numpy().tobytes()


def test_files_are_read_in_order_and_others_skipped(corpus: ModuleType, folder: Path) -> None:
    text = corpus.Corpus.of_folder(folder, 2**20)
    again = corpus.Corpus.of_folder(folder, 2**20)
    assert torch.equal(text.train, again.train)
    assert torch.equal(text.validation, again.validation)
    train = text.train.numpy().tobytes().decode()
    validation = text.validation.numpy().tobytes().decode()
    assert "SKIPPED" not in train + validation
    assert train.splitlines() == sorted(train.splitlines(), key=lambda line: int(line.split()[-1]))
    assert not set(train.splitlines()) & set(validation.splitlines())


def test_a_new_file_does_not_move_another_to_the_other_side(corpus: ModuleType, folder: Path) -> None:
    before = set(corpus.Corpus.of_folder(folder, 2**20).validation.numpy().tobytes().splitlines())
    (folder / "a_new_one.py").write_text("# new\n")
    after = set(corpus.Corpus.of_folder(folder, 2**20).validation.numpy().tobytes().splitlines())
    assert after - {b"# new"} == before


def test_the_cap_holds(corpus: ModuleType, folder: Path) -> None:
    text = corpus.Corpus.of_folder(folder, 5000)
    assert len(text.train) + len(text.validation) == 5000


def test_a_folder_without_source_is_refused(corpus: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ShardwiseError, match="--text"):
        corpus.Corpus.of_folder(tmp_path, 2**20)


def test_pieces_are_every_place_and_the_byte_that_follows(corpus: ModuleType) -> None:
    text = torch.arange(5000).remainder(251).to(torch.uint8)
    pieces = corpus.pieces(text, context=16)
    assert len(pieces) == 5000 - 16
    for place in (0, 1, 4983):
        assert pieces[place].tolist() == text[place : place + 17].tolist()
    assert pieces[0].dtype == np.int64


def test_a_text_without_a_piece_is_refused(corpus: ModuleType) -> None:
    with pytest.raises(ShardwiseError, match="16 tokens in all do not fill one row of 17"):
        corpus.pieces(torch.zeros(16, dtype=torch.uint8), context=16)
