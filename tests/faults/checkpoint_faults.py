"""Run by `test_checkpoint_faults.py`: one process that imports torch once, and forks whoever is to meet with a fault.

    checkpoint_faults.py FOLDER SCENARIO...

Prints `SCENARIO: what happened` for each. It runs no thread of its own, so that it may fork.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwise as sw
from shardwise.checkpoint import checkpoints_in, folder
from shardwise.errors import CheckpointError
from tests.patience import wait_until
from tests.thorough import drawn

NUM_KILLS = drawn(6, 100)
NOBODY = 65534


def build() -> sw.Engine:
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(4)))
    return sw.shard(model, "zero3", optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def give_all(engine: sw.Engine, value: int) -> None:
    """Every parameter is `value`, so that a checkpoint mixed of two would show."""
    with engine.gathered(write=True), torch.no_grad():
        for param in engine.module.parameters():
            param.fill_(value)


def what_is_there(engine: sw.Engine, path: Path) -> int:
    """The value of the checkpoint that would be resumed from, which is whole; 0 if there is none."""
    resumed = engine.resume(path)
    if resumed is None:
        return 0
    value: int = resumed.state["value"]
    for name, tensor in engine.state_dict().items():
        assert bool((tensor == value).all()), f"{name} is not all {value}"
    return value


def fork(work: Callable[[], object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def expect_good(pid: int) -> None:
    assert os.waitpid(pid, 0)[1] == 0, "the forked process failed"


def refusal_of(work: Callable[[], object]) -> str:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("this should have been refused")


def save(engine: sw.Engine, path: Path, value: int, *, wait: bool) -> None:
    engine.save(path, step=value, state={"value": value}, wait=wait)
    engine.wait_for_save()


# --- scenarios -------------------------------------------------------------------------------------------


def killed(path: Path) -> str:
    """SIGKILL at random moments of saving in a loop, in the background or not, over another of the same step or not.

    What had been confirmed before the kill is never lost, and what is found is whole.
    """
    numbers = random.Random(0)
    engine = build()
    confirmed, moments = 0, []
    for _ in range(NUM_KILLS):
        reader, writer = os.pipe()

        def save_for_ever(first: int, out: int) -> None:
            for value in range(first, 10**9):
                give_all(engine, value)
                engine.save(path, step=value // 2, state={"value": value}, wait=value % 3 > 0, keep=sw.Keep(last=2))
                if value % 3 > 0:
                    os.write(out, value.to_bytes(8, "little"))

        pid = fork(lambda first=confirmed + 1, out=writer: save_for_ever(first, out))  # type: ignore[misc]
        os.close(writer)
        said = b"".join(os.read(reader, 8) for _ in range(numbers.randrange(3)))
        time.sleep(numbers.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while block := os.read(reader, 2**16):
            said += block
        os.close(reader)
        if said:
            confirmed = int.from_bytes(said[-8:], "little")
        found = what_is_there(engine, path)
        assert found >= confirmed, f"{confirmed} had been saved, but {found} is found"
        moments.append(any(path.glob(".writing-*")))
        confirmed = found
    assert confirmed >= NUM_KILLS / 2, "hardly anything was saved between the kills"
    return f"{NUM_KILLS} kills, {sum(moments)} of them left a draft, {confirmed} checkpoints"


def full(path: Path) -> str:
    """The file-size limit of the process stands for the disk's: a write fails in the middle, as with a full disk."""

    def work() -> None:
        engine = build()
        give_all(engine, 1)
        save(engine, path, 1, wait=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, -1))
        for value, wait in ((2, True), (3, False)):
            give_all(engine, value)
            message = refusal_of(lambda value=value, wait=wait: save(engine, path, value, wait=wait))  # type: ignore[misc]
            assert "File too large" in message, message
            assert str(path) in message, message
            assert what_is_there(engine, path) == 1
            assert not list(path.glob(".writing-*")), "half a checkpoint was left behind"
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        give_all(engine, 4)
        engine.save(path, step=4, state={"value": 4})
        assert what_is_there(engine, path) == 4
        engine.close()

    expect_good(fork(work))
    return "refused twice, then written"


def really_full(path: Path) -> str:
    """A small file system of memory, mounted by whoever started this, that says it has room for more."""

    class Usage:
        free = 2**40

    def work() -> None:
        engine = build()
        give_all(engine, 1)
        engine.save(path, step=1, state={"value": 1})
        folder.shutil.disk_usage = lambda _: Usage  # type: ignore[assignment]
        for wait in (True, False):
            give_all(engine, 2)
            message = refusal_of(lambda wait=wait: save(engine, path, 2, wait=wait))  # type: ignore[misc]
            assert "No space left on device" in message, message
            assert what_is_there(engine, path) == 1
            assert not list(path.glob(".writing-*"))
        shutil.rmtree(path / "step-00000001")
        save(engine, path, 1, wait=False)
        engine.close()

    expect_good(fork(work))
    return "refused twice, then written"


def read_only(path: Path) -> str:
    path.chmod(0o555)

    def work() -> None:
        engine = build()
        if os.getuid() == 0:
            os.setuid(NOBODY)
        message = refusal_of(lambda: engine.save(path / "below", wait=False))
        assert "PermissionError" in message, message
        assert str(path) in message, message
        engine.backward(engine(torch.ones(1, 300)).sum())
        engine.step()
        engine.close()

    expect_good(fork(work))
    return "refused"


def two_jobs(path: Path) -> str:
    """The second is told who the first is; once that has been killed, the folder is the second's."""
    reader, writer = os.pipe()

    def first() -> None:
        engine = build()
        give_all(engine, 1)
        engine.save(path, step=1, state={"value": 1})
        os.write(writer, b"!")
        signal.pause()

    pid = fork(first)
    assert os.read(reader, 1) == b"!"
    engine = build()
    give_all(engine, 2)
    message = refusal_of(lambda: engine.claim(path))  # at the start, before anything is written
    assert f"is being written to by process {pid} on" in message, message
    message = refusal_of(lambda: save(engine, path, 2, wait=False))
    assert f"is being written to by process {pid} on" in message, message
    os.kill(pid, signal.SIGKILL)  # not asked after yet: it is a zombie, and counts as gone
    wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z")
    engine.save(path, step=2, state={"value": 2})
    os.waitpid(pid, 0)
    assert what_is_there(engine, path) == 2
    engine.close()
    return "the first was named, then followed"


def end_without_closing(path: Path) -> str:
    """A script that ends right after a background save, and never closes its engine: the interpreter waits for it."""
    script = f"""
import torch, shardwise as sw
from torch import nn
model = nn.Linear(2000, 2000)
engine = sw.shard(model, "zero3")
engine.save({str(path)!r}, wait=False)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert list(checkpoints_in(path)) == [0]
    return "written"


SCENARIOS = {work.__name__: work for work in (killed, full, really_full, read_only, two_jobs, end_without_closing)}


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        path = Path(sys.argv[1]) / name
        path.mkdir(exist_ok=True)
        print(f"{name}: {SCENARIOS[name](path)}", flush=True)


if __name__ == "__main__":
    main()
