"""A script written for Horovod, unmodified, under `shardwise launch --as-horovod` and `shardwise horovodrun`."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

import warm

SCRIPT = """
    import torch
    import torch.nn.functional as F
    import horovod
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.torch.elastic.sampler import ElasticSampler
    from horovod.torch.mpi_ops import allreduce_async_, synchronize

    hvd.init()
    torch.manual_seed(42 + hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16, op=hvd.Average
    )
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    sampler = torch.utils.data.distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        losses.append(hvd.allreduce(loss.detach(), name="avg_loss").item())
    last = hvd.join()
    weights = hvd.allgather(model[0].weight.detach()[None])
    assert torch.equal(weights[0], weights[-1])
    if hvd.rank() == 0:
        print("LOSSES", losses[0] > losses[-1], hvd.size(), hvd.local_rank(), hvd.cross_size(), hvd.is_homogeneous())
"""


KILLED = """
    import os
    import signal

    import horovod.torch as hvd
    import torch

    for _ in range(2):
        hvd.init()
        hvd.allreduce(torch.ones(3), name="all")
        hvd.shutdown()
    hvd.init()
    hvd.allreduce(torch.ones(3), name="all")
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        hvd.allreduce(torch.ones(3), name="w")
    except hvd.HorovodInternalError as error:
        print("LETTER", error, flush=True)
        raise SystemExit(3)
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TMPDIR": str(folder)} | warm.RANKS_TOO
    return subprocess.run(
        [warm.python(), "-m", "shardwise", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


def test_an_unmodified_script_trains(folder: Path) -> None:
    options = ["-np", "2", "-H", "localhost:2", "--gloo", "--cycle-time-ms", "3.5", "--timeline-filename", "trace.json"]
    done = run(folder, "horovodrun", *options, "--output-filename", "out", "python", "-u", "train.py")
    assert done.returncode == 0, done.stderr
    assert "LOSSES True 2 0 1 True" in done.stdout
    assert "--cycle-time-ms has no effect: collectives run when they are ready" in done.stderr
    assert any("DistributedOptimizer" not in event and event.get("ph") == "X" for event in trace(folder))
    assert (folder / "out").is_dir()


def test_who_is_killed_is_named_after_two_shutdowns(folder: Path) -> None:
    (folder / "killed.py").write_text(textwrap.dedent(KILLED))
    done = run(folder, "launch", "--as-horovod", "-np", "2", "killed.py")
    assert done.returncode != 0
    assert "LETTER allreduce 'w' was issued by rank 0, but rank 1 has exited without calling shutdown()" in done.stdout


def trace(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((folder / "trace.json").read_text())
    return found


def test_what_cannot_be_meant_is_refused(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=1  # here\nnode7 slots=4\n")
    for options, said in (
        (["-np", "2", "--mpi", "train.py"], "--mpi: Ranks are started by MPI with `mpirun"),
        (["-np", "2", "--slots-per-host", "2", "train.py"], "Let the script of --host-discovery-script print"),
        (["-np", "2", "-H", "a:2", "--host-discovery-script", "x", "train.py"], "Leave out -H and --hostfile."),
        (["-np", "2", "-H", "localhost:1", "train.py"], "-np 2 is more than the 1 slots"),
        (["-np", "2", "--hostfile", "hosts", "train.py"], "localhost is one of several hosts: write the name by which"),
        (["-np", "2", "-H", "a:1,b", "--hostfile", "hosts", "train.py"], "--hosts and --hostfile both say where"),
        (["-H", "a:x", "train.py"], "a:x does not say how many ranks: write a:2."),
        (["train.py"], "Give the number of ranks"),
        (["-np", "2"], "Give a Python script"),
    ):
        done = run(folder, "horovodrun", *options)
        assert done.returncode == 2
        assert said in done.stderr
    done = run(folder, "launch", "--as-horovod", "--as-deepspeed", "train.py")
    assert "--as-horovod replicates the whole model" in done.stderr
    assert "[X] PyTorch" in run(folder, "horovodrun", "--check-build").stdout
