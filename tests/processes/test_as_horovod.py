"""A script written for Horovod, unmodified, under `shardwise launch --as-horovod` and `shardwise horovodrun`."""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import warm
from tests.patience import PATIENCE

SCRIPT = """
    import json
    import os

    import torch
    import torch.nn.functional as F
    import horovod
    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError
    from horovod.torch.elastic.sampler import ElasticSampler
    from horovod.torch.mpi_ops import allreduce_async_, synchronize

    told = [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    hvd.init()
    assert told == [os.environ["RANK"], "2", os.environ["RANK"], "2"]
    assert [os.environ[f"HOROVOD_CROSS_{name}"] for name in ("RANK", "SIZE")] == ["0", "1"]
    torch.manual_seed(42 + hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05 * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.none, op=hvd.Average
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
        assert (hvd.size(), hvd.local_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (2, 0, 1, True)
        print("TRAINED", json.dumps([losses, weights[0].tolist()]))
"""


KILLED = """
    import os
    import signal

    import horovod.torch as hvd
    import torch

    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends the others, maybe before they have said it
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
        print("ERROR", error, flush=True)
        raise SystemExit(3)
"""


RETRIED = """
    import os

    import horovod.torch as hvd
    import torch

    hvd.init()
    hvd.shutdown()
    try:
        hvd.init(process_sets=[hvd.ProcessSet([int(os.environ["RANK"])])])
    except Exception as error:
        print("REFUSED", error, flush=True)
    pair, other = hvd.ProcessSet([0, 1]), hvd.ProcessSet([0])
    hvd.init(process_sets=[other, pair])
    hvd.remove_process_set(other)

    @hvd.elastic.run
    def train(state):
        state.attempt += 1
        hvd.allreduce_async(torch.ones(1), name="left behind" if hvd.rank() else "also left behind")
        if attempts.append(1) or len(attempts) == 1:
            hvd.allreduce(torch.ones(1 + hvd.rank()), name="mismatch")
        return hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item(), state.attempt

    attempts = []
    sums = train(hvd.elastic.ObjectState(hvd.broadcast_object, attempt=0))
    print("RETRIED", sums, len(attempts), flush=True)
"""


def plain() -> tuple[list[float], list[list[float]]]:
    """The losses and the weights of `SCRIPT`, on one process, which draws the random numbers of both ranks."""
    models, generators = [], []
    for rank in range(2):
        torch.manual_seed(42 + rank)
        parts = nn.Linear(8, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 2)
        models.append(nn.Sequential(*parts))
        generators.append(torch.get_rng_state())
    model = models[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    y, losses = (x.sum(1) > 0).long(), []
    shares = [DistributedSampler(range(64), num_replicas=2, rank=rank) for rank in range(2)]
    for epoch in range(4):
        for rank, share in enumerate(shares):
            share.set_epoch(epoch)
            generators[rank] = drawn(generators[rank], lambda: iter(DataLoader(range(64))))[0]
        for rows in zip(*(torch.tensor(list(share)).split(8) for share in shares), strict=True):
            both = []
            for rank, own in enumerate(rows):
                generators[rank], output = drawn(generators[rank], lambda own=own: model(x[own]))
                both.append(nn.functional.cross_entropy(output, y[own]))
            loss = torch.stack(both).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses, model[0].weight.tolist()


def drawn(state: torch.Tensor, work: Callable[[], Any]) -> tuple[torch.Tensor, Any]:
    """The state of the generator after `work()`, which begins with `state`, and its result."""
    torch.set_rng_state(state)
    result = work()
    return torch.get_rng_state(), result


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TMPDIR": str(folder)} | warm.RANKS_TOO
    return subprocess.run(
        [warm.python(), "-m", "shardwise", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
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
    trained = json.loads(done.stdout.partition("TRAINED ")[2].splitlines()[0])
    losses, weights = plain()
    assert trained[0] == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(torch.tensor(trained[1]), torch.tensor(weights), rtol=1e-5, atol=1e-6)
    assert "--cycle-time-ms has no effect: collectives are executed when they are ready" in done.stderr
    assert any("DistributedOptimizer" not in event and event.get("ph") == "X" for event in trace(folder))
    assert (folder / "out").is_dir()


def test_a_killed_rank_is_named_also_after_two_shutdowns(folder: Path) -> None:
    (folder / "killed.py").write_text(textwrap.dedent(KILLED))
    done = run(folder, "launch", "--as-horovod", "-np", "2", "killed.py")
    assert done.returncode != 0
    assert "ERROR allreduce 'w' was issued by rank 0, but rank 1 has exited without calling shutdown()" in done.stdout


def test_init_after_a_refusal_and_a_loop_that_is_run_again(folder: Path) -> None:
    """The loop keeps its process sets, of which number 1 is missing."""
    (folder / "retried.py").write_text(textwrap.dedent(RETRIED))
    done = run(folder, "launch", "--as-horovod", "-np", "2", "retried.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("REFUSED init() was given process sets [[0]] on rank 0 and [[1]] on rank 1.") == 2
    assert done.stdout.count("RETRIED (2.0, 1) 2") == 2


def trace(folder: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((folder / "trace.json").read_text())
    return found


def test_options_that_are_refused(folder: Path) -> None:
    (folder / "hosts").write_text("localhost slots=1  # here\nnode7 slots=4\n")
    for options, said in (
        (["-np", "2", "--mpi", "train.py"], "--mpi: MPI is not supported here. To start ranks by MPI, use `mpirun"),
        (["-np", "2", "--slots-per-host", "2", "train.py"], "Let the script of --host-discovery-script print"),
        (["-np", "2", "-H", "a:2", "--host-discovery-script", "x", "train.py"], "Leave out -H and --hostfile."),
        (["-np", "2", "-H", "localhost:1", "train.py"], "-np 2 is more than the 1 slots"),
        (["-np", "2", "--hostfile", "hosts", "train.py"], "Other hosts cannot reach localhost. Write this host's name"),
        (["-np", "2", "-H", "a:1,b", "--hostfile", "hosts", "train.py"], "--hosts and --hostfile exclude each other"),
        (["-H", "a:x", "train.py"], "a:x has no valid number of slots. Write a:2."),
        (["train.py"], "Pass the number of ranks"),
        (["-np", "2"], "Pass a Python script"),
    ):
        done = run(folder, "horovodrun", *options)
        assert done.returncode == 2
        assert said in done.stderr
    done = run(folder, "launch", "--as-horovod", "--as-deepspeed", "train.py")
    assert "--as-horovod replicates the whole model" in done.stderr
    assert "[X] PyTorch" in run(folder, "horovodrun", "--check-build").stdout
