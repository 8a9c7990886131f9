"""Worker processes of the loader: the same batches as from threads, and what happens if one dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from launching import launch
from torch.utils.data import Dataset

from shardwise.comm import World
from shardwise.data import Loader, Samples, Workers
from shardwise.errors import ConfigError, DataError
from tests.patience import wait_until
from tests.thorough import soak, thorough_only

pytestmark = pytest.mark.slow


class Rows(Dataset[tuple[int, int]]):
    """Index and process of each sample. Index 7 raises; index 11 kills its process once, and leaves `mark`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 7:
            raise OSError("disk is gone")
        if index == 11 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index, os.getpid()


def noisy(sample: tuple[int, int], generator: np.random.Generator) -> tuple[int, int, float]:
    return *sample, float(generator.random())


def workers_alive() -> list[str]:
    return [child.name for child in multiprocessing.active_children() if child.name.startswith("shardwise-data")]


@thorough_only("slow; smaller tests beside it cover the same code")
def test_processes_make_the_same_batches_and_their_failures_are_named(tmp_path: Path) -> None:
    """One test, because starting a process costs seconds."""
    mark = tmp_path / "killed"
    options: dict[str, Any] = {"batch_rows": 4, "samples": Samples(shuffle=False, transform=noisy), "steps": 4}
    with Loader(Rows(mark), workers=0, **options) as plain:
        index, _, noise = next(iter(plain))
    with Loader(Rows(mark), workers=Workers(2, processes=True), **options) as loader:
        iterator = iter(loader)
        first = next(iterator)
        assert first[0].tolist() == index.tolist()
        assert first[2].tolist() == noise.tolist()
        assert os.getpid() not in first[1].tolist()
        with pytest.raises(
            DataError, match=r"failed at index 7, in epoch 0, row 3 of the batch of step 1: OSError"
        ) as failure:
            next(iterator)
        assert "in __getitem__" in failure.value.__notes__[0], "the worker's own traceback"

        assert len(workers_alive()) == 2 or mark.exists()

        loader.close()
        mark.unlink(missing_ok=True)
        loader.seek(2)
        with pytest.raises(DataError, match=r"Worker process 0 .* was killed by SIGKILL .* the batch of step 2"):
            next(iter(loader))
        assert not workers_alive()
        again = next(iter(loader))
        assert again[0].tolist() == [8, 9, 10, 11]
        assert len(workers_alive()) == 2

        loader.seek(0)
        assert next(iter(loader))[0].tolist() == [0, 1, 2, 3], "what was asked for before is thrown away"
    assert not workers_alive()


def test_what_cannot_be_pickled_is_refused() -> None:
    with (
        Loader(
            range(8), batch_rows=4, samples=Samples(transform=lambda x, _: x), workers=Workers(processes=True)
        ) as loader,
        pytest.raises(ConfigError, match=r"cannot be sent to a worker process.*processes=False"),
    ):
        next(iter(loader))


def test_a_script_that_ends_its_workers_while_they_import_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    Path(main.__file__).write_text("raise SystemExit(3)")
    monkeypatch.setitem(sys.modules, "__main__", main)
    said = rf"ended with exit code 3 while it imported {main.__file__}.*if __name__ == \"__main__\":.*processes=False"
    with Loader(range(8), batch_rows=4, workers=Workers(processes=True)) as loader:
        for _ in range(2):
            with pytest.raises(DataError, match=said):
                next(iter(loader))
    assert not workers_alive()


def test_who_imports_the_script_of_a_rank_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(ConfigError, match=r'imports the rank\'s script.*under `if __name__ == "__main__":`'):
        World.join()


UNGUARDED = """
import sys
import torch
import shardwise as sw

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(4)

model = torch.nn.Linear(4, 2)
engine = sw.shard(model, optimizer=torch.optim.SGD(model.parameters()))
if "torch" in sys.argv:
    loader = torch.utils.data.DataLoader(Rows(), batch_size=8, num_workers=1, multiprocessing_context="spawn")
else:
    workers = sw.data.Workers(processes=True)
    loader = sw.data.Loader(Rows(), batch_rows=8, world=engine.data_ranks, workers=workers, steps=3)
for batch in loader:
    engine.backward(engine(batch).sum())
    engine.step()
"""


@thorough_only("its processes import torch; a smaller test above covers the loader's part")
@pytest.mark.parametrize(
    ("kind", "said"), [("ours", "while it imported"), ("torch", "DataLoader worker (pid(s)")], ids=["ours", "torch"]
)
def test_workers_of_a_script_without_a_guard_do_not_join_as_ranks(kind: str, said: str, tmp_path: Path) -> None:
    """They did, and the ranks waited for each other, or read messages that were not for them."""
    script = tmp_path / "job.py"
    script.write_text(UNGUARDED)
    done = launch(script, 2, kind)
    assert done.returncode == 1
    assert said in done.stderr
    assert 'Put what the script does under `if __name__ == "__main__":`' in done.stderr


SCRIPT = """
import itertools, os, signal, sys, time
import torch
import shardwise as sw

class Rows(torch.utils.data.Dataset):
    calls = itertools.count()
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if next(self.calls) >= 4 and "die" in sys.argv:
            signal.pause()  # in the middle of a batch when the rank dies
        return torch.tensor([index, os.getpid()])

def main():
    workers = sw.data.Workers(processes=True)
    with sw.World.join() as world, sw.data.Loader(Rows(), batch_rows=8, world=world, workers=workers) as loader:
        batch = next(iter(loader))
        assert set(batch[:, 1].tolist()) != {os.getpid()}
        mine = loader.draw(0).index[world.rank * 4 : world.rank * 4 + 4]
        print("rows", world.rank, batch[:, 0].tolist() == mine.tolist())
        if "die" in sys.argv:
            print("worker", batch[0, 1].item())
            world.barrier()
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    main()
"""


@soak("kills a process at any moment")
def test_ranks_of_a_launched_job_have_workers_that_do_not_outlive_them(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    done = launch(script, 2, "die")
    assert done.returncode == 128 + signal.SIGKILL, done.stderr
    assert "rows 0 True" in done.stdout
    assert "rows 1 True" in done.stdout
    workers = [int(line.split()[-1]) for line in done.stdout.splitlines() if " worker " in f" {line} "]
    assert len(workers) == 2, done.stdout
    wait_until(lambda: not any(_is_running(worker) for worker in workers))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


LEAVES = """
import torch
import shardwise as sw

model = torch.nn.Linear(2, 2)
engine = sw.shard(model, optimizer=torch.optim.SGD(model.parameters()))
loader = sw.data.Loader(list(torch.ones(96, 2)), batch_rows=48, steps=2)
engine.remember(loader=loader)
for batch in loader:
    engine.backward(engine(batch).sum())
    engine.step()
print(loader.step)
"""


def test_a_script_may_end_without_closing_its_loader(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(LEAVES)
    done = launch(script, 1)
    assert (done.returncode, done.stdout, done.stderr) == (0, "2\n", "")
