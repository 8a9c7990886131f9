"""The main job's text and batches: the same on every machine with this Python, at any world size."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from shardwise import ShardwiseError

SCRIPT = Path(__file__).parents[2] / "examples" / "stdlib_gpt" / "corpus.py"


@pytest.fixture(scope="module")
def corpus() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stdlib_gpt_corpus", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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


@pytest.fixture
def batches(corpus: ModuleType) -> object:
    text = torch.arange(5000).remainder(251).to(torch.uint8)
    return corpus.Batches(text, rows=12, context=16, seed=3)


@pytest.mark.parametrize("world", [2, 3, 4, 6, 12])
def test_ranks_share_the_batch_that_one_process_has(batches, world: int) -> None:  # type: ignore[no-untyped-def]
    x, y = batches.batch(7, 0, 1)
    shares = [batches.batch(7, rank, world) for rank in range(world)]
    assert torch.equal(torch.cat([share[0] for share in shares]), x)
    assert torch.equal(torch.cat([share[1] for share in shares]), y)


def test_targets_are_the_bytes_that_follow(batches) -> None:  # type: ignore[no-untyped-def]
    x, y = batches.batch(0, 0, 1)
    assert x.shape == y.shape == (12, 16)
    assert x.dtype == y.dtype == torch.int64
    assert torch.equal((x + 1) % 251, y)


def test_a_batch_depends_on_seed_and_step_alone(corpus: ModuleType, batches) -> None:  # type: ignore[no-untyped-def]
    state = torch.get_rng_state()
    first = batches.batch(5, 0, 1)[0]
    torch.manual_seed(99)
    assert torch.equal(batches.batch(5, 0, 1)[0], first)
    assert not torch.equal(batches.batch(6, 0, 1)[0], first)
    other = corpus.Batches(batches.text, rows=12, context=16, seed=4)
    assert not torch.equal(other.batch(5, 0, 1)[0], first)
    torch.set_rng_state(state)


def test_rows_that_do_not_divide_are_refused(batches) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ShardwiseError, match="12 rows do not divide among 5 ranks"):
        batches.batch(0, 0, 5)
